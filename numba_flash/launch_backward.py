"""From a choice to running code, for gradients."""

import functools
from typing import Any

import numpy as np

from . import arrays, reference
from .arrays import GradientOperands
from .backward_problem import BackwardProblem
from .launch import Given, Launch, heads_first, reference_options
from .select_backward import BackwardChoice
from .target import Target


def prepare_backward(choice: BackwardChoice, problem: BackwardProblem, target: Target) -> Launch:
    """The chosen kernels for this problem; their operands come in the order of arrays.GradientOperands."""
    return _OnCpu(problem) if choice.kernel == "cpu" else _OnReference(problem)


class _OnCpu(Launch):
    __slots__ = ("_problem",)

    def __init__(self, problem: BackwardProblem) -> None:
        self._problem = problem

    def run(self, operands: Given, stream: int) -> None:
        cpu_backward().backward(self._problem, [0 if array is None else array.pointer for array in operands])


@functools.cache
def cpu_backward() -> Any:
    from . import cpu_backward  # Numba comes in with it

    return cpu_backward


class _OnReference(Launch):
    __slots__ = ("_problem",)

    def __init__(self, problem: BackwardProblem) -> None:
        self._problem = problem

    def run(self, operands: Given, stream: int) -> None:
        _run_reference(self._problem, GradientOperands(*operands))  # type: ignore[arg-type]


def _run_reference(problem: BackwardProblem, operands: GradientOperands) -> None:
    """Hand NumPy views in (batch, heads, seqlen, dim) order to the oracle and round its results."""
    forward = problem.forward
    do, q, k, v, o = (heads_first(forward, getattr(operands, name)) for name in ("do", "q", "k", "v", "o"))
    gradients = reference.backward(
        do, q, k, v, o, arrays.host_view(operands.lse),
        dlse=None if operands.dlse is None else arrays.host_view(operands.dlse),
        **reference_options(forward, operands),
    )  # fmt: skip
    for name in problem.wanted:
        array, found = getattr(operands, name), getattr(gradients, name)
        view = heads_first(forward, array) if name in ("dq", "dk", "dv") else arrays.host_view(array)
        with np.errstate(over="ignore"):  # a result beyond float16's range becomes inf, as in every kernel
            view[...] = found.reshape(view.shape).astype(view.dtype)
