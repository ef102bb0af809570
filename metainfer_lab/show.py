"""How the nouns look in a notebook: formatters that IPython picks by type, nothing imported early.

Each noun has plain text (terminal, papermill's log, a diff) and HTML (folded, escaped, colours from
the Lab theme so that dark stays readable). Tables are plain tables: GitHub strips style sheets.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from html import escape
from typing import TYPE_CHECKING, Any

from metainfer_lab.markup import Markup, code, fold, frame_html, table

if TYPE_CHECKING:
    from metainfer_lab.agent.replay import Report
    from metainfer_lab.agent.run import Run, Turn
    from metainfer_lab.engine import Chat, Engine
    from metainfer_lab.gates import GateVerdict, Verdict
    from metainfer_lab.gates.audit import Audit
    from metainfer_lab.plan import Plan
    from metainfer_lab.roofline import Term
    from metainfer_lab.spec import Spec

MARKS = {"pass": "✓", "fail": "✗", "not_judged": "–"}
COLOURS = {
    "pass": "var(--jp-success-color1, #2e7d32)",
    "fail": "var(--jp-error-color1, #c62828)",
    "not_judged": "var(--jp-ui-font-color2, #777)",
}


def status(word: str) -> Markup:
    """pass, fail or not_judged as a coloured mark and word."""
    shown = f"{MARKS[word]} {word.replace('_', ' ')}"
    return Markup(f'<span style="color: {COLOURS[word]}">{shown}</span>')


def spec_html(spec: Spec) -> str:
    """What is asked, one row a field; the YAML folded."""
    goals = {k: v for k, v in spec.goals.model_dump(exclude_defaults=True).items() if v}
    work = spec.workload
    can = [k for k, v in spec.capabilities.model_dump(exclude_none=True).items() if v is True]
    rows = [
        ("model", spec.model),
        ("hardware", f"{spec.hardware}, tensor parallel {spec.parallel.tp}"),
        ("precision", _pairs(spec.precision.model_dump(exclude_none=True, exclude_defaults=True))),
        ("workload", f"{work.concurrency} x ({work.prompt_len} in, {work.output_len} out)"),
        ("capabilities", ", ".join(can)),
        ("goals", _pairs(goals) or "none"),
    ]
    return f"<b>{escape(spec.id)}</b>{table(('asked', ''), rows)}{fold('YAML', code(str(spec)))}"


def plan_html(plan: Plan) -> str:
    """The numbers in words, then the terms of a decode step and of the prompt, folded."""
    lines = "<br>".join(escape(line.strip()) for line in str(plan).splitlines())
    step, prompt = _terms(plan.step_terms), _terms(plan.prompt_terms)
    return f"{lines}{fold('terms of a decode step', step)}{fold('terms of the prompt', prompt)}"


def _terms(terms: Iterable[Term]) -> str:
    rows = [
        (t.name, t.formula, f"{t.amount:,.0f} {t.unit}", f"{t.seconds * 1e3:.3f}", t.source)
        for t in terms
    ]
    return table(("term", "formula", "amount", "ms", "rate"), rows)


def verdict_html(verdict: Verdict) -> str:
    """A table of gates; failures unfold."""
    word = status("pass" if verdict.passed else "fail")
    line = (
        f"{word} <b>{escape(verdict.engine)}</b> on {escape(verdict.device)}, sandbox "
        f"{escape(verdict.sandbox)}, tree {verdict.tree[:12]}, verdict {verdict.hash[:12]}"
    )
    return line + _gates(verdict.gates) + "".join(_failures(gate) for gate in verdict.gates)


def gate_html(gate: GateVerdict) -> str:
    """One gate, its failures unfolded."""
    return _gates([gate]) + _failures(gate, is_open=True)


def _gates(gates: Iterable[GateVerdict]) -> str:
    head = ("gate", "status", "cases", "worst error", "tolerance", "seconds", "reason")
    rows = [
        (g.gate, status(g.status), g.cases, g.worst_error, g.tolerance, g.seconds, g.reason)
        for g in gates
    ]
    return table(head, rows)


def _failures(gate: GateVerdict, is_open: bool = False) -> str:
    if not gate.failures:
        return ""
    head = ("case", "position", "error", "tolerance", "layer", "detail")
    rows = [tuple(getattr(f, name) for name in head) for f in gate.failures]
    return fold(f"{gate.gate}: {len(rows)} failures", table(head, rows), is_open)


def audit_html(audit: Audit) -> str:
    """How it ended and what each gate kills; what became of each wrong engine, folded."""
    word = status("pass" if audit.passed else "fail")
    lines = "<br>".join(escape(line) for line in audit.summary())
    head = ("gate", "kills", "alone", "of them")
    gates = [(g, n, len(audit.only[g]), ", ".join(audit.only[g])) for g, n in audit.gates.items()]
    rows = [
        (one.name, one.description, ", ".join(one.by) or Markup("<b>lives</b>"), one.words)
        for one in (*audit.mutants, *audit.fakes)
    ]
    every = table(("wrong engine", "what is wrong", "killed by", "in words"), rows)
    return f"{word} {lines}{table(head, gates)}{fold(f'{len(rows)} wrong engines', every)}"


def engine_text(engine: Engine) -> str:
    """What it serves and how large it is."""
    files = sorted(engine.folder.rglob("*.py"))
    lines = sum(len(path.read_text().splitlines()) for path in files)
    return (
        f"engine {engine.folder.name} for {engine.spec.id}: {len(files)} files, {lines} lines, "
        f"tree {engine.tree[:12]}"
    )


def engine_html(engine: Engine) -> str:
    """The line, and every file folded."""
    files = sorted(engine.folder.rglob("*.py"))
    folded = [
        fold(path.relative_to(engine.folder).as_posix(), code(path.read_text(), "python"))
        for path in files
    ]
    return escape(engine_text(engine)) + "".join(folded)


def chat_text(chat: Chat) -> str:
    """How an answer came (its text has already streamed)."""
    rate = "" if chat.decode_tok_s is None else f", then {chat.decode_tok_s:.1f} tok/s"
    return f"{len(chat.tokens)} tokens, the first after {chat.ttft_ms:.0f} ms{rate}"


def chat_html(chat: Chat) -> str:
    """The answer, and how it came."""
    return f"<blockquote>{escape(chat.text)}</blockquote>{escape(chat_text(chat))}"


def run_html(run: Run) -> str:
    """Who wrote it and what it took, then one row a phase."""
    lines = "<br>".join(escape(line) for line in str(run).splitlines())
    turns = run.timeline()
    rows = []
    for phase, of_phase in turns.groupby("phase", sort=False):
        judged = [passed for passed in of_phase["passed"] if passed is not None]
        last = status("pass" if judged[-1] else "fail") if judged else ""
        gates = of_phase.loc[of_phase["submission"], "gates"]
        rows.append((phase, len(of_phase), judged.count(False), last, *gates.tail(1)))
    head = ("phase", "turns", "failed verdicts", "ended by", "gates")
    return f"{lines}{table(head, rows)}"


def turn_html(turn: Turn) -> str:
    """What was asked, said, changed and judged, folded."""
    head = f"turn {turn.number}, {turn.role}, phase {turn.phase}, attempt {turn.attempt}"
    from metainfer_lab.agent.turns import counted

    calls = counted(call["name"] for call in turn.calls) or "none"
    judged = "".join(
        f"<br>{status('pass' if j.passed else 'fail')} {escape(', '.join(j.gates))}"
        for j in turn.judgements
    )
    judged += "".join(f"<br>{escape(str(finding))}" for finding in turn.findings or [])
    parts = [("asked", code(turn.asked)), ("said", code(turn.said))]
    parts += [("diff", code(turn.diff, "diff"))]
    parts += [("results", code("\n\n".join(str(r.get("content", "")) for r in turn.results)))]
    folds = "".join(fold(name, body) for name, body in parts)
    return f"<b>{escape(head)}</b><br>calls: {escape(calls)}{judged}{folds}"


def report_html(report: Report) -> str:
    """What ran for real, and every difference from the record."""
    line = escape(str(report).splitlines()[0])
    rows = [(g["gate"], status(g["status"]), g["cases"], g["worst_error"]) for g in report.gates]
    ran = table(("gate run for real", "status", "cases", "worst error"), rows)
    found = table(("divergence",), [(str(d),) for d in report.divergences])
    return line + ran + (found if report.divergences else "")


def figure_png(figure: Any) -> bytes:
    """A figure made without pyplot, which would have registered a formatter of its own."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=figure.dpi, metadata={"Software": None})
    return buffer.getvalue()


