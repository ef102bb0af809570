"""Machine code as nvdisasm prints it: instructions, memory accesses, matrix products.

The tools come with triton's wheel and need no GPU. One line of SASS is one instruction that a
scheduler issues for the 32 lanes of a warp, so instructions over weights that a lane multiplies
are lane-instructions per weight.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from metainfer_lab.errors import InputError

_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P[T\d]+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_SECTION = re.compile(r"^\.text\.(\S+):\s*$(.*?)(?=^\s*\.section|^//-{5}|\Z)", re.M | re.S)
_USAGE = re.compile(r"Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
# Rows and depth of one product of a warp: HMMA.16816 multiplies a 16 x 16 operand by a 16 x 8 one.
_WARP_PRODUCT = re.compile(r"(?:H|Q|O|I|D|B)MMA(?:\.SP)?\.(16|8)8(4|8|16|32|64|128)\b")
_MATRIX = re.compile(r"(?:(?:H|Q|O|I|D|B)MMA|(?:H|Q|I)GMMA|UTC\w*MMA)\b")
_MEMORY = re.compile(r"(LDGSTS|LDSM|STSM|LDG|STG|LDS|STS|LDL|STL|LD|ST|REDG?|ATOMG?|ATOMS)\b")
_BULK = re.compile(r"(UBLKCP|UTMALDG|UTMASTG)\b")
_WIDTHS = {"ENL2": 32, "256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
_WIDE = 16  # bytes of a lane in one access: what a stream of weights is read by


class Instruction(NamedTuple):
    """One line: opcode with modifiers (`LDG.E.128`), operands, guard, and where a branch goes."""

    opcode: str
    operands: str
    predicate: str | None
    target: int | None  # index of the instruction that a branch goes to

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".")[0]

    @property
    def kind(self) -> str:
        """The name; with its modifier where a multiply-add stands for a move or a shift."""
        parts = self.opcode.split(".")
        return ".".join(parts[:2]) if parts[0] in {"IMAD", "HADD2"} else parts[0]

    @property
    def is_matrix(self) -> bool:
        """Whether tensor cores do it."""
        return _MATRIX.match(self.opcode) is not None

    @property
    def weights(self) -> int:
        """Elements of the 16-row operand that a lane brings to a warp's matrix product.

        Zero where it is none, or one whose operand lies in shared memory (wgmma, tcgen05).
        """
        found = _WARP_PRODUCT.match(self.opcode)
        return int(found[1]) * int(found[2]) // 32 if found else 0

    @property
    def access(self) -> str | None:
        """`LDG 16 B` for an access to memory: what it is, and bytes of one lane."""
        if bulk := _BULK.match(self.opcode):
            return f"{bulk[1]} bulk"
        found = _MEMORY.match(self.opcode)
        return f"{found[1]} {access_bytes(self.opcode)} B" if found else None

    @property
    def is_stream(self) -> bool:
        """Whether every lane brings 16 bytes or more from global memory.

        A bulk copy is asked for by one lane of one warp: others do not pass it.
        """
        return self.name in {"LDG", "LDGSTS"} and access_bytes(self.opcode) >= _WIDE

    def __str__(self) -> str:
        guard = f"@{self.predicate} " if self.predicate else ""
        return f"{guard}{self.opcode} {self.operands}".rstrip()


def access_bytes(opcode: str) -> int:
    """Bytes that one lane moves: the width that the opcode names, 4 where it names none.

    LDSM moves eight rows of 16 bytes for each of its matrices: 4 bytes a lane and matrix.
    """
    parts = opcode.split(".")[1:]
    if opcode.startswith(("LDSM", "STSM")):
        return 4 * max((int(part) for part in parts if part in {"2", "4"}), default=1)
    return next((size for part, size in _WIDTHS.items() if part in parts), 4)


@dataclass(frozen=True)
class Function:
    """One kernel of a cubin. registers per thread; stack and static shared memory in bytes."""

    name: str
    text: str
    instructions: tuple[Instruction, ...]
    registers: int
    stack_bytes: int
    shared_bytes: int


def functions(cubin: bytes) -> dict[str, Function]:
    """The kernels of a cubin by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cubin"
        path.write_bytes(cubin)
        text = _run("nvdisasm", "-c", str(path))
        usage = {
            found[0]: found[1:]
            for found in _USAGE.findall(_run("cuobjdump", "-res-usage", str(path)))
        }
    return {
        name: _function(name, body, [int(value) for value in usage[name]])
        for name, body in _SECTION.findall(text)
        if name in usage
    }


def _function(name: str, body: str, usage: list[int]) -> Function:
    registers, stack, shared, local = usage
    instructions = parse(body)
    text = "\n".join(str(instruction) for instruction in instructions)
    return Function(name, text, instructions, registers, stack + local, shared)


def parse(body: str) -> tuple[Instruction, ...]:
    """Instructions of one function, without the padding behind its end."""
    lines, labels = [], {}
    for line in body.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        elif found := _LINE.search(line):
            lines.append(found.groups())
    parsed = [
        Instruction(opcode, operands.strip(), predicate, _target(operands, labels))
        for predicate, opcode, operands in lines
    ]
    while parsed and (parsed[-1].name == "NOP" or parsed[-1].target == len(parsed) - 1):
        parsed.pop()
    return tuple(parsed)


def _target(operands: str, labels: dict[str, int]) -> int | None:
    found = _TARGET.search(operands)
    return labels.get(found[1]) if found else None


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([str(_tool(tool)), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"inspection: {tool} failed: {done.stderr.strip()}")
    return done.stdout


@cache
def _tool(name: str) -> Path:
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        raise InputError("inspection: triton is not installed; its wheel brings the disassembler")
    return Path(found.origin).parent / "backends" / "nvidia" / "bin" / name
