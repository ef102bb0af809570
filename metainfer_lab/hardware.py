"""Machine profiles: memory, bandwidth, arithmetic and link rates, each with its source.

A rate has a nominal value (the data sheet's, the only one a refusal may rest on), measured ones
(by probe name) and a planning value: what floors are shown at. A CPU has no data sheet that
helps: it is measured on first use, the result stays in `data/local/`, and its nominal rates are
the measured ones with a margin, since other work on the machine may have slowed the probe.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from metainfer_lab.errors import InputError
from metainfer_lab.paths import HARDWARE, LOCAL, write_atomic

CpuDtype = Literal["fp32", "bf16", "int8"]
CPU_DTYPES: tuple[CpuDtype, ...] = ("fp32", "bf16", "int8")
CPU_MARGIN = 1.25
CPU_PROFILES = LOCAL / "hardware"


class Record(BaseModel):
    """A piece of a profile: unknown fields are mistakes, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Rate(Record):
    """A rate in bytes/s or operations/s; `planning` is the one that floors are shown at."""

    nominal: float = Field(gt=0)
    measured: dict[str, float] = {}
    planning: float = Field(gt=0)
    source: str


class Link(Record):
    """Device-to-device link: bytes/s in one direction per device, and seconds per message."""

    name: str
    bandwidth: float = Field(gt=0)
    latency_s: float = Field(ge=0)
    source: str


class Hardware(Record):
    """One machine: what a plan may count on."""

    name: str
    title: str
    kind: Literal["cpu", "gpu"]
    arch: str
    n_gpu: int = Field(ge=0, description="most devices of one host that a spec may use")
    memory_bytes: int = Field(gt=0, description="of one device")
    cache_bytes: int = Field(gt=0, description="last-level cache of one device")
    bandwidth: Rate
    flops: dict[str, Rate]
    link: Link | None = None
    sources: dict[str, str] = {}

    @classmethod
    def load(cls, name: str) -> Hardware:
        """A profile by name; `cpu` is this machine, measured once and then remembered."""
        return measured_cpu() if name == "cpu" else _from_yaml(name)

    @property
    def is_gpu(self) -> bool:
        return self.kind == "gpu"

    @property
    def sm(self) -> int:
        """Compute capability as an integer (90 for sm_90a); 0 for a CPU."""
        digits = "".join(char for char in self.arch if char.isdigit())
        return int(digits) if self.is_gpu else 0

    def rate(self, dtype: str) -> Rate:
        """Arithmetic rate (operations/s) of matrix products in a dtype."""
        if dtype not in self.flops:
            raise InputError(
                f"hardware {self.name}: no {dtype} rate; it has {', '.join(self.flops)}"
            )
        return self.flops[dtype]

    def __str__(self) -> str:
        rates = [f"{key} {rate.planning / 1e12:,.4g} T/s" for key, rate in self.flops.items()]
        planned, nominal = self.bandwidth.planning / 1e9, self.bandwidth.nominal / 1e9
        return (
            f"{self.title}: {self.memory_bytes / 1e9:,.0f} GB at {planned:,.0f} GB/s "
            f"(nominal {nominal:,.0f}); {', '.join(rates)}"
        )


def known() -> list[str]:
    """Names of the profiles: this machine's CPU and the files of `data/hardware`."""
    return ["cpu", *sorted(path.stem for path in HARDWARE.glob("*.yaml"))]


def measured_cpu(
    profile: Path | None = None, probe: Callable[[], Hardware] | None = None
) -> Hardware:
    """This machine's profile: read back if the same processor wrote it, else measured (seconds).

    Each number of usable cores has its own, so that a process with fewer spoils nobody's.
    """
    profile = profile or CPU_PROFILES / f"cpu-{usable_cores()}.json"
    if profile.is_file():
        try:
            stored = Hardware.model_validate_json(profile.read_text())
        except ValidationError:
            profile.unlink()
        else:
            if stored.title == cpu_title():
                return stored
    hardware = (probe or measure_cpu)()
    write_atomic(profile, hardware.model_dump_json(indent=1) + "\n")
    return hardware


