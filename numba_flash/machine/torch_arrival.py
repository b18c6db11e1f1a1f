"""Registers the operations of attention when torch is there, so that a program saved with them loads.

torch.jit.load and torch.export.load know the operations of modules that were imported, and nobody imports a bridge for
a program that was saved. Either package may be imported first.
"""

import contextlib
import importlib
import importlib.util
import sys
from typing import Any


class _Finder:
    """Is first in sys.meta_path until torch is imported."""

    @staticmethod
    def find_spec(name: str, *others: Any) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(_FINDER)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: Any) -> None:
                run(module)
                register()

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


_FINDER: Any = _Finder


def register() -> None:
    """Never makes the import of torch fail: the error comes when the bridge is imported for a call."""
    with contextlib.suppress(Exception):
        importlib.import_module("numba_flash.bridges.torch")


def await_torch() -> None:
    if "torch" in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _FINDER)
