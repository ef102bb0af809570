"""Set up the virtual environment, torch first. Standard library only: nothing else is there yet.

    python3 metainfer_lab/bootstrap.py .venv

Which torch, decided once and printed: one that this Python already imports is used through a .pth
file and never replaced; else, on Linux without an NVIDIA driver, PyTorch's CPU build; else PyPI's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_TORCH = "torch==2.13.0"  # the release this project is tested with on CPUs
OLDEST, TOO_NEW = (3, 11), (3, 14)  # as pyproject.toml says


def main(folder: Path) -> None:
    """Create `folder`, decide on torch, install the rest, leave `.ready` behind as the last act."""
    _require(
        OLDEST <= sys.version_info < TOO_NEW,
        f"python: this is {sys.version.split()[0]}; 3.11, 3.12 or 3.13 is needed",
    )
    _require(
        importlib.util.find_spec("ensurepip") is not None,
        "python3-venv: missing; run `apt install python3-venv` (Debian, Ubuntu) and try again",
    )
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"setup: creating {folder.name}", flush=True)
        venv.create(folder, with_pip=True, clear=folder.exists())
    pins = choose_torch(python)
    print("setup: installing the packages of pyproject.toml (one to four minutes)", flush=True)
    install_packages(python, pins)
    (folder / ".ready").write_text(fingerprint())


def choose_torch(python: Path) -> list[str]:
    """Make torch importable by `python`; returns the pins that keep pip from replacing it."""
    if importlib.util.find_spec("torch"):
        return borrow_torch(python)
    if sys.platform == "linux" and not has_nvidia_driver():
        install_cpu_torch(python)
    else:
        print("setup: torch from PyPI", flush=True)
    return []


def borrow_torch(python: Path) -> list[str]:
    """Let `python` see this interpreter's packages, after its own; pins for torch and triton."""
    folders = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    site = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    )
    (Path(site.strip()) / "borrowed.pth").write_text("\n".join(folders) + "\n")
    pins = [f"{name}=={_version(name)}" for name in ("torch", "triton") if _version(name)]
    print(f"setup: torch {_version('torch')} of {sys.executable} is used as it is", flush=True)
    return pins


def install_cpu_torch(python: Path) -> None:
    """PyTorch's CPU build, alone and without retries: an unreachable index shows at once."""
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0:
        return
    print(f"setup: {CPU_TORCH}, CPU build (no NVIDIA driver found)", flush=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    where = ["--retries", "0", "--timeout", "15", "--index-url", CPU_INDEX]
    done = subprocess.run([*pip, *where, CPU_TORCH], capture_output=True, text=True)
    _require(
        done.returncode == 0,
        f"torch: {CPU_INDEX} gave no {CPU_TORCH}; install torch into a Python of your own and run "
        f"`make PYTHON=/path/to/that/python` ({(done.stderr.strip().splitlines() or ['?'])[-1]})",
    )


def install_packages(python: Path, pins: list[str]) -> None:
    """The package itself, editable, with everything that pyproject.toml lists."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(pins) + "\n")
        file.flush()
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        limits = ["-c", ROOT / "constraints.txt", "-c", file.name]
        done = subprocess.run([*pip, *limits, "-e", ROOT])
    _require(
        done.returncode == 0, "setup: pip could not install the packages (its reason is above)"
    )


def has_nvidia_driver() -> bool:
    """Whether this machine has an NVIDIA driver loaded or its tool installed."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def fingerprint() -> str:
    """What the environment was made from; another value means it is to be made again."""
    names = ("pyproject.toml", "constraints.txt", "metainfer_lab/bootstrap.py")
    return hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in names)).hexdigest()


def is_ready(folder: Path) -> bool:
    """Whether a finished environment of today's dependency list is there."""
    ready = folder / ".ready"
    return ready.is_file() and ready.read_text() == fingerprint()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _require(condition: bool, message: str) -> None:
    if not condition:
        print(message, file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    target = Path(os.path.abspath(sys.argv[1]))
    if not is_ready(target):
        try:
            main(target)
        except KeyboardInterrupt:
            print("setup: interrupted; the next run goes on", file=sys.stderr)
            raise SystemExit(130) from None