def _pairs(values: dict[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


# (module, class) -> plain text and HTML; `str` where the noun's own words are good.
NOUNS: dict[tuple[str, str], tuple[Callable[[Any], str], Callable[[Any], str]]] = {
    ("metainfer_lab.spec", "Spec"): (str, spec_html),
    ("metainfer_lab.plan.result", "Plan"): (str, plan_html),
    ("metainfer_lab.gates.verdict", "Verdict"): (str, verdict_html),
    ("metainfer_lab.gates.verdict", "GateVerdict"): (str, gate_html),
    ("metainfer_lab.gates.audit", "Audit"): (str, audit_html),
    ("metainfer_lab.agent.run", "Run"): (str, run_html),
    ("metainfer_lab.agent.run", "Turn"): (str, turn_html),
    ("metainfer_lab.agent.replay", "Report"): (str, report_html),
    ("metainfer_lab.engine.session", "Engine"): (engine_text, engine_html),
    ("metainfer_lab.engine.session", "Chat"): (chat_text, chat_html),
}


def register(shell: Any = None) -> None:
    """Teach IPython the nouns; does nothing outside it, and twice is as good as once."""
    if shell is None:
        from IPython import get_ipython

        shell = get_ipython()
    if shell is None:
        return
    formatters = shell.display_formatter.formatters
    for (module, name), (text, html) in NOUNS.items():
        formatters["text/plain"].for_type_by_name(module, name, _pretty(text))
        formatters["text/html"].for_type_by_name(module, name, html)
    for module in ("pandas", "pandas.core.frame"):  # pandas 3, pandas 2
        formatters["text/html"].for_type_by_name(module, "DataFrame", frame_html)
    formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", figure_png)


def _pretty(text: Callable[[Any], str]) -> Callable[[Any, Any, bool], None]:
    return lambda noun, printer, cycle: printer.text(text(noun))
