"""The audit: a fixed sample of wrong engines dies, each with a witness; what the matrix says of it.

Slow: the sample starts an oracle and a few dozen candidates, about 40 s on a free machine.
"""

import random
import re
import secrets

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

import metainfer_lab as lab
from metainfer_lab import cli
from metainfer_lab.errors import InputError
from metainfer_lab.gates import GATES
from metainfer_lab.gates import audit as room
from metainfer_lab.gates.audit import Audit, audit
from metainfer_lab.gates.mutants import Mutant, catalogue, families
from metainfer_lab.gates.witness import Witness
from metainfer_lab.gates.worker import Judged, Worker, brief
from metainfer_lab.paths import ENGINES, tree_hash
from metainfer_lab.show import audit_html

WRONG = {one.name: one for kind in ("mutants", "fakes") for one in catalogue(kind)}
# Wrong engine -> the gate that must kill it, and what its words must say.
SAMPLE = {
    "rope-interleaved": ("logits", "layer 0 attention"),
    "cancel-keeps-cache": ("batching", "cache_bytes_used"),
    "nan-temperature-accepted": ("limits", "temperature|logit_bias"),
    "top-k-one-more": ("sampling", "top_k|probability is 0"),
    "goes-on-after-stop": ("decode", "stop"),
    "loader-fills-missing": ("weights", "accepted without an error"),
    "leaves-early": ("logits", "process ended"),
    "hidden-import": ("logits", "transformers"),
    "never-the-same-twice": ("batching", "the same calls twice"),
    "helper-process": ("alone", "still run"),
    "beta-dropped": ("logits", "layer 0"),
}


@pytest.fixture(scope="module")
def worker():
    with Worker() as started:
        yield started


@pytest.mark.parametrize("key", SAMPLE)
def test_a_wrong_engine_is_killed_in_words(worker, key):
    """Slow. By the gate meant, in words that name the fault, and with its witness."""
    gate, words = SAMPLE[key]
    row = worker.judge(WRONG[key], [gate])
    assert gate in row.by, f"{key} lives"
    assert re.search(words, row.by[gate]), row.by[gate]
    assert row.flaw is None and bool(row.witness) != WRONG[key].is_fake


@pytest.mark.parametrize("engine", families().values())
def test_mutants_have_witnesses_and_the_right_engine_none(worker, engine, tmp_path):
    """Some mutants each time."""
    world = worker.world(engine)
    assert world.witness(ENGINES / engine) is None
    mutants = [one for one in WRONG.values() if one.engine == engine and not one.is_fake]
    for mutant in random.sample(mutants, 8):
        witness = world.witness(mutant.apply(tmp_path / mutant.name))
        assert witness, mutant.name
        assert witness.departure is None or witness.departure > 10


def test_every_patch_fits_once_and_parses(tmp_path):
    for i, mutant in enumerate(WRONG.values()):
        for path in mutant.apply(tmp_path / str(i)).glob("*.py"):
            compile(path.read_text(), str(path), "exec")
    mutants, fakes = catalogue("mutants"), catalogue("fakes")
    assert len(mutants) >= 60 and len(fakes) >= 25
    assert len(WRONG) == len(mutants) + len(fakes), "a name is there twice"


def test_bad_catalogue_entries_are_named(tmp_path):
    entry = {"engine": "qwen3-reference", "spec": "qwen3-tiny-cpu", "description": ""}
    gone = Mutant(**entry, name="gone", file="model.py", old="??", new="")
    with pytest.raises(InputError, match="gone: its old text is 0 times"):
        gone.apply(tmp_path / "x")
    with pytest.raises(ValidationError, match="file, old and new"):
        Mutant(**entry, name="empty")
    with pytest.raises(ValidationError, match="which gate kills it"):
        Mutant(**entry, name="aimless", files={"__init__.py": ""})
    for call in (
        lambda: catalogue("fakes", "mamba"),
        lambda: audit(names=["nobody"]),
        lambda: audit(gates=["speling"]),
        lambda: audit(gates=["speed"]),
    ):
        with pytest.raises(InputError):
            call()


def by_turns(one, gate):
    """Each gate kills some engines alone."""
    gates = [name for name in GATES if name != "speed"]
    turn = [*WRONG].index(one.name)
    return gate if gates[turn % len(gates)] == gate else None


@pytest.fixture
def judged(monkeypatch, tmp_path):
    """An audit whose workers are replaced: `reasons` by engine and gate, None where it passes."""
    monkeypatch.setattr(room, "LOCAL", tmp_path)

    def run(reasons=by_turns, passes=lambda one: True, stop_after=None, fresh=True, **chosen):
        def work(tasks, gates):
            for one in tasks[:stop_after]:
                found = row(one, gates, reasons, passes)
                tree = "" if fresh else tree_hash(one.apply(tmp_path / secrets.token_hex(4)))
                yield found.model_copy(update={"tree": tree})
            if stop_after is not None:
                raise KeyboardInterrupt

        monkeypatch.setattr(room, "_work", work)
        return audit(fresh=fresh, **chosen)

    def row(one, gates, reasons, passes):
        right = not isinstance(one, Mutant)
        if right:
            by = {} if passes(one) else {"logits": "it departs"}
        else:
            by = {gate: reasons(one, gate) for gate in gates if reasons(one, gate)}
        facts = {name: getattr(one, name) for name in ("name", "engine", "spec", "description")}
        facts |= {"tree": "", "seconds": 0.1}
        witness = None if one.is_fake else Witness(observable="logits", departure=1e4)
        asked = {gate: GATES[gate].version for gate in gates}
        return Judged(**facts, by=by, asked=asked, witness=witness, right=right)

    return run


