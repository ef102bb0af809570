"""One token's matrix products alone: the rate that an engine of the same products cannot pass.

The floor divides bytes by bandwidth; this runs the very products (torch, the model's true shapes,
each on weights of its own, in turn), in a process of its own with as many threads as the engine.
What an engine loses against it is everything that is not a product.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from metainfer_lab.bench.timing import spread
from metainfer_lab.bench.worker import Worker, serve
from metainfer_lab.errors import InputError
from metainfer_lab.model import ModelDims

Shape = tuple[int, int]
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}


def product_shapes(dims: ModelDims) -> list[Shape]:
    """[out, in] of each matrix that one token is multiplied with, in order; the tied head last."""
    matrices = [
        shape
        for name, shape in dims.tensors().items()
        if len(shape) == 2 and "embed_tokens" not in name and "lm_head" not in name
    ]
    return [*matrices, (dims.vocab_size, dims.hidden_size)]


class Products:
    """The products behind a pipe; a context manager."""

    name = "products"

    def __init__(self, dims: ModelDims, precision: str, threads: int | None = None) -> None:
        if dims.family == "qwen3_5_moe":
            raise InputError("products: one token's products of an MoE model depend on its routing")
        if precision not in DTYPES:
            raise InputError(f"products: precision.weights {precision}: one of {', '.join(DTYPES)}")
        self.worker = Worker("metainfer_lab.bench.products")
        self.opening = {"op": "open", "shapes": product_shapes(dims), "precision": precision}
        self.opening["threads"] = threads

    def __enter__(self) -> Products:
        self.worker.__enter__()
        self.threads = self.worker.call(**self.opening)["threads"]
        return self

    def __exit__(self, *exc: object) -> None:
        self.worker.__exit__(*exc)

    def rate(self, passes: int = 20) -> float:
        """Median tokens a second over some passes through all products."""
        seconds = self.worker.call(op="run", passes=passes)["seconds"]
        return 1 / spread(seconds).p50


def matrix_product_rate(plan: object, threads: int | None = None, passes: int = 20) -> float:
    """Tokens a second of one token's matrix products alone, for a plan's model and precision."""
    with Products(plan.dims, plan.spec.precision.weights, threads) as products:
        return products.rate(passes)


class _Bench:
    """The child's side: weights of the true shapes, and one call for each."""

    def open(self, shapes: list[Shape], precision: str, threads: int | None) -> Iterator[dict]:
        import torch

        if threads:
            torch.set_num_threads(threads)
        make = _int8_product if precision == "int8" else partial(_product, DTYPES[precision])
        self.products = [make(*shape) for shape in shapes]
        yield {"threads": torch.get_num_threads()}

    def run(self, passes: int) -> Iterator[dict]:
        import torch

        with torch.inference_mode():
            self._once()
            yield {"seconds": [self._once() for _ in range(passes)]}

    def _once(self) -> float:
        start = time.perf_counter()
        for product in self.products:
            product()
        return time.perf_counter() - start

    def handle(self, request: dict) -> Iterator[dict]:
        yield from getattr(self, request.pop("op"))(**request)


def _product(dtype: str, rows: int, columns: int) -> Callable[[], object]:
    import torch

    kind = getattr(torch, dtype)
    weight, x = torch.randn(rows, columns).to(kind), torch.randn(1, columns).to(kind)
    return partial(torch.nn.functional.linear, x, weight)


def _int8_product(rows: int, columns: int) -> Callable[[], object]:
    """int8 weights by output channel, activations on the fly: torch's fastest on a CPU."""
    import torch

    scales, zeros = torch.full((rows,), 0.01, dtype=torch.float64), torch.zeros(rows).long()
    weight = torch.quantize_per_channel(torch.randn(rows, columns), scales, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(weight, None)
    return partial(torch.ops.quantized.linear_dynamic, torch.randn(1, columns), packed)


if __name__ == "__main__":
    serve(_Bench().handle)
