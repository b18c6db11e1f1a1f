"""A score is the result of a chain of stages, which change the product q . k before the softmax. STAGES is their order.

Each stage is a file with the same functions. `make(config)` returns its Stage, or None if the problem does not use it:
such a stage leaves no code. A new option of the score is a new file and an entry in STAGES.

Tensor-core kernels hold scores in fragments, where fragments.py composes the same stages.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda

from ..steps import elements
from . import alibi, bias, counts, mask, mask_mod, scale, score_mod, sinks, softcap

STAGES = (scale, score_mod, softcap, alibi, bias)
# Stages that remove a score. mask_mod is separate, because not every tile calls it (tile_walk.py). causal, window and
# lengths are ranges of keys (problem/ranges.py).
MASKS = (mask,)

TERMS = (sinks,)  # terms of a row's sum that belong to no key (sum_terms.py)
OF_HEADS = {"alibi_slopes": alibi, "sinks": sinks}  # options of one number for each head that have gradients


class At(NamedTuple):
    """The place of a score: query q_index at position q_pos, and key k_index, whose position is its index."""

    b: int
    h: int
    q_index: int
    k_index: int
    q_pos: int


class Placed(NamedTuple):
    """At, in a fragment. ahead: q_pos - k_index, computed so that all scores on a diagonal share the number."""

    b: int
    h: int
    q_index: int
    k_index: int
    q_pos: int
    ahead: int


class Score(NamedTuple):
    """Device functions. `score`: the numbers of the kernel's parameter of this name."""

    value: Callable[..., Any]  # (product, at, arrays, strides, score) -> the score
    with_derivative: Callable[..., Any]  # likewise -> (the score, its derivative by scale * product)
    visible: Callable[..., Any]  # (at, arrays, strides) -> whether no mask removes the score
    visible_in: Callable[
        ..., Any
    ]  # (at, asks, arrays, strides) -> the same, in a tile where mask_mod removes some: asks
    count: Callable[..., Any]  # (at, arrays, sizes, score) -> how often its weight counts in the output


@functools.cache
def make(config: Any) -> Score:
    """The chain of one kernel, in its computing type."""
    one = elements.COMPUTE_TYPES[config.dtype](1)
    value, with_derivative, visible = _first(one)
    for stage in STAGES:
        made = stage.make(config)
        if made is not None:
            value = _then(value, made.value)
            with_derivative = _then_with_derivative(with_derivative, made.value, made.with_derivative)
    for stage in MASKS:
        made = stage.make(config)
        if made is not None:
            visible = _and(visible, made)
    visible_in, own = _in_any_tile(visible), mask_mod.make(config)
    if own is not None:
        visible, visible_in = _and(visible, own), _and_where_asked(visible, own)
    return Score(value, with_derivative, visible, visible_in, counts.make(config))


def around_score_mod(config: Any) -> tuple[Any, Any]:
    """(value of the stages before score_mod, with_derivative of those after it), as in Score."""
    value, behind, _ = _first(elements.COMPUTE_TYPES[config.dtype](1))
    at = STAGES.index(score_mod)
    for stage in STAGES[:at]:
        made = stage.make(config)
        if made is not None:
            value = _then(value, made.value)
    for stage in STAGES[at + 1 :]:
        made = stage.make(config)
        if made is not None:
            behind = _then_with_derivative(behind, made.value, made.with_derivative)
    return value, behind


def by_head(config: Any) -> Any:
    """(at) -> the score's derivative by the option that is one number for each head; None if no stage has one.

    It is the derivative of the stage itself: the stages after it have derivative 1.
    """
    made = [stage for file in STAGES if (stage := file.make(config)) is not None]
    return next((stage.by_head for stage in made if stage.by_head is not None), None)


def _first(one: Any) -> tuple[Any, Any, Any]:
    @cuda.jit(device=True)
    def value(product, at, arrays, strides, score):
        return product

    @cuda.jit(device=True)
    def with_derivative(product, at, arrays, strides, score):
        return product, one

    @cuda.jit(device=True)
    def visible(at, arrays, strides):
        return True

    return value, with_derivative, visible


def _then(before: Any, stage: Any) -> Any:
    @cuda.jit(device=True)
    def value(product, at, arrays, strides, score):
        return stage(before(product, at, arrays, strides, score), at, arrays, strides, score)

    return value


def _then_with_derivative(before: Any, stage: Any, stage_with_derivative: Any) -> Any:
    """The chain rule. A stage without a derivative of its own has derivative 1."""

    @cuda.jit(device=True)
    def constant(product, at, arrays, strides, score):
        s, derivative = before(product, at, arrays, strides, score)
        return stage(s, at, arrays, strides, score), derivative

    @cuda.jit(device=True)
    def varying(product, at, arrays, strides, score):
        s, derivative = before(product, at, arrays, strides, score)
        s, own = stage_with_derivative(s, at, arrays, strides, score)
        return s, derivative * own

    return constant if stage_with_derivative is None else varying


def _and(before: Any, other: Any) -> Any:
    @cuda.jit(device=True)
    def visible(at, arrays, strides):
        return before(at, arrays, strides) and other(at, arrays, strides)

    return visible


def _and_where_asked(before: Any, other: Any) -> Any:
    @cuda.jit(device=True)
    def visible(at, asks, arrays, strides):
        return before(at, arrays, strides) and (not asks or other(at, arrays, strides))

    return visible


def _in_any_tile(visible: Any) -> Any:
    @cuda.jit(device=True)
    def in_any(at, asks, arrays, strides):
        return visible(at, arrays, strides)

    return in_any
