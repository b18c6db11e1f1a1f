"""Checks what shapes do not show: where arrays are, whether they share memory, and lengths in host memory."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..arrays import ITEM_SIZE, Array, host_view
from .forward import Problem, check_one_place, check_result
from .options import Operands
from .strides import check_strides

OPERAND_NAMES = [
    {"o": "out", "lse": "the lse of out"}.get(name, name) for name in Operands._fields
]  # the names that callers know
O, LSE, SEQLENS_K = (Operands._fields.index(name) for name in ("o", "lse", "seqlens_k"))


def check_memory(given: list[Any], problem: Problem) -> None:
    """Checks where the arrays are, and lengths in host memory.

    given: an Array or None for each field of Operands, followed by those of aux. Every call with more than q, k and v
    comes here, so it must be fast.
    """
    arrays = [array for array in given if array is not None]
    check_alignments(arrays, lambda: named(OPERAND_NAMES, given))
    for written in (given[O], given[LSE]):
        if written is not None and anything_near(written, arrays):
            check_overlap("out", written, named(OPERAND_NAMES, given))
    if given[SEQLENS_K] is not None or problem.packed is not None:
        check_lengths(dict(zip(Operands._fields, given, strict=False)), problem)


def named(names: Sequence[str], given: list[Any]) -> Iterable[tuple[str, Array | None]]:
    """Operands with their names, followed by those of aux."""
    of_aux = [f"aux[{number}]" for number in range(len(given) - len(names))]
    return zip([*names, *of_aux], given, strict=True)


def check_alignments(arrays: list[Array], named: Callable[[], Iterable[tuple[str, Array | None]]]) -> None:
    """arrays: those that are given; `named` returns all with their names. Almost never does one need an individual
    check."""
    addresses = 0
    for array in arrays:
        addresses |= array.pointer
    if addresses & 7:  # no element is larger than 8 bytes
        for name, one in named():
            if one is not None:
                check_alignment(name, one)


def check_lengths(given: dict[str, Any], problem: Problem) -> None:
    """Checks lengths in host memory. On a device the kernels clamp them, because reading them would mean waiting.
    given: arrays by name."""
    if problem.packed is not None:
        from .packed import SPANS, check_spans  # a plain call does not load it

        check_spans(problem, {name: given[name] for name in SPANS})
        return
    seqlens_k = given["seqlens_k"]
    if seqlens_k is not None and seqlens_k.layout.device is None and problem.batch:
        values = host_view(seqlens_k)
        if values.min() < 0 or values.max() > problem.seqlen_k:
            raise ValueError(f"seqlens_k must lie in 0 to seqlen_k = {problem.seqlen_k}, not {values.tolist()}")


def check_alignment(name: str, array: Array) -> None:
    """Checks that elements are at multiples of their size; otherwise a GPU stops the whole process."""
    size = ITEM_SIZE.get(array.layout.dtype, 1)
    if array.pointer % size:
        raise ValueError(
            f"{name} starts at address {array.pointer:#x}, not a multiple of its {size}-byte elements: copy it"
        )


def anything_near(written: Array, arrays: list[Array]) -> bool:
    """Whether another array's first and last byte are not both on one side of `written`: almost never."""
    low, high = written.layout.byte_bounds
    low, high = written.pointer + low, written.pointer + high
    for array in arrays:
        if array is not written:
            other_low, other_high = array.layout.byte_bounds
            if low < array.pointer + other_high and array.pointer + other_low < high:
                return True
    return False


def check_overlap(name: str, written: Array, others: Iterable[tuple[str, Array | None]]) -> None:
    """Checks that an output shares no element with an input: tiles are read after others were written."""
    for other, array in others:
        if array is not None and array is not written and _share_elements(written, array):
            raise ValueError(f"{name} shares memory with {other}; nothing is computed in place")


def check_output(name: str, out: Array, like: Array) -> None:
    """Checks an output for a function whose result has its input's shape, dtype and place."""
    check_one_place({"x": like.layout, name: out.layout})
    check_strides(name, out.layout)
    check_result(name, out.layout, like.layout.shape, like.layout.dtype, "like x")
    check_alignment(name, out)
    check_overlap(name, out, [("x", like)])


def _share_elements(one: Array, other: Array) -> bool:
    try:
        return np.shares_memory(_address_view(one), _address_view(other), max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _address_view(array: Array) -> np.ndarray:
    """A NumPy array with the same addresses that is never read: only its extent matters."""

    class Interface:
        __array_interface__ = {
            "version": 3,
            "data": (array.pointer, True),
            "shape": array.layout.shape,
            "strides": tuple(s * array.layout.unit for s in array.layout.strides),
            "typestr": f"|V{ITEM_SIZE[array.layout.dtype]}",
        }

    return np.asarray(Interface())