def measure_cpu() -> Hardware:
    """Measure copy and read bandwidth and the fp32 and int8 matrix product rates, best of a few."""
    import psutil

    with _every_core():
        bandwidth = _measured({"read": _read_bandwidth(), "copy": _copy_bandwidth()})
        flops = {dtype: _measured({"matmul": _product_rate(dtype)}) for dtype in CPU_DTYPES}
    return Hardware(
        name="cpu",
        title=cpu_title(),
        kind="cpu",
        arch=platform.machine(),
        n_gpu=0,
        memory_bytes=psutil.virtual_memory().total,
        cache_bytes=last_level_cache_bytes(),
        bandwidth=bandwidth,
        flops=flops,
    )


def _measured(probes: dict[str, float]) -> Rate:
    best = max(probes.values())
    source = (
        f"measured on this machine with torch, best of several, {time.strftime('%Y-%m-%d')}; "
        f"nominal: {CPU_MARGIN} times that"
    )
    return Rate(nominal=best * CPU_MARGIN, measured=probes, planning=best, source=source)


def cpu_title() -> str:
    """Processor name and usable core count: what a stored measurement belongs to."""
    info = Path("/proc/cpuinfo")
    names = [
        line.split(":", 1)[1].strip()
        for line in (info.read_text().splitlines() if info.is_file() else [])
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {usable_cores()} cores"


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def last_level_cache_bytes() -> int:
    """Size of the largest cache that Linux lists for core 0; 32 MiB where it lists none."""
    sizes = [
        int(text.removesuffix("K")) * 1024
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        if (text := path.read_text().strip()).endswith("K")
    ]
    return max(sizes, default=32 << 20)


def _from_yaml(name: str) -> Hardware:
    path = HARDWARE / f"{name}.yaml"
    if not path.is_file():
        raise InputError(f"hardware: {name!r} is not known; use one of {', '.join(known())}")
    try:
        return Hardware.model_validate({"name": name, **yaml.safe_load(path.read_text())})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path.name}: {field}: {first['msg']}; correct the profile") from None


def _best_seconds(work: Callable[[], object], settled: int = 6, patience_s: float = 4.0) -> float:
    """Least time of a call: a rate's ceiling, not its mean.

    Called until `settled` calls in a row were no faster (by 2 % or more), so that another's burst
    of work does not pass for the machine.
    """
    work()
    best, since, deadline = float("inf"), 0, time.perf_counter() + patience_s
    while since < settled and time.perf_counter() < deadline:
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        since = 0 if seconds < 0.98 * best else since + 1
        best = min(best, seconds)
    return best


@contextmanager
def _every_core() -> Iterator[None]:
    """torch on all usable cores, as engines run, whatever the caller has set."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _read_bandwidth() -> float:
    """Bytes/s of a matrix-vector product, the matrix far beyond the cache: how decode reads."""
    import torch

    columns = 4096
    rows = max(4 * last_level_cache_bytes(), 256 << 20) // (4 * columns)
    matrix, vector = torch.ones(rows, columns), torch.ones(columns)
    return matrix.nbytes / _best_seconds(lambda: matrix @ vector)


def _copy_bandwidth() -> float:
    """Bytes/s (read plus written) of a copy far larger than the cache."""
    import torch

    count = max(2 * last_level_cache_bytes(), 256 << 20) // 4
    source, target = torch.ones(count), torch.zeros(count)
    return 2 * source.nbytes / _best_seconds(lambda: target.copy_(source))


def _product_rate(dtype: CpuDtype, size: int = 1536) -> float:
    """Operations/s of a square matrix product in a dtype."""
    import torch

    if dtype == "int8":
        left = torch.ones(size, size, dtype=torch.int8)
        seconds = _best_seconds(lambda: torch._int_mm(left, left))
    else:
        kind = torch.float32 if dtype == "fp32" else torch.bfloat16
        left = torch.ones(size, size, dtype=kind)
        seconds = _best_seconds(lambda: left @ left)
    return 2 * size**3 / seconds
