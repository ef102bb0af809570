"""The Python that confined code gets: the standard library and the few packages an engine may use.

Site-packages folders are hidden as a whole; what is allowed is bound in (bubblewrap) or permitted
(Landlock) package by package, and reached through a folder of links.
"""

from __future__ import annotations

import importlib.metadata
import site
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from metainfer_lab.errors import InputError

ALLOWED = ("torch", "triton", "safetensors", "numpy", "nvidia-cuda-nvrtc")
OPTIONAL = frozenset({"triton", "nvidia-cuda-nvrtc"})  # there is no wheel for every platform


def interpreter() -> Path:
    """The base interpreter: a virtual environment's own would bring its site-packages back."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


@cache
def allowed_packages() -> dict[str, Path]:
    """`package_paths` of what an engine may import."""
    found = package_paths(ALLOWED)
    if "torch" not in found:
        raise InputError("sandbox: torch is not installed with a RECORD of its files; use pip")
    return found


def package_paths(names: Iterable[str]) -> dict[str, Path]:
    """Name on the module path -> real path, for distributions and all that they require."""
    found: dict[str, Path] = {}
    for distribution in _closure(names):
        for name in {Path(file).parts[0] for file in distribution.files or []}:
            path = Path(str(distribution.locate_file(name)))
            if name not in {"..", "__pycache__"} and path.exists():
                found[name] = path.resolve()
    return found


def _closure(names: Iterable[str]) -> list[importlib.metadata.Distribution]:
    from packaging.requirements import Requirement

    seen: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in seen:
            continue
        try:
            seen[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if name in ALLOWED and name not in OPTIONAL:
                raise InputError(f"sandbox: {name} is not installed; engines need it") from None
            continue
        requirements = [Requirement(line) for line in seen[name].requires or []]
        waiting += [r.name for r in requirements if not r.marker or r.marker.evaluate()]
    return list(seen.values())


def site_folders() -> list[Path]:
    """Every folder of third-party packages that an interpreter here could look into."""
    candidates = [Path(entry) for entry in [*sys.path, *site.getsitepackages()]]
    candidates.append(Path(site.getusersitepackages()))
    for prefix in (Path(sys.base_prefix), Path("/usr"), Path("/usr/local")):
        candidates += prefix.glob("lib/python3*/*-packages")
    return sorted(
        {path.resolve() for path in candidates if path.name in {"site-packages", "dist-packages"}}
    )


def link_packages(folder: Path) -> Path:
    """Fill a folder with one link per allowed package."""
    folder.mkdir()
    for name, path in allowed_packages().items():
        (folder / name).symlink_to(path)
    return folder


def without(root: Path, excluded: Iterable[Path]) -> list[Path]:
    """Paths that together cover `root` but none of the excluded folders below it."""
    inside = [path for path in excluded if path == root or path.is_relative_to(root)]
    if not inside:
        return [root]
    if root in inside:
        return []
    return [part for child in sorted(root.iterdir()) for part in without(child, inside)]
