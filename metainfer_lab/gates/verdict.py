"""Verdicts: records of what was asked and what was wrong, in words an engineer can act on."""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import BaseModel, ConfigDict

Status = Literal["pass", "fail", "not_judged"]
KEPT_FAILURES = 8


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Failure(Record):
    """One thing that was wrong. position: index of the token; layer: the first part that departs,
    where it could be found."""

    case: str
    position: int | None = None
    error: float | None = None
    tolerance: float | None = None
    layer: str | None = None
    detail: str = ""

    def __str__(self) -> str:
        parts = [self.case]
        if self.position is not None:
            parts.append(f"position {self.position}")
        if self.error is not None:
            parts.append(f"error {self.error:.3g}, allowed {self.tolerance:.3g}")
        text = ", ".join(parts) + (f": {self.detail}" if self.detail else "")
        return text + (f" [first part that departs: {self.layer}]" if self.layer else "")


class GateVerdict(Record):
    """What one gate found. worst_error and tolerance: the case that came nearest to its limit."""

    gate: str
    version: int
    status: Status
    cases: int
    worst_error: float | None
    tolerance: float | None
    reason: str
    failures: list[Failure]
    seconds: float
    passed: bool

    def __str__(self) -> str:
        word = {"pass": "pass", "fail": "FAIL", "not_judged": "not judged"}[self.status]
        lines = [f"{self.gate}: {word} ({self.cases} cases, {self.seconds:.1f} s) {self.reason}"]
        return "\n  - ".join([lines[0].rstrip(), *map(str, self.failures)])


class Verdict(Record):
    """What all asked gates found on one tree of one engine, on one device."""

    engine: str
    tree: str
    spec: str
    device: str
    sandbox: str
    checkpoint: str | None
    gates: list[GateVerdict]
    passed: bool
    created: str
    versions: dict[str, str]

    @property
    def hash(self) -> str:
        """SHA-256 of the record's JSON."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def failures(self) -> list[Failure]:
        """Of all gates, in order."""
        return [failure for gate in self.gates for failure in gate.failures]

    def __str__(self) -> str:
        word = "passed" if self.passed else "FAILED"
        head = f"{self.engine} {self.tree[:12]} on {self.device} ({self.sandbox}): {word}"
        return "\n".join([head, *map(str, self.gates)])


class NotJudged(Exception):
    """The gate cannot say here, and why; neither pass nor fail."""


class Findings:
    """Collects a gate's cases; the gate's verdict is made from it."""

    def __init__(self) -> None:
        self.cases = 0
        self.failures: list[Failure] = []
        self.worst: tuple[float, float] | None = None
        self.note = ""

    def case(self) -> None:
        """Count one thing that was asked."""
        self.cases += 1

    def fail(
        self, case: str, detail: str, *, position: int | None = None, layer: str | None = None
    ) -> None:
        """Something is wrong that has no number."""
        self.failures.append(Failure(case=case, detail=detail, position=position, layer=layer))

    def measure(
        self,
        case: str,
        error: float,
        allowed: float,
        *,
        position: int | None = None,
        layer: str | None = None,
        detail: str = "",
    ) -> bool:
        """Hold an error to its tolerance; NaN is beyond any. Whether it is within."""
        within = error <= allowed  # False for NaN
        share = error / allowed
        if self.worst is None or not share <= self.worst[0] / self.worst[1]:
            self.worst = (error, allowed)
        if not within:
            self.failures.append(
                Failure(
                    case=case,
                    position=position,
                    error=error,
                    tolerance=allowed,
                    layer=layer,
                    detail=detail,
                )
            )
        return within

    def verdict(self, gate: str, version: int, seconds: float, not_judged: str = "") -> GateVerdict:
        """The record; a gate that asked nothing does not pass."""
        status: Status = "pass"
        reason = self.note
        if self.failures:
            status, reason = "fail", str(self.failures[0])
        elif not_judged:
            status, reason = "not_judged", not_judged
        elif not self.cases:
            status, reason = "fail", "nothing was asked"
        return GateVerdict(
            gate=gate,
            version=version,
            status=status,
            cases=self.cases,
            worst_error=self.worst and self.worst[0],
            tolerance=self.worst and self.worst[1],
            reason=reason,
            failures=self.failures[:KEPT_FAILURES],
            seconds=round(seconds, 2),
            passed=status == "pass",
        )
