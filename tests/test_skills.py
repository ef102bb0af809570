"""Skills: the schema, references that resolve, and who is shown what."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from metainfer_lab.agent.phases import TEMPLATES, changed, explain, phases
from metainfer_lab.errors import InputError
from metainfer_lab.skills import as_markdown, load_skills, parse, reachable, route, traits
from metainfer_lab.spec import Spec, shipped

GATES = ("alone", "weights", "operators", "logits", "decode", "batching", "limits")
GATES += ("sampling", "drift", "memory", "parallel", "speed")
FP32, INT8 = "smollm2-135m-fp32-cpu", "smollm2-135m-int8-cpu"


@pytest.fixture(scope="module")
def skills():
    return load_skills()


def names(spec, phase, **options):
    return {skill.name for skill in route(Spec.load(spec), phase, **options)}


def test_every_skill_keeps_to_the_schema_of_agent_skills(skills):
    assert len(skills) >= 12
    for skill in skills.values():
        assert skill.body.count("\n") < 500 and skill.tokens < 5000
        assert re.search(r"\b(Use|Read)\b", skill.description), f"{skill.name}: say when to use it"


def test_every_gate_and_phase_named_exists(skills):
    known = {template.name for template in TEMPLATES} | {"all"}
    for skill in skills.values():
        assert set(skill.gates) <= set(GATES), skill.name
        assert set(skill.phase) <= known, skill.name


def test_every_trait_named_exists_and_every_skill_is_reachable(skills):
    specs = [Spec.load(name) for name in shipped()]
    known = set(traits(specs[0]))
    shown = {skill.name for spec in specs for skill in reachable(spec)}
    for skill in skills.values():
        assert set(skill.applies_to) <= known, skill.name
    assert shown == set(skills)


def test_no_skill_holds_a_body_of_code(skills):
    for skill in skills.values():
        assert not re.search(r"^\s*(def|class|import) ", skill.body, re.M), skill.name


def test_int8_specs_are_told_of_int8_and_others_are_not():
    assert "int8-weights" in names(INT8, "model") and "int8-weights" not in names(FP32, "model")


def test_failure_skills_come_after_a_failure_or_to_a_reviewer():
    assert "state-leaks" not in names(FP32, "decode")
    assert "state-leaks" in names(FP32, "decode", failed=["decode"])
    assert "state-leaks" not in names(FP32, "decode", failed=["alone"])
    assert "state-leaks" in names(FP32, "decode", role="reviewer")


def test_required_skills_come_along():
    assert "engine-contract" in names(FP32, "speed") and "kv-cache" in names(FP32, "speed")


def test_phases_grow_their_regression_gates():
    chain = phases(Spec.load(FP32), GATES)
    named = ["model", "decode", "batching", "limits", "memory", "speed"]
    assert [phase.name for phase in chain] == named
    for before, after in pairwise(chain):
        assert after.regression_gates == before.all_gates
    assert chain[-1].all_gates[-1] == "speed"
    assert "sampling" in chain[3].gates
    assert "sampling" not in phases(Spec.load(FP32), set(GATES) - {"sampling"})[3].gates


def test_a_hybrid_on_two_gpus_has_more_phases_than_a_dense_engine_on_a_cpu():
    dense = {phase.name for phase in phases(Spec.load(FP32), GATES)}
    hybrid = Spec.load("qwen3.6-35b-a3b-nvfp4-h200").change(parallel__tp=2)
    chain = phases(hybrid, GATES)
    more = {"operators", "state", "parallel"}
    assert {phase.name for phase in chain} == dense | more
    asked = [gate for phase in chain for gate in phase.gates]
    assert sorted(asked) == sorted(GATES)  # each once, in one phase
    tiny = [phase.name for phase in phases(Spec.load("qwen3.6-tiny-cpu"), GATES)]
    assert "speed" not in tiny and "state" in tiny


def test_explain_says_what_each_role_is_shown():
    rows = explain(Spec.load(FP32), GATES)
    assert set(rows["role"]) == {"implementer", "reviewer"} and len(rows) == 12
    assert (rows["tokens"] > 1000).all()


def test_an_edited_skill_changes_the_phases_that_show_it(skills):
    spec = Spec.load(FP32)
    assert changed(spec, skills).empty
    told = skills["kv-cache"].model_copy(update={"body": skills["kv-cache"].body + "\nMore." * 80})
    rows = changed(spec, skills | {"kv-cache": told})
    assert "model" in set(rows["phase"]) and (rows["edited"] == "kv-cache").all()
    assert (rows["more_tokens"] == 120).all()
    moved = skills["sampler"].model_copy(update={"phase": ["limits", "speed"]})
    rows = changed(spec, skills | {"sampler": moved}).set_index(["phase", "role"])
    assert rows.loc[("speed", "implementer"), "added"] == "sampler"
    assert rows.loc[("decode", "implementer"), "dropped"] == "sampler"
    assert "limits" not in rows.index.get_level_values("phase")


def test_a_wrong_skill_is_refused_by_name(tmp_path):
    folder = tmp_path / "0-general" / "one-thing"
    folder.mkdir(parents=True)
    path = folder / "SKILL.md"
    path.write_text("no front matter")
    with pytest.raises(InputError, match=r"one-thing.*front matter"):
        parse(path)
    path.write_text("---\nname: one-thing\nlayer: 0-general\n---\nbody")
    with pytest.raises(InputError, match="one-thing: description: missing"):
        parse(path)


def test_a_skill_survives_being_written_out(skills, tmp_path):
    for skill in skills.values():
        path = tmp_path / skill.layer / skill.name / "SKILL.md"
        path.parent.mkdir(parents=True)
        path.write_text(as_markdown(skill))
        assert parse(path) == skill
