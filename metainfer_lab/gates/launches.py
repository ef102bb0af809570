"""Which of an engine's kernels are launched, and which of them no pair in OPERATORS leads to.

On a GPU the profiler says what ran. Elsewhere the source is read: names are followed from OPERATORS
through functions, classes, module variables and strings, which finds no kernel whose name is put
together when the engine runs.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from metainfer_lab.paths import tree_files

ENTRY = re.compile(r"__global__([^;{]*?)\(", re.DOTALL)
ATTRIBUTES = re.compile(r"__(?!global__)\w+__\s*\((?:[^()]|\([^()]*\))*\)")
LIBRARIES = (
    "memcpy",
    "memset",
    "nvjet",
    "sm80",
    "sm90",
    "sm100",
    "cutlass",
    "cudnn",
    "nccl",
    "ampere",
    "hopper",
)

Uses = dict[str, set[str]]  # name -> names that its definitions use


def own(names: Iterable[str], folder: Path) -> set[str]:
    """Of the kernels that a profiler saw, the engine's: named in its source, or in plain C."""
    known, found = kernels(folder), set()
    for name in names:
        word = re.match(r"\w+", name.removeprefix("void "))
        plain = name.isidentifier() and not name.startswith(LIBRARIES)
        if word and (plain or word[0] in known):
            found.add(word[0])
    return found


def kernels(folder: Path) -> set[str]:
    """Names of the CUDA and Triton kernels in the source of an engine."""
    found: set[str] = set()
    for path in tree_files(folder):
        text = path.read_text(errors="replace")
        heads = ENTRY.findall(ATTRIBUTES.sub("", text))
        found |= {head.split()[-1].lstrip("*&") for head in heads if head.strip()}
        if path.suffix == ".py":
            found |= {
                node.name
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.FunctionDef)
                and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            }
    return found


def undeclared(folder: Path) -> list[str]:
    """Kernels that the source launches by name, and that nothing in OPERATORS leads to."""
    uses: Uses = defaultdict(set)
    launched: set[str] = set()
    for path in tree_files(folder):
        if path.suffix == ".py":
            tree = ast.parse(path.read_text())
            _index(tree, uses)
            launched |= _launched(tree)
    reached, waiting = set(), {"OPERATORS"}
    while waiting:
        reached |= waiting
        waiting = set().union(*(uses.get(name, set()) for name in waiting)) - reached
    return sorted(kernels(folder) & launched - reached)


def _launched(tree: ast.Module) -> set[str]:
    """`kernel` of every `kernel[grid](...)`, and every string."""
    found = _strings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            found.add(ast.unparse(node.func.value).rpartition(".")[2])
    return found


def _strings(node: ast.AST) -> set[str]:
    constants = (one.value for one in _walk(node) if isinstance(one, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


def _index(tree: ast.Module, uses: Uses) -> None:
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.asname or alias.name for node in imports for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            uses[node.name] |= _used(node, modules)
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value:
            for name in (one.id for one in _walk(node) if isinstance(one, ast.Name)):
                uses[name] |= _used(node.value, modules) if _is_target(name, node) else set()


def _is_target(name: str, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return name in {one.id for t in targets for one in ast.walk(t) if isinstance(one, ast.Name)}


def _used(node: ast.AST, modules: set[str]) -> set[str]:
    """Names, strings and what is taken from an imported name; no annotations, no other methods."""
    found = _strings(node) | {one.id for one in _walk(node) if isinstance(one, ast.Name)}
    taken = (one for one in _walk(node) if isinstance(one, ast.Attribute))
    return found | {one.attr for one in taken if ast.unparse(one.value) in modules}


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it but annotations."""
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _walk(child)
