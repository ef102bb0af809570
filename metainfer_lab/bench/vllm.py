"""The baseline vLLM, where it is installed: its `LLM` class, CUDA graphs on, prefix cache off.

Two rivals: `vllm` as it comes, with the engine core in a process of its own, and `vllm-in-process`
without. vLLM hands out tokens step by step, so both are timed like an engine of ours.
METAINFER_VLLM (JSON) holds further arguments of `LLM`, for a machine where a default of its does
not run; a row names them.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

from metainfer_lab.bench.rival import Rival
from metainfer_lab.bench.worker import serve
from metainfer_lab.errors import InputError


class Vllm(Rival):
    """vLLM on a checkpoint folder, in the precision that the folder states."""

    module = "metainfer_lab.bench.vllm"

    def __init__(
        self, checkpoint: Path, streams: int, max_context: int, tp: int = 1, *, in_process: bool
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise InputError("beside: vllm is not installed here; install it, or leave it out")
        folder = str(Path(checkpoint).resolve())
        sizes = {"streams": streams, "max_context": max_context, "tp": tp}
        super().__init__(checkpoint=folder, in_process=in_process, **sizes)
        self.name = "vllm-in-process" if in_process else "vllm"


class _Model:
    """The child's side: one LLM, its engine stepped by hand so that tokens are seen one by one."""

    def open(
        self, checkpoint: str, streams: int, max_context: int, tp: int, in_process: bool
    ) -> Iterator[dict]:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
        quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        os.environ |= {key: value for key, value in quiet.items() if key not in os.environ}
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # CUDA is awake before vLLM starts
        import torch
        import vllm

        self.vllm, self.count = vllm, 0
        free, total = torch.cuda.mem_get_info()  # beside an engine that keeps its memory
        more = json.loads(os.environ.get("METAINFER_VLLM", "{}"))
        if "vision_config" in json.loads((Path(checkpoint) / "config.json").read_text()):
            more = {"language_model_only": True, **more}
        arguments = {
            "skip_tokenizer_init": True,
            "max_model_len": max_context,
            "max_num_seqs": streams,
            "tensor_parallel_size": tp,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": 0.9 * free / total,
        }
        self.engine = vllm.LLM(model=checkpoint, **arguments | more).llm_engine
        versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        setting = {"process": "in-process" if in_process else "default", "prefix_cache": "off"}
        yield {"versions": versions, "setting": setting | more}

    def run(self, prompts: list, output_len: int) -> Iterator[dict]:
        params = self.vllm.SamplingParams(
            temperature=0.0,
            max_tokens=output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=self.vllm.sampling_params.RequestOutputKind.DELTA,
        )
        names = {}
        for stream, prompt in enumerate(prompts):
            names[str(self.count)] = stream
            self.engine.add_request(str(self.count), {"prompt_token_ids": prompt}, params)
            self.count += 1
        while self.engine.has_unfinished_requests():
            made = [
                (names[output.request_id], token)
                for output in self.engine.step()
                for token in output.outputs[0].token_ids
            ]
            if made:
                yield {"tokens": made}

    def handle(self, request: dict) -> Iterator[dict]:
        yield from getattr(self, request.pop("op"))(**request)


if __name__ == "__main__":
    serve(_Model().handle)
