"""What is counted in machine code: paths, loops, widths, products; budgets; engines' declarations.

About 25 s: small kernels are compiled, one engine's single-stream kernels too.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from metainfer_lab import figures, paths
from metainfer_lab.errors import InputError
from metainfer_lab.inspection import (
    Budget,
    Kernel,
    build,
    compare,
    inspect,
    inspect_kernel,
    sass,
    summary,
    view,
)
from metainfer_lab.inspection import kernel as kernels
from metainfer_lab.inspection.flow import Flow
from metainfer_lab.inspection.targets import TARGETS, occupancy

DRAW = random.Random()
PRODUCT = r"""
__device__ void mma(float *d, uint4 a, uint2 b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},"
               "{%8,%9},{%0,%1,%2,%3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}
extern "C" __global__ void product(const uint4 *w, const uint2 *x, float4 *y, int turns) {
  float d[4] = {};
#pragma unroll 1
  for (int t = 0; t < turns; t++)
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++) mma(d, w[(t * PRODUCTS + i) * 32 + threadIdx.x], x[t]);
  y[threadIdx.x] = make_float4(d[0], d[1], d[2], d[3]);
}
"""


def lines(*code: str) -> tuple[sass.Instruction, ...]:
    """Instructions as nvdisasm writes them; a line that ends in a colon is a label."""
    text = [
        line if line.endswith(":") else f"        /*{place:04x}*/                   {line} ;"
        for place, line in enumerate(code)
    ]
    return sass.parse("\n".join(text))


def branch(label: int) -> str:
    return f"`(.L_x_{label})"


def test_lines_labels_and_padding():
    code = lines(
        "MOV R1, R2",
        ".L_x_7:",
        f"@!P0 BRA {branch(7)}",
        "EXIT",
        ".L_x_8:",
        f"BRA {branch(8)}",
        "NOP",
    )
    assert [step.opcode for step in code] == ["MOV", "BRA", "EXIT"]
    assert code[1].predicate == "!P0" and code[1].target == 1


@pytest.mark.parametrize(
    ("opcode", "size"),
    [
        ("LDG.E", 4),
        ("LDG.E.U8", 1),
        ("LDG.E.64.CONSTANT", 8),
        ("LDG.E.NA.128", 16),
        ("LDG.E.ENL2.256", 32),
        ("LDGSTS.E.BYPASS.LTC128B.128", 16),
        ("LDSM.16.M88.4", 16),
        ("LDSM.16.M88", 4),
        ("STS.U16", 2),
    ],
)
def test_bytes_of_an_access(opcode, size):
    assert sass.access_bytes(opcode) == size


def test_steady_path_of_a_loop_with_special_cases():
    """First turn's extra work and the dearer of two variants are passed by; parted warps too."""
    code = lines(
        "MOV R0, RZ",
        ".L_x_0:",
        f"BRA.DIV UR4, {branch(9)}",
        f"@P0 BRA {branch(1)}",
        *["FADD R1, R1, R2"] * 20,  # the first turn alone
        ".L_x_1:",
        f"@P1 BRA {branch(2)}",
        *["FMUL R3, R3, R3"] * 9,
        "HMMA.16816.F32 R4, R8, R12, R4",
        f"BRA {branch(3)}",
        ".L_x_2:",
        "FMUL R3, R3, R3",
        "HMMA.16816.F32 R4, R8, R12, R4",
        ".L_x_3:",
        f"@!P2 BRA {branch(0)}",
        "STG.E R0, R4",
        "EXIT",
        ".L_x_9:",
        "FADD R5, R5, R5",
        f"BRA {branch(1)}",
    )
    flow = Flow(code)
    (loop,) = flow.product_loops
    path = [step.name for step in flow.steady_path(loop)]
    assert path == ["BRA", "BRA", "BRA", "FMUL", "HMMA", "BRA"]
    assert flow.outside(loop) == 3


def test_innermost_loop_with_products_counts():
    """An outer loop, and a loop inside that multiplies nothing, are not the inner loop."""
    code = lines(
        ".L_x_0:",
        "MOV R0, RZ",
        ".L_x_1:",
        "HMMA.16816.F32 R4, R8, R12, R4",
        ".L_x_2:",
        "LDS R1, [R2]",
        f"@P0 BRA {branch(2)}",
        f"@P1 BRA {branch(1)}",
        f"@P2 BRA {branch(0)}",
        "EXIT",
    )
    (loop,) = Flow(code).product_loops
    assert [step.name for step in Flow(code).steady_path(loop)] == ["HMMA", "LDS", "BRA", "BRA"]


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "blocks", "limit"),
    [
        (24, 256, 0, 8, "warps"),
        (33, 256, 0, 6, "registers"),  # 40 a thread are given
        (255, 256, 0, 1, "registers"),
        (64, 128, 110 << 10, 2, "shared memory"),
        (16, 32, 0, 32, "blocks"),
    ],
)
def test_occupancy(registers, threads, shared, blocks, limit):
    found = occupancy(registers, threads, shared)
    assert (found.blocks, found.limit) == (blocks, limit)


