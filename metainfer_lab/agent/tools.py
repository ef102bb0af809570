"""The tools of an author: their schemas for the API, and what each does when it is called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from metainfer_lab.agent import prompts
from metainfer_lab.agent.editor import Edit, ToolError, View, edit
from metainfer_lab.agent.scrub import scrub
from metainfer_lab.agent.transcript import Block, Finding, Judgement
from metainfer_lab.errors import InputError
from metainfer_lab.paths import tree_files, tree_hash, write_atomic
from metainfer_lab.skills import Role, Skill
from metainfer_lab.spec import Spec, explain

if TYPE_CHECKING:
    from metainfer_lab.agent.phases import Phase
    from metainfer_lab.gates import GateVerdict, Verdict

EDITOR, REMOVE, SUBMIT = "str_replace_based_edit_tool", "remove_file", "submit_phase"
REVIEW, PROPOSE = "submit_review", "propose"
ENDINGS = (SUBMIT, REVIEW, PROPOSE)  # calls that end a reply
BASH_SECONDS = 120
NOT_JUDGED = (
    "A gate could not judge, for the reason that it gives; this was no attempt. Mend what it "
    "names in the engine, or submit again where the reason is the machine's."
)
# `import engine` must find the folder by that name, whatever its parent lets us see
BASH_SETUP = """\
export CHECKPOINT='{checkpoint}'
mkdir -p "$TMPDIR/path" && ln -s "$PWD" "$TMPDIR/path/engine"
export PYTHONPATH="$TMPDIR/path:$PYTHONPATH"
"""


class _Input(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RemoveFile(_Input):
    """Delete a file of the engine folder."""

    path: str


class ReadSkill(_Input):
    """Show one skill in full."""

    name: str


class RunGate(_Input):
    """Run gates on the engine as it stands and say what they found. Costs no attempt."""

    gates: list[str] = Field(min_length=1)


class InspectKernel(_Input):
    """What the compiler made of kernels for a GPU, without one: registers, occupancy, the inner
    loop's instructions and cost. inspection.py declares them (skill kernel-inspection)."""

    kernels: list[str] = []
    target: Literal["sm_90a", "sm_100a"] = "sm_90a"


class Measure(_Input):
    """Decode speed of the engine as it stands, beside its baseline, in tokens per second."""


class SubmitPhase(_Input):
    """Have the phase judged: its gates and those of all earlier phases. Must be the last call."""


class Bash(_Input):
    """A shell command in the sandbox."""

    command: str = ""
    restart: bool = False


class SubmitReview(_Input):
    """Hand in the review: every place that departs from a skill; an empty list approves."""

    findings: list[Finding]


# What each role may call beside the editor (the reviewer: its `view`) and, to write, bash.
INPUTS: dict[Role, dict[str, type[_Input]]] = {
    "implementer": {
        REMOVE: RemoveFile,
        "read_skill": ReadSkill,
        "run_gate": RunGate,
        "inspect_kernel": InspectKernel,
        "measure": Measure,
        SUBMIT: SubmitPhase,
    },
    "reviewer": {"read_skill": ReadSkill, REVIEW: SubmitReview},
}


def calls(made: Iterable[tuple[str, dict[str, Any]]], prefix: str = "toolu") -> list[Block]:
    """Calls, each a name and its input, as the blocks of a reply."""
    return [
        {"type": "tool_use", "id": f"{prefix}_{i:04d}", "name": name, "input": given}
        for i, (name, given) in enumerate(made)
    ]


