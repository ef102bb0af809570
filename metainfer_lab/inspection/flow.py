"""The way that a warp takes through a kernel: blocks, loops, and the steady path round a loop.

A loop's body holds more than what each turn issues: the first and last turn's special cases,
variants for other sizes, code for warps that have parted. The *steady path* is the way round with
the most matrix products and wide loads, and of such ways the shortest: a least count of a turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from metainfer_lab.inspection.sass import Instruction

_ENDS = {"EXIT", "RET", "BRX", "JMX", "KILL"}


@dataclass(frozen=True)
class Loop:
    """A natural loop: the block that every turn begins with, and all blocks of it."""

    head: int
    blocks: frozenset[int]


class Flow:
    """Basic blocks of one function and where each may go. Calls return, so they end no block."""

    def __init__(self, instructions: tuple[Instruction, ...]) -> None:
        self.instructions = instructions
        self.starts = self._block_starts()
        self.block_of = {start: block for block, start in enumerate(self.starts)}
        self.after = [self._successors(block) for block in range(len(self.starts))]

    def _block_starts(self) -> list[int]:
        starts = {0}
        for index, instruction in enumerate(self.instructions):
            if _jumps(instruction):
                starts |= {index + 1, instruction.target}
            elif instruction.name in _ENDS:
                starts.add(index + 1)
        return sorted(start for start in starts if start < len(self.instructions))

    def span(self, block: int) -> range:
        """Indices of a block's instructions."""
        following = (*self.starts, len(self.instructions))
        return range(self.starts[block], following[block + 1])

    def _successors(self, block: int) -> tuple[int, ...]:
        last = self.instructions[self.span(block)[-1]]
        falls_to = (block + 1,) if block + 1 < len(self.starts) else ()
        if _jumps(last):
            return (self.block_of[last.target], *(falls_to if _is_conditional(last) else ()))
        return () if last.name in _ENDS and not last.predicate else falls_to

    def matrix_products(self, blocks: frozenset[int]) -> int:
        """Matrix instructions in some blocks."""
        return sum(self.instructions[i].is_matrix for block in blocks for i in self.span(block))

    @cached_property
    def order(self) -> dict[int, int]:
        """Reverse postorder from the entry: a block's place before those that it leads to."""
        seen, finished, stack = {0}, [], [(0, iter(self.after[0]))]
        while stack:
            step = next((to for to in stack[-1][1] if to not in seen), None)
            if step is None:
                finished.append(stack.pop()[0])
            else:
                seen.add(step)
                stack.append((step, iter(self.after[step])))
        return {block: place for place, block in enumerate(reversed(finished))}

    @cached_property
    def before(self) -> dict[int, list[int]]:
        """Predecessors that the entry reaches."""
        found: dict[int, list[int]] = {block: [] for block in self.order}
        for block in self.order:
            for to in self.after[block]:
                found[to].append(block)
        return found

    @cached_property
    def dominators(self) -> dict[int, set[int]]:
        """Blocks that every way from the entry to a block passes (iterated to a fixed point)."""
        found = {block: set(self.order) for block in self.order} | {0: {0}}
        changed = True
        while changed:
            changed = False
            for block in self.order:
                common = [found[p] for p in self.before[block]] if block else []
                new = {block} | (set.intersection(*common) if common else set())
                changed, found[block] = changed or new != found[block], new
        return found

    @cached_property
    def loops(self) -> list[Loop]:
        """Natural loops; back edges to one head are one loop."""
        bodies: dict[int, set[int]] = {}
        for block in self.order:
            for head in self.after[block]:
                if head in self.dominators[block]:
                    bodies.setdefault(head, {head}).update(self._body(head, block))
        return [Loop(head, frozenset(body)) for head, body in bodies.items()]

    def _body(self, head: int, latch: int) -> set[int]:
        body, waiting = {head}, [latch]
        while waiting:
            if (block := waiting.pop()) not in body:
                body.add(block)
                waiting += self.before[block]
        return body

    @cached_property
    def product_loops(self) -> list[Loop]:
        """Innermost loops with matrix products, the most products first; without any, the largest.

        Innermost among their kind: a loop inside that multiplies nothing does not count.
        """
        kind = [loop for loop in self.loops if self.matrix_products(loop.blocks)] or self.loops
        inner = [a for a in kind if not any(b.blocks < a.blocks for b in kind)]
        return sorted(inner, key=lambda loop: self._weight(loop.blocks), reverse=True)

    def _weight(self, blocks: frozenset[int]) -> tuple[int, int]:
        return self.matrix_products(blocks), sum(len(self.span(block)) for block in blocks)

    def steady_path(self, loop: Loop | None = None) -> list[Instruction]:
        """Instructions of one turn of a loop, or of the whole kernel: of all ways round those with
        the most matrix products and wide loads, of those the shortest."""
        blocks = frozenset(self.order) if loop is None else loop.blocks
        head = 0 if loop is None else loop.head
        ends = {b for b in blocks if (head in self.after[b] if loop else not self.after[b])}
        path = self._way(head, ends, blocks, self._wanted)
        return [self.instructions[i] for block in path for i in self.span(block)]

    def outside(self, loop: Loop) -> int:
        """Least instructions of a warp before it enters a loop and after it leaves it."""
        everything = frozenset(self.order)
        way_in = self._way(0, {loop.head}, everything)[:-1]
        leaving = {to for block in loop.blocks for to in self.after[block]} - loop.blocks
        ends = {block for block in everything if not self.after[block]}
        ways_out = [self._way(to, ends, everything) for to in leaving]
        return self._size(way_in) + min(map(self._size, ways_out), default=0)

    def _size(self, path: list[int]) -> int:
        return sum(len(self.span(block)) for block in path)

    def _wanted(self, block: int) -> int:
        """Matrix products and wide loads of a block."""
        inside = (self.instructions[i] for i in self.span(block))
        return sum(step.is_matrix or step.is_stream for step in inside)

    def _way(
        self,
        start: int,
        ends: set[int],
        within: frozenset[int],
        wanted: Callable[[int], int] = lambda block: 0,
    ) -> list[int]:
        """Blocks from start to an end: most wanted first, then fewest instructions; no block twice.

        Only edges that lead forward in reverse postorder are taken, so blocks can be settled in
        that order. Empty where no end can be reached.
        """
        cost = lambda block: (-wanted(block), len(self.span(block)))  # noqa: E731
        best = {start: (cost(start), [start])}
        for block in sorted(within, key=self.order.__getitem__):
            if block not in best:
                continue
            (want, size), path = best[block]
            for to in self.after[block]:
                if to in within and self.order[to] > self.order[block]:
                    more = cost(to)
                    step = ((want + more[0], size + more[1]), [*path, to])
                    best[to] = min(best.get(to, step), step)
        return min((best[end] for end in ends if end in best), default=((0, 0), []))[1]


def _jumps(instruction: Instruction) -> bool:
    """Whether it goes elsewhere inside the function; the way of parted warps is left out."""
    if instruction.target is None or instruction.name not in {"BRA", "JMP"}:
        return False
    return not instruction.opcode.startswith(("BRA.DIV", "BRA.CONV"))


def _is_conditional(branch: Instruction) -> bool:
    return branch.predicate not in (None, "PT") or "P" in branch.operands.split("`")[0]
