"""The baseline: transformers on the same checkpoint, in its own process, at its best setting here.

Which setting is best depends on the machine, so it is looked for, not assumed: `generate` or a bare
decode loop over the model, a growing or a static cache, fused or eager attention, threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from metainfer_lab.bench.rival import Rival
from metainfer_lab.bench.worker import serve
from metainfer_lab.bench.workload import Workload


class Setting(BaseModel):
    """One way to run transformers."""

    model_config = ConfigDict(frozen=True)

    loop: str  # generate | bare
    cache: str  # dynamic | static
    attention: str  # sdpa | eager
    threads: int

    def __str__(self) -> str:
        return f"{self.loop} loop, {self.cache} cache, {self.attention}, {self.threads} threads"


def settings(threads: int) -> list[Setting]:
    """The settings worth a try, each a change of one thing from the first."""
    first = Setting(loop="bare", cache="dynamic", attention="sdpa", threads=threads)
    changes = [{}, {"loop": "generate"}, {"cache": "static"}, {"attention": "eager"}]
    if threads > 1:
        changes.append({"threads": threads // 2})
    return [first.model_copy(update=change) for change in changes]


class Transformers(Rival):
    """transformers at the best setting that is found."""

    name = "transformers"
    module = "metainfer_lab.bench.transformers"

    def __init__(self, checkpoint: Path, dtype: str = "float32", device: str = "cpu") -> None:
        folder = str(Path(checkpoint).resolve())
        super().__init__(checkpoint=folder, dtype=dtype, device=device)
        self.trials: dict[Setting, float] = {}

    def __enter__(self) -> Transformers:
        super().__enter__()
        self.candidates = settings(self.opened["cores"])
        self.setting = self.candidates[0]
        return self

    def find_best(self, workload: Workload, vocab_size: int, output_len: int = 12) -> Setting:
        """Try every setting on a short piece of the workload; the fastest decode is kept."""
        short = workload.model_copy(update={"output_len": min(output_len, workload.output_len)})
        prompts = short.prompts(vocab_size)
        for setting in self.candidates:
            self.setting = setting
            rates = [self.sample(next(prompts), short).decode_tok_s for _ in range(3)]
            self.trials[setting] = max(rates)
        self.setting = max(self.trials, key=self.trials.__getitem__)
        return self.setting

    def options(self) -> dict[str, object]:
        """The setting in use."""
        return self.setting.model_dump()

    def describe(self) -> dict[str, object]:
        """The setting, and how many were tried."""
        return {"setting": self.setting, "settings_tried": len(self.trials)}


class _Model:
    """The child's side: one model, run one request at a time."""

    def open(self, checkpoint: str, dtype: str, device: str) -> Iterator[dict]:
        import torch
        import transformers

        self.torch, self.device = torch, device
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=getattr(torch, dtype), local_files_only=True
        )
        self.model = self.model.to(device).eval()
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        yield {"versions": versions, "cores": len(os.sched_getaffinity(0))}

    def run(self, prompts: list, output_len: int, loop: str, cache: str, **how) -> Iterator[dict]:
        self.torch.set_num_threads(how["threads"])
        self.model.set_attn_implementation(how["attention"])
        ids = self.torch.tensor(prompts, device=self.device)
        steps = self._generate if loop == "generate" else self._bare
        yield from steps(ids, output_len, cache)

    def _cache(self, kind: str, length: int) -> object:
        from transformers import DynamicCache, StaticCache

        config = self.model.config
        if kind == "static":
            return StaticCache(config=config, max_cache_len=length)
        return DynamicCache(config=config)

    def _bare(self, ids, output_len: int, cache: str) -> Iterator[dict]:
        """A decode loop over the model and nothing else: what generate costs is left out."""
        past = self._cache(cache, ids.shape[1] + output_len)
        with self.torch.inference_mode():
            for _ in range(output_len):
                out = self.model(
                    input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1
                )
                ids = out.logits[:, -1].argmax(-1, keepdim=True)
                yield {"tokens": [*enumerate(ids[:, 0].tolist())]}

    def _generate(self, ids, output_len: int, cache: str) -> Iterator[dict]:
        """`generate` in a thread of its own, as its streamer asks."""
        from queue import SimpleQueue
        from threading import Thread

        queue: SimpleQueue = SimpleQueue()
        length = ids.shape[1] + output_len
        arguments = {
            "inputs": ids,
            "attention_mask": self.torch.ones_like(ids),
            "past_key_values": self._cache(cache, length),
            "max_new_tokens": output_len,
            "min_new_tokens": output_len,
            "do_sample": False,
            "streamer": _Stream(queue),
        }
        thread = Thread(target=self.model.generate, kwargs=arguments, daemon=True)
        thread.start()
        queue.get()  # the prompt comes first
        for _ in range(output_len):
            yield {"tokens": [*enumerate(queue.get())]}
        thread.join()

    def handle(self, request: dict) -> Iterator[dict]:
        yield from getattr(self, request.pop("op"))(**request)


class _Stream:
    """What `generate` calls with each step's tokens."""

    def __init__(self, queue) -> None:
        self.queue = queue

    def put(self, tokens) -> None:
        self.queue.put(tokens.flatten().tolist())

    def end(self) -> None:
        """Nothing is held back, so there is nothing to flush."""


if __name__ == "__main__":
    serve(_Model().handle)
