"""What running requests remember: keys and values, convolution tails and recurrent states."""

import torch

from .config import FULL, LINEAR, Config

BYTES = 4  # of a float32


class Cache:
    """Slots for sequences of up to max_context tokens, allocated once.

    keys, values [full layers, slots, K, max_context, D], so that a head's positions are contiguous;
    tails [linear layers, slots, W-1, C]; states [linear layers, slots, H, Dk, Dv]; all float32.
    """

    def __init__(self, config: Config, slots: int, max_context: int) -> None:
        full, linear = _layer_counts(config)
        kv_heads, taps = config.num_key_value_heads, config.linear_conv_kernel_dim
        heads = config.linear_num_value_heads
        widths = config.linear_key_head_dim, config.linear_value_head_dim
        self.keys = torch.zeros(full, slots, kv_heads, max_context, config.head_dim)
        self.values = torch.zeros_like(self.keys)
        self.tails = torch.zeros(linear, slots, taps - 1, config.conv_width)
        self.states = torch.zeros(linear, slots, heads, *widths)
        self.slots = slots
        self.slot_bytes = slot_bytes(config, max_context)
        self._free = list(range(slots))

    def can_allocate(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    def allocate(self) -> int:
        """Take the lowest free slot, its tails and states set to zero.

        Keys and values stay: only positions that the new sequence wrote are ever read.
        """
        slot = min(self._free)
        self._free.remove(slot)
        self.tails[:, slot] = 0
        self.states[:, slot] = 0
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back."""
        self._free.append(slot)

    @property
    def bytes_total(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes

    @property
    def bytes_used(self) -> int:
        """Bytes of the slots that are taken."""
        return (self.slots - len(self._free)) * self.slot_bytes


def slot_bytes(config: Config, max_context: int) -> int:
    """Bytes of one sequence over all layers."""
    full, linear = _layer_counts(config)
    keys = max_context * config.num_key_value_heads * config.head_dim
    tail = (config.linear_conv_kernel_dim - 1) * config.conv_width
    state = config.value_width * config.linear_key_head_dim
    return BYTES * (full * 2 * keys + linear * (tail + state))


def fitting_slots(config: Config, max_batch: int, max_context: int, bound: int | None) -> int:
    """Slots that fit into bound bytes, max_batch at most; ValueError when there is room for none."""
    if bound is None:
        return max_batch
    slots = min(max_batch, bound // slot_bytes(config, max_context))
    if slots < 1:
        needed = slot_bytes(config, max_context)
        raise ValueError(f"cache_bytes {bound} is below the {needed} of a single request")
    return slots


def _layer_counts(config: Config) -> tuple[int, int]:
    return config.layer_types.count(FULL), config.layer_types.count(LINEAR)