def test_the_matrix_adds_up(judged, monkeypatch, tmp_path):
    seen = []
    whole = judged(on_kill=seen.append)
    assert whole.passed and whole.whole
    assert len(seen) == len(WRONG) + len(whole.right_engines)
    assert sum(whole.gates.values()) == len(WRONG) == sum(map(len, whole.only.values()))
    assert whole.right_engines and not whole.earlier
    assert Audit.model_validate_json(whole.model_dump_json()) == whole
    monkeypatch.setattr(room, "RECORD", tmp_path / "audit.json")
    with pytest.raises(InputError, match="--record"):
        Audit.recorded()
    whole.record()
    assert Audit.recorded() == whole
    older = whole.model_copy(update={"versions": whole.versions | {"alone": 0}})
    assert older.earlier == ["alone"] and "earlier version of alone" in str(older)


def test_an_interrupted_audit_goes_on(judged, monkeypatch):
    """What was found is kept while engine, spec and versions are the same; flaws are not kept."""
    with pytest.raises(KeyboardInterrupt):
        judged(stop_after=20, fresh=False)
    seen = []
    whole = judged(fresh=False, on_kill=seen.append)
    every = len(WRONG) + len(whole.right_engines)
    assert whole.passed and len(seen) == every - 20 and whole.resumed == 20
    newer = GATES["drift"]._replace(version=GATES["drift"].version + 1)
    monkeypatch.setitem(GATES, "drift", newer)
    judged(fresh=False, on_kill=seen.append)
    assert len(seen) == 2 * every - 20, "a gate has changed"


def test_the_matrix_is_seen(judged):
    """The picture has a cell for each engine and gate; the noun shows itself."""
    whole = judged(lambda one, gate: by_turns(one, gate) or (gate == "logits" and gate))
    table = whole.table()
    axes = lab.figures.kill_matrix(table).axes[0]
    drawn = axes.collections[0].get_array()
    assert drawn.size == len(WRONG) * len(whole.gates)
    lone = sum(len(names) for names in whole.only.values())
    assert (drawn == 2).sum() == lone and (drawn > 0).sum() == sum(whole.gates.values())
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert f"logits ({len(WRONG)})" in labels
    html = audit_html(whole)
    assert all(name in html for name in (*whole.gates, *table["name"]))


def test_a_diff_says_what_is_wrong():
    patch = WRONG["mask-off-by-one"]
    lines = patch.diff().splitlines()
    assert lines[0].startswith("--- operators.py")
    assert any(line.startswith("+") and patch.new in line for line in lines)
    assert len([line for line in lines if line[0] in "+-"]) == 4


def test_what_fails_an_audit(judged):
    victim = secrets.choice([*WRONG])
    alive = judged(lambda one, gate: None if one.name == victim else by_turns(one, gate))
    assert not alive.passed and alive.survivors == [victim]
    assert f"LIVES: {victim}" in str(alive)
    broken = judged(passes=lambda one: one.engine != "qwen3-reference")
    assert not broken.passed and not all(broken.right_engines.values())
    idle = judged(lambda one, gate: None if gate == "drift" else "dead")
    assert not idle.passed and idle.gates["drift"] == 0
    assert not judged(lambda one, gate: "dead").passed, "no gate kills anything alone"
    part = judged(lambda one, gate: "dead", names=["zeros"], gates=["logits"])
    assert part.passed and not part.whole and not part.earlier
    with pytest.raises(InputError, match="whole"):
        part.record()


def test_reasons_name_no_folder_of_this_machine():
    assert brief("OSError: '/tmp/a-1/b/c.py' at 3 tok/s") == "OSError: '…/c.py' at 3 tok/s"
    audit = Audit.recorded()
    words = [word for one in (*audit.mutants, *audit.fakes) for word in one.by.values()]
    assert audit.passed and len(words) > 200
    assert not [word for word in words if brief(word) != word]


def test_a_fake_that_dies_of_something_else_does_not_count(worker, monkeypatch):
    fake = WRONG["stored-in-a-file"]
    wrong = fake.model_copy(update={"dies": {"alone": "of boredom"}})
    row = worker.judge(wrong, ["alone"])
    assert row.by and "of boredom" in row.flaw
    missed = worker.judge(fake.model_copy(update={"dies": {"logits": "."}}), ["alone"])
    assert missed.flaw == "logits should have killed it"


def test_the_verb(judged, monkeypatch):
    for reasons, code in ((by_turns, 0), (lambda one, gate: None, 1)):
        whole = judged(reasons)
        monkeypatch.setattr(lab, "audit", lambda family, whole=whole, **more: whole)
        done = CliRunner().invoke(cli.app, ["audit", "--json"])
        assert done.exit_code == code
        assert Audit.model_validate_json(done.stdout) == whole
