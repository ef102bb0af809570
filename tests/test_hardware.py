"""Profiles load and are consistent; a CPU is measured once, and again when the record is bad."""

import pytest

from metainfer_lab import hardware
from metainfer_lab.errors import InputError
from metainfer_lab.hardware import (
    Hardware,
    known,
    last_level_cache_bytes,
    measure_cpu,
    measured_cpu,
)

GPUS = [name for name in known() if name != "cpu"]


@pytest.mark.parametrize("name", GPUS)
def test_a_profile_is_consistent(name):
    machine = Hardware.load(name)
    rates = [machine.bandwidth, *machine.flops.values()]
    for rate in rates:
        assert rate.source
        assert all(value <= rate.nominal for value in rate.measured.values())
        assert rate.planning <= rate.nominal
    assert machine.link is not None and machine.link.source
    assert machine.flops["fp32"].nominal < machine.flops["bf16"].nominal
    assert machine.title in str(machine)


def test_profiles_are_the_listed_machines():
    assert set(GPUS) >= {"a800", "h200", "b200"}
    assert [Hardware.load(name).sm for name in ("a800", "h200", "b200")] == [80, 90, 100]


def test_h200_rates_are_the_measured_ones():
    machine = Hardware.load("h200")
    assert machine.bandwidth.measured == {"copy": 4.27e12, "read": 4.26e12}
    assert (machine.bandwidth.nominal, machine.bandwidth.planning) == (4.8e12, 4.3e12)


def test_a_missing_rate_names_those_there_are():
    with pytest.raises(InputError, match="h200: no nvfp4 rate; it has bf16"):
        Hardware.load("h200").rate("nvfp4")


def test_a_burst_of_others_work_does_not_pass_for_the_machine(monkeypatch):
    """The first calls share the processor with somebody: their time is not taken."""
    durations, now = iter([9, 5, 5, 5, 4, *[1] * 20]), [0.0]

    def work() -> None:
        now[0] += next(durations)

    monkeypatch.setattr(hardware.time, "perf_counter", lambda: now[0])
    assert hardware._best_seconds(work, settled=4, patience_s=100) == 1


def test_a_cpu_is_measured_once_and_again_when_the_record_does_not_hold(tmp_path):
    """Takes some seconds: the probes run once for real."""
    profile, measured = tmp_path / "local" / "cpu.json", measure_cpu()
    calls = []

    def probe() -> Hardware:
        calls.append(1)
        return measured

    assert measured_cpu(profile, probe) == measured_cpu(profile, probe) == measured
    assert len(calls) == 1
    profile.write_text(profile.read_text()[:50])
    assert measured_cpu(profile, probe) == measured and len(calls) == 2
    other = measured.model_copy(update={"title": "another processor, 3 cores"})
    profile.write_text(other.model_dump_json())
    assert measured_cpu(profile, probe).title == measured.title and len(calls) == 3
    assert 1e9 < measured.bandwidth.planning < measured.bandwidth.nominal < 5e12
    assert measured.flops["fp32"].planning > 1e9
    assert measured.cache_bytes == last_level_cache_bytes() > 100_000
    assert not measured.is_gpu and measured.sm == 0


def test_other_numbers_of_cores_keep_their_own_profiles(tmp_path, monkeypatch):
    """A process confined to one core must not replace what all cores measured."""
    monkeypatch.setattr(hardware, "CPU_PROFILES", tmp_path)
    for cores in (2, 1, 2):
        monkeypatch.setattr(hardware, "usable_cores", lambda cores=cores: cores)
        probe = hardware.Hardware.load("h200").model_copy(update={"title": hardware.cpu_title()})
        assert hardware.measured_cpu(probe=lambda probe=probe: probe).title.endswith(
            f"{cores} cores"
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu-1.json", "cpu-2.json"]
