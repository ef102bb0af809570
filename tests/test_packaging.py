"""One list of dependencies, two files that name it, layers that hold, words that belong."""

import importlib
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

from metainfer_lab.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
PIP = next(item["pip"] for item in ENVIRONMENT["dependencies"] if isinstance(item, dict))


def test_environment_names_what_pyproject_names():
    pip = {str(Requirement(item)) for item in PIP if not item.startswith("-e")}
    assert pip == {str(Requirement(item)) for item in PROJECT["dependencies"]}
    assert "-e ." in PIP
    assert f"python{PROJECT['requires-python']}" in ENVIRONMENT["dependencies"]


def test_the_packages_that_users_expect_are_listed():
    names = {Requirement(item).name for item in PROJECT["dependencies"]}
    assert names >= {
        "jupyterlab", "torch", "triton", "anthropic", "papermill", "matplotlib", "pandas", "nbval",
    }  # fmt: skip


def test_pip_section_resolves(tmp_path):
    """About 10 s: pip finds versions for all that the conda file lists; nothing is installed."""
    listing = tmp_path / "pip.txt"
    listing.write_text("\n".join(item for item in PIP if not item.startswith("-e")))
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "-r", str(listing)]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_constraints_pin_all_but_torch_and_triton():
    pinned = {Requirement(line).name.lower().replace("_", "-") for line in _constraints()}
    assert not pinned & {"torch", "triton"}
    wanted = {Requirement(item).name.lower().replace("_", "-") for item in PROJECT["dependencies"]}
    assert wanted - pinned <= {"torch", "triton", "nvidia-cuda-nvrtc"}
    assert all("==" in line for line in _constraints())


def _constraints() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_layers_hold():
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "1 kept, 0 broken" in done.stdout, "nothing was checked"


@pytest.mark.parametrize("check", [["check"], ["format", "--check"]])
def test_ruff_has_nothing_to_say(check):
    ruff = [sys.executable, "-m", "ruff", *check, "--no-cache", "."]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_importing_the_package_is_light():
    code = (
        "import time, sys; start = time.perf_counter(); import metainfer_lab; "
        "took = time.perf_counter() - start; "
        "heavy = {'torch', 'transformers', 'matplotlib', 'pandas'} & set(sys.modules); "
        "assert not heavy, heavy; assert took < 0.5, took"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", importlib.import_module("metainfer_lab").__all__)
def test_public_names_resolve(name):
    assert getattr(importlib.import_module("metainfer_lab"), name) is not None


def test_unknown_public_name_is_refused():
    with pytest.raises(AttributeError, match="it offers"):
        _ = importlib.import_module("metainfer_lab").no_such_thing


def test_modules_stay_small():
    sources = [
        *ROOT.glob("metainfer_lab/**/*.py"),
        *ROOT.glob("data/engines/**/*.py"),
        *ROOT.glob("tests/**/*.py"),
    ]
    long = {str(p.relative_to(ROOT)): n for p in sources if (n := _lines(p)) > 400}
    assert not long


def _lines(path) -> int:
    return len(path.read_text().splitlines())
