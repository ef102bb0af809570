"""`Engine`: an engine opened to be used, with its spec's checkpoint and tokenizer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from metainfer_lab import checkpoints
from metainfer_lab.bootstrap import has_nvidia_driver
from metainfer_lab.engine.manifest import EngineManifest, find_engine
from metainfer_lab.engine.process import DEFAULT_TIMEOUT_S, EngineProcess
from metainfer_lab.errors import InputError
from metainfer_lab.paths import tree_hash
from metainfer_lab.sandbox import Sandbox
from metainfer_lab.spec import Spec
from metainfer_lab.text import Tokenizer


class Chat(BaseModel):
    """An answer and how it came: ttft_ms from submission to the first token's arrival,
    decode_tok_s over the tokens after it (None when there is but one)."""

    text: str
    tokens: list[int]
    ttft_ms: float
    decode_tok_s: float | None
    finish_reason: str


class Engine:
    """A context manager; nothing runs before it is entered or first used, nothing after it."""

    def __init__(self, folder: Path, spec: Spec, sandbox: Sandbox = "auto"):
        self.folder = folder
        self.spec = spec
        self.sandbox = sandbox
        self._process: EngineProcess | None = None

    @classmethod
    def open(
        cls, source: Spec | Path | str, spec: Spec | None = None, sandbox: Sandbox = "auto"
    ) -> Engine:
        """The engine of a spec (object or id), or of a folder (under the first that it serves).

        spec: another that it serves, to open it under."""
        if isinstance(source, Spec):
            return cls(find_engine(source), source, sandbox)
        folder = Path(source)
        if folder.is_dir():
            manifest = EngineManifest.read(folder)
            return cls(folder.resolve(), spec or Spec.load(manifest.specs[0]), sandbox)
        found = Spec.load(source)
        return cls(find_engine(found), spec or found, sandbox)

    @property
    def tree(self) -> str:
        """The hash of the folder as it is now."""
        return tree_hash(self.folder)

    @cached_property
    def manifest(self) -> EngineManifest:
        return EngineManifest.read(self.folder)

    @cached_property
    def checkpoint(self) -> Path:
        return checkpoints.fetch(self.spec)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.open(self.checkpoint)

    @property
    def device(self) -> str:
        """Where the engine runs: the spec's machine decides."""
        return "cpu" if self.spec.hardware == "cpu" else "cuda"

    @property
    def process(self) -> EngineProcess:
        """The running host, of as many ranks as the spec says; started on first use."""
        if self._process is None:
            if self.device == "cuda" and not has_nvidia_driver():
                wanted = f"{self.spec.id} is for {self.spec.hardware}"
                raise InputError(f"hardware: {wanted}, and this machine has no NVIDIA GPU")
            process = EngineProcess(
                self.folder,
                self.checkpoint,
                device=self.device,
                max_batch=self.spec.workload.concurrency,
                max_context=self.spec.workload.max_context,
                sandbox=self.sandbox,
                timeout_s=DEFAULT_TIMEOUT_S,
                world=self.spec.parallel.tp,
            )
            self._process = process.__enter__()
        return self._process

    def __enter__(self) -> Engine:
        _ = self.process
        return self

    def __exit__(self, *exc: Any) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.__exit__(*exc)

    def close(self) -> None:
        """End the process."""
        self.__exit__(None, None, None)

    def chat(
        self,
        prompt: str | Sequence[dict[str, str]],
        system: str | None = None,
        max_new_tokens: int = 128,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
        **params: Any,
    ) -> Chat:
        """Answer a message (or a conversation); the text streams to stdout, or to `on_text`."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        stops = sorted(self.tokenizer.eos_ids | set(params.pop("stop_token_ids", ())))
        params |= {"max_new_tokens": max_new_tokens, "stop_token_ids": stops}
        return self._answer(self.tokenizer.chat(messages), stop, on_text or _to_stdout, params)

    def generate(self, tokens: Sequence[int], **params: Any) -> list[int]:
        """Token ids that follow a prompt of token ids."""
        return [result.token for result in self.process.answer(tokens, params)]

    def _answer(
        self,
        prompt: list[int],
        stop: Sequence[str],
        on_text: Callable[[str], None],
        params: dict[str, Any],
    ) -> Chat:
        stream, tokens, times, pieces, finish = self.tokenizer.stream(stop), [], [], [], "stop"
        process = self.process

        def show(text: str) -> None:
            pieces.append(text)
            on_text(text)

        started = time.perf_counter()
        request = process.submit(prompt, params)
        for arrival in process.run():
            for result in (r for r in arrival.results if r.request == request):
                tokens.append(result.token)
                times.append(arrival.seconds)
                finish = result.finish_reason or finish
                if result.finish_reason != "stop":  # the token that ends an answer is no text
                    show(stream.push(result.token))
            if stream.stopped:
                break
        if stream.stopped:
            process.cancel(request)
        show(stream.flush())
        seconds = times[-1] - times[0]
        return Chat(
            text="".join(pieces),
            tokens=tokens,
            ttft_ms=1e3 * (times[0] - started),
            decode_tok_s=(len(times) - 1) / seconds if seconds > 0 else None,
            finish_reason=finish,
        )


def _to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
