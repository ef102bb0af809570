"""operators: each pair of an engine's OPERATORS, its kernel against its naive form in float64.

Where no kernel is bound, on a CPU, the naive form in float32 takes its place. Operators that
formulas.py knows are tried on the gate's own inputs, against its own formulas too. What an engine
launches without a pair is judged by nobody, so it fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np

from metainfer_lab.engine import EngineError, EngineProcess
from metainfer_lab.gates.formulas import Draw, Known, known
from metainfer_lab.gates.launches import kernels, own, undeclared
from metainfer_lab.gates.tolerances import OPERATOR
from metainfer_lab.gates.trial import Trial
from metainfer_lab.gates.verdict import NotJudged

BLOCKS = (16, 32, 64, 128, 256, 512)  # at whose edges tiles, pages and chunks end
CASES = {"cpu": 6, "cuda": 8}  # of an operator

Results = Mapping[str, np.ndarray]
Form = Literal["naive", "kernel"]


def operators(trial: Trial) -> None:
    """Sizes one below, at and one above the edge of a block, and some drawn on the spot."""
    on_gpu = trial.device == "cuda"
    checkpoint = trial.shallow() if on_gpu else trial.tiny()
    with trial.candidate(checkpoint, max_batch=_streams(trial)) as engine:
        pairs = engine.operators()
        if pairs is None and not (on_gpu or kernels(trial.folder)):
            raise NotJudged("the engine names no OPERATORS; on a CPU it has no kernels to judge")
        if pairs is None:
            trial.findings.fail("OPERATORS", "missing; each kernel has its naive form there")
            return
        formulas, undrawn, judged = known(trial.dims.family), [], set()
        for name, pair in pairs.items():
            if on_gpu:
                engine.watch()
            sizes = [*_sizes(trial.rng, range(*pair["rows"]), CASES[trial.device])]
            if name in formulas and not pair["draws"]:
                _by_formula(trial, engine, name, formulas[name], sizes)
            elif pair["draws"]:
                undrawn += [] if _by_pair(trial, engine, name, sizes) else [name]
            else:
                trial.findings.fail(name, "draws no arguments, and is none that the gate knows")
            if on_gpu:  # one at a time: naive forms may launch millions
                judged |= own(engine.launched(), trial.folder)
        alone = _launched(trial, engine) - judged if on_gpu else undeclared(trial.folder)
    for kernel in sorted(alone):
        detail = "is launched, and no pair in OPERATORS leads to it: nobody judges it"
        trial.findings.fail(kernel, detail)
    if undrawn and not trial.findings.cases:
        raise NotJudged("the operators do not take the dimensions of a small model")
    trial.findings.case()  # of launches
    trial.findings.note = f"in a small model's dimensions none of {undrawn}" if undrawn else ""


def _streams(trial: Trial) -> int:
    """The batch of the timed run, where other kernels may serve it than serve a small one."""
    return trial.spec.workload.concurrency if trial.device == "cuda" else 4


def _launched(trial: Trial, engine: EngineProcess) -> set[str]:
    """The engine's kernels that prefill and decode launch, alone and in a full batch."""
    vocab, params = trial.dims.vocab_size, {"max_new_tokens": 4, "ignore_eos": True}
    engine.watch()
    for streams in (1, _streams(trial)):
        for _ in range(streams):
            engine.submit(trial.prompt(70, vocab), params)
        engine.finish()
    engine.score(trial.prompt(70, vocab), [69])
    seen = engine.launched()
    if not seen:
        raise NotJudged("the profiler sees no kernel on this GPU: what is launched is not known")
    return own(seen, trial.folder)


def _sizes(rng: np.random.Generator, rows: range, count: int) -> Iterator[tuple[int, int]]:
    """Pairs of rows and context; the least and the most rows, then edges of blocks, then any."""
    yield rows[0], int(rng.integers(1, 1000))
    yield rows[-1], int(rng.integers(0, 64))
    for i in range(count - 2):
        row, context = (int(rng.choice(BLOCKS)) + int(rng.integers(-1, 2)) for _ in range(2))
        near = min(range(len(rows)), key=lambda at: abs(rows[at] - row))
        row = rows[near] if i % 3 else int(rng.choice(rows[: 1 + near]))
        yield row, context


def _form(trial: Trial) -> Form:
    return "naive" if trial.device == "cpu" else "kernel"


