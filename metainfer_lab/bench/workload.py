"""What is asked of an engine while the clock runs: lengths, streams, fresh prompts."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from metainfer_lab.errors import InputError
from metainfer_lab.spec import Spec, explain


class Workload(BaseModel):
    """One operating point: `concurrency` streams of the same lengths, by default all at once."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_len: int = Field(ge=1, description="tokens of each prompt")
    output_len: int = Field(ge=2, description="tokens of each answer; the first gives the TTFT")
    concurrency: int = Field(default=1, ge=1)
    gap_ms: float = Field(default=0.0, ge=0, description="from one stream's start to the next")
    runs: int = Field(default=5, ge=1, description="timed runs, after one that warms up")

    @classmethod
    def from_spec(cls, spec: Spec, **changes: int) -> Workload:
        """The traffic that a spec's goals are meant for, with fields replaced."""
        asked = spec.workload
        point = {key: getattr(asked, key) for key in ("prompt_len", "output_len", "concurrency")}
        try:
            return cls(**{**point, **changes})
        except ValidationError as error:
            raise InputError(f"workload: {explain(error)}") from None

    @property
    def mean_context(self) -> float:
        """Tokens in the cache of one stream, averaged over its decode steps."""
        return self.prompt_len + (self.output_len - 1) / 2

    def params(self) -> dict[str, object]:
        """Request parameters: greedy, exactly `output_len` tokens whatever the model says."""
        return {"max_new_tokens": self.output_len, "temperature": 0.0, "ignore_eos": True}

    def prompts(self, vocab_size: int, seed: int | None = None) -> Iterator[list[list[int]]]:
        """Endless batches of random prompts; no two share a prefix worth caching.

        A seed of None draws from the system, so that no engine can know what is coming.
        """
        random = Random(seed)
        while True:
            yield [
                [random.randrange(vocab_size) for _ in range(self.prompt_len)]
                for _ in range(self.concurrency)
            ]
