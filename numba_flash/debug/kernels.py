"""The files of all kernels, by name."""

import functools
import importlib
import pkgutil
from typing import Any

from .. import config
from ..config.forward import LaunchFacts


@functools.cache
def modules() -> dict[str, str]:
    """The file of each kernel below numba_flash/kernels, as the Configs state it."""
    for module in pkgutil.iter_modules(config.__path__):
        importlib.import_module(f"{config.__name__}.{module.name}")
    return dict(sorted((name, kind.module) for kind in _kinds(LaunchFacts) for name in _names_of(kind)))


def _kinds(kind: Any) -> list[Any]:
    return [kind, *(other for below in kind.__subclasses__() for other in _kinds(below))]


def _names_of(kind: Any) -> tuple[str, ...]:
    name = getattr(kind, "kernel", None)
    return (name,) if isinstance(name, str) else kind.names
