"""What the compiler made of an engine's kernels, for its author: the inspection room, confined.

An engine's declaration is code that a model wrote, so it runs in the sandbox, where the inspection
room is laid out beside the packages of engines, and nothing else of this package is.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from metainfer_lab import sandbox
from metainfer_lab.agent.editor import ToolError
from metainfer_lab.paths import HARDWARE, ROOT
from metainfer_lab.sandbox.packages import package_paths

OURS = ("__init__.py", "errors.py", "paths.py", "hardware.py", "spec.py", "markup.py", "inspection")
NEEDED = ("pydantic", "PyYAML")
SECONDS = 300


def inspected(engine: Path, config: Path, kernels: Sequence[str], target: str) -> str:
    """Reports on an engine's kernels (all that it declares when none is named), as text.

    config: the model's config.json; target: sm_90a or sm_100a. ToolError says what is wrong.
    """
    with tempfile.TemporaryDirectory(prefix="inspection-") as scratch:
        modules = Path(scratch).resolve()
        readable = [modules, config, HARDWARE, *_lay_out(modules)]
        command = ["python", "-m", "metainfer_lab.inspection", str(engine), *kernels]
        command += ["--target", target, "--config", str(config)]
        script = f'PYTHONPATH="{modules}:$PYTHONPATH" exec {shlex.join(command)}'
        done = sandbox.run(["bash", "-c", script], cwd=engine, readable=readable, timeout_s=SECONDS)
    if done.rc:
        why = done.stderr.strip().splitlines()[-1:] or [f"exit {done.rc}"]
        raise ToolError("the inspection took too long" if done.timed_out else why[0])
    return done.stdout


def _lay_out(modules: Path) -> list[Path]:
    """Links to what the inspection imports; the real paths."""
    (modules / "metainfer_lab").mkdir()
    ours = {f"metainfer_lab/{name}": ROOT / "metainfer_lab" / name for name in OURS}
    wanted = ours | package_paths(NEEDED)
    for name, path in wanted.items():
        (modules / name).symlink_to(path)
    return list(wanted.values())
