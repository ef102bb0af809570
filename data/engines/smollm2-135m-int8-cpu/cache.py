"""The KV cache: one slot of max_context positions for each running request."""

import torch
from torch import Tensor

from .config import ModelConfig


class KVCache:
    """Keys (after RoPE) and values in float32, allocated once.

    Each slot of a layer is [2, 1, K, max_context, D], keys before values, so that the positions
    of a head lie side by side; the 1 is the batch axis that attention wants.
    """

    def __init__(self, config: ModelConfig, slots: int, max_context: int) -> None:
        shape = (config.num_layers, slots, 2, 1, config.num_kv_heads, max_context, config.head_dim)
        store = torch.empty(shape, dtype=torch.float32)
        self.layers: list[list[Tensor]] = [list(layer.unbind(0)) for layer in store.unbind(0)]
        self.slot_bytes = slot_bytes(config, max_context)
        self.slots = slots
        self._free = list(range(slots))

    def can_allocate(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    def allocate(self) -> int:
        """Take the lowest free slot."""
        slot = min(self._free)
        self._free.remove(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back; its values stay and are never read before they are overwritten."""
        self._free.append(slot)

    @property
    def bytes_total(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes

    @property
    def bytes_used(self) -> int:
        """Bytes of the slots that are taken."""
        return (self.slots - len(self._free)) * self.slot_bytes


def slot_bytes(config: ModelConfig, max_context: int) -> int:
    """Bytes of keys and values of one request of max_context tokens."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    return per_token * max_context
