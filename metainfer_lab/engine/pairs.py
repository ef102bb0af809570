"""The pairs in an engine's OPERATORS, run in its own process. Stands alone, like host.py.

Operator: naive and kernel take the same arguments and return the same tensors (one, a tuple or a
dict). draw(engine, rows, context, seed) draws arguments, a dict by name or a tuple, in the engine's
own formats; None where the gate knows the operator by its name. rows: the counts that the kernel
takes; mutated: arguments that a call also writes. A torch.dtype among the arguments is for naive
alone: the format in which it computes on what other arguments hold.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def described(operators: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Name -> what the parent must know of a pair."""
    return {
        name: {
            "rows": [operator.rows.start, operator.rows.stop, operator.rows.step],
            "draws": operator.draw is not None,
        }
        for name, operator in operators.items()
    }


@torch.inference_mode()
def applied(
    function: Any,
    arrays: dict[str, np.ndarray],
    dtypes: dict[str, str],
    scalars: dict[str, Any],
    device: str,
) -> dict[str, np.ndarray]:
    """Results of a function of tensors by name; an array that `dtypes` names takes that type."""
    tensors = {name: _tensor(array, dtypes.get(name)).to(device) for name, array in arrays.items()}
    if "dtype" in scalars:
        scalars["dtype"] = getattr(torch, scalars["dtype"])
    return results(function(**tensors, **scalars))


@torch.inference_mode()
def both(
    operator: Any, form: str, engine: Any, rows: int, context: int, seed: int
) -> dict[str, np.ndarray]:
    """Results of naive in float64 ("want…") and of a form on the same arguments ("got…")."""
    arguments = operator.draw(engine, rows, context, seed)
    if not isinstance(arguments, dict):
        arguments = dict(enumerate(arguments))
    exact = {name: _wide(value) for name, value in arguments.items()}
    want = _called(operator.naive, exact) | _mutated(operator, exact)
    if form == "kernel":
        arguments = {n: x for n, x in arguments.items() if not isinstance(x, torch.dtype)}
    got = _called(getattr(operator, form), arguments) | _mutated(operator, arguments)
    named = {f"want {name}": value for name, value in want.items()}
    return named | {f"got {name}": value for name, value in got.items()}


def _called(function: Any, arguments: dict[Any, Any]) -> dict[str, np.ndarray]:
    by_place = [value for name, value in arguments.items() if isinstance(name, int)]
    by_name = {name: value for name, value in arguments.items() if isinstance(name, str)}
    return results(function(*by_place, **by_name))


def results(returned: Any) -> dict[str, np.ndarray]:
    """What an operator returned, by name or place, as arrays that the wire takes."""
    if isinstance(returned, torch.Tensor):
        returned = (returned,)
    named = returned if isinstance(returned, dict) else dict(enumerate(returned))
    return {str(name): _array(value) for name, value in named.items()}


def _mutated(operator: Any, arguments: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: _array(arguments[name]) for name in operator.mutated}


def _tensor(array: np.ndarray, dtype: str | None) -> torch.Tensor:
    tensor = torch.from_numpy(array.copy())
    if dtype is None:
        return tensor
    wanted = getattr(torch, dtype)
    return tensor.view(wanted) if tensor.dtype is torch.uint8 else tensor.to(wanted)


def _array(tensor: torch.Tensor) -> np.ndarray:
    """On the CPU, in a type that the wire takes."""
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point() and tensor.itemsize < 4:
        tensor = tensor.float()
    return (tensor.to(torch.int8) if tensor.dtype is torch.bool else tensor).numpy()


def _wide(value: Any) -> Any:
    """A copy with every float in float64, and that format in place of another."""
    if isinstance(value, torch.dtype):
        return torch.float64
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value.clone()
    if isinstance(value, tuple | list):
        return type(value)(map(_wide, value))
    return value
