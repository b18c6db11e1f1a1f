"""Makes a launch from a BackwardChoice."""

import functools
from typing import Any

import numpy as np

from .. import arrays, reference
from ..arrays import Array
from ..machine import toolchain
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from ..problem.options import GradientOperands
from ..select.backward import BackwardChoice
from .for_reference import PackedRows, heads_first, reference_options, write
from .launch import Given, Launch, OnCpu, WarnsIfSlow, sequence_of


def make_backward_launch(choice: BackwardChoice, problem: BackwardProblem, target: Target) -> Launch:
    """The chosen kernels for this problem; their operands are in the order of options.GradientOperands."""
    if choice.kernel == "reference":
        return _OnReference(problem)
    if choice.kernel == "cpu":
        return OnCpu(problem, _cpu)
    ready = sequence_of(choice.configs, problem, target)
    return WarnsIfSlow(problem.forward, ready, choice.kernel, times=3.5) if target.simulated else ready


@functools.cache
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
    forward, rows = problem.forward, PackedRows.of(problem.forward, operands)

    def of(side: str, name: str) -> np.ndarray:
        return rows.padded(side, heads_first(forward, getattr(operands, name)))

    def of_queries(array: Array) -> np.ndarray:
        view = arrays.host_view(array)
        return rows.padded("q", view if forward.packed is None else view[None])

    daux = behind[-len(forward.aux) :] if problem.wanted_aux else ()
    gradients = reference.backward(
        of("q", "do"),
        of("q", "q"),
        of("k", "k"),
        of("k", "v"),
        of("q", "o"),
        of_queries(operands.lse),
        dlse=None if operands.dlse is None else of_queries(operands.dlse),
        **reference_options(forward, operands, behind[: len(behind) - len(daux)]),
        wanted_aux=problem.wanted_aux,
    )
    for number in problem.wanted_aux:
        array = daux[number]
        assert array is not None
        write(arrays.host_view(array), gradients.daux[number])
    for name in problem.wanted:
        array, found = getattr(operands, name), getattr(gradients, name)
        if name in ("dq", "dk", "dv"):
            write(heads_first(forward, array), rows.packed("q" if name == "dq" else "k", found))
        else:
            write(arrays.host_view(array), found)
