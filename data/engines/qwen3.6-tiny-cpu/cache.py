"""What requests remember: keys and values, convolution tails and recurrent states, in slots."""

import heapq

import torch

from .config import LINEAR, Config

BYTES = 4  # of one float32


def slot_bytes(config: Config, context: int) -> int:
    """Bytes of one request of `context` tokens, all layers."""
    c, linear = config, config.layer_types.count(LINEAR)
    full = c.num_hidden_layers - linear
    tail = (c.linear_conv_kernel_dim - 1) * c.conv_dim
    state = c.value_dim * c.linear_key_head_dim
    return BYTES * (
        linear * (tail + state) + full * 2 * c.num_key_value_heads * c.head_dim * context
    )


class Cache:
    """Slots for requests, allocated once. Layers of one kind are counted by themselves.

    keys, values [L_full, slots, K, context, D]; tails [L_linear, slots, W-1, C];
    states [L_linear, slots, H, Dk, Dv].
    """

    def __init__(self, config: Config, slots: int, context: int) -> None:
        """Allocate `slots` slots of `context` tokens, all free."""
        c, linear = config, config.layer_types.count(LINEAR)
        kv_shape = (c.num_hidden_layers - linear, slots, c.num_key_value_heads, context, c.head_dim)
        self.keys = torch.zeros(kv_shape)
        self.values = torch.zeros(kv_shape)
        self.tails = torch.zeros(linear, slots, c.linear_conv_kernel_dim - 1, c.conv_dim)
        heads = (c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        self.states = torch.zeros(linear, slots, *heads)
        self._slot_bytes = slot_bytes(config, context)
        self._slots = slots
        self._free = list(range(slots))

    @property
    def bytes_total(self) -> int:
        """Bytes of all tensors."""
        return self._slots * self._slot_bytes

    @property
    def bytes_used(self) -> int:
        """Bytes of the slots that are taken."""
        return (self._slots - len(self._free)) * self._slot_bytes

    def can_allocate(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    def allocate(self) -> int:
        """Take the lowest free slot; its tails and states start from zero."""
        slot = heapq.heappop(self._free)
        self.tails[:, slot] = 0.0
        self.states[:, slot] = 0.0
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back."""
        heapq.heappush(self._free, slot)
