"""What running requests remember: keys and values in blocks, recurrent state in slots, both
allocated once; and a scratch form for scoring."""

from typing import NamedTuple

import torch
from torch import Tensor

from .config import Config

BLOCK = 16  # positions in a block
State = tuple[Tensor, Tensor]  # tail of the convolution [width - 1, C]; S [H, Dk, Dv]


class Place(NamedTuple):
    """Where a request is kept: its blocks of attention, its slot of recurrent state."""

    block_table: list[int]
    slot: int


class Cache:
    """Block b of an attention layer holds BLOCK positions of K and V; slot s of a DeltaNet layer
    holds the state of one sequence."""

    def __init__(
        self,
        config: Config,
        n_blocks: int,
        n_slots: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        block = (n_blocks, BLOCK, config.num_key_value_heads, config.head_dim)
        self.layers: list[tuple[Tensor, Tensor]] = []
        for kind in config.layer_types:
            if kind == "full_attention":
                pair = (torch.zeros(block, dtype=dtype), torch.zeros(block, dtype=dtype))
            else:
                pair = tuple(x.expand(n_slots, *x.shape).clone() for x in fresh(config, dtype))
            self.layers.append((pair[0].to(device), pair[1].to(device)))
        self.layer_types = config.layer_types
        self.n_blocks, self.n_slots = n_blocks, n_slots
        self.free_blocks = list(range(n_blocks))[::-1]
        self.free_slots = list(range(n_slots))[::-1]

    def can_allocate(self, n_tokens: int) -> bool:
        """Whether that many positions and a slot are free."""
        return bool(self.free_slots) and blocks_for(n_tokens) <= len(self.free_blocks)

    def allocate(self, n_tokens: int) -> Place:
        """A place for that many positions, its state at rest."""
        slot = self.free_slots.pop()
        for layer, kind in enumerate(self.layer_types):
            if kind == "linear_attention":
                for store in self.layers[layer]:
                    store[slot] = 0
        return Place([self.free_blocks.pop() for _ in range(blocks_for(n_tokens))], slot)

    def free(self, place: Place) -> None:
        """Give a request's blocks and its slot back."""
        self.free_blocks.extend(reversed(place.block_table))
        self.free_slots.append(place.slot)
        assert len(self.free_blocks) <= self.n_blocks and len(self.free_slots) <= self.n_slots

    def update(
        self, layer: int, place: Place, start: int, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write k, v [T, K, D] at positions start..; all K, V [start + T, K, D] up to there."""
        end = start + k.shape[0]
        blocks = torch.tensor(place.block_table[: blocks_for(end)], device=k.device)
        positions = torch.arange(start, end, device=k.device)
        for store, new in zip(self.layers[layer], (k, v), strict=True):
            store[blocks[positions // BLOCK], positions % BLOCK] = new
        keys, values = (store[blocks].flatten(0, 1)[:end] for store in self.layers[layer])
        return keys, values

    def state(self, layer: int, place: Place) -> State:
        """The state that the last token of a sequence left."""
        tail, recurrent = self.layers[layer]
        return tail[place.slot], recurrent[place.slot]

    def set_state(self, layer: int, place: Place, state: State) -> None:
        """Keep the state for the sequence's next token."""
        for store, new in zip(self.layers[layer], state, strict=True):
            store[place.slot] = new


class NoCache:
    """For a prompt that is computed at once: what was just written is all there is."""

    def __init__(self, config: Config, device: torch.device, dtype: torch.dtype):
        tail, recurrent = fresh(config, dtype)
        self.at_rest = (tail.to(device), recurrent.to(device))

    def update(
        self, layer: int, place: Place, start: int, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """k, v [T, K, D] themselves."""
        return k, v

    def state(self, layer: int, place: Place) -> State:
        """The state before the first token."""
        return self.at_rest

    def set_state(self, layer: int, place: Place, state: State) -> None:
        """No token comes after."""


def fresh(config: Config, dtype: torch.dtype) -> State:
    """The state before the first token: zeros; S in float32 at least, whatever the dtype."""
    tail = (config.linear_conv_kernel_dim - 1, config.conv_dim)
    heads, keys, values = (
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )
    wide = torch.promote_types(dtype, torch.float32)
    return torch.zeros(tail, dtype=dtype), torch.zeros((heads, keys, values), dtype=wide)


def blocks_for(n_tokens: int) -> int:
    """Blocks that hold so many positions."""
    return -(-n_tokens // BLOCK)


def block_bytes(config: Config, dtype: torch.dtype) -> int:
    """Bytes of one block over all attention layers, K and V."""
    per_position = config.num_key_value_heads * config.head_dim * dtype.itemsize
    return 2 * config.layer_types.count("full_attention") * BLOCK * per_position


def slot_bytes(config: Config, dtype: torch.dtype) -> int:
    """Bytes of one sequence's state over all DeltaNet layers."""
    per_layer = sum(tensor.nbytes for tensor in fresh(config, dtype))
    return config.layer_types.count("linear_attention") * per_layer
