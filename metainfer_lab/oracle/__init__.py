"""The oracle: transformers' own model class on a checkpoint, in a process of its own.

    with Oracle(checkpoint, dtype="float64") as oracle:
        logits = oracle.logits(tokens, positions)

It never sees the candidate, and its process is the only one that imports transformers. float64 is
float64 throughout: norms, routers, the delta rule and rotary angles too, where transformers itself
narrows to float32. `streamed`: one layer of the model at a time is in memory, dequantised on the
way, so that a model that fits nowhere in wide numbers is answered for all the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from metainfer_lab import wire
from metainfer_lab.errors import InputError

Dtype = Literal["float32", "float64"]
Rounding = Literal["symmetric", "asymmetric", "bfloat16"]
TIMEOUT_S = 600.0


class Routed(NamedTuple):
    """logits [positions, V]; router: the logits of all experts [layers, T, E], None where there
    are none."""

    logits: np.ndarray
    router: np.ndarray | None


def _beside(experts: Sequence[np.ndarray], longest: int) -> np.ndarray:
    """Experts [layers, T, k] of each text as one array [layers, texts * longest, k]."""
    layers, _, k = experts[0].shape
    filled = np.broadcast_to(np.arange(k), (layers, len(experts), longest, k)).copy()
    for text, chosen in enumerate(experts):
        filled[:, text, : chosen.shape[1]] = chosen
    return filled.reshape(layers, -1, k)


class Oracle:
    """A context manager; `use` moves it to another checkpoint without a new process.

    device: where it computes; streamed: layer by layer, quantised checkpoints too.
    """

    def __init__(
        self,
        checkpoint: Path | str | None = None,
        dtype: Dtype = "float64",
        *,
        device: str = "cpu",
        streamed: bool = False,
    ):
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.settings = {"device": device, "streamed": streamed}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Oracle:
        child_in, self._commands = os.pipe()
        self._results, child_out = os.pipe()
        settings = self.settings | {"commands": child_in, "results": child_out}
        argv = [sys.executable, "-m", "metainfer_lab.oracle.service", json.dumps(settings)]
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            argv,
            pass_fds=(child_in, child_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )
        os.close(child_in)
        os.close(child_out)
        if self.checkpoint is not None:
            self.use(self.checkpoint)
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            os.close(self._commands)
            os.close(self._results)
            process.kill()
            process.wait()

    def use(self, checkpoint: Path | str, dtype: Dtype | None = None) -> None:
        """Answer for this checkpoint from now on."""
        self.checkpoint, self.dtype = checkpoint, dtype or self.dtype
        self._call(op="use", checkpoint=str(checkpoint), dtype=self.dtype)

    def logits(
        self, tokens: Sequence[int], positions: Sequence[int], rounding: Rounding | None = None
    ) -> np.ndarray:
        """Logits [len(positions), V] in the oracle's dtype, after tokens[0 .. position].

        rounding: to see what a number format costs. symmetric, asymmetric: the input of every
        matrix product is rounded to 8 bits, one scale per token; bfloat16: what enters and leaves
        every module is rounded.
        """
        return self.routed(tokens, positions, None, rounding).logits

    def routed(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        experts: np.ndarray | None = None,
        rounding: Rounding | None = None,
    ) -> Routed:
        """`logits`, and what the routers said on the way.

        experts [layers, T, k]: those that each token goes through, in place of the routers' own
        choice; their weights are the routers' (a softmax over the chosen ones).
        """
        forced = None if experts is None else [experts]
        return self.together([(tokens, positions)], forced, rounding)[0]

    def together(
        self,
        texts: Sequence[tuple[Sequence[int], Sequence[int]]],
        experts: Sequence[np.ndarray] | None = None,
        rounding: Rounding | None = None,
    ) -> list[Routed]:
        """`routed` of some (tokens, positions) in one pass, with experts of each where given."""
        tokens = [[int(t) for t in text] for text, _ in texts]
        positions = [[int(p) for p in asked] for _, asked in texts]
        forced = {} if experts is None else {"experts": _beside(experts, max(map(len, tokens)))}
        asked = {"tokens": tokens, "positions": positions, "rounding": rounding}
        answer = self._call(op="logits", **asked, **forced)
        ends = np.cumsum([len(asked) for asked in positions])[:-1]
        router = answer.get("router")
        return [
            Routed(rows, None if router is None else router[:, i, : len(tokens[i])])
            for i, rows in enumerate(np.split(answer["logits"], ends))
        ]

    def sensitivity(self, tokens: Sequence[int]) -> dict[str, float]:
        """Parameter (an expert's by "name.expert") -> how far changing it moves the logits.

        In units of the logits' size, to first order, for a change of each weight by ± half of it
        at random: by one backward pass from a random direction of all positions' logits.
        """
        return self._call(op="sensitivity", tokens=[int(t) for t in tokens])["moves"]

    def input_amax(self, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Module -> largest |input| of each linear module, experts apart, over some prompts."""
        return self._call(op="input_amax", prompts=[list(map(int, p)) for p in prompts])["amax"]

    def _call(self, **message: Any) -> dict[str, Any]:
        try:
            wire.send(self._commands, message)
            answer = wire.receive(self._results, time.monotonic() + TIMEOUT_S)
        except (EOFError, BrokenPipeError, TimeoutError) as error:
            raise RuntimeError(f"oracle: its process ended or hung on {message['op']}") from error
        if "error" in answer:
            raise InputError(f"oracle: {self.checkpoint}: {answer['error']}")
        return answer
