"""Every published number comes out of the plan's JSON; what cannot be is refused by field."""

import json
from pathlib import Path

import pytest
import yaml

from metainfer_lab.errors import InputError
from metainfer_lab.hardware import Hardware, Rate
from metainfer_lab.model import ModelDims
from metainfer_lab.paths import MODELS, SPECS
from metainfer_lab.plan import Case, Refused, plan, refusals, warnings
from metainfer_lab.spec import Spec, shipped

Q8, Q36 = "qwen3-8b-bf16-h200", "qwen3.6-35b-a3b-nvfp4-h200"
SMOL = "smollm2-135m-fp32-cpu"


def cpu(cache_bytes: int = 32 << 20) -> Hardware:
    """A made-up CPU, so that nothing here depends on the machine or takes its time to measure."""
    rate = Rate(nominal=25e9, planning=24e9, source="made up")
    products = {
        kind: Rate(nominal=4e11, planning=3e11, source="made up")
        for kind in ("fp32", "bf16", "int8")
    }
    return Hardware(
        name="cpu",
        title="made-up CPU",
        kind="cpu",
        arch="x86_64",
        n_gpu=0,
        memory_bytes=24 << 30,
        cache_bytes=cache_bytes,
        bandwidth=rate,
        flops=products,
    )


@pytest.fixture(autouse=True)
def _made_up_cpu(monkeypatch):
    real = Hardware.load.__func__
    monkeypatch.setattr(
        Hardware, "load", classmethod(lambda cls, name: cpu() if name == "cpu" else real(cls, name))
    )


def numbers(name: str) -> dict:
    return json.loads(plan(name).model_dump_json())


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_spec_resolves_and_reads_well(name):
    resolved = plan(name)
    assert resolved.tok_s_floor[1][0] > 0
    assert str(resolved).startswith(f"plan {name}: ")
    assert len(resolved.model_dump_json()) < 30_000


def test_qwen3_8b_numbers():
    found = numbers(Q8)
    assert found["parameters"] == 8_190_735_360
    assert found["weight_bytes_per_token"] == found["bytes_per_token"] == 15_136_811_008
    assert found["ttft_floor_ms"]["1024"] == pytest.approx(18.0, abs=0.05)
    assert found["tok_s_floor"]["1"]["0"] == pytest.approx(284, abs=0.5)
    assert found["tok_s_floor"]["1"]["1088"] == pytest.approx(281, abs=0.5)


def test_qwen36_numbers():
    found = numbers(Q36)
    assert found["parameters"] == 35_951_822_704
    assert found["weight_bytes_per_token"] / 1e9 == pytest.approx(2.255, abs=5e-4)
    assert found["bytes_per_token"] / 1e9 == pytest.approx(2.380, abs=5e-4)
    assert found["tok_s_floor"]["1"]["0"] == pytest.approx(1806, abs=0.5)
    assert found["tok_s_floor"]["32"]["1024"] == pytest.approx(7668, abs=0.5)
    assert found["experts_touched"]["32"] == pytest.approx(163, abs=0.5)
    assert found["ttft_floor_ms"]["1024"] == pytest.approx(6.3, abs=0.05)
    on_b200 = numbers("qwen3.6-35b-a3b-nvfp4-b200")
    assert on_b200["tok_s_floor"]["1"]["0"] == pytest.approx(3361, abs=0.5)


def test_the_papers_case_is_far_from_its_floor():
    found = numbers("qwen3-8b-bf16-tp4-a800")
    assert found["tok_s_floor"]["1"]["0"] == pytest.approx(540, abs=3)
    reported = {row["tok_s"]: row for row in found["reported"]}
    assert {62.0, 60.2, 172.7} <= reported.keys()
    assert all(row["source"] and row["conditions"] for row in reported.values())
    assert reported[62.0]["share_of_floor"] == pytest.approx(0.115, abs=0.002)


def test_tables_hold_the_terms_of_the_floor():
    resolved = plan(Q36)
    table = resolved.terms(batch=32, context=1024)
    memory = table[table.resource == "memory"]
    assert memory.us.sum() / 1e6 == pytest.approx(32 / resolved.tok_s_floor[32][1024])
    assert {"name", "formula", "amount", "unit", "us", "source"} <= set(table.columns)
    floors = resolved.floors()
    row = floors[(floors.batch == 32) & (floors.context == 1024)].iloc[0]
    assert row.tok_s == pytest.approx(resolved.tok_s_floor[32][1024])
    assert row.bound_by == "memory" and row.tok_s < row.tok_s_nominal
    prompt = resolved.terms_of_prompt(1024)
    arithmetic = prompt[prompt.resource == "arithmetic"].us.sum()
    assert arithmetic / 1e3 == pytest.approx(resolved.ttft_floor_ms[1024])


def test_a_rows_floor_takes_measured_experts_and_nominal_rates():
    resolved = plan(Q36)
    assert resolved.floor_tok_s(32, 1024, experts_touched=100) > resolved.floor_tok_s(32, 1024)
    assert resolved.floor_tok_s(32, 1024) == pytest.approx(resolved.tok_s_floor_nominal[32][1024])
    assert resolved.floor_ttft_ms(1024) == resolved.ttft_floor_nominal_ms[1024]


