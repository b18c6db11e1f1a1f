"""Packed sequences on the CPU rung: each is a problem of its own in a part of the arrays.

Long sequences run one after the other, each on all threads. Short ones run side by side, each on one thread. In both
cases a sequence has the same bits as in a call of its own.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from ..arrays import ITEM_SIZE, host_pointer, host_view
from ..problem.backward import GRADIENTS, BackwardProblem
from ..problem.forward import Problem
from ..problem.options import HEAD_GRADIENTS, GradientOperands, Operands
from ..problem.packed import SPANS, Span, outside, spans_of_operands

OF_KEYS = ("k", "v", "dk", "dv")
WRITTEN = dict(o=0.0, lse=-np.inf, dq=0.0, dk=0.0, dv=0.0)  # results, with the value of rows of no sequence


def run(problem: Any, operands: Any, addresses: tuple[int, ...], code: Any) -> None:
    """operands and their addresses, in the order of options.Operands or GradientOperands. code: the module of cpu/ that
    computes the problem."""
    forward = problem.forward
    fields = Operands if problem is forward else GradientOperands
    given = fields(*operands[: len(fields._fields)])
    spans = spans_of_operands(forward, given)
    _fill_outside(given, ("o", "lse") if problem is forward else ("dq", "dk", "dv"), spans, forward)
    own, behind = addresses[: len(fields._fields)], addresses[len(fields._fields) :]
    shared = {} if problem is forward else _of_all(problem)
    for name, sums in shared.items():
        own = (*own[: (at := fields._fields.index(name))], host_pointer(sums), *own[at + 1 :])
    of_aux = code.OfAux.of(problem) if problem is not forward and problem.wanted_aux else None
    aux_sums = None if of_aux is None else of_aux.no_sums()
    pointers = _pointers(problem, own, spans)
    ready = {
        b: _ready(problem, code, span.queries, span.keys, span.q_start)
        for b, span in enumerate(spans)
        if span.queries or problem is not forward
    }
    share = sum([each.seconds for each in ready.values()]) / code.workers_of(False)
    side_by_side = [b for b, each in ready.items() if each.behind is not None and each.seconds <= share]
    for b in [b for b in ready if b not in side_by_side]:
        more = () if aux_sums is None else (aux_sums,)
        ready[b].run((*pointers[b].tolist(), *behind), b, *more)
    if side_by_side:
        side_by_side.sort(key=lambda b: -ready[b].seconds)  # so that the last ones are short
        calls = [ready[b] for b in side_by_side]
        numbers = [(*call.behind[:2], b) for call, b in zip(calls, side_by_side, strict=True)]
        code.run_several(calls, np.column_stack([[call.address for call in calls], pointers[side_by_side], numbers]))
    if problem is not forward and _terms_of_all(problem):
        code.ready(_of_terms(problem)).run(addresses)
    for name, sums in shared.items():
        result = host_view(getattr(given, name))
        result[...] = (sums if result.ndim == 2 else sums.sum(axis=0)).astype(result.dtype)
    if of_aux is not None:
        of_aux.write(aux_sums, behind[len(behind) - len(forward.aux) :])


def _of_all(problem: BackwardProblem) -> dict[str, np.ndarray]:
    """Float64 arrays in which each sequence stores its sums of the gradients of options with a number for each head."""
    names = [name for name, option in HEAD_GRADIENTS.items() if option.acts_on == "score" and name in problem.wanted]
    return {name: np.zeros((problem.forward.batch, problem.forward.heads)) for name in names}


def _fill_outside(given: Any, results: Any, spans: list[Span], p: Problem) -> None:
    assert p.packed is not None
    of_queries = outside([(span.first_query, span.queries) for span in spans], p.packed[0])
    of_keys = outside([(span.first_key, span.keys) for span in spans], p.packed[1])
    for name in results:
        array, rows = getattr(given, name, None), of_keys if name in OF_KEYS else of_queries
        if array is not None and rows.any():
            host_view(array)[(slice(None), rows) if name == "lse" else rows] = WRITTEN[name]


def _pointers(problem: Any, addresses: tuple[int, ...], spans: list[Span]) -> np.ndarray:
    """The address of each sequence's first row in each array: (sequences, arrays). 0 for an array that is not there."""
    steps = _row_bytes(problem)
    first_query, first_key = np.array([(span.first_query, span.first_key) for span in spans]).reshape(-1, 2).T
    base = np.array(addresses, np.int64)
    return base + np.where(base != 0, first_query[:, None] * steps[0] + first_key[:, None] * steps[1], 0)


@functools.lru_cache(maxsize=256)
def _row_bytes(problem: Any) -> np.ndarray:
    """(2, arrays): the bytes between rows of queries, and of keys, in each array; 0 if it has no such rows."""
    p = problem.forward
    fields = Operands._fields if problem is p else GradientOperands._fields
    steps = np.zeros((2, len(fields)), np.int64)
    for n, name in enumerate(fields):
        if name in ("lse", "dlse"):
            step = (1 if name == "lse" else problem.dlse_strides[2]) * ITEM_SIZE[p.compute_dtype]
        else:
            strides = problem.do_strides if name == "do" else getattr(p, f"{name}_strides", None)
            if name in ("dq", "dk", "dv"):
                strides = problem.strides_of(name)
            step = 0 if strides is None else strides[2] * ITEM_SIZE[p.dtype]
        steps[int(name in OF_KEYS), n] = step
    return steps


@functools.lru_cache(maxsize=4096)
def _ready(problem: Any, code: Any, queries: int, keys: int, q_start: int) -> Any:
    return code.ready(_of_span(problem, queries, keys, q_start))


def _of_span(problem: Any, queries: int, keys: int, q_start: int) -> Any:
    """One sequence as a problem. Its lse has the strides of the whole array."""
    p = problem.forward
    own = dataclasses.replace(
        p,
        batch=1,
        seqlen_q=queries,
        seqlen_k=keys,
        q_offset=q_start,
        q_offset_source="number",
        arrays=tuple(array for array in p.arrays if array.name not in (*SPANS, "q_offset")),
    )
    if problem is p:
        return own
    shapes, strides = (dict(zip(GRADIENTS, of, strict=True)) for of in (problem.shapes, problem.strides))
    alone = tuple(name for name in problem.wanted if name not in _terms_of_all(problem))
    for name in HEAD_GRADIENTS:
        if name in alone:  # one row per sequence
            shapes[name], strides[name] = (1, p.heads), (p.heads, 1)
    return dataclasses.replace(
        problem, forward=own, wanted=alone, shapes=tuple(shapes.values()), strides=tuple(strides.values())
    )


def _terms_of_all(problem: BackwardProblem) -> tuple[str, ...]:
    """The wanted gradients of terms of every row's sum that all sequences share."""
    terms = (name for name, option in HEAD_GRADIENTS.items() if option.acts_on == "sum" and name in problem.wanted)
    return tuple(name for name in terms if len(problem.shape_of(name)) == 1)


def _of_terms(problem: BackwardProblem) -> BackwardProblem:
    """The problem of these gradients, with all rows as one sequence: rows of no sequence add nothing."""
    assert problem.forward.packed is not None
    rows, _ = problem.forward.packed
    whole = _of_span(problem, rows, 0, 0)
    return dataclasses.replace(whole, wanted=_terms_of_all(problem), wanted_aux=())  # type: ignore[no-any-return]
