"""Every folder in one place, atomic writes, and the hash that names a tree of files."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
SPECS = DATA / "specs"
HARDWARE = DATA / "hardware"
MODELS = DATA / "models"
SKILLS = DATA / "skills"
ENGINES = DATA / "engines"
RUNS = DATA / "runs"
MUTANTS = DATA / "mutants"
FAKES = DATA / "fakes"
RESULTS = DATA / "results"
LOCAL = DATA / "local"
FIGURES = ROOT / "figures"
NOTEBOOKS = ROOT / "notebooks"


def cache_dir() -> Path:
    """Folder for checkpoints, outside the repository; METAINFER_LAB_CACHE moves it."""
    default = Path.home() / ".cache" / "metainfer_lab"
    folder = Path(os.environ.get("METAINFER_LAB_CACHE", default))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    blob = data.encode() if isinstance(data, str) else data
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def tree_files(folder: Path) -> list[Path]:
    """The files that make a tree what it is, sorted; caches and hidden files are not among them."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and path.suffix != ".pyc"
        and not any(
            part == "__pycache__" or part.startswith(".") for part in path.relative_to(folder).parts
        )
    )


def tree_hash(folder: Path) -> str:
    """SHA-256 over the relative paths and the bytes of a tree's files."""
    digest = hashlib.sha256()
    for path in tree_files(folder):
        blob = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(blob)}\0".encode())
        digest.update(blob)
    return digest.hexdigest()
