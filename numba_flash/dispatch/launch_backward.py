"""From a BackwardChoice to running code."""

from typing import Any

import numpy as np

from .. import arrays, reference
from ..machine import toolchain
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from ..problem.options import GradientOperands
from ..select.backward import BackwardChoice
from .for_reference import heads_first, reference_options
from .launch import Given, Launch, OnCpu, WarnsIfSlow, sequence_of


def make_backward_launch(choice: BackwardChoice, problem: BackwardProblem, target: Target) -> Launch:
    """The chosen kernels for this problem; their operands are in the order of options.GradientOperands."""
    if choice.kernel == "reference":
        return _OnReference(problem)
    if choice.kernel == "cpu":
        return OnCpu(problem, _cpu)
    ready = sequence_of(choice.configs, problem, target)
    return WarnsIfSlow(problem.forward, ready, times=3.5) if target.simulated else ready


def _cpu() -> Any:
    with toolchain.importing():
        from ..cpu import backward as cpu

    return cpu


class _OnReference(Launch):
    __slots__ = ("_problem",)

    def __init__(self, problem: BackwardProblem) -> None:
        self._problem = problem

    def run(self, operands: Given, stream: int) -> None:
        own = len(GradientOperands._fields)
        _run_reference(self._problem, GradientOperands(*operands[:own]), operands[own:])  # type: ignore[arg-type]


def _run_reference(problem: BackwardProblem, operands: GradientOperands, behind: Given) -> None:
    """Hand NumPy views in (batch, heads, seqlen, dim) order to the oracle and round its results."""
    forward = problem.forward
    do, q, k, v, o = (heads_first(forward, getattr(operands, name)) for name in ("do", "q", "k", "v", "o"))
    daux = behind[-len(forward.aux) :] if problem.wanted_aux else ()
    gradients = reference.backward(
        do,
        q,
        k,
        v,
        o,
        arrays.host_view(operands.lse),
        dlse=None if operands.dlse is None else arrays.host_view(operands.dlse),
        **reference_options(forward, operands, behind[: len(behind) - len(daux)]),
        wanted_aux=problem.wanted_aux,
    )
    for number in problem.wanted_aux:
        array, found = daux[number], gradients.daux[number]
        assert array is not None
        view = arrays.host_view(array)
        with np.errstate(over="ignore"):
            view[...] = found.astype(view.dtype)
    for name in problem.wanted:
        array, found = getattr(operands, name), getattr(gradients, name)
        view = heads_first(forward, array) if name in ("dq", "dk", "dv") else arrays.host_view(array)
        with np.errstate(over="ignore"):  # a result beyond float16's range becomes inf, as in every kernel
            view[...] = found.reshape(view.shape).astype(view.dtype)
