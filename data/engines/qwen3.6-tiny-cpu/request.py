"""One request: its tokens, how far it is, and when it ends."""

from random import Random

from .params import Params


class Request:
    """State of a request. `num_computed_tokens` of its tokens are in the cache.

    `tokens` is prompt and output; the token sampled last is not computed until it is fed.
    """

    def __init__(
        self, request_id: int, prompt: list[int], params: Params, end_tokens: frozenset[int]
    ) -> None:
        """A waiting request; `end_tokens` are the model's, within its vocabulary."""
        self.id = request_id
        self.params = params
        self.tokens = prompt
        self.prompt_len = len(prompt)
        self.num_computed_tokens = 0
        self.slot = -1  # while it waits
        ends = frozenset() if params.ignore_eos else end_tokens
        self.stop_tokens = ends.union(params.stop_token_ids)
        # Random takes the whole seed; torch's generator on a CPU only its lower 32 bits.
        self.random = Random(params.seed) if params.temperature > 0 else None

    @property
    def num_produced(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def num_pending(self) -> int:
        """Tokens that are known and not in the cache."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def may_stop(self) -> bool:
        """Whether the next token may be a stop token."""
        return self.num_produced >= self.params.min_tokens

    def append(self, token: int, max_context: int) -> str | None:
        """Take a sampled token; returns the finish reason if it is the last."""
        stops = self.may_stop and token in self.stop_tokens
        self.tokens.append(token)
        full = len(self.tokens) >= max_context
        if stops:
            return "stop"
        return "length" if full or self.num_produced >= self.params.max_new_tokens else None