@pytest.mark.parametrize("arch", TARGETS)
def test_products_of_a_compiled_loop_are_counted(arch):
    count, turns, grid = DRAW.randint(2, 9), DRAW.randint(3, 50), DRAW.randint(1, 99)
    weights = 256 * count * turns * grid
    kernel = Kernel(
        name="p", entry="product", defines={"PRODUCTS": count}, block=32, grid=grid, weights=weights
    )
    report = build(kernel, arch, source=PRODUCT)
    turn = report.inner
    assert turn.kind == "loop" and turn.weights == 8 * count
    assert sum(turn.matrix.values()) == count == turn.accesses["LDG 16 B"]
    assert report.per_weight == pytest.approx(turn.issued / (8 * count))
    assert report.issued == pytest.approx(32 * grid * (report.outside + turns * turn.issued))
    assert report.memory_us == pytest.approx(2 * weights / TARGETS[arch].bandwidth * 1e6)
    assert report.arithmetic_us > 0 and report.widest_load == 16
    assert ".entry product" in report.stages["ptx"] and "HMMA" in report.stages["sass"]


def test_columns_share_a_fragment_of_weights():
    fields = {"name": "p", "entry": "product", "defines": {"PRODUCTS": 4}, "weights": 1024}
    one, four = (build(Kernel(**fields, column_tiles=n), source=PRODUCT) for n in (1, 4))
    assert four.per_weight == 4 * one.per_weight


def test_local_memory_and_narrow_loads_fail_a_budget():
    source = r"""
    extern "C" __global__ void k(const int *at, float *y) {
      float a[64];
      for (int i = 0; i < 64; i++) a[i] = i * at[64];
      for (int i = 0; i < 64; i++) a[at[i] & 63] += i;
      y[threadIdx.x] = a[at[threadIdx.x] & 63];
    }"""
    report = build(Kernel(name="k", entry="k"), source=source)
    assert report.local_accesses > 0 and report.stack_bytes >= 256
    checks = report.check(Budget(stream_bytes=16, blocks=33, registers=255))
    assert [check.asked for check in checks.failures] == [
        "local accesses at most",
        "blocks at least",
        "stream bytes at least",
    ]
    assert not checks.passed and "✗" in str(checks) and "✗" in checks._repr_html_()


def test_budget_per_weight_is_exact():
    report = build(
        Kernel(name="p", entry="product", defines={"PRODUCTS": 4}, weights=1024), source=PRODUCT
    )
    exact = report.per_weight
    assert report.check(Budget(per_weight=exact, issue_share=None)).passed
    assert not report.check(Budget(per_weight=exact - 1e-6, issue_share=None)).passed


def test_two_versions_side_by_side():
    before, after = (
        build(
            Kernel(name=f"v{n}", entry="product", defines={"PRODUCTS": n}, weights=1024),
            source=text,
        )
        for n, text in (
            (2, PRODUCT),
            (5, PRODUCT.replace("float d[4] = {};", "float d[4] = {1.f};")),
        )
    )
    found = compare(before, after)
    assert found.opcodes["HMMA"] == (2, 5)
    assert "+  float d[4] = {1.f};" in found.source.splitlines()
    assert "v5" in str(found) and "&lt;" not in str(found)
    assert "difference of the sources" in found._repr_html_()
    rows = summary([before, after])
    assert rows["per_weight"].tolist() == [before.per_weight, after.per_weight]


def test_html_is_escaped_and_folded_and_long_texts_are_cut():
    report = build(Kernel(name="a<b", entry="product", defines={"PRODUCTS": 2}), source=PRODUCT)
    html = view.report_html(report, ("ptx",))
    assert "a&lt;b" in html and "a<b" not in html
    assert html.count("<details") == 4 and html.count("<details open") == 1
    long = "\n".join(f"line {n}" for n in range(1000))
    title, part = view.excerpt(long, "line 700")
    assert "line 700" in part and len(part.splitlines()) == view.LINES and "551 to 850" in title


@pytest.mark.parametrize(
    ("change", "source", "says"),
    [
        ({"entry": "none"}, PRODUCT, "no function 'none'.*product"),
        ({"defines": {}}, PRODUCT, 'identifier "PRODUCTS" is undefined'),
        ({"files": ("gone.cu",)}, None, "gone.cu is missing"),
        ({"naive": ("gone.py:f",)}, PRODUCT, "gone.py is missing"),
    ],
)
def test_what_cannot_be_inspected_is_said_in_a_line(change, source, says, tmp_path):
    fields = {"name": "p", "entry": "product", "defines": {"PRODUCTS": 2}}
    with pytest.raises(InputError, match=says) as refused:
        build(Kernel(**(fields | change)), folder=tmp_path, source=source)
    assert "\n" not in str(refused.value)


