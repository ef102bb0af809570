"""What a compiler made of a kernel: counts along the path a warp takes, and what they cost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field

from metainfer_lab.errors import InputError
from metainfer_lab.hardware import Hardware
from metainfer_lab.inspection import compilers, sass, view
from metainfer_lab.inspection.flow import Flow, Loop
from metainfer_lab.inspection.kernel import Kernel, Record
from metainfer_lab.inspection.targets import TARGETS, Occupancy, Target, find_target, occupancy

STAGES = ("naive", "source", "ttir", "ttgir", "ptx", "sass")


class Turn(Record):
    """What a warp issues in one turn of a loop, or between its first and last matrix product.

    body: instructions of the loop, cold ones too; issued: along its steady path; weights: that a
    lane multiplies in it; the histograms count the steady path.
    """

    kind: Literal["loop", "unrolled", "whole"]
    body: int
    issued: int
    weights: float
    opcodes: dict[str, int]
    accesses: dict[str, int]
    matrix: dict[str, int]

    @property
    def per_weight(self) -> float | None:
        """Lane-instructions per weight; None where no weights are multiplied."""
        return self.issued / self.weights if self.weights else None


class Budget(Record):
    """What a kernel may cost; None asks nothing.

    per_weight: lane-instructions per weight in the inner loop; issue_share: issue time over memory
    time; blocks: least on a multiprocessor; stream_bytes: least width of its widest global load.
    """

    per_weight: float | None = None
    issue_share: float | None = 1.0
    local_accesses: int | None = 0
    registers: int | None = None
    blocks: int | None = None
    stream_bytes: int | None = None


class Check(Record):
    """One line of a budget: what was found beside what is allowed; found None: not judged."""

    asked: str
    found: float | None
    allowed: float
    passed: bool


class Checks(view.Shown, Record):
    """A kernel beside its budget."""

    kernel: str
    arch: str
    checks: list[Check]

    @property
    def failures(self) -> list[Check]:
        """The lines that did not hold."""
        return [check for check in self.checks if not check.passed]

    @property
    def passed(self) -> bool:
        """Whether every line holds."""
        return not self.failures

    def __str__(self) -> str:
        return f"{self.kernel} for {self.arch}\n" + view.text_table(*view.checks_table(self))

    def _repr_html_(self) -> str:
        return f"<b>{view.escape(f'{self.kernel} for {self.arch}')}</b>" + view.table_html(
            *view.checks_table(self)
        )


class Report(view.Shown, Record):
    """One kernel compiled for one target. stages: texts by name, in the order of STAGES."""

    kernel: Kernel
    arch: str
    registers: int
    stack_bytes: int
    shared_bytes: int = Field(description="of a block, static and dynamic")
    local_accesses: int = Field(description="loads and stores of local memory: spills, arrays")
    instructions: int
    outside: int = Field(description="least instructions of a warp outside its inner loop")
    turns: list[Turn] = Field(description="inner loops, the most matrix products first")
    accesses: dict[str, int] = Field(description="of the whole kernel")
    stages: dict[str, str] = Field(repr=False)

    @property
    def target(self) -> Target:
        """The machine it is compiled for."""
        return TARGETS[self.arch]

    @property
    def inner(self) -> Turn:
        """The loop that a budget is about."""
        return self.turns[0]

    @property
    def per_weight(self) -> float | None:
        """Lane-instructions per weight in the inner loop."""
        return self.inner.per_weight if self.kernel.weights else None

    @property
    def occupancy(self) -> Occupancy:
        """Blocks of a multiprocessor."""
        return occupancy(self.registers, self.kernel.block, self.shared_bytes)

    @cached_property
    def issued(self) -> float | None:
        """Lane-instructions of a launch, at least; None where no weights say how often it turns.

        warps x 32 x (outside + turns x issued), turns = weights / (lanes x weights of a turn).
        """
        if not (self.kernel.weights and self.inner.weights):
            return None
        lanes = 32 * self.kernel.warps
        turns = self.kernel.weights / (lanes * self.inner.weights)
        return lanes * (self.outside + max(1.0, turns) * self.inner.issued)

    @property
    def issue_us(self) -> float | None:
        """Time to issue a launch's instructions, every scheduler busy."""
        return None if self.issued is None else self.issued / self.target.issue_rate * 1e6

    @property
    def memory_us(self) -> float:
        """Time to move a launch's bytes at the rate that floors are shown at."""
        return self.kernel.bytes / self.target.bandwidth * 1e6

    @property
    def arithmetic_us(self) -> float:
        """Time of a launch's products at the tensor cores' 16-bit rate."""
        rate = Hardware.load(self.target.hardware).rate("bf16").planning
        return self.kernel.operations / rate * 1e6

    @property
    def issue_share(self) -> float | None:
        """Issue time over memory time: beyond 1 instructions, not memory, set the pace."""
        return self.issue_us / self.memory_us if self.issue_us and self.memory_us else None

    @property
    def widest_load(self) -> int:
        """Bytes of a lane in the widest load from global memory; a bulk copy counts as 16."""
        found = [re.fullmatch(r"(?:LDG|LDGSTS) (\d+) B", name) for name in self.accesses]
        bulk = 16 * any(name.endswith("bulk") for name in self.accesses)
        return max([bulk, *(int(match[1]) for match in found if match)])

    def check(self, budget: Budget | None = None) -> Checks:
        """The report beside a budget (by default: no local memory, issue within memory time)."""
        budget = budget or Budget()
        found = {
            "per_weight": self.per_weight,
            "issue_share": self.issue_share,
            "local_accesses": self.local_accesses,
            "registers": self.registers,
            "blocks": self.occupancy.blocks,
            "stream_bytes": self.widest_load,
        }
        asked = {name: limit for name, limit in budget if limit is not None}
        checks = [_check(name, found[name], limit) for name, limit in asked.items()]
        return Checks(kernel=self.kernel.name, arch=self.arch, checks=checks)

    def show(self, *stages: str) -> None:
        """Display it in a notebook, the named stages unfolded."""
        from IPython.display import display

        display({"text/plain": str(self), "text/html": view.report_html(self, stages)}, raw=True)

    def __str__(self) -> str:
        return f"{self.kernel.name} for {self.arch}\n" + view.text_table(*view.report_table(self))

    def _repr_html_(self) -> str:
        return view.report_html(self)


