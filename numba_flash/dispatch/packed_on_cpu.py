"""Packed sequences on the CPU rung: one after the other, each a problem of its own in a part of the arrays.

All threads work on one sequence. So it has the same bits as in a call of its own, for any number of threads.
"""

import dataclasses
from typing import Any

import numpy as np

from ..arrays import ITEM_SIZE, host_view
from ..problem.backward import GRADIENTS, BackwardProblem
from ..problem.forward import Problem
from ..problem.options import GradientOperands, Operands
from ..problem.packed import SPANS, Span, outside, spans_of_operands

OF_KEYS = ("k", "v", "dk", "dv")
WRITTEN = dict(o=0.0, lse=-np.inf, dq=0.0, dk=0.0, dv=0.0)  # and what rows of no sequence have there


def run(problem: Any, operands: Any, addresses: tuple[int, ...], code: Any) -> None:
    """operands and their addresses, in the order of options.Operands or GradientOperands. code: the module of cpu/ that
    computes the problem."""
    forward = problem.forward
    fields = Operands if problem is forward else GradientOperands
    given = fields(*operands[: len(fields._fields)])
    spans = spans_of_operands(forward, given)
    _fill_outside(given, ("o", "lse") if problem is forward else ("dq", "dk", "dv"), spans, forward)
    for b, span in enumerate(spans):
        if span.queries or problem is not forward:
            moved = [_moved(name, x, problem, span) for name, x in zip(fields._fields, addresses, strict=False)]
            code.ready(_of_span(problem, span)).run((*moved, *addresses[len(moved) :]), b)
    if problem is not forward and "dsinks" in problem.wanted and len(problem.shape_of("dsinks")) == 1:
        code.ready(_of_sinks(problem)).run(addresses)


def _fill_outside(given: Any, results: Any, spans: list[Span], p: Problem) -> None:
    assert p.packed is not None
    of_queries = outside([(span.first_query, span.queries) for span in spans], p.packed[0])
    of_keys = outside([(span.first_key, span.keys) for span in spans], p.packed[1])
    for name in results:
        array = getattr(given, name, None)
        if array is not None:
            view = host_view(array)
            view[(slice(None), of_queries) if name == "lse" else of_keys if name in OF_KEYS else of_queries] = WRITTEN[
                name
            ]


def _moved(name: str, address: int, problem: Any, span: Span) -> int:
    """The address of a sequence's first row in an array."""
    p, row = problem.forward, span.first_key if name in OF_KEYS else span.first_query
    if not address:
        return 0
    if name in ("lse", "dlse"):
        return address + row * ITEM_SIZE[p.compute_dtype] * (1 if name == "lse" else problem.dlse_strides[2])
    strides = getattr(p, f"{name}_strides", None)
    if name == "do":
        strides = problem.do_strides
    elif name in ("dq", "dk", "dv"):
        strides = problem.strides_of(name)
    return address if strides is None else address + row * strides[2] * ITEM_SIZE[p.dtype]


def _of_span(problem: Any, span: Span) -> Any:
    """One sequence as a problem. Its row of lse stays as long as that of all."""
    p = problem.forward
    own = dataclasses.replace(
        p,
        batch=1,
        seqlen_q=span.queries,
        seqlen_k=span.keys,
        q_offset=span.q_start,
        q_offset_source="number",
        arrays=tuple(array for array in p.arrays if array.name not in (*SPANS, "q_offset")),
    )
    if problem is p:
        return own
    shapes = dict(zip(GRADIENTS, problem.shapes, strict=True))
    alone = tuple(name for name in problem.wanted if name != "dsinks" or len(shapes[name]) == 2)
    return dataclasses.replace(
        problem,
        forward=own,
        wanted=alone,
        shapes=tuple((1, *x[1:]) if name == "dsinks" and len(x) == 2 else x for name, x in shapes.items()),
    )


def _of_sinks(problem: BackwardProblem) -> BackwardProblem:
    """The gradient of sinks that all sequences share, as of one of all rows: those of no sequence add nothing."""
    assert problem.forward.packed is not None
    rows, _ = problem.forward.packed
    whole = _of_span(problem, Span(0, rows, 0, 0, 0))
    return dataclasses.replace(whole, wanted=("dsinks",))  # type: ignore[no-any-return]
