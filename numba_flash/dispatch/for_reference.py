"""Calls the oracle (the reference) for a launch, with NumPy views of its operands."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import arrays, reference
from ..arrays import Array
from ..problem.forward import Problem
from ..problem.options import ARRAYS, NUMBERS, GradientOperands, Operands


def heads_first(problem: Problem, array: Array) -> np.ndarray:
    """q, k, v or o, in host memory, in the order of dimensions that the oracle takes."""
    view = arrays.host_view(array)
    return view if problem.layout == "bhsd" else view.transpose(0, 2, 1, 3)


def reference_options(
    problem: Problem, operands: Operands | GradientOperands, behind: Sequence[Array | None]
) -> dict[str, Any]:
    """The keyword arguments of the oracle's functions. behind: the operands after the others, a seed and aux."""
    seed, aux = (behind[0], behind[1:]) if problem.seeded else (None, behind)

    def optional(array: Array | None) -> np.ndarray | None:
        return None if array is None else arrays.host_view(array)

    full = np.full(problem.batch, problem.seqlen_k)
    lengths = optional(operands.seqlens_k)
    seqlens_k = full if lengths is None else lengths.astype(np.int64)
    q_offset = np.full(problem.batch, problem.q_offset)
    if problem.q_offset_source == "seqlens_k":
        q_offset = q_offset + seqlens_k
    elif operands.q_offset is not None:
        q_offset = q_offset + arrays.host_view(operands.q_offset)
    given = {
        option.name: optional(getattr(operands, option.name)) for option in ARRAYS if option.acts_on in ("score", "sum")
    }
    for option in ARRAYS:  # (heads,) is read as (1, heads)
        array = given.get(option.name)
        if option.shape == "heads" and array is not None and array.ndim == 1:
            given[option.name] = array[None]
    return dict(
        **{name: problem.number(name) for name in NUMBERS},
        **given,
        q_offset=q_offset,
        visible=reference.visible_keys(
            problem.batch,
            problem.seqlen_q,
            problem.seqlen_k,
            left=problem.left,
            right=problem.right,
            q_offset=q_offset,
            seqlens_k=seqlens_k,
            mask=optional(operands.mask),
        ),
        **dict(problem.functions),
        seed=None if seed is None else seed.pointer,
        aux=tuple(arrays.host_view(array) for array in aux if array is not None),
    )


def run_forward(problem: Problem, operands: Operands, behind: Sequence[Array | None]) -> None:
    """Hand NumPy views in (batch, heads, seqlen, dim) order to the oracle and round its results."""
    o, lse = reference.forward(
        *(heads_first(problem, array) for array in (operands.q, operands.k, operands.v)),
        **reference_options(problem, operands, behind),
    )
    assert operands.o is not None
    view = heads_first(problem, operands.o)
    with np.errstate(over="ignore"):  # a result beyond float16's range becomes inf, as in every kernel
        view[...] = o.astype(view.dtype)
    if operands.lse is not None:
        arrays.host_view(operands.lse)[...] = lse
