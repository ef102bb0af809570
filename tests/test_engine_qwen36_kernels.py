"""The Qwen3.6 engine's kernels compiled for both targets without a GPU: spills, instructions."""

import importlib
import re
import subprocess
from pathlib import Path

import pytest
from qwen36_maker import FOLDER, FULL_SIZES, load_package


@pytest.fixture(scope="module")
def cubins():
    """{target: {file: cubin}} of all kernels at the model's full sizes."""
    package = load_package()
    part = lambda name: importlib.import_module(f"{package.__name__}.{name}")  # noqa: E731
    config = part("config").read_config(FOLDER.parents[2] / FULL_SIZES)
    sizes = part("buffers").defines(config)
    return {target: part("cuda").build(target, sizes) for target in ("sm_90a", "sm_100a")}


def triton_tool(name, *arguments):
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_kernels_compile_without_spills(cubins, target, tmp_path):
    """Two small blocks or one large fit a multiprocessor; nothing but a few bytes goes to stack."""
    found = {}
    for name, cubin in cubins[target].items():
        path = tmp_path / f"{name}.cubin"
        path.write_bytes(cubin)
        usage = triton_tool("cuobjdump", "-res-usage", str(path))
        for kernel, registers, stack in re.findall(
            r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", usage
        ):
            found[kernel] = int(registers), int(stack)
    assert len(found) > 25
    assert {k: v for k, v in found.items() if v[1] > 16} == {}
    assert max(registers for registers, _ in found.values()) <= 168


def test_at_most_three_instructions_per_weight(tmp_path):
    """The loop over NVFP4 stages of the single-token head: 128 weights a lane each turn."""
    part = lambda name: importlib.import_module(f"{load_package().__name__}.{name}")  # noqa: E731
    sizes = part("buffers").defines(part("config").read_config(FOLDER.parents[2] / FULL_SIZES))
    cuda = part("cuda")
    source = "".join((cuda.KERNELS / file).read_text() for file in cuda.SOURCES["persistent.cu"])
    path = tmp_path / "head.cubin"
    path.write_bytes(cuda.compile_source(source, "sm_90a", sizes | {"ONLY": "HEAD"}))
    text = triton_tool("nvdisasm", "-c", str(path))
    body = text.split(".text.decode_one:")[1].split(".section")[0]
    lines = body.splitlines()
    label = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\.L_x_\d+):", line))}
    loops = []
    for i, line in enumerate(lines):
        jump = re.search(r"BRA.*(\.L_x_\d+)", line)
        if jump and label.get(jump[1], i) < i:
            loops.append(lines[label[jump[1]] : i])
    products = [loop for loop in loops if sum("HMMA" in line for line in loop) == 16]
    innermost = min(products, key=len)
    instructions = sum(bool(re.search(r"/\*[0-9a-f]{4,5}\*/", line)) for line in innermost)
    print("instructions per weight", instructions / 128)
    assert instructions <= 3 * 128
