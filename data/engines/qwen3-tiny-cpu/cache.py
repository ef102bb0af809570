"""The key/value cache: one slot of max_context positions for each running request."""

import heapq

import torch
from torch import Tensor

from .config import Config


class KVCache:
    """Keys (after RoPE) and values of all layers, allocated once.

    keys[i] and values[i] are layer i's [slots, K, max_context, D]: the positions of one head of
    one request are contiguous.
    """

    def __init__(self, config: Config, num_slots: int, max_context: int) -> None:
        heads, dim = config.num_key_value_heads, config.head_dim
        shape = (2, config.num_hidden_layers, num_slots, heads, max_context, dim)
        self._data = torch.zeros(shape, dtype=torch.float32)
        self._free = list(range(num_slots))
        self.num_slots = num_slots
        self.keys: list[Tensor] = list(self._data[0])
        self.values: list[Tensor] = list(self._data[1])
        self.slot_rows = heads * max_context
        self.head_rows = torch.arange(heads) * max_context

    def can_allocate(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    def allocate(self) -> int:
        """Take the lowest free slot.

        It is zeroed: batched attention reads up to the longest request's length, and a masked
        position adds exactly nothing only if what the slot's last request left (it may be NaN)
        is gone.
        """
        slot = heapq.heappop(self._free)
        self._data[:, :, slot].zero_()
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back."""
        heapq.heappush(self._free, slot)

    def rows(self, slots: list[int], positions: list[int]) -> Tensor:
        """Rows [T, K] of each token's heads in a layer seen as [slots · K · max_context, D]."""
        base = [s * self.slot_rows + p for s, p in zip(slots, positions, strict=True)]
        return torch.tensor(base).unsqueeze(1) + self.head_rows

    @property
    def bytes_total(self) -> int:
        """Bytes that the cache takes."""
        return self._data.nbytes

    @property
    def bytes_used(self) -> int:
        """Bytes of the slots that are taken."""
        return self.bytes_total // self.num_slots * (self.num_slots - len(self._free))


def slot_bytes(config: Config, max_context: int) -> int:
    """Bytes of the keys and values of one request of max_context tokens, in float32."""
    heads = 2 * config.num_hidden_layers * config.num_key_value_heads
    return heads * max_context * config.head_dim * 4
