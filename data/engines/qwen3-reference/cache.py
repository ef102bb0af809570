"""Keys and values of running requests, in blocks of one allocation; a scratch form for scoring."""

import torch
from torch import Tensor

from .config import Config

BLOCK = 16  # positions in a block


class BlockCache:
    """Block b of layer l holds BLOCK positions of K and V; a request owns a list of blocks."""

    def __init__(self, config: Config, n_blocks: int, device: torch.device, dtype: torch.dtype):
        shape = (n_blocks, BLOCK, config.num_key_value_heads, config.head_dim)
        self.layers = [
            (
                torch.zeros(shape, device=device, dtype=dtype),
                torch.zeros(shape, device=device, dtype=dtype),
            )
            for _ in range(config.num_hidden_layers)
        ]
        self.n_blocks = n_blocks
        self.free_blocks = list(range(n_blocks))[::-1]

    def can_allocate(self, n_tokens: int) -> bool:
        """Whether that many positions are free."""
        return blocks_for(n_tokens) <= len(self.free_blocks)

    def allocate(self, n_tokens: int) -> list[int]:
        """A block table for that many positions."""
        return [self.free_blocks.pop() for _ in range(blocks_for(n_tokens))]

    def free(self, block_table: list[int]) -> None:
        """Give a request's blocks back."""
        self.free_blocks.extend(reversed(block_table))
        assert len(self.free_blocks) <= self.n_blocks

    def update(
        self, layer: int, table: list[int], start: int, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write k, v [T, K, D] at positions start..; all K, V [start + T, K, D] up to there."""
        end = start + k.shape[0]
        blocks = torch.tensor(table[: blocks_for(end)], device=k.device)
        positions = torch.arange(start, end, device=k.device)
        for store, new in zip(self.layers[layer], (k, v), strict=True):
            store[blocks[positions // BLOCK], positions % BLOCK] = new
        keys, values = (store[blocks].flatten(0, 1)[:end] for store in self.layers[layer])
        return keys, values


class NoCache:
    """For a prompt that is computed at once: what was just written is all there is."""

    def update(
        self, layer: int, table: list[int], start: int, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """k, v [T, K, D] themselves."""
        return k, v


def blocks_for(n_tokens: int) -> int:
    """Blocks that hold so many positions."""
    return -(-n_tokens // BLOCK)


def block_bytes(config: Config, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, K and V."""
    per_position = config.num_key_value_heads * config.head_dim * dtype.itemsize
    return 2 * config.num_hidden_layers * BLOCK * per_position
