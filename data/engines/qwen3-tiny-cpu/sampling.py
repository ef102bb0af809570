"""From logits to a token: penalties, bias, filters and the draw of one request."""

from collections import Counter

import numpy as np

from .params import SamplingParams


class Sampler:
    """Random state, counts and stop tokens of one request."""

    def __init__(
        self, params: SamplingParams, prompt: list[int], end_tokens: frozenset[int]
    ) -> None:
        self._params = params
        self._prompt_ids = frozenset(prompt)
        self._output_counts: Counter[int] = Counter()
        self._stop_ids = params.stop_token_ids | (
            frozenset() if params.ignore_eos else end_tokens
        )
        self._adjusts = bool(
            params.repetition_penalty != 1.0
            or params.frequency_penalty
            or params.presence_penalty
            or params.logit_bias
        )
        self._generator = np.random.default_rng(params.seed) if params.temperature else None

    def sample(self, logits: np.ndarray, num_produced: int) -> tuple[int, bool]:
        """Choose a token from float32 logits [V], which stay as they are.

        `num_produced` tokens of the answer came before. Returns the token and whether it is a stop.
        """
        may_stop = num_produced >= self._params.min_tokens
        if self._adjusts or not may_stop:
            logits = self._adjusted(logits, may_stop)
        # numpy's argmax gives the first of equal values, so the lowest id.
        token = int(logits.argmax()) if self._generator is None else self._draw(logits)
        self._output_counts[token] += 1
        return token, may_stop and token in self._stop_ids

    def _adjusted(self, logits: np.ndarray, may_stop: bool) -> np.ndarray:
        """Logits [V] in float64 after penalties, bias and the ban of stop tokens."""
        params = self._params
        z = logits.astype(np.float64)
        with np.errstate(over="ignore"):
            if params.repetition_penalty != 1.0:
                seen = list(self._prompt_ids | self._output_counts.keys())
                known, penalty = z[seen], params.repetition_penalty
                z[seen] = np.where(known > 0, known / penalty, known * penalty)
            counts = np.array(list(self._output_counts.values()), dtype=np.float64)
            produced = list(self._output_counts)
            z[produced] -= params.frequency_penalty * counts + params.presence_penalty
            z[list(params.logit_bias)] += list(params.logit_bias.values())
        if not may_stop:
            z[list(self._stop_ids)] = -np.inf
        return z

    def _draw(self, logits: np.ndarray) -> int:
        """Draw an id from logits [V]: temperature, top_k, top_p, min_p, in this order.

        The candidates are kept in descending order, equal values by id, so that each filter cuts
        a prefix.
        """
        params = self._params
        z = np.nan_to_num(logits.astype(np.float64), nan=-np.inf, neginf=-np.inf)
        ids = np.argsort(-z, kind="stable")[: params.top_k or None]
        probabilities = _softmax(z[ids], params.temperature)
        kept = np.searchsorted(probabilities.cumsum(), params.top_p) + 1
        probabilities = probabilities[:kept]
        probabilities = probabilities[probabilities >= params.min_p * probabilities[0]]
        cumulative = probabilities.cumsum()
        # Staying below the total and searching for the first sum above the point can only meet
        # an id whose own probability is not zero.
        point = self._generator.random() * cumulative[-1]
        point = min(point, np.nextafter(cumulative[-1], 0.0))
        return int(ids[np.searchsorted(cumulative, point, side="right")])


def _softmax(z: np.ndarray, temperature: float) -> np.ndarray:
    """Softmax of z / temperature for z [k] in descending order; uniform if all are -inf."""
    if z[0] == -np.inf:
        return np.full(len(z), 1.0 / len(z))
    with np.errstate(over="ignore"):
        weights = np.exp((z - z[0]) / temperature)
    return weights / weights.sum()


def top_logprobs(logprobs: np.ndarray, count: int) -> list[tuple[int, float]] | None:
    """The `count` likeliest (id, logprob) of logprobs [V], equal values by id; None for 0."""
    if count == 0:
        return None
    ids = np.argsort(-logprobs, kind="stable")[:count]
    return [(int(token), float(logprobs[token])) for token in ids]
