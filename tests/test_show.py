"""Each noun has good plain text and escaped, folded HTML; registering imports nothing heavy."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from metainfer_lab import live, markup, paths, show
from metainfer_lab.engine.session import Chat, Engine
from metainfer_lab.gates.verdict import Failure, GateVerdict, Verdict
from metainfer_lab.plan import plan
from metainfer_lab.spec import Spec

EVIL = "<script>alert('x')</script>"


class Balance(HTMLParser):
    """Checks that every tag is closed in order, and remembers which there were."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.seen.add(tag)
        if tag not in ("br",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags(html: str) -> set[str]:
    checker = Balance()
    checker.feed(html)
    assert not checker.open
    return checker.seen


@pytest.fixture(scope="module")
def shell() -> InteractiveShell:
    shell = InteractiveShell.instance()
    show.register(shell)
    show.register(shell)
    return shell


def shown(shell: InteractiveShell, noun: object) -> tuple[str, str]:
    data, _ = shell.display_formatter.format(noun)
    return data["text/plain"], data["text/html"]


def gate(status: str, **fields: object) -> GateVerdict:
    return GateVerdict(
        gate="logits",
        version=1,
        status=status,
        cases=3,
        worst_error=0.25,
        tolerance=1e-5,
        reason=EVIL,
        failures=fields.pop("failures", []),
        seconds=1.5,
        passed=status == "pass",
    )


def verdict(*gates: GateVerdict) -> Verdict:
    return Verdict(
        engine="mine",
        tree="ab" * 32,
        spec="s",
        device="cpu",
        sandbox="bubblewrap",
        checkpoint=None,
        gates=list(gates),
        passed=all(g.passed for g in gates),
        created="2026-11-30T12:00:00Z",
        versions={},
    )


def test_spec_and_plan(shell):
    spec = Spec.load("qwen3-8b-bf16-h200")
    text, html = shown(shell, spec)
    assert text == str(spec) and "details" in tags(html) and "qwen3-8b" in html
    text, html = shown(shell, plan(spec))
    assert "decode floor" in text and "\n" in text
    assert {"details", "table"} <= tags(html) and "terms of a decode step" in html


def test_failed_verdict_unfolds_and_is_escaped(shell):
    failure = Failure(case=EVIL, position=7, error=0.25, tolerance=1e-5, detail="layer 3")
    text, html = shown(shell, verdict(gate("pass"), gate("fail", failures=[failure])))
    assert "FAILED" in text and "position 7" in text
    assert {"details", "table"} <= tags(html)
    assert "<script>" not in html and "layer 3" in html and "✗ fail" in html
    assert "<details open>" in shown(shell, gate("fail", failures=[failure]))[1]


def test_not_judged_never_looks_like_a_pass(shell):
    _, html = shown(shell, gate("not_judged"))
    assert "not judged" in html and "✓" not in html and "pass" not in html


def test_colours_follow_the_theme():
    html = show.verdict_html(verdict(gate("pass"), gate("fail")))
    assert html.count("color: var(--jp-") == html.count("color: ")


def test_chat_and_engine(shell, tmp_path: Path):
    chat = Chat(text=EVIL, tokens=[1, 2], ttft_ms=99.6, decode_tok_s=None, finish_reason="stop")
    text, html = shown(shell, chat)
    assert text == "2 tokens, the first after 100 ms" and "<script>" not in html
    (tmp_path / "__init__.py").write_text("x = '<b>'\n")
    text, html = shown(shell, Engine(tmp_path, Spec.load("qwen3-8b-bf16-h200")))
    assert "1 files, 1 lines" in text and "__init__.py" in html and "'<b>'" not in html


def test_words_stand_to_the_left_and_numbers_to_the_right(shell):
    """In tables of ours and in pandas', whatever is null, escaped or spans rows."""
    import pandas as pd

    places = pd.MultiIndex.from_tuples([("x", 1), ("x", 2)], names=["place", "no"])
    said, half = ["<b>", "longer"], [None, 0.5]
    frame = pd.DataFrame({"said": said, "half": half, "time": ["3 ms", "40 ms"]}, index=places)
    _, html = shown(shell, frame)
    left = re.findall('<t[dh] style="text-align: left"[^>]*>(.*?)<', html)
    assert left == ["", "said", "place", "", "x", "&lt;b&gt;", "longer"]
    assert len(re.findall("<t[dh][ >]", html)) == 19 and "</style>" in html
    own = markup.table(["a", "b", "c"], [("-1 ms", "word", None), ("2", None, 3)])
    assert re.findall('left">(.*?)<', own) == ["b", "word", ""]


def test_figure_is_shown_without_pyplot(shell):
    from matplotlib.figure import Figure

    data, _ = shell.display_formatter.format(Figure())
    assert "image/png" in data


def test_formatters_name_classes_that_exist():
    import importlib

    for module, name in show.NOUNS:
        assert isinstance(getattr(importlib.import_module(module), name), type)


def test_import_inside_ipython_is_light():
    """Under half a second (the work, not a busy machine's clock): no heavy module is loaded."""
    code = (
        "import IPython, sys; before = set(sys.modules); import metainfer_lab, metainfer_lab.show;"
        "new = set(sys.modules) - before;"
        "print(sorted({'torch', 'pandas', 'matplotlib', 'transformers', 'pydantic'} & new))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=paths.ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_progress_is_plain_lines_in_batch(capsys, monkeypatch):
    monkeypatch.setenv(live.BATCH, "1")
    line = live.Live(every_s=60)
    line.update("first")
    line.update("too soon")
    line.close("last")
    assert capsys.readouterr() == ("", "first\nlast\n")
    monkeypatch.setattr(live, "in_kernel", lambda: True)
    live.Live().close("in a kernel")
    assert capsys.readouterr() == ("in a kernel\n", "")
