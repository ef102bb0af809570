"""GPUs that a kernel is compiled for: issue rate, and what limits the blocks of a multiprocessor.

Limits: CUDA C++ programming guide, "compute capabilities" 9.0 and 10.0, alike in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from metainfer_lab.errors import InputError
from metainfer_lab.hardware import Hardware

LANES = 128  # of a multiprocessor: four schedulers, one instruction of 32 lanes each a cycle
REGISTERS, REGISTER_GRANULE = 65536, 256  # 32-bit; a warp gets a multiple of the granule
SHARED_BYTES, RESERVED_SHARED = 228 << 10, 1 << 10  # the reserve is of each block
WARPS, BLOCKS = 64, 32


@dataclass(frozen=True)
class Target:
    """An architecture as NVRTC names it, on the machine whose profile gives its memory rate."""

    arch: str
    hardware: str
    multiprocessors: int
    clock_hz: float
    source: str

    @property
    def issue_rate(self) -> float:
        """Lane-instructions a second, all multiprocessors."""
        return self.multiprocessors * LANES * self.clock_hz

    @property
    def bandwidth(self) -> float:
        """Bytes a second that floors are shown at."""
        return Hardware.load(self.hardware).bandwidth.planning

    @property
    def capability(self) -> int:
        """90 for sm_90a."""
        return int(self.arch.removeprefix("sm_").rstrip("af"))


TARGETS = {
    target.arch: target
    for target in (
        Target("sm_90a", "h200", 132, 1.83e9, "H200: 132 SMs at 1.83 GHz"),
        Target("sm_100a", "b200", 148, 1.83e9, "B200: 148 SMs; the H200's clock is assumed"),
    )
}


def find_target(name: str) -> Target:
    """A target by architecture or machine; InputError lists the known ones."""
    for target in TARGETS.values():
        if name in (target.arch, target.hardware):
            return target
    raise InputError(f"target: {name!r} is not known; use one of {', '.join(TARGETS)}")


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps that one multiprocessor holds at a time, and what allows no more."""

    blocks: int
    warps: int
    limit: str

    def __str__(self) -> str:
        return f"{self.blocks} blocks, {self.warps} of {WARPS} warps ({self.limit})"


def occupancy(registers: int, threads: int, shared_bytes: int) -> Occupancy:
    """From registers a thread, threads a block and shared bytes a block, static and dynamic."""
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // REGISTER_GRANULE) * REGISTER_GRANULE
    limits = {
        "registers": REGISTERS // (per_warp * warps) if registers else BLOCKS,
        "shared memory": SHARED_BYTES // (shared_bytes + RESERVED_SHARED),
        "warps": WARPS // warps,
        "blocks": BLOCKS,
    }
    limit = min(limits, key=limits.__getitem__)
    return Occupancy(limits[limit], limits[limit] * warps, limit)