def test_a_config_alone_can_be_planned(tmp_path):
    path = MODELS / "qwen3-8b" / "config.json"
    assert plan(path, hardware="h200").tok_s_floor == plan("qwen3-8b", hardware="h200").tok_s_floor
    assert plan(MODELS / "qwen3.6-35b-a3b-nvfp4", hardware="b200").formats["head"] == "nvfp4"
    assert plan(MODELS / "smollm2-135m").hardware.name == "cpu"
    with pytest.raises(InputError, match="is no shipped geometry"):
        plan(tmp_path / "config.json", hardware="h200")
    named = tmp_path / "My Model"
    named.mkdir()
    (named / "config.json").write_text(path.read_text())
    assert plan(named, hardware="h200").spec.id == "my-model-h200"


def test_hardware_can_be_replaced():
    assert plan(Q8, hardware="b200").hardware.name == "b200"


REFUSALS = yaml.safe_load((Path(__file__).parent / "plan_refusals.yaml").read_text())


def found(name: str, changes: dict) -> list[str]:
    with pytest.raises(Refused) as refused:
        plan(Spec.load(name).change(**changes))
    assert "\n" not in str(refused.value) and isinstance(refused.value, InputError)
    return [str(finding) for finding in refused.value.refusals]


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: f"{row['field']}-{row['reason'][:30]}")
def test_the_impossible_is_refused_by_field(row):
    lines = found(row["spec"], row["change"])
    assert any(
        line.startswith(f"{row['field']}: ") and row["reason"] in line and row["remedy"] in line
        for line in lines
    ), lines


def test_at_least_thirty_refusals_are_held():
    assert len(REFUSALS) >= 30


def test_weights_beyond_memory_suggest_devices():
    spec = Spec.load(Q36).change(model="qwen3.6-35b-a3b", precision__weights="bf16", goals={})
    small = Hardware.load("a800").model_copy(update={"memory_bytes": 40 << 30})
    case = Case(spec, ModelDims.load("qwen3.6-35b-a3b"), small)
    assert [str(finding) for finding in refusals(case)] == [
        "hardware: 69.3 GB of weights a device and it holds 42.9 GB; "
        "use parallel.tp: 2, fewer bits a weight, or more memory"
    ]


def test_several_faults_are_named_at_once():
    lines = found(SMOL, {"parallel__tp": 2, "capabilities__cuda_graphs": True})
    assert {line.split(":")[0] for line in lines} >= {"parallel.tp", "capabilities.cuda_graphs"}


def test_unknown_model_and_hardware_are_named():
    with pytest.raises(InputError, match="model: 'zork' is no shipped geometry"):
        plan(Spec.load(Q8).change(model="zork"))
    with pytest.raises(InputError, match="hardware: 'h999' is not known; use one of cpu, a800"):
        plan(Q8, hardware="h999")


def test_a_goal_beyond_a_floor_that_a_cache_beats_is_a_warning():
    spec = Spec.load(SMOL).change(goals__tok_s=1000)
    dims = ModelDims.load("smollm2-135m")
    assert [f.field for f in refusals(Case(spec, dims, cpu()))] == ["goals.tok_s"]
    cached = Case(spec, dims, cpu(cache_bytes=1 << 30))
    assert refusals(cached) == []
    assert [finding.field for finding in warnings(cached)] == ["hardware", "goals.tok_s"]


def test_a_goal_between_planning_and_nominal_rates_is_allowed():
    resolved = plan(Spec.load(Q8).change(goals__tok_s=300))
    assert resolved.floor_tok_s(1, 1088, kind="planning") < 300 < resolved.floor_tok_s(1, 1088)


def test_more_devices_than_kv_heads_are_allowed_with_a_warning():
    resolved = plan(Spec.load(Q36).change(parallel__tp=4))
    assert "each head is kept 2 times" in str(resolved.warnings[0])


def test_speculation_lifts_goals_per_token():
    spec = Spec.load(Q36).change(
        capabilities__speculative="mtp", capabilities__state_snapshots=True, goals__tok_s=4000
    )
    assert plan(spec).warnings[0].field == "capabilities.speculative"


def test_specs_of_one_folder_have_one_name_each():
    assert all(Spec.load(path).id == path.stem for path in SPECS.glob("*.yaml"))


def test_the_figure_draws_each_spec_once_a_panel_and_only_one_context():
    import pandas as pd

    from metainfer_lab.figures import floors_by_batch

    rows = pd.concat([plan(name).floors().assign(spec=name) for name in (Q8, Q36)])
    figure = floors_by_batch(rows[rows.context == 1024])
    for axes, column in zip(figure.axes, ("tpot_ms", "tok_s"), strict=True):
        assert [line.get_label() for line in axes.lines] == [Q8, Q36]
        expected = rows[(rows.context == 1024) & (rows.spec == Q36)][column]
        assert list(axes.lines[1].get_ydata()) == list(expected)
    with pytest.raises(InputError, match="one context"):
        floors_by_batch(rows)
