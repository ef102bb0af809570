"""Key/value cache: one slot of max_context positions for each running request."""

import heapq

import torch

from .config import ModelConfig


def slot_bytes(config: ModelConfig, max_context: int) -> int:
    """Bytes that one request of max_context tokens takes in float32."""
    values = 2 * config.num_layers * config.num_kv_heads * config.head_dim * max_context
    return values * torch.float32.itemsize


class KVCache:
    """Keys (after RoPE) and values, allocated once.

    `layers[i]` is [2, slots, K, max_context, D], keys first: the positions of one head of one
    request are contiguous, which is the order in which decode reads them.
    """

    def __init__(self, config: ModelConfig, num_slots: int, max_context: int) -> None:
        heads, dim = config.num_kv_heads, config.head_dim
        self._data = torch.empty(config.num_layers, 2, num_slots, heads, max_context, dim)
        self._free = list(range(num_slots))
        self._num_slots = num_slots
        self.layers = self._data.unbind(0)

    def can_allocate(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    def allocate(self) -> int:
        """Take the lowest free slot, so that running requests lie side by side.

        The slot is cleared: requests of different lengths are read together up to the longest, and
        a masked position must hold a number, as 0 * NaN is NaN.
        """
        slot = heapq.heappop(self._free)
        self._data[:, :, slot].zero_()
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back."""
        heapq.heappush(self._free, slot)

    @property
    def bytes_total(self) -> int:
        """Bytes allocated."""
        return self._data.nbytes

    @property
    def bytes_used(self) -> int:
        """Bytes of the slots that are taken."""
        return self._data.nbytes // self._num_slots * (self._num_slots - len(self._free))
