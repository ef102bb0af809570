"""The KV cache: one contiguous slot of max_context positions for each running request."""

import torch

from .config import ModelConfig


class KVCache:
    """Keys (after RoPE) and values of every computed token, in slots that requests borrow."""

    def __init__(self, config: ModelConfig, num_slots: int, max_context: int) -> None:
        """Allocate [layers, slots, 2 * kv_heads, max_context, head_dim], keys before values."""
        self.data = torch.empty(
            config.num_hidden_layers,
            num_slots,
            2 * config.num_key_value_heads,
            max_context,
            config.head_dim,
            dtype=torch.float32,
        )
        self.slot_bytes = slot_bytes(config, max_context)
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))

    @property
    def bytes_total(self) -> int:
        """Bytes allocated."""
        return self.num_slots * self.slot_bytes

    @property
    def bytes_used(self) -> int:
        """Bytes of the slots that requests hold."""
        return (self.num_slots - len(self._free)) * self.slot_bytes

    def can_allocate(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    def allocate(self) -> int:
        """Take a free slot."""
        return self._free.pop()

    def free(self, slot: int) -> None:
        """Give a slot back; what it holds stays until the next owner overwrites it."""
        self._free.append(slot)


def slot_bytes(config: ModelConfig, max_context: int) -> int:
    """Bytes of one slot: K and V of every layer in float32."""
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return per_token * max_context * torch.float32.itemsize