def creations(files: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    """Calls that write files (name -> text) anew."""
    return [
        (EDITOR, {"command": "create", "path": name, "file_text": text})
        for name, text in files.items()
    ]


def texts(folder: Path) -> dict[str, str]:
    """An engine's files, name -> text."""
    return {path.relative_to(folder).as_posix(): path.read_text() for path in tree_files(folder)}


def in_words(model: type[BaseModel]) -> str:
    """What a tool is for, on one line."""
    return " ".join((model.__doc__ or "").split())


@dataclass(frozen=True)
class Judge:
    """The gates: their names, and the call that runs some of them on an engine folder."""

    gates: tuple[str, ...]
    verify: Callable[[Path, Sequence[str], Callable[[GateVerdict], None]], Verdict]


@dataclass
class Result:
    """What a call came to: text for the author; the judgement if gates ran, a review's findings."""

    text: str
    is_error: bool = False
    judgement: Judgement | None = None
    findings: list[Finding] | None = None


@dataclass
class Tools:
    """The tools bound to one run's folders.

    engine: the folder that is written; verdicts: where verdicts are stored; skills: those that may
    be read; judge: the gates; inspect, measure: reports on the engine; checkpoint: fetches the
    folder that bash may read; names: to scrub.
    """

    engine: Path
    verdicts: Path
    skills: dict[str, Skill]
    inputs: ClassVar[Mapping[Role, Mapping[str, type[BaseModel]]]] = INPUTS

    judge: Judge
    inspect: Callable[[Path, Sequence[str], str], str]
    measure: Callable[[Path], str]
    say: Callable[[str], None]
    checkpoint: Callable[[], Path]
    names: dict[Path, str] = field(default_factory=dict)

    def call(self, block: Block, phase: Phase, role: Role = "implementer") -> Result:
        """Carry out one tool call; whatever the author got wrong comes back as an error result."""
        try:
            result = self._dispatch(block["name"], block["input"], phase, role)
        except ValidationError as error:
            result = Result(f"{block['name']}: {explain(error)}", is_error=True)
        except (ToolError, InputError) as error:
            result = Result(str(error), is_error=True)
        if result.judgement:
            result.judgement = result.judgement.model_copy(update={"call": block["id"]})
        result.text = prompts.clip(scrub(result.text, self.names))
        return result

    def definitions(self, role: Role = "implementer") -> list[dict[str, Any]]:
        """A role's tools as the Messages API takes them, in an order that never changes (the
        prompt cache needs one)."""
        shell = [{"type": "bash_20250124", "name": "bash"}] if role == "implementer" else []
        own = [
            {"name": name, "description": in_words(model), "input_schema": _schema(model)}
            for name, model in self.inputs[role].items()
        ]
        return [{"type": "text_editor_20250728", "name": EDITOR}, *shell, *own]

    def _dispatch(self, name: str, given: Any, phase: Phase, role: Role) -> Result:
        if name == EDITOR:
            command = TypeAdapter(Edit).validate_python(given)
            if role == "reviewer" and not isinstance(command, View):
                raise ToolError(f"{command.command}: a reviewer reads; `view` is its one command")
            return Result(edit(self.engine, command))
        if name == "bash" and role == "implementer":
            return self._bash(Bash.model_validate(given))
        if name not in self.inputs[role]:
            known = ", ".join(tool["name"] for tool in self.definitions(role))
            raise ToolError(f"no tool {name!r}; there are {known}")
        return self._do(self.inputs[role][name].model_validate(given), phase)

    def _do(self, asked: BaseModel, phase: Phase) -> Result:
        match asked:
            case RemoveFile(path=path):
                return Result(apply_edit(self.engine, REMOVE, {"path": path}))
            case ReadSkill(name=skill):
                return self._read_skill(skill)
            case RunGate(gates=gates):
                return self._run_gates(gates)
            case InspectKernel(kernels=kernels, target=target):
                return Result(self.inspect(self.engine, kernels, target))
            case SubmitPhase():
                return self._judged(list(phase.all_gates), submission=True)
            case SubmitReview(findings=findings):
                return self._reviewed(findings)
        return Result(self.measure(self.engine))

    def _read_skill(self, name: str) -> Result:
        _known("skill", name, self.skills)
        return Result(str(self.skills[name]))

    def _reviewed(self, findings: list[Finding]) -> Result:
        """A review whose findings point at lines that exist and at skills that exist."""
        files = texts(self.engine)
        for finding in findings:
            _known("file", finding.file, files)
            _known("skill", finding.skill, self.skills)
            lines = len(files[finding.file].splitlines())
            if finding.line > lines:
                raise ToolError(f"findings: {finding.file} has {lines} lines, no {finding.line}")
        return Result(f"{len(findings)} findings taken", findings=findings)

    def _run_gates(self, gates: list[str]) -> Result:
        for gate in gates:
            _known("gate", gate, self.judge.gates)
        return self._judged(gates, submission=False)

    def _judged(self, gates: list[str], *, submission: bool) -> Result:
        """Run gates, store the verdict, and put it into words."""
        try:
            verdict = self.judge.verify(self.engine, gates, self._say_gate)
        except InputError as error:
            text = scrub(str(error), self.names)
            judgement = Judgement(
                gates=gates, failed=gates, passed=False, submission=submission, error=text
            )
            return Result(f"FAILED before any gate ran: {text}", judgement=judgement)
        name = f"{len(list(self.verdicts.glob('*.json'))):04d}.json"
        text = scrub(verdict.model_dump_json(indent=1), self.names)
        write_atomic(self.verdicts / name, text + "\n")
        unjudged = [gate for gate in verdict.gates if gate.status == "not_judged"]
        judgement = Judgement(
            gates=gates,
            failed=[gate.gate for gate in verdict.gates if gate.status == "fail"],
            passed=verdict.passed,
            submission=submission and not (verdict.passed and unjudged),
            file=name,
        )
        remark = f"\n{NOT_JUDGED}" if submission and not judgement.submission else ""
        return Result(f"{verdict}{remark}", judgement=judgement)

    def _say_gate(self, gate: GateVerdict) -> None:
        self.say("    " + str(gate).replace("\n", "\n    "))

    def _bash(self, given: Bash) -> Result:
        from metainfer_lab import sandbox

        if given.restart or not given.command:
            return Result("each call is a new shell; there is nothing to restart")
        checkpoint = self.checkpoint()
        script = BASH_SETUP.format(checkpoint=checkpoint) + given.command
        limits = {"cwd": self.engine, "readable": [checkpoint], "timeout_s": BASH_SECONDS}
        done = sandbox.run(["bash", "-c", script], **limits)
        end = f"stopped after {BASH_SECONDS} s" if done.timed_out else f"exit {done.rc}"
        return Result(f"{done.stdout}{done.stderr}[{end}]", is_error=done.rc != 0)


def _known(kind: str, name: str, names: Collection[str]) -> None:
    if name not in names:
        raise ToolError(f"no {kind} {name!r}; there are {', '.join(names) or 'none'}")


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    names = ("type", "properties", "required", "$defs")
    return {key: schema[key] for key in names if key in schema}


def apply_edit(engine: Path, name: str, given: Any) -> str:
    """Do one edit (editor or remove_file) on a folder: the only way an engine's tree changes."""
    command = {"command": "remove", **given} if name == REMOVE else given
    return edit(engine, TypeAdapter(Edit).validate_python(command))


def real_judge(spec: Spec) -> Judge:
    """The gates themselves, asked on behalf of a spec (an engine.json may be wrong or missing)."""
    from metainfer_lab.gates import GATES, verify

    def run(folder: Path, gates: Sequence[str], on_gate: Callable[[GateVerdict], None]) -> Verdict:
        return verify(folder, spec=spec, gates=gates, on_gate=on_gate)

    return Judge(tuple(GATES), run)


def brought(path: Path, engine: Path) -> Judge:
    """Hands out a verdict given elsewhere, on a machine that has the spec's GPU: of the engine's
    very tree, by gates of today's versions; InputError otherwise."""
    from metainfer_lab.gates import Verdict, versions

    verdict, today = Verdict.model_validate_json(path.read_text()), versions()
    if (here := tree_hash(engine)) != verdict.tree:
        raise InputError(f"{path}: is of the tree {verdict.tree[:12]}; this is {here[:12]}")
    if earlier := [gate.gate for gate in verdict.gates if gate.version != today[gate.gate]]:
        raise InputError(f"{path}: gates have been raised since: {', '.join(earlier)}")

    def run(folder: Path, gates: Sequence[str], on_gate: Callable[[GateVerdict], None]) -> Verdict:
        for gate in verdict.gates:
            on_gate(gate)
        return verdict

    return Judge(tuple(gate.gate for gate in verdict.gates), run)


def measured(folder: Path, spec: Spec) -> str:
    """Decode speed of an engine folder beside what a spec's goals compare with, in one line."""
    from metainfer_lab.bench.compare import measure, summary
    from metainfer_lab.engine import Engine, EngineDied, EngineError

    try:
        with Engine.open(folder, spec) as engine:
            return summary(measure(engine))
    except (EngineDied, EngineError) as error:
        raise ToolError(f"the engine could not be measured: {error}") from error