def _format(trial: Trial) -> str:
    return "float32" if trial.device == "cpu" or trial.activations == "fp32" else "bfloat16"


def _by_formula(
    trial: Trial, engine: EngineProcess, name: str, of: Known, sizes: list[tuple[int, int]]
) -> None:
    """The bound form in its own format, and naive in float64, against the gate's formula."""
    for rows, context in sizes:
        arrays, scalars = of.inputs(Draw(trial.rng, rows, context, trial.manifest.granules))
        narrow = _format(trial)
        arrays = {key: rounded(value, narrow) for key, value in arrays.items()}
        want = {str(i): x for i, x in enumerate(of.formula(**arrays, **scalars))}
        shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in arrays.items())
        for form, dtype in ((_form(trial), narrow), ("naive", "float64")):
            got = engine.operate(
                "apply",
                name=name,
                form=form,
                dtypes=_dtypes(arrays, of, dtype),
                scalars=scalars,
                device=trial.device,
                **{f"arg {key}": value for key, value in arrays.items()},
            )
            case = f"{name} ({form}, {dtype}) on {shapes}"
            compare(trial, case, got, want, OPERATOR[dtype])


def _dtypes(arrays: Results, of: Known, dtype: str) -> dict[str, str]:
    """Torch's type for each array that is a float, or the bytes of one."""
    wide = "float32" if dtype == "bfloat16" else dtype
    floats = {key for key, value in arrays.items() if value.dtype.kind == "f"}
    chosen = dict.fromkeys(floats, dtype) | dict.fromkeys(of.wide, wide)
    chosen |= dict.fromkeys(of.exact, "float64")
    return chosen | ({"block_scale": "float8_e4m3fn"} if "block_scale" in arrays else {})


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """Float64 values that the format holds exactly; integers as they are."""
    if array.dtype.kind != "f":
        return array
    narrow = array.astype(np.float32)
    if dtype == "bfloat16":
        bits = narrow.view(np.uint32)
        narrow = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    return narrow.astype(np.float64)


def _by_pair(trial: Trial, engine: EngineProcess, name: str, sizes: list[tuple[int, int]]) -> bool:
    """The bound form against naive in float64, on inputs that the operator draws.

    False if it cannot draw them: kernels of a large model need not serve a small one's dimensions.
    """
    form = _form(trial)
    for rows, context in sizes:
        seed = int(trial.rng.integers(2**31))
        case = {"name": name, "form": form, "rows": rows, "context": context, "seed": seed}
        try:
            found = engine.operate("compare", **case)
        except EngineError as error:
            if error.type == "NotImplementedError" and trial.device == "cpu":
                return False
            raise
        got, want = (
            {key.removeprefix(side): found[key] for key in found if key.startswith(side)}
            for side in ("got ", "want ")
        )
        case = f"{name} ({form}), {rows} rows after {context}"
        compare(trial, case, got, want, OPERATOR[_format(trial)])
    return True


def compare(trial: Trial, case: str, got: Results, want: Results, limit: float) -> None:
    """Names, shapes, then each row's relative L2 error; integers must be equal.

    What is not a number in `want` was not to be written: there `got` must hold none either.
    """
    trial.findings.case()
    for name in [*want, *(got.keys() - want.keys())]:
        shapes = [list(x[name].shape) if name in x else "nothing" for x in (got, want)]
        if shapes[0] != shapes[1]:
            trial.findings.fail(case, f"result {name} is {shapes[0]}, not {shapes[1]}")
            return
        if want[name].dtype.kind in "iub":
            wrong = int((got[name] != want[name]).sum())
            if wrong:
                trial.findings.fail(case, f"{wrong} integers of result {name} are others")
            continue
        error = row_error(got[name], want[name])
        detail = f"relative L2 of a row of result {name}"
        trial.findings.measure(case, error, limit, detail=detail)


def row_error(got: np.ndarray, want: np.ndarray) -> float:
    """The greatest ||got - want|| / ||want|| of a row, short rows measured by the longest."""
    got, want = (np.atleast_2d(x.astype(np.float64)) for x in (got, want))
    if not np.array_equal(np.isnan(got), np.isnan(want)):
        return float("nan")
    got, want = np.nan_to_num(got), np.nan_to_num(want)
    lengths = np.linalg.norm(want, axis=-1)
    least = OPERATOR["short"] * lengths.max()
    return float((np.linalg.norm(got - want, axis=-1) / np.maximum(lengths, least)).max())
