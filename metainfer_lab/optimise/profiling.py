"""Where a decode step's time goes: the engine's own operators by time, beside their roofline.

The engine runs in the sandbox with a script of ours, and what it prints is untrusted: one line of
JSON is parsed into fixed keys, nothing else is read. A profile decides nothing; it says where to
look.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from metainfer_lab import checkpoints, sandbox
from metainfer_lab.agent.tools import BASH_SETUP
from metainfer_lab.bench.workload import Workload
from metainfer_lab.model.layout import BITS
from metainfer_lab.optimise.records import Profile, Record, Target, one_line
from metainfer_lab.plan import Plan
from metainfer_lab.spec import Spec

SCRIPT = Path(__file__).with_name("profile_script.py")
TIMEOUT_S = 300.0
MARK = "PROFILE "
SHOWN = 14
BETWEEN = "between operators (Python, launches, allocation)"


class Operator(Record):
    """One operator: us and calls of a step, elements of its largest matrix argument."""

    name: str
    us: float
    calls: float
    matrix: int


class Measured(Record):
    """What the script prints: the step undisturbed, the step under the profiler, operators."""

    step_us: float
    profiled_us: float
    operators: list[Operator]


def profiled(folder: Path, spec: Spec, plan: Plan) -> Profile:
    """Profile one engine folder at the spec's traffic; RuntimeError when nothing usable came."""
    checkpoint = checkpoints.fetch(spec)
    workload = Workload.from_spec(spec)
    given = {
        "device": "cpu" if spec.hardware == "cpu" else "cuda",
        "max_batch": workload.concurrency,
        "max_context": spec.workload.max_context,
        "prompt_len": workload.prompt_len,
        "vocab_size": plan.dims.vocab_size,
    }
    script = BASH_SETUP.format(checkpoint=checkpoint)
    script += f"exec python {SCRIPT} '{json.dumps(given)}'"
    done = sandbox.run(
        ["bash", "-c", script], folder, readable=[checkpoint, SCRIPT], timeout_s=TIMEOUT_S
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    try:
        found = TypeAdapter(Measured).validate_json(lines[-1].removeprefix(MARK))
    except (IndexError, ValidationError):
        said = one_line(f"{done.stdout[-300:]} {done.stderr[-300:]}", 400)
        raise RuntimeError(f"the profile came to nothing: {said}") from None
    return as_profile(found, plan, workload)


def as_profile(found: Measured, plan: Plan, workload: Workload) -> Profile:
    """Operators as targets, with the rest of the step; times scaled to the undisturbed step.

    An operator's floor is its weight matrix, in the precision of the spec's weights, read once a
    call at the planning bandwidth. A profiler slows every call, so shares count, not times.
    """
    scale = found.step_us / found.profiled_us
    rate = plan.hardware.bandwidth.planning / 1e6  # bytes a microsecond
    width = BITS.get(plan.spec.precision.weights, 16) / 8
    targets = [
        Target(
            name=one_line(operator.name, 80),
            us=operator.us * scale,
            calls=operator.calls,
            floor_us=operator.matrix * width * operator.calls / rate if operator.matrix else None,
        )
        for operator in found.operators[:SHOWN]
    ]
    rest = max(0.0, found.step_us - sum(o.us for o in found.operators) * scale)
    targets.append(Target(name=BETWEEN, us=rest, calls=1))
    floor = plan.floor_tok_s(workload.concurrency, round(workload.mean_context), kind="planning")
    return Profile(
        step_us=found.step_us, floor_us=1e6 * workload.concurrency / floor, targets=targets
    )
