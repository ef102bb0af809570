"""inspect_kernel: an author's declaration is compiled, in the sandbox."""

from __future__ import annotations

import pytest

from metainfer_lab.agent.editor import ToolError
from metainfer_lab.agent.inspector import inspected
from metainfer_lab.paths import MODELS, ROOT

CONFIG = MODELS / "qwen3-tiny" / "config.json"
SOURCE = """
extern "C" __global__ void copy(const float4* x, float4* y) {
  y[blockIdx.x * blockDim.x + threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
}
"""
DECLARED = """
def kernels(config):
    return [{"name": "copy", "files": ["copy.cu"], "entry": "copy", "block": 256}]
"""


@pytest.fixture
def engine(tmp_path):
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "copy.cu").write_text(SOURCE)
    (folder / "inspection.py").write_text(DECLARED)
    return folder


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_an_author_reads_what_the_compiler_made_of_a_kernel(engine, target):
    text = inspected(engine, CONFIG, ["copy"], target)
    assert f"copy for {target}" in text and "1 x LDG 16 B" in text and "1 x STG 16 B" in text


def test_what_cannot_be_inspected_is_said_in_one_line(engine):
    with pytest.raises(ToolError, match="no kernel 'move'; there are copy"):
        inspected(engine, CONFIG, ["move"], "sm_90a")
    (engine / "copy.cu").write_text(SOURCE.replace("float4*", "float5*"))
    with pytest.raises(ToolError, match="float5"):
        inspected(engine, CONFIG, [], "sm_90a")
    (engine / "inspection.py").unlink()
    with pytest.raises(ToolError, match=r"needs inspection\.py"):
        inspected(engine, CONFIG, [], "sm_90a")


def test_a_declaration_sees_neither_gates_nor_other_engines(engine):
    hidden = [ROOT / "metainfer_lab" / "gates", ROOT / "metainfer_lab" / "oracle.py"]
    hidden += [ROOT / "data" / "engines", engine.parent / "secret.txt"]
    hidden[-1].write_text("secret")
    names = list(map(str, hidden))
    look = f"import os\nseen = [p for p in {names} if os.path.exists(p)]"
    (engine / "inspection.py").write_text(f"{look}\nraise OSError(f'seen: {{seen}}')")
    with pytest.raises(ToolError, match=r"seen: \[\]"):
        inspected(engine, CONFIG, [], "sm_90a")
    (engine / "inspection.py").write_text("import transformers")
    with pytest.raises(ToolError, match="No module named 'transformers'"):
        inspected(engine, CONFIG, [], "sm_90a")
