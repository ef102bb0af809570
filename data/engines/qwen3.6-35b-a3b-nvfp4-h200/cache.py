"""What a sequence keeps between steps: paged keys and values, states, convolution columns."""

import torch

from .config import Config

PAGE = 64


class Cache:
    """Fixed memory for `max_batch` sequences and one scratch slot that padded rows write to.

    Where cache_bytes is given, fewer run at once if their states would take more than half of it.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        dtype: torch.dtype,
        max_batch: int,
        max_context: int,
        cache_bytes: int | None,
    ) -> None:
        gdn = config.layer_types.count("linear_attention")
        attention = len(config.layer_types) - gdn
        per_slot = 4 * gdn * config.value_heads * config.value_dim * config.key_dim
        per_slot += 4 * gdn * 4 * config.conv_width
        if cache_bytes is not None and per_slot:
            max_batch = max(1, min(max_batch, cache_bytes // (2 * per_slot) - 1))
        self.max_batch, self.scratch = max_batch, max_batch
        self.pages_per_slot = -(-max_context // PAGE)
        page_bytes = attention * 2 * config.kv_heads * PAGE * config.head_dim * dtype.itemsize
        slots = max_batch + 1
        state = (gdn, slots, config.value_heads, config.value_dim, config.key_dim)
        ring = (gdn, slots, 4, config.conv_width)
        self.state_bytes = slots * per_slot
        self.pages_total = max_batch * self.pages_per_slot
        if cache_bytes is not None:
            fits = (cache_bytes - self.state_bytes) // max(page_bytes, 1) - 1
            if fits < 1:
                raise ValueError(
                    f"cache_bytes: {cache_bytes} holds no page beside {self.state_bytes} bytes of "
                    f"recurrent state for {max_batch} sequences"
                )
            self.pages_total = min(self.pages_total, fits)
        # Page 0 belongs to the scratch slot.
        shape = (attention, self.pages_total + 1, 2, config.kv_heads, PAGE, config.head_dim)
        self.pages = torch.zeros(shape, dtype=dtype, device=device)
        self.states = torch.zeros(state, dtype=torch.float32, device=device)
        self.rings = torch.zeros(ring, dtype=torch.float32, device=device)
        self.page_table = torch.zeros(slots, self.pages_per_slot, dtype=torch.int32, device=device)
        self.free_slots = list(range(max_batch))
        self.free_pages = list(range(1, self.pages_total + 1))
        self.held: dict[int, list[int]] = {}

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // PAGE)

    def can_allocate(self, tokens: int) -> bool:
        """Whether a sequence of at most `tokens` can start now and finish without eviction."""
        return bool(self.free_slots) and self.pages_for(tokens) <= len(self.free_pages)

    def allocate(self, tokens: int) -> int:
        """Reserve a slot and all pages for at most `tokens`; the caller asked first."""
        assert self.can_allocate(tokens), "allocate() without can_allocate()"
        slot = self.free_slots.pop(0)
        pages = [self.free_pages.pop() for _ in range(self.pages_for(tokens))]
        self.held[slot] = pages
        row = torch.tensor(pages, dtype=torch.int32, device=self.page_table.device)
        self.page_table[slot].zero_()
        self.page_table[slot, : len(pages)] = row
        return slot

    def deallocate(self, slot: int) -> None:
        """Give slot and pages back; the memory is overwritten by whoever gets it next."""
        self.free_pages += self.held.pop(slot)
        self.free_slots.append(slot)
        self.free_slots.sort()

    def bytes_total(self) -> int:
        return self.pages.nbytes + self.states.nbytes + self.rings.nbytes

    def bytes_used(self) -> int:
        pages = sum(len(pages) for pages in self.held.values())
        per_slot = (self.states.nbytes + self.rings.nbytes) // (self.max_batch + 1)
        return pages * self.pages.nbytes // (self.pages_total + 1) + len(self.held) * per_slot
