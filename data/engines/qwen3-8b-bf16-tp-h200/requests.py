"""A request from submit to its last token."""

import random
from dataclasses import dataclass, field

from .params import SamplingParams


@dataclass
class Request:
    """`num_computed` counts the tokens whose keys and values are in the cache or on their way.

    Launches run one step ahead of what the host has read: of the `num_launched` output tokens only
    those in `tokens` are known here.
    """

    id: int
    tokens: list[int]  # prompt, then what was generated and read
    prompt_len: int
    params: SamplingParams
    stop_ids: frozenset[int]  # end the answer
    limit: int  # most output tokens
    generator: random.Random
    num_prefill: int = 0  # tokens to compute before the next one can be sampled
    num_computed: int = 0
    num_launched: int = 0
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    finished: bool = False

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def decoding(self) -> bool:
        return self.num_computed >= self.num_prefill

    def start(self, slot: int, pages: list[int], num_cached: int) -> None:
        self.slot, self.pages, self.num_computed = slot, pages, num_cached
        self.num_prefill, self.num_launched = len(self.tokens), self.num_output

    def stop(self) -> None:
        """Out of the batch, to start again later from its tokens."""
        self.slot, self.pages, self.num_computed = None, [], 0

    def needs_sampler(self) -> bool:
        """Whether its next token is more than the arg max, or more than its log-probability is
        asked.
        """
        hidden_stop = self.num_launched < self.params.min_tokens
        return self.params.reshapes or self.params.logprobs > 0 or hidden_stop

    def finish_reason(self, token: int) -> str | None:
        """After `token` was appended to `tokens`."""
        if token in self.stop_ids and self.num_output >= max(1, self.params.min_tokens):
            return "stop"
        return "length" if self.num_output >= self.limit else None
