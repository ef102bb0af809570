"""alone: the folder stands alone. Imports, size, what it calls, and what is loaded at run time.

The reading of the source is a tripwire; the sandbox, where nothing else can be imported, is the
wall.
"""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from metainfer_lab.gates.trial import Trial
from metainfer_lab.paths import tree_files

ALLOWED = frozenset({"torch", "triton", "safetensors", "numpy"})
FORBIDDEN_STDLIB = frozenset(
    {"asyncio", "code", "ftplib", "gc", "http", "inspect", "marshal", "multiprocessing", "pickle"}
    | {"pty", "runpy", "shelve", "smtplib", "socket", "socketserver", "ssl", "subprocess"}
    | {"urllib", "webbrowser", "xmlrpc"}
)
FORBIDDEN_CALLS = frozenset(
    {"exec", "eval", "compile", "__import__", "importlib.import_module", "exit", "quit"}
    | {"os._exit", "os.system", "os.popen", "os.fork", "os.execv", "sys.exit", "sys._getframe"}
)
CLOCKS = frozenset({"time"})
# What must never be loaded beside an engine, whether or not its source says so.
OTHER_ENGINES = frozenset(
    {"transformers", "vllm", "sglang", "tensorrt_llm", "metainfer_lab", "flash_attn", "flashinfer"}
    | {"accelerate", "ctransformers", "deepspeed", "fla", "llama_cpp", "lmdeploy", "mlc_llm"}
    | {"onnxruntime"}
)
SUFFIXES = frozenset({".py", ".json", ".md", ".cu", ".cuh", ".h", ".txt", ".toml"})
MAX_FILE_BYTES = 200_000
MAX_TREE_BYTES = 1_000_000
MAX_LITERAL = 10_000  # characters: weights and answers do not fit in one


def alone(trial: Trial) -> None:
    """Read every file, then import the folder from another place and look at what was loaded."""
    trial.findings.case()
    _ = trial.manifest
    for path in tree_files(trial.folder):
        _file(trial, path)
    total = sum(path.stat().st_size for path in tree_files(trial.folder))
    if total > MAX_TREE_BYTES:
        trial.findings.fail("size", f"{total} bytes in all, allowed are {MAX_TREE_BYTES}")
    _run_elsewhere(trial)


def _file(trial: Trial, path: Path) -> None:
    name = path.relative_to(trial.folder).as_posix()
    trial.findings.case()
    if path.is_symlink():
        trial.findings.fail(name, "is a link; an engine is plain files")
    elif path.suffix not in SUFFIXES:
        trial.findings.fail(name, f"is no source file ({', '.join(sorted(SUFFIXES))} are)")
    elif path.stat().st_size > MAX_FILE_BYTES:
        trial.findings.fail(name, f"{path.stat().st_size} bytes, allowed are {MAX_FILE_BYTES}")
    elif path.suffix == ".py":
        for line, complaint in complaints(path.read_text(errors="replace")):
            trial.findings.fail(f"{name}:{line}", complaint)


def complaints(source: str) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) of Python source."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        yield error.lineno or 0, f"does not parse: {error.msg}"
        return
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for root in _imported(node):
            if root in FORBIDDEN_STDLIB or root not in ALLOWED | sys.stdlib_module_names:
                yield line, f"imports {root}; an engine imports {', '.join(sorted(ALLOWED))}"
        if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in FORBIDDEN_CALLS:
            yield line, f"calls {called}"
        if isinstance(node, ast.Assign | ast.AugAssign) and _patches_clock(node):
            yield line, "assigns to a clock"
        if isinstance(node, ast.Constant) and len(repr(node.value)) > MAX_LITERAL:
            yield line, f"a literal of {len(repr(node.value))} characters"


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [(node.module or "").partition(".")[0]]
    return []


def _patches_clock(node: ast.Assign | ast.AugAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(
        isinstance(target, ast.Attribute) and ast.unparse(target.value) in CLOCKS
        for target in targets
    )


def _run_elsewhere(trial: Trial) -> None:
    checkpoint = trial.tiny(num_hidden_layers=1)
    copy = trial.new_folder() / "moved"
    shutil.copytree(trial.folder, copy, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    trial.findings.case()
    with trial.candidate(checkpoint, folder=copy) as engine:
        engine.score([0, 1, 2], [2])
        engine.submit([0, 1, 2], {"max_new_tokens": 2})
        engine.finish()
        found = engine.surroundings()
    for name in sorted(OTHER_ENGINES & set(found.modules)):
        trial.findings.fail("loaded modules", f"{name} is loaded in the engine's process")
    for name in found.clocks:
        trial.findings.fail("clocks", f"time.{name} is not the one that Python came with")
    if found.children:
        detail = f"{found.children} of the engine's own still run when nothing is left to do"
        trial.findings.fail("processes", detail)