_AT_LEAST = {"blocks", "stream_bytes"}


def _check(name: str, found: float | None, limit: float) -> Check:
    holds = found is None or (found >= limit if name in _AT_LEAST else found <= limit)
    word = "at least" if name in _AT_LEAST else "at most"
    asked = f"{name.replace('_', ' ')} {word}"
    return Check(asked=asked, found=found, allowed=limit, passed=holds)


def build(
    kernel: Kernel, target: str = "sm_90a", *, folder: Path = Path(), source: str | None = None
) -> Report:
    """Compile one kernel in this process and report on it.

    Its files lie in `folder`; `source` is CUDA C++ that takes their place. A Triton kernel's file
    is imported: use `inspect` for code that you do not trust.
    """
    return report_group([kernel], folder, find_target(target), source)[0]


def report_group(
    kernels: Sequence[Kernel], folder: Path, target: Target, source: str | None = None
) -> list[Report]:
    """Reports on kernels that one compilation serves."""
    first = kernels[0]
    text = first.source(folder) if source is None else source
    if first.language == "triton":
        compiled = compilers.compile_triton(first, folder, target)
    else:
        compiled = compilers.compile_cuda(text, target.arch, first.defines, first.options)
    functions = sass.functions(compiled.cubin)
    texts = [{"source": text, "naive": kernel.specification(folder)} for kernel in kernels]
    return [
        report(kernel, stages, compiled, functions, target)
        for kernel, stages in zip(kernels, texts, strict=True)
    ]


def report(
    kernel: Kernel,
    texts: dict[str, str],
    compiled: compilers.Compiled,
    functions: dict[str, sass.Function],
    target: Target,
) -> Report:
    """The report on one of a compilation's functions; InputError when it is not among them."""
    function = functions.get(kernel.entry)
    if function is None:
        raise InputError(
            f"inspection: kernel {kernel.name}: no function {kernel.entry!r} in "
            f"{', '.join(kernel.files)}; there are {', '.join(sorted(functions))}"
        )
    flow = Flow(function.instructions)
    turns, outside = _turns(flow, kernel)
    accesses = _accesses(function.instructions)
    stages = compiled.stages | texts | {"sass": function.text}
    stages["ptx"] = _of_entry(stages["ptx"], kernel.entry)
    return Report(
        kernel=kernel,
        arch=target.arch,
        registers=function.registers,
        stack_bytes=function.stack_bytes,
        shared_bytes=function.shared_bytes + max(kernel.shared_bytes, compiled.shared_bytes),
        local_accesses=sum(n for name, n in accesses.items() if name.startswith(("LDL", "STL"))),
        instructions=len(function.instructions),
        outside=outside,
        turns=turns,
        accesses=accesses,
        stages={stage: stages[stage] for stage in STAGES if stages.get(stage)},
    )


def _turns(flow: Flow, kernel: Kernel) -> tuple[list[Turn], int]:
    """The inner loops, or what lies between first and last product of a kernel without; and the
    instructions of a warp outside the first."""
    loops = flow.product_loops
    everything = flow.steady_path()
    products = [place for place, step in enumerate(everything) if step.is_matrix]
    if loops and (flow.matrix_products(loops[0].blocks) or not products):
        return [_loop_turn(flow, loop, kernel) for loop in loops], flow.outside(loops[0])
    first, last = (products[0], products[-1] + 1) if products else (0, len(everything))
    inside = everything[first:last]
    kind = "unrolled" if products else "whole"
    return [_turn(kind, inside, len(inside), kernel)], len(everything) - len(inside)


def _loop_turn(flow: Flow, loop: Loop, kernel: Kernel) -> Turn:
    body = sum(len(flow.span(block)) for block in loop.blocks)
    return _turn("loop", flow.steady_path(loop), body, kernel)


def _turn(kind: str, path: Sequence[sass.Instruction], body: int, kernel: Kernel) -> Turn:
    weights = sum(step.weights for step in path) / kernel.column_tiles
    return Turn(
        kind=kind,
        body=body,
        issued=len(path),
        weights=kernel.weights_per_lane or weights,
        opcodes=_counted(step.kind for step in path),
        accesses=_accesses(path),
        matrix=_counted(step.opcode for step in path if step.is_matrix),
    )


def _accesses(path: Sequence[sass.Instruction]) -> dict[str, int]:
    return _counted(step.access for step in path if step.access)


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def _of_entry(ptx: str, entry: str) -> str:
    """The part of a PTX text that is one kernel."""
    found = re.search(rf"(?:\.visible )?\.entry {re.escape(entry)}\b.*?^}}", ptx, re.M | re.S)
    return found[0] if found else ptx
