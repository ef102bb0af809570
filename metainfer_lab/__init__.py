"""From a constraint spec to a verified inference engine: what one types in a cell.

Names are loaded on first use, so importing the package costs next to nothing.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_HOMES = {
    "Spec": "spec",
    "plan": "plan",
    "doctor": "doctor",
    "Engine": "engine",
    "verify": "gates",
    "audit": "gates.audit",
    "bench": "bench",
    "Run": "agent",
    "generate": "agent",
    "workspace": "agent",
    "adopt": "agent",
    "optimise": "optimise",
    "record": "agent",
    "figures": None,
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"metainfer_lab has no {name!r}; it offers {', '.join(__all__)}")
    home = _HOMES[name]
    module = importlib.import_module(f".{home or name}", __name__)
    value = getattr(module, name) if home else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


class _Face(ModuleType):
    """Keeps the submodules `plan`, `bench`, ... from taking the place of the functions so named.

    Importing a submodule sets it as an attribute of its package; here the function is meant.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (_HOMES.get(name) == name and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face


if "IPython" in sys.modules:
    from .show import register

    register()
