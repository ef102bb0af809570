"""Notebooks in JupyterLab in a real browser, dark theme; some minutes, for three of them run.

Needs Debian's Chromium and the npm package playwright-core (in data/local/browser, or where
NODE_PATH points); skipped where they are not. Screenshots stay in data/local/browser/screenshots.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from metainfer_lab import paths

HOME = paths.LOCAL / "browser"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MODULES = [HOME / "node_modules", *map(Path, os.environ.get("NODE_PATH", "").split(os.pathsep))]
RUN = ("00", "04", "05")
LEAST_CONTRAST = 3.0  # WCAG's bound for large text; code in colours stays above it
SETTINGS = {
    "apputils-extension/themes": {"theme": "JupyterLab Dark"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}


def missing() -> str | None:
    if not CHROMIUM:
        return "no Chromium here: apt install chromium"
    if not shutil.which("node"):
        return "no node here: apt install nodejs"
    if not any((folder / "playwright-core").is_dir() for folder in MODULES):
        return "no playwright-core: npm install --prefix data/local/browser playwright-core"
    return None


pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[str]:
    """JupyterLab over copies of the notebooks, so that saving changes nothing; its URL."""
    root = tmp_path_factory.mktemp("lab")
    for path in paths.NOTEBOOKS.glob("*.ipynb"):
        shutil.copyfile(path, root / path.name)
    for name, settings in SETTINGS.items():
        file = root / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [f"--ServerApp.root_dir={root}", f"--ServerApp.port={port}", "--ServerApp.ip=127.0.0.1"]
    flags += ["--no-browser", "--allow-root", "--IdentityProvider.token=", "--ServerApp.password="]
    flags += ["--LabApp.expose_app_in_browser=True", f"--LabApp.user_settings_dir={root}/settings"]
    with open(root / "log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *flags],
            env={**os.environ, "PYTHONPATH": str(paths.ROOT)},
            stdout=log,
            stderr=log,
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/api", server, root / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=30)


def wait_for(url: str, server: subprocess.Popen, log: Path) -> None:
    for _ in range(240):
        assert server.poll() is None, log.read_text()[-2000:]
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(log.read_text()[-2000:])


@pytest.fixture(scope="module")
def visited(lab) -> dict[str, dict]:
    """What the browser found in each notebook, by its number."""
    names = [path.stem for path in sorted(paths.NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))]
    asked = [f"{name}:run" if name[:2] in RUN else name for name in names]
    shots = HOME / "screenshots"
    shutil.rmtree(shots, ignore_errors=True)
    shots.mkdir(parents=True)
    script = Path(__file__).parent / "browser" / "notebooks.js"
    done = subprocess.run(
        ["node", str(script), lab, str(shots), CHROMIUM, *asked],
        env={**os.environ, "NODE_PATH": os.pathsep.join(map(str, MODULES))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["name"] for one in found] == names
    return {one["name"][:2]: one for one in found}


@pytest.mark.timeout(1500)
def test_run_all_ends_without_an_error_cell(visited):
    ran = {number: one for number, one in visited.items() if one["ran"]}
    assert set(ran) == {number for number in RUN if number in visited} >= {"00", "05"}
    assert {n: (one["errors"], one["unrun"]) for n, one in ran.items()} == dict.fromkeys(
        ran, ([], 0)
    )


def test_every_notebook_opens_with_its_pictures(visited):
    for one in visited.values():
        assert one["cells"] > 10 and not one["errors"] and not one["unrun"], one
    assert visited["00"]["images"] and visited["05"]["images"]


def test_folded_views_unfold(visited):
    for one in visited.values():
        assert one["unfolded"] == min(4, len(one["folded"])), one
    assert visited["00"]["folded"] and visited["05"]["folded"]


def test_the_dark_theme_is_readable(visited):
    assert {one["theme"] for one in visited.values()} == {"JupyterLab Dark"}
    faint = {
        n: one["least"] for n, one in visited.items() if one["least"]["contrast"] < LEAST_CONTRAST
    }
    assert not faint
