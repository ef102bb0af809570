"""Gates: what decides whether an engine is right. They know nothing of who wrote it."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import platform
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from metainfer_lab.engine import Engine, EngineDied, EngineError
from metainfer_lab.errors import InputError
from metainfer_lab.gates.alone import alone
from metainfer_lab.gates.batching import batching
from metainfer_lab.gates.decode import decode
from metainfer_lab.gates.drift import drift
from metainfer_lab.gates.limits import limits
from metainfer_lab.gates.logits import logits
from metainfer_lab.gates.memory import memory
from metainfer_lab.gates.operators import operators
from metainfer_lab.gates.parallel import parallel
from metainfer_lab.gates.sampling import sampling
from metainfer_lab.gates.speed import speed
from metainfer_lab.gates.trial import Trial
from metainfer_lab.gates.verdict import Failure, Findings, GateVerdict, NotJudged, Verdict
from metainfer_lab.gates.weights import weights
from metainfer_lab.oracle import Oracle
from metainfer_lab.paths import tree_hash
from metainfer_lab.sandbox import Sandbox
from metainfer_lab.spec import Spec

__all__ = ["GATES", "Failure", "Gate", "GateVerdict", "NotJudged", "Trial", "Verdict", "verify"]
__all__ += ["versions"]

OWN_FILES = Path(__file__).parent


class Gate(NamedTuple):
    """version: raised when what the gate or the checkpoint maker asks changes, and only then."""

    version: int
    asks: str
    run: Callable[[Trial], None]


GATES: dict[str, Gate] = {
    "alone": Gate(2, "imports, size, no forbidden module loaded at run time", alone),
    "weights": Gate(2, "each tensor matters; bad checkpoints are refused by name", weights),
    "operators": Gate(2, "each kernel against its naive form in float64, at edges", operators),
    "logits": Gate(2, "score against the oracle: rows, likeliest tokens, chosen experts", logits),
    "decode": Gate(2, "submit and step: text that is known, text scored by the oracle", decode),
    "batching": Gate(2, "an answer does not depend on neighbours, arrivals, cancels", batching),
    "limits": Gate(2, "edges of the context; bad arguments are refused by name", limits),
    "sampling": Gate(2, "distributions, filters, penalties, seeds", sampling),
    "drift": Gate(1, "hundreds of steps; the precision of cache and state", drift),
    "memory": Gate(1, "capacity as predicted; nothing grows by step or by request", memory),
    "parallel": Gate(1, "several ranks against one and the oracle; a lost rank", parallel),
    "speed": Gate(1, "the goals, beside what they compare with; some timed tokens checked", speed),
}

READ_REAL = ("logits", "decode", "speed")  # the spec's own checkpoint


def versions() -> dict[str, int]:
    """Version of each gate as it is now."""
    return {name: gate.version for name, gate in GATES.items()}


def verify(
    engine: Engine | Spec | Path | str,
    *,
    spec: Spec | None = None,
    gates: Sequence[str] | None = None,
    on_gate: Callable[[GateVerdict], None] | None = None,
    seed: int | None = None,
    sandbox: Sandbox = "auto",
    oracle: Oracle | None = None,
    jobs: int = 1,
    kernels: Path | None = None,
) -> Verdict:
    """Run gates (all when None) on an engine, a spec's engine or an engine folder.

    seed: only to repeat a verdict; without it every input is drawn from the system's randomness.
    oracle: one that is running already; without it one is started, and ended, here. jobs: gates
    asked at once, each in a process with an oracle of its own; speed comes last, alone. kernels:
    where candidates keep those that they compile; none but gates of one engine may share it.
    The engine's own faults become failures; InputError is for what the caller got wrong.
    """
    folder, spec = _target(engine, spec)
    chosen = _chosen(gates)

    before, tree = tree_hash(OWN_FILES), tree_hash(folder)
    seed = random.SystemRandom().getrandbits(64) if seed is None else seed
    if jobs > 1 and len(chosen) > 1:
        asked = partial(verify, folder, spec=spec, seed=seed, sandbox=sandbox)
        return _side_by_side(asked, chosen, jobs, on_gate)
    verdicts: list[GateVerdict] = []
    with tempfile.TemporaryDirectory(prefix="metainfer-gates-") as work:
        place = Path(work).resolve()
        trial = Trial(folder, spec, _device(spec), sandbox, place, kernels, _oracle=oracle)
        try:
            trial.warm()
            for name in chosen:
                trial.rng = np.random.default_rng([seed, list(GATES).index(name)])
                verdicts.append(_judged(name, trial, (before, tree)))
                if on_gate is not None:
                    on_gate(verdicts[-1])
        finally:
            trial.end()
    return Verdict(
        engine=folder.name,
        tree=tree,
        spec=spec.id,
        device=trial.device,
        sandbox=trial.level + ", sockets open" * trial.sockets,
        checkpoint=spec.checkpoint.source,
        gates=verdicts,
        passed=all(verdict.status != "fail" for verdict in verdicts),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=_libraries(),
    )


def _side_by_side(
    asked: partial[Verdict],
    chosen: list[str],
    jobs: int,
    on_gate: Callable[[GateVerdict], None] | None,
) -> Verdict:
    """One verdict of gates that are asked at once; in the order of GATES whoever ends first."""
    folder, spec = asked.args[0], asked.keywords["spec"]
    parts: dict[str, Verdict] = {}

    def take(name: str, part: Verdict) -> None:
        parts[name] = part
        if on_gate is not None:
            on_gate(part.gates[0])

    with (
        tempfile.TemporaryDirectory(prefix="metainfer-gates-") as work,
        ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool,
    ):
        # What one compiled the others need not; the spec's own checkpoint is made once, meanwhile.
        asked = partial(asked, kernels=Path(work).resolve() / "kernels")
        early, late = ([n for n in chosen if (n in READ_REAL) == is_late] for is_late in (0, 1))
        waiting = {pool.submit(asked, gates=[name]): name for name in early}
        if late:
            Trial(folder, spec, _device(spec), "auto", Path(work)).real()
        waiting |= {pool.submit(asked, gates=[name]): name for name in late if name != "speed"}
        for one in as_completed(waiting):
            take(waiting[one], one.result())
        if "speed" in chosen:
            take("speed", asked(gates=["speed"]))
    gates = [parts[name].gates[0] for name in chosen]
    return parts[chosen[0]].model_copy(
        update={
            "sandbox": max((part.sandbox for part in parts.values()), key=_openness),
            "gates": gates,
            "passed": all(gate.status != "fail" for gate in gates),
            "created": max(part.created for part in parts.values()),
        }
    )


def _openness(sandbox: str) -> tuple[bool, int]:
    """Orders what gates say of their sandbox; one that started no candidate says `none`."""
    return sandbox != "none", len(sandbox)


def _judged(name: str, trial: Trial, hashes: tuple[str, str]) -> GateVerdict:
    """One gate's verdict; what the engine raises or dies of is a failure of the engine."""
    started = time.perf_counter()
    trial.findings = Findings()
    not_judged = ""
    try:
        GATES[name].run(trial)
    except NotJudged as reason:
        not_judged = str(reason)
    except EngineError as error:
        place = error.trace.strip().splitlines()[-2:-1]
        trial.findings.fail("the engine raised", f"{error} {' '.join(place).strip()}".strip())
    except EngineDied as error:
        trial.findings.fail("the engine's process", str(error))
    if (tree_hash(OWN_FILES), tree_hash(trial.folder)) != hashes:
        trial.findings.fail("files", "gate files or the engine's files changed while it ran")
    seconds = time.perf_counter() - started
    return trial.findings.verdict(name, GATES[name].version, seconds, not_judged)


def _target(engine: Engine | Spec | Path | str, spec: Spec | None) -> tuple[Path, Spec]:
    if not isinstance(engine, Engine):
        if spec is not None and isinstance(engine, str | Path) and Path(engine).is_dir():
            return Path(engine).resolve(), spec  # its engine.json is a gate's business
        engine = Engine.open(engine, spec)
    return engine.folder, spec or engine.spec


def _chosen(gates: Sequence[str] | None) -> list[str]:
    unknown = sorted(set(gates or ()) - set(GATES))
    if unknown:
        raise InputError(f"gates: {', '.join(unknown)} unknown; known are {', '.join(GATES)}")
    return [name for name in GATES if gates is None or name in gates]


def _device(spec: Spec) -> str:
    """The spec's own device where this machine has it; else the CPU and the naive operators."""
    return "cuda" if spec.hardware != "cpu" and Path("/dev/nvidia0").exists() else "cpu"


def _libraries() -> dict[str, str]:
    names = ("torch", "transformers", "numpy", "safetensors")
    return {"python": platform.python_version()} | {n: importlib.metadata.version(n) for n in names}
