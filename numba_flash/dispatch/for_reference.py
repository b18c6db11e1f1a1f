"""Calls the oracle (the reference) for a launch, with NumPy views of its operands."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import arrays, reference
from ..arrays import Array
from ..problem.forward import Problem
from ..problem.options import ARRAYS, NUMBERS, GradientOperands, Operands
from ..problem.packed import Span, spans_of_operands


def heads_first(problem: Problem, array: Array) -> np.ndarray:
    """q, k, v or o, in host memory, in the order of dimensions that the oracle takes."""
    view = arrays.host_view(array)
    if problem.packed is not None:
        return view.transpose(1, 0, 2)[None]
    return view if problem.layout == "bhsd" else view.transpose(0, 2, 1, 3)


def reference_options(
    problem: Problem, operands: Operands | GradientOperands, behind: Sequence[Array | None]
) -> dict[str, Any]:
    """The keyword arguments of the oracle's functions. behind: the operands after the others, a seed and aux."""
    full = np.full(problem.batch, problem.seqlen_k)
    lengths = optional(operands.seqlens_k)
    seqlens_k = full if lengths is None else lengths.astype(np.int64)
    q_offset = np.full(problem.batch, problem.q_offset)
    spans = spans_of_operands(problem, operands)
    if spans:
        seqlens_k, q_offset = (np.array([getattr(span, name) for span in spans]) for name in ("keys", "q_start"))
    elif problem.q_offset_source == "seqlens_k":
        q_offset = q_offset + seqlens_k
    elif operands.q_offset is not None:
        q_offset = q_offset + arrays.host_view(operands.q_offset)
    queries = np.array([span.queries for span in spans]) if spans else None
    return options_at(problem, operands, behind, seqlens_k, q_offset, queries)


def options_at(
    problem: Problem,
    operands: Operands | GradientOperands,
    behind: Sequence[Array | None],
    seqlens_k: np.ndarray,
    q_offset: np.ndarray,
    queries: np.ndarray | None = None,
) -> dict[str, Any]:
    """reference_options with other valid keys, positions of the first queries, and numbers of queries (None = all)."""
    seed, aux = (behind[0], behind[1:]) if problem.seeded else (None, behind)
    given = {
        option.name: optional(getattr(operands, option.name)) for option in ARRAYS if option.acts_on in ("score", "sum")
    }
    for option in ARRAYS:  # (heads,) is read as (1, heads)
        array = given.get(option.name)
        if option.shape == "heads" and array is not None and array.ndim == 1:
            given[option.name] = array[None]
    visible = reference.visible_keys(
        problem.batch,
        problem.seqlen_q,
        problem.seqlen_k,
        left=problem.left,
        right=problem.right,
        q_offset=q_offset,
        seqlens_k=seqlens_k,
        mask=optional(operands.mask),
    )
    for b, count in enumerate(() if queries is None else queries):
        visible[b, :, count:] = False
    return dict(
        **{name: problem.number(name) for name in NUMBERS},
        **given,
        q_offset=q_offset,
        visible=visible,
        **dict(problem.functions),
        seed=None if seed is None else seed.pointer,
        aux=tuple(arrays.host_view(array) for array in aux if array is not None),
    )


def optional(array: Array | None) -> np.ndarray | None:
    return None if array is None else arrays.host_view(array)


def run_forward(problem: Problem, operands: Operands, behind: Sequence[Array | None]) -> None:
    """Hand NumPy views in (batch, heads, seqlen, dim) order to the oracle and round its results."""
    rows = PackedRows.of(problem, operands)
    o, lse = reference.forward(
        rows.padded("q", heads_first(problem, operands.q)),
        rows.padded("k", heads_first(problem, operands.k)),
        rows.padded("k", heads_first(problem, operands.v)),
        **reference_options(problem, operands, behind),
    )
    write(heads_first(problem, operands.o), rows.packed("q", o))
    if operands.lse is not None:
        write(arrays.host_view(operands.lse), rows.packed("q", lse, -np.inf))


def write(to: np.ndarray, values: np.ndarray) -> None:
    with np.errstate(over="ignore"):  # a result beyond float16's range becomes inf, as in every kernel
        to[...] = values.reshape(to.shape).astype(to.dtype)


class PackedRows(NamedTuple):
    """Packed sequences as padded batch entries, which the oracle takes. Arrays that are not packed stay as they are."""

    problem: Problem
    spans: list[Span]

    @staticmethod
    def of(problem: Problem, operands: Operands | GradientOperands) -> "PackedRows":
        return PackedRows(problem, spans_of_operands(problem, operands))

    def _of_side(self, side: str) -> tuple[list[tuple[int, int]], int, int]:
        """-> (first row, rows) for each sequence, the rows of all, the most rows of one."""
        p, first, count = self.problem, *(("first_query", "queries") if side == "q" else ("first_key", "keys"))
        assert p.packed is not None
        total, most = (p.packed[0], p.seqlen_q) if side == "q" else (p.packed[1], p.seqlen_k)
        return [(getattr(span, first), getattr(span, count)) for span in self.spans], total, most

    def padded(self, side: str, rows: np.ndarray) -> np.ndarray:
        """rows (1, heads, all rows, ...) as (batch, heads, most rows, ...)."""
        if self.problem.packed is None:
            return rows
        spans, _, most = self._of_side(side)
        made = np.zeros((len(spans), rows.shape[1], most, *rows.shape[3:]), rows.dtype)
        for b, (first, count) in enumerate(spans):
            made[b, :, :count] = rows[0, :, first : first + count]
        return made

    def packed(self, side: str, padded: np.ndarray, nothing: float = 0.0) -> np.ndarray:
        """The reverse of `padded`. nothing: the value of rows of no sequence."""
        if self.problem.packed is None:
            return padded
        spans, total, _ = self._of_side(side)
        made = np.full((1, padded.shape[1], total, *padded.shape[3:]), nothing, padded.dtype)
        for b, (first, count) in enumerate(spans):
            made[0, :, first : first + count] = padded[b, :, :count]
        return made
