"""Which torch the setup takes, and what it says when it cannot go on."""

import importlib.machinery
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from metainfer_lab import bootstrap


def fake_package(site: Path, name: str, version: str) -> None:
    """An importable package with metadata, as pip would have left it."""
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text(f"__version__ = '{version}'\n")
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def site_of(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([python, "-c", code], text=True).strip())


def test_a_torch_inside_a_venv_is_borrowed_and_pinned(tmp_path):
    """About 5 s. A venv made from a venv does not see its packages; the .pth file makes it."""
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    venv.create(outer)
    venv.create(inner)
    fake_package(site_of(outer / "bin/python"), "torch", "2.11.0+cu130")
    fake_package(site_of(outer / "bin/python"), "triton", "3.6.0")
    code = (
        f"import sys; sys.path.insert(0, {str(bootstrap.ROOT)!r}); "
        "from pathlib import Path; from metainfer_lab import bootstrap; "
        f"print(bootstrap.choose_torch(Path({str(inner / 'bin/python')!r})))"
    )
    said = subprocess.check_output([outer / "bin/python", "-c", code], text=True)
    assert "used as it is" in said
    assert "['torch==2.11.0+cu130', 'triton==3.6.0']" in said
    seen = subprocess.check_output(
        [inner / "bin/python", "-c", "import torch; print(torch.__version__)"], text=True
    )
    assert seen.strip() == "2.11.0+cu130"


@pytest.fixture
def no_torch(monkeypatch):
    real = bootstrap.importlib.util.find_spec
    monkeypatch.setattr(
        bootstrap.importlib.util, "find_spec", lambda n: None if n == "torch" else real(n)
    )
    monkeypatch.setattr(bootstrap.sys, "platform", "linux")


def test_without_driver_the_cpu_build_is_taken(no_torch, monkeypatch):
    asked = []
    monkeypatch.setattr(bootstrap, "has_nvidia_driver", lambda: False)
    monkeypatch.setattr(bootstrap, "install_cpu_torch", asked.append)
    assert bootstrap.choose_torch(Path("python")) == []
    assert asked == [Path("python")]


def test_with_driver_pypi_decides(no_torch, monkeypatch, capsys):
    monkeypatch.setattr(bootstrap, "has_nvidia_driver", lambda: True)
    assert bootstrap.choose_torch(Path("python")) == []
    assert "torch from PyPI" in capsys.readouterr().out


def test_unreachable_cpu_index_stops_with_one_line(monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found")
    monkeypatch.setattr(bootstrap.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(SystemExit) as stop:
        bootstrap.install_cpu_torch(Path("python"))
    assert stop.value.code == 2
    assert "make PYTHON=" in capsys.readouterr().err


def test_old_python_and_missing_venv_are_named(monkeypatch, capsys, tmp_path):
    for version in ((3, 10, 0), (3, 14, 0)):
        monkeypatch.setattr(bootstrap.sys, "version_info", version)
        with pytest.raises(SystemExit):
            bootstrap.main(tmp_path / "v")
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 11, 0))
    with pytest.raises(SystemExit):
        bootstrap.main(tmp_path / "v")
    said = capsys.readouterr().err
    assert said.count("3.11, 3.12 or 3.13 is needed") == 2 and "apt install python3-venv" in said
    assert not (tmp_path / "v").exists()


def test_ready_only_after_the_last_act(tmp_path):
    assert not bootstrap.is_ready(tmp_path)
    (tmp_path / ".ready").write_text("made from another list")
    assert not bootstrap.is_ready(tmp_path)
    (tmp_path / ".ready").write_text(bootstrap.fingerprint())
    assert bootstrap.is_ready(tmp_path)


def test_bootstrap_needs_only_the_standard_library():
    source = Path(bootstrap.__file__).read_text()
    imported = {
        line.split()[1].split(".")[0] for line in source.splitlines() if line[:7] == "import "
    }
    assert imported <= set(sys.stdlib_module_names)
    assert importlib.machinery.PathFinder.find_spec("ensurepip")
