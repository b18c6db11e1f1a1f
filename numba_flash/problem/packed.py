"""Packed sequences: q (total_q, heads, head_dim), in which sequences of any lengths follow each other.

A packed problem is a Problem whose batch entries are the sequences and whose arrays have no batch: their batch strides
are 0. Where a sequence's rows begin and how many it has is on the device, in cu_seqlens_q and cu_seqlens_k. The
lengths that a Problem has are upper bounds.
"""

import dataclasses
import operator
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, Layout, host_view
from ..arrays.dtypes import conversion
from .options import PACKED_ARRAYS, Options, Packed

SPANS = ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k")  # the arrays that say where sequences are


def bounds(max_seqlen_q: Any, max_seqlen_k: Any) -> Packed:
    """Checks a caller's bounds: as parts of a key 5.0 and 5 would be equal."""
    return Packed(_bound("max_seqlen_q", max_seqlen_q), _bound("max_seqlen_k", max_seqlen_k))


def one_entry(name: str, array: Layout) -> Layout:
    """An array (total, heads, dim) as (1, total, heads, dim)."""
    if len(array.shape) != 3:
        raise ValueError(f"{name} must have 3 dimensions (total, heads, head_dim), not shape {array.shape}")
    return dataclasses.replace(array, shape=(1, *array.shape), strides=(0, *array.strides))


def sizes(options: Options, total_q: int, total_k: int) -> tuple[int, int, int]:
    """-> (number of sequences, upper bounds of the lengths of queries and of keys)."""
    ends = [options.array(name) for name in PACKED_ARRAYS]
    for name, array in zip(PACKED_ARRAYS, ends, strict=True):
        if array.dtype != "int32":
            raise TypeError(f"{name} must be int32, not {array.dtype}; {conversion(name, array.family, 'int32')}")
        if len(array.shape) != 1 or not array.shape[0]:
            raise ValueError(f"{name} must have shape (batch + 1,), not {array.shape}: 0, and where each sequence ends")
    if ends[0].shape != ends[1].shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have one shape, (batch + 1,), not {ends[0].shape} and {ends[1].shape}"
        )
    of_q, of_k = options.layout
    seqlen_q, seqlen_k = (
        total if most is None else min(most, total) for most, total in ((of_q, total_q), (of_k, total_k))
    )
    return ends[0].shape[0] - 1, seqlen_q, seqlen_k


def _bound(name: str, given: Any) -> int | None:
    if given is None:
        return None
    try:
        if isinstance(given, bool) or not isinstance(given, (int, np.integer)) and hasattr(given, "shape"):
            raise TypeError
        number = given if isinstance(given, int) else operator.index(given)  # the same one to torch.compile
    except TypeError:
        hint = "; leave it out, or take a number: to read an array the host would wait for the GPU"
        of_array = hint if hasattr(given, "shape") else ""
        raise TypeError(f"{name} must be a whole number or None, not {given!r}{of_array}") from None
    if number < 0:
        raise ValueError(f"{name} must be at least 0, not {number}")
    return number


def check_spans(problem: Any, given: dict[str, Array | None]) -> None:
    """Checks in host memory where sequences are. On a device the kernels clamp that, because reading it would mean
    waiting. given: the arrays of SPANS."""
    assert problem.packed is not None
    lengths = {}
    for side, total, most in zip("qk", problem.packed, (problem.seqlen_q, problem.seqlen_k), strict=True):
        name = f"cu_seqlens_{side}"
        array = given[name]
        assert array is not None
        if array.layout.device is not None:
            return
        ends = host_view(array).astype(np.int64)
        lengths[side] = np.diff(ends)
        if ends[0] < 0 or ends[-1] > total or (lengths[side] < 0).any():
            raise ValueError(f"{name} must rise from 0 or more to at most {total}, the rows, not {ends.tolist()}")
        if (lengths[side] > most).any():
            raise ValueError(f"max_seqlen_{side} = {most} is less than a length of {name}, {lengths[side].max()}")
    used = given["seqlens_k"]
    if used is not None:
        values = host_view(used)
        if (values < 0).any() or (values > lengths["k"]).any():
            raise ValueError(
                f"seqlens_k must lie in 0 to the keys of each sequence, {lengths['k'].tolist()}, not {values.tolist()}"
            )


class Span(NamedTuple):
    """Where the rows of a sequence are, in host memory: numbers as the kernels find them."""

    first_query: int
    queries: int
    first_key: int
    keys: int  # that are valid
    q_start: int  # the position of query 0


def spans_of(problem: Any, given: dict[str, Any], q_offset: Any = None) -> list[Span]:
    """given: the arrays of SPANS in host memory, or None. q_offset: the array, if positions come from one."""
    assert problem.packed is not None
    first_query, queries = _rows(given["cu_seqlens_q"], problem.packed[0], problem.seqlen_q)
    first_key, keys = _rows(given["cu_seqlens_k"], problem.packed[1], problem.seqlen_k)
    if given["seqlens_k"] is not None:
        keys = np.clip(given["seqlens_k"].astype(np.int64), 0, keys)
    start = np.full(problem.batch, problem.q_offset)
    if problem.q_offset_source == "sequence":
        start = keys - queries
    elif q_offset is not None:
        start = start + q_offset
    return [Span(*row) for row in np.stack([first_query, queries, first_key, keys, start], 1).tolist()]


def spans_of_operands(problem: Any, operands: Any) -> list[Span]:
    """Where packed sequences are in host memory; [] for others. operands: options.Operands or GradientOperands."""
    if problem.packed is None:
        return []
    given = {name: None if (x := getattr(operands, name)) is None else host_view(x) for name in SPANS}
    return spans_of(problem, given, None if operands.q_offset is None else host_view(operands.q_offset))


def _rows(ends: Any, total: int, most: int) -> tuple[Any, Any]:
    """-> (first rows, numbers of rows), clamped as on a device (kernels/steps/sequence.py)."""
    ends = np.minimum(ends.astype(np.int64), total)  # twice as fast as np.clip
    first = np.maximum(ends[:-1], 0)
    return first, np.minimum(np.maximum(ends[1:] - first, 0), most)


def outside(spans: list[tuple[int, int]], total: int) -> np.ndarray:
    """True for rows of no sequence. spans: (first row, rows) of each."""
    rows = np.ones(total, bool)
    for first, count in spans:
        rows[first : first + count] = False
    return rows
