"""Prepares the caller's functions and a BlockMask for a call. Calls without them do not load this module."""

import sys
from typing import Any

from .. import arrays
from ..functions.function import Function
from ..functions.remembered import forgetting
from ..problem.options import FUNCTIONS
from .block_mask import BlockMask

MASK_MOD = FUNCTIONS.index("mask_mod")


def functions_of(given: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The caller's functions as values, and aux. A BlockMask stays a BlockMask."""
    *functions, aux = given
    if not isinstance(aux, tuple):
        raise TypeError(f"aux must be a tuple of arrays, not {type(aux).__name__}")
    found = [
        x if x is None or type(x) is BlockMask else Function.of(name, x)
        for name, x in zip(FUNCTIONS, functions, strict=True)
    ]
    return tuple(found), aux


def without_blocks(functions: tuple[Any, ...]) -> tuple[Function | None, ...]:
    """The functions, with a BlockMask replaced by its function."""
    return tuple([x.function if type(x) is BlockMask else x for x in functions])


def block_mask_of(functions: tuple[Any, ...]) -> BlockMask | None:
    """The BlockMask in the place of mask_mod, or None."""
    found = functions[MASK_MOD]
    return found if type(found) is BlockMask else None


def read_functions(given: tuple[Any, ...]) -> tuple[tuple[Function | None, ...], list[arrays.Array]]:
    """The caller's functions as values, and the arrays that they read."""
    functions, aux = functions_of(given)
    return without_blocks(functions), [arrays.read(f"aux[{number}]", array) for number, array in enumerate(aux)]


def _forget() -> None:
    """Forgets plans, the CPU's compiled functions, and the parts that GPU kernels were compiled from. Running calls
    have their own references. Kernels stay loaded, because CUDA graphs use them. Few of these modules may be loaded.
    """
    modules = {
        name.partition(".")[2]: module for name, module in list(sys.modules.items()) if name.startswith("numba_flash.")
    }
    for name in ("dispatch.forward", "dispatch.backward"):
        if name in modules:
            modules[name]._plans.clear()
    made: list[Any] = [vars(modules[name]).get(maker) for name, maker in _MAKERS if name in modules]
    made += [value for name in modules if name.startswith("kernels.") for value in list(vars(modules[name]).values())]
    for maker in made:
        if hasattr(maker, "cache_clear"):
            maker.cache_clear()


_MAKERS = (
    *(("cpu.functions", "make"), ("cpu.functions", "make_gradient")),
    *(("cpu.forward", "ready"), ("cpu.backward", "ready")),
)
forgetting.append(_forget)
