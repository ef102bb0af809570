"""What is published hangs together: runs are whole, engines are their last trees, sizes kept."""

import json

import pytest

from metainfer_lab.agent import Run, explain, overview, runs
from metainfer_lab.agent.loop import rebuild
from metainfer_lab.bench import ledger
from metainfer_lab.engine.manifest import EngineManifest
from metainfer_lab.paths import DATA, ENGINES, ROOT, RUNS, tree_hash
from metainfer_lab.spec import Spec, shipped

RECORDED = [run for run in runs() if run.folder.parent == RUNS]
MADE = [f for f in sorted(ENGINES.iterdir()) if f.is_dir() and EngineManifest.read(f).run]


def folder_bytes(folder) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("run", RECORDED, ids=lambda run: run.id)
def test_a_recorded_run_is_whole_and_small(run):
    assert run.info.status == "passed"
    assert run.transcript.broken_link() is None
    assert run.spec == Spec.load(run.info.spec)
    assert folder_bytes(run.folder) < 2e6


@pytest.mark.parametrize("run", RECORDED, ids=lambda run: run.id)
def test_edits_lead_to_the_tree_that_was_judged(run, tmp_path):
    rebuild(run.transcript.lines, tmp_path / "engine")
    assert tree_hash(tmp_path / "engine") == run.info.tree
    assert [*run.verdicts.values()][-1]["tree"] == run.info.tree


@pytest.mark.parametrize("folder", MADE, ids=lambda folder: folder.name)
def test_an_engine_is_its_runs_last_tree(folder):
    """A GPU engine not adopted yet is known by its ledger, or by attempts without intervals."""
    manifest = EngineManifest.read(folder)
    trees = json.loads((ENGINES / "trees.json").read_text())
    if (RUNS / manifest.run / "run.json").is_file():
        assert tree_hash(folder) == Run.open(manifest.run).info.tree == trees[folder.name]
    else:
        kept = RUNS / manifest.run
        assert (kept / "ledger.tsv").is_file() or (kept / "attempts.tsv").is_file()
        assert folder.name not in trees
    assert all(Spec.load(name).id == name for name in manifest.specs)


@pytest.mark.parametrize("path", sorted(RUNS.glob("*/ledger.tsv")), ids=lambda p: p.parent.name)
def test_a_ledger_holds_to_its_schema(path):
    assert len(ledger.read(path)) > 0


def test_the_two_smollm2_engines_are_recorded():
    assert {run.info.spec for run in RECORDED} >= {"smollm2-135m-fp32-cpu", "smollm2-135m-int8-cpu"}


def test_every_spec_says_what_it_asks_to_be_read_and_how_often_it_was_written():
    rows = overview().set_index("spec")
    assert list(rows.index) == shipped()
    for name in ("smollm2-135m-fp32-cpu", "qwen3-tiny-cpu", "qwen3.6-tiny-cpu"):
        made = [run for run in RECORDED if run.info.spec == name and run.info.kind == "generation"]
        assert rows.loc[name, "k_of_n"] == f"{len(made)} of {len(made)}" and len(made) >= 3
    told = explain(Spec.load("qwen3.6-tiny-cpu"))
    row, read = rows.loc["qwen3.6-tiny-cpu"], told[told["role"] == "reviewer"]["tokens"]
    assert row["phases"] == len(read) and row["reviewer_most"] == max(read)
    assert row["implementer_least"] == min(told[told["role"] == "implementer"]["tokens"])
    assert rows["k_of_n"].isna()["qwen3-8b-bf16-tp4-a800"]


def test_the_record_stays_small():
    published = [path for path in DATA.iterdir() if path.name != "local"]
    assert sum(folder_bytes(p) if p.is_dir() else p.stat().st_size for p in published) < 25e6
    assert folder_bytes(ROOT / "figures") < 5e6
