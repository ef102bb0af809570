"""From a spec, or a config.json alone, to a plan; or to a refusal that says what would do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from metainfer_lab.errors import InputError
from metainfer_lab.model import ModelDims
from metainfer_lab.paths import MODELS
from metainfer_lab.plan.case import Case, Finding
from metainfer_lab.plan.checks import refusals, warnings
from metainfer_lab.plan.result import Plan, make_plan
from metainfer_lab.spec import Spec, shipped


class Refused(InputError):
    """A spec that cannot be; `refusals` has every field, reason and remedy."""

    def __init__(self, name: str, found: list[Finding]) -> None:
        self.refusals = tuple(found)
        super().__init__(f"{name}: " + " | ".join(str(finding) for finding in found))


def plan(source: Spec | str | Path, hardware: str | None = None) -> Plan:
    """Resolve a spec (object, shipped id, YAML file) or a config.json (file, folder, model name).

    hardware: profile that replaces the spec's, or that a bare config is planned for (default cpu).
    Raises Refused with every impossible field, InputError for what cannot be read.
    """
    spec = _spec(source, hardware)
    case = Case.load(spec)
    found = refusals(case)
    if found:
        raise Refused(spec.id, found)
    return make_plan(case, warnings(case))


def _spec(source: Spec | str | Path, hardware: str | None) -> Spec:
    if not isinstance(source, Spec) and _is_model(str(source)):
        return spec_of_model(str(source), hardware or "cpu")
    spec = source if isinstance(source, Spec) else Spec.load(source)
    return spec if hardware is None else spec.change(hardware=hardware)


def _is_model(source: str) -> bool:
    """A path, hub id or shipped geometry; a shipped spec's id and YAML files are specs."""
    if source in shipped() or source.endswith((".yaml", ".yml")):
        return False
    return "/" in source or Path(source).exists() or (MODELS / source).is_dir()


def spec_of_model(model: str, hardware: str) -> Spec:
    """The plainest spec for a model: as stored (bfloat16 on a GPU, fp32 on a CPU), one request."""
    dims = ModelDims.load(model)
    plain = "fp32" if hardware == "cpu" else "bf16"
    longest = min(4096, dims.max_position_embeddings)
    data: dict[str, Any] = {
        "id": re.sub(r"[^a-z0-9.]+", "-", f"{dims.name.lower()}-{hardware}").strip("-."),
        "model": model,
        "checkpoint": {"source": model},
        "hardware": hardware,
        "precision": {
            "weights": "nvfp4-mix" if dims.quantised_layers else plain,
            "activations": plain,
            "kv_cache": plain,
        },
        "parallel": {"tp": 1},
        "capabilities": {
            "paged_kv": False,
            "continuous_batching": True,
            "prefix_cache": False,
            "chunked_prefill": True,
            "cuda_graphs": hardware != "cpu",
            "speculative": "none",
        },
        "workload": {
            "prompt_len": longest // 4,
            "output_len": longest // 4,
            "concurrency": 1,
            "max_context": longest,
        },
    }
    return Spec.parse(data, name=f"model {model}")
