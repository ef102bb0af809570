"""The Qwen3.6 engine's kernels compiled for both targets without a GPU: spills, instructions."""

import importlib
import re
import subprocess
from dataclasses import replace
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
    most = {"prompt_scan": 224}  # blocks of two warps, one a multiprocessor
    assert {k: v for k, v in found.items() if v[0] > most.get(k, 168)} == {}


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


@pytest.fixture(scope="module")
def single_step():
    """The step of one row of the model's first layers, built on a device without memory."""
    part = lambda name: importlib.import_module(f"{load_package().__name__}.{name}")  # noqa: E731
    inspection, config = part("inspection"), part("config")
    full = config.read_config(FOLDER.parents[2] / FULL_SIZES)
    short = replace(full, layer_types=full.layer_types[2:5])
    weights = part("weights").Loader(inspection.Shapes(), short, packed=True).load()
    return part("single"), full, short, inspection.resident_step(short, weights)


def test_program_of_one_row_passes_through_all_layers(single_step):
    """Six or seven instructions a layer; what is fetched bears the tag that was posted last."""
    module, full, config, step = single_step
    names = [name for name, _ in step.program]
    attention = config.layer_types.count("full_attention")
    assert len(names) == 6 * len(config.layer_types) + attention + 2
    assert [names[0], names[-1]] == ["single_embed", "single_head"]
    posted = 0
    for name, made in step.program:
        reads_before = name in ("single_in", "single_head")
        assert made.tag - reads_before == posted or name == "single_embed"
        posted = made.tag
    assert posted == len(config.layer_types) + 1
    assert len(full.layer_types) + 1 < module.TAGS


def test_host_and_kernel_agree_on_the_program(single_step):
    """Operations in the order of the kernel's enum, tags of a launch, size of an instruction."""
    module, _, _, step = single_step
    source = (FOLDER / "kernels/producer.cuh").read_text()
    ops = re.search(r"enum Op \{([^}]*)\}", source)[1].replace(" ", "").replace("\n", "").split(",")
    short = {"single_in": "PROJECT", "single_attention": "ATTEND", "single_router": "ROUTE"}
    for name, made in step.program:
        expected = short.get(name, name.removeprefix("single_").upper())
        assert ops[made.op] == expected
        assert len(bytes(made)) == 128
    assert f"#define TAGS {module.TAGS} " in source