def test_unknown_target():
    with pytest.raises(InputError, match="sm_90a, sm_100a"):
        build(Kernel(name="p", entry="product"), "sm_61", source=PRODUCT)


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ([{"name": "a", "entry": "k", "gird": 1}], "kernel a: gird"),
        ([{"name": "a", "entry": "k", "block": 2048}], "kernel a: block"),
        ([{"name": "a", "entry": "k"}] * 2, "two kernels are named 'a'"),
        (
            [{"name": "a", "entry": "k", "language": "triton", "defines": {"X": 1}}],
            "a Triton kernel",
        ),
    ],
)
def test_declarations_are_checked(declared, says):
    with pytest.raises(InputError, match=says):
        kernels.parse(declared)


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    """An engine folder that follows the convention: one CUDA kernel, one of Triton."""
    folder = tmp_path_factory.mktemp("engines") / "mine"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "raise RuntimeError('opening an engine costs too much here')\n"
    )
    (folder / "sizes.py").write_text("PRODUCTS = 3\n")
    (folder / "product.cu").write_text(PRODUCT)
    (folder / "add.py").write_text(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
        "def add(x, y, n, BLOCK: tl.constexpr):\n"
        "    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
        "    tl.store(y + at, tl.load(x + at, mask=at < n) + 1.0, mask=at < n)\n"
    )
    (folder / "naive.py").write_text("def add(x):\n    return x + 1\n")
    (folder / "inspection.py").write_text(
        "from .sizes import PRODUCTS\n\n\ndef kernels(config):\n"
        "    return [dict(name='product', files=('product.cu',), entry='product', grid=4,\n"
        "                 defines={'PRODUCTS': PRODUCTS}, weights=4096),\n"
        "            dict(name='add', language='triton', files=('add.py',), entry='add',\n"
        "                 arguments={'x': '*fp32', 'y': '*fp32', 'n': 4096}, block=128,\n"
        "                 constants={'BLOCK': 1024}, naive=('naive.py:add',), other_bytes=32768)]\n"
    )
    return folder


def test_an_engine_declares_its_kernels(engine):
    """8 s: a child process compiles both for both targets."""
    config = paths.MODELS / "qwen3-tiny" / "config.json"
    reports = inspect(engine, list(TARGETS), config=config)
    assert [(r.arch, r.kernel.name) for r in reports] == [
        (arch, name) for arch in TARGETS for name in ("product", "add")
    ]
    product, add = reports[:2]
    assert sum(product.inner.matrix.values()) == 3
    assert list(add.stages) == ["naive", "source", "ttir", "ttgir", "ptx", "sass"]
    assert add.stages["naive"] == "def add(x):\n    return x + 1"
    assert add.accesses["LDG 16 B"] == 2, "1,024 floats by 128 threads: two wide loads each"


def test_the_command_says_what_is_wrong_in_a_line(engine):
    config = paths.MODELS / "qwen3-tiny" / "config.json"
    command = [
        sys.executable,
        "-m",
        "metainfer_lab.inspection",
        str(engine),
        "sum",
        f"--config={config}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=paths.ROOT)
    assert done.returncode == 2
    assert done.stderr.strip() == "inspection: no kernel 'sum'; there are product, add"
    with pytest.raises(InputError, match="there is no folder nowhere"):
        inspect_kernel("nowhere", "product")


def test_engine_reads_each_weight_once():
    """12 s. What Qwen3.6 kernels declare to read in a step is what the plan says a token costs."""
    from metainfer_lab.plan import plan

    name = "qwen3.6-35b-a3b-nvfp4-h200"
    step = ["GDN in", "GDN out", "shared gate/up, router", "experts gate/up", "experts down"]
    reports = inspect(name, "sm_90a", [*step, "attention in", "attention out", "head"])
    read = sum(report.kernel.bytes * report.kernel.launches for report in reports)
    assert read == pytest.approx(plan(name).weight_bytes_per_token, rel=0.01)
    assert all(report.per_weight and report.per_weight < 4 for report in reports)


def test_figure_marks_what_is_bound_by_issue():
    rows = pd.DataFrame(
        [("a", "sm_90a", 2.0, 4.0), ("b", "sm_90a", 6.0, 3.0), ("c", "sm_90a", None, 1.0)],
        columns=["kernel", "arch", "issue_us", "memory_us"],
    )
    figure = figures.issue_against_memory(rows)
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert [text.get_text() for text in axes.texts] == ["50%", "200%"]
    colours = [bar.get_facecolor() for bar in axes.containers[1]]
    assert colours[0] != colours[1] and axes.get_xlim()[0] == 0
    with pytest.raises(InputError, match="issue time"):
        figures.issue_against_memory(rows[rows["kernel"] == "c"])


def test_looking_at_the_room_loads_nothing_heavy():
    heavy = ("torch", "triton", "pandas", "matplotlib")
    code = f"import sys, metainfer_lab.inspection; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=paths.ROOT, env=os.environ
    )
    assert done.stdout.strip() == "[]", done.stderr
