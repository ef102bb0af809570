"""An engine's kernels: found by its own declaration, compiled in a process of their own."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from pydantic import TypeAdapter

from metainfer_lab import paths
from metainfer_lab.errors import InputError
from metainfer_lab.hardware import usable_cores
from metainfer_lab.inspection import kernel
from metainfer_lab.inspection.kernel import Kernel
from metainfer_lab.inspection.report import Report, report_group
from metainfer_lab.inspection.targets import Target, find_target
from metainfer_lab.spec import Spec

DECLARATION = "inspection.py"
REPORTS = TypeAdapter(list[Report])
TIMEOUT_S = 300


def inspect(
    engine: Path | str,
    targets: str | Sequence[str] = "sm_90a",
    names: Sequence[str] = (),
    *,
    config: Path | None = None,
) -> list[Report]:
    """Reports on an engine's kernels (all, or those named) for one target or several.

    engine: a folder, or a name in data/engines. config: the model's config.json; by default that
    of the first spec that engine.json names. The engine's code runs in a child process, unconfined;
    whoever does not trust it runs `python -m metainfer_lab.inspection` in the sandbox.
    """
    wanted = [targets] if isinstance(targets, str) else targets
    command = [sys.executable, "-m", __package__, str(engine), *names, "--json"]
    command += [f"--target={target}" for target in wanted]
    command += ["--config", str(config)] if config else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(_import_path())}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise InputError(lines[-1])
    return REPORTS.validate_json(done.stdout)


def _import_path() -> list[str]:
    return [str(paths.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]


def inspect_kernel(engine: Path | str, name: str, target: str = "sm_90a") -> str:
    """A kernel's report as a short table of text: a tool for the author of an engine."""
    return "\n\n".join(map(str, inspect(engine, target, [name])))


def inspect_here(
    folder: Path, config: Path, targets: Sequence[Target], names: Sequence[str]
) -> list[Report]:
    """What the child process does: declare, compile each text once a target, report."""
    chosen = _chosen(declared(folder, config), names)
    work = [(target, group) for target in targets for group in _units(chosen)]
    with ThreadPoolExecutor(usable_cores()) as pool:
        groups = pool.map(lambda item: report_group(item[1], folder, item[0]), work)
        found = {(one.arch, one.kernel.name): one for group in groups for one in group}
    return [found[target.arch, kernel.name] for target in targets for kernel in chosen]


def declared(folder: Path, config: Path) -> list[Kernel]:
    """The kernels that an engine declares (kernel.py says how); its code is imported."""
    package = _package(folder)
    if not (folder / DECLARATION).is_file():
        raise InputError(f"inspection: {folder.name} declares no kernels; it needs {DECLARATION}")
    module = importlib.import_module(f"{package.__name__}.inspection")
    return kernel.parse(module.kernels(config))


def _package(folder: Path) -> ModuleType:
    """The folder as a package `engine`, so that its modules import each other; its __init__.py,
    which may load much, does not run."""
    package = ModuleType("engine")
    package.__path__ = [str(folder)]
    sys.modules["engine"] = package
    return package


def _chosen(kernels: list[Kernel], names: Sequence[str]) -> list[Kernel]:
    known = {kernel.name: kernel for kernel in kernels}
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"inspection: no kernel {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in names] if names else kernels


def _units(kernels: list[Kernel]) -> list[list[Kernel]]:
    """Kernels that one compilation serves, together."""
    units: dict[str, list[Kernel]] = {}
    for one in kernels:
        shared = {"language", "files", "defines", "options"}
        alone = {"name"} if one.language == "triton" else set()
        units.setdefault(one.model_dump_json(include=shared | alone), []).append(one)
    return list(units.values())


def engine_folder(engine: Path | str) -> Path:
    """A folder as it is, or the engine of that name; InputError when there is none."""
    for path in (Path(engine), paths.ENGINES / str(engine)):
        if path.is_dir():
            return path.resolve()
    raise InputError(
        f"engine: there is no folder {engine}; give a folder, or a name in data/engines"
    )


def engine_config(folder: Path) -> Path:
    """config.json of the model that an engine's first spec names."""
    manifest = folder / "engine.json"
    specs = json.loads(manifest.read_text()).get("specs") if manifest.is_file() else None
    model = Spec.load(specs[0] if specs else folder.name).model
    path = paths.MODELS / model / "config.json"
    return path if path.is_file() else Path(model)


def run(
    engine: str, targets: Sequence[str], names: Sequence[str], config: str | None, as_json: bool
) -> str:
    """What `python -m metainfer_lab.inspection` prints."""
    folder = engine_folder(engine)
    at = Path(config) if config else engine_config(folder)
    reports = inspect_here(folder, at, [find_target(target) for target in targets], names)
    return REPORTS.dump_json(reports).decode() if as_json else "\n\n".join(map(str, reports))
