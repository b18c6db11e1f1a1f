"""A score is the result of a chain of stages, which change the product q . k before the softmax. STAGES is their order.

Each stage is a file with the same functions. `make(config)` returns its Stage, or None if the problem does not use it:
such a stage leaves no code. A new option of the score is a new file and an entry in STAGES.

Tensor-core kernels hold scores in fragments, where fragments.py composes the same stages.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda, int64

from ..steps import elements
from ..steps.basics import inlined
from . import alibi, bias, kept_weights, mask, scale, score_mod, softcap, sum_term, user

STAGES = (scale, score_mod, softcap, alibi, bias)
OF_HEADS = {"alibi_slopes": alibi, "sinks": sum_term}  # options of one number for each head that have gradients


class At(NamedTuple):
    """The place of a score: query q_index at position q_pos, and key k_index, whose position is its index.

    ahead: q_pos - k_index. In a fragment it is computed so that all scores on a diagonal share the number.
    """

    b: int
    h: int
    q_index: int
    k_index: int
    q_pos: int
    ahead: int


@inlined
def at_position(b, h, q_index, k_index, q_pos):
    return At(b, h, q_index, k_index, q_pos, int64(q_pos) - int64(k_index))


@inlined
def at_key(query, k_index):
    """The place of the score of a steps.sequence.Query and a key."""
    return at_position(query.b, query.h, query.q_index, k_index, query.q_pos)


class Score(NamedTuple):
    """Device functions. `score`: the numbers of the kernel's parameter of this name. needs_mask: whether mask_mod
    removes some score of the tile (tile_walk.py)."""

    value: Callable[..., Any]  # (product, at, arrays, strides, score) -> the score
    with_derivative: Callable[..., Any]  # likewise -> (the score, its derivative by scale * product)
    visible: Callable[..., Any]  # (at, needs_mask, arrays, strides) -> whether no mask removes the score
    masked: Callable[..., Any]  # (product, query, k_index, needs_mask, arrays, strides, score) -> the score or -inf
    # (product, row_lse, at, needs_mask, arrays, strides, score) -> (p, derivative of the score by scale * product)
    weight: Callable[..., Any]
    weight_factor: Callable[..., Any]  # (at, arrays, sizes, score) -> 1, or a random weight's factor


@functools.cache
def make(config):
    """The chain of one kernel, in its computing type."""
    compute = elements.COMPUTE_TYPES[config.dtype]
    minus_inf = compute(-math.inf)
    (value, with_derivative), visible = _chain(config, STAGES), _visible(config)

    @inlined
    def masked(product, query, k_index, needs_mask, arrays, strides, score):
        """The score of a steps.sequence.Query and a key, or -inf if the query does not see the key."""
        at = at_key(query, k_index)
        s = minus_inf
        if query.first_key <= k_index and k_index < query.end_key and visible(at, needs_mask, arrays, strides):
            s = value(product, at, arrays, strides, score)
        return s

    @cuda.jit(device=True)
    def weight(product, row_lse, at, needs_mask, arrays, strides, score):
        """P of one position, recomputed from the row's log-sum-exp: a backward stores no scores (Dao et al., 2022,
        section 3.1). If a mask removes the key or the row sees none (lse -inf), p is 0 and is not computed."""
        p, derivative = compute(0), compute(1)
        if row_lse != minus_inf and visible(at, needs_mask, arrays, strides):
            s, derivative = with_derivative(product, at, arrays, strides, score)
            if s != minus_inf:
                exponent = s - row_lse
                p = math.exp(compute(0) if exponent > compute(0) else exponent)  # above 0 is the rounding of lse
        return p, derivative

    return Score(value, with_derivative, visible, masked, weight, kept_weights.make(config))


def around_score_mod(config):
    """(value of the stages before score_mod, with_derivative of those after it), as in Score."""
    at = STAGES.index(score_mod)
    return _chain(config, STAGES[:at])[0], _chain(config, STAGES[at + 1 :])[1]


def by_head(config):
    """(at) -> the score's derivative by the option that is one number for each head; None if no stage has one.

    It is the derivative of the stage itself: the stages after it have derivative 1.
    """
    made = [stage for file in STAGES if (stage := file.make(config)) is not None]
    return next((stage.by_head for stage in made if stage.by_head is not None), None)


def _chain(config, stages):
    """(value, with_derivative) of these stages, as in Score."""
    one = elements.COMPUTE_TYPES[config.dtype](1)

    @cuda.jit(device=True)
    def product_alone(product, at, arrays, strides, score):
        return product

    @cuda.jit(device=True)
    def with_one(product, at, arrays, strides, score):
        return product, one

    value, with_derivative = product_alone, with_one
    for stage in stages:
        made = stage.make(config)
        if made is not None:
            value = _then(value, made.value)
            with_derivative = _then_with_derivative(with_derivative, made.value, made.with_derivative)
    return value, with_derivative


def _visible(config):
    """`visible` of Score. causal, window and lengths are ranges of keys (problem/ranges.py), and no concern of it."""
    has_mask, has_mask_mod, shown = config.has("mask"), config.has("mask_mod"), mask.make(config)
    leaves = user.make(config, "mask_mod") if has_mask_mod else None

    @cuda.jit(device=True)
    def visible(at, needs_mask, arrays, strides):
        seen = True
        if has_mask:
            seen = shown(at, arrays, strides)
        if has_mask_mod:  # not every tile calls it (tile_walk.py)
            seen = seen and (not needs_mask or leaves(at, arrays, strides))
        return seen

    return visible


def _then(before, stage):
    @cuda.jit(device=True)
    def value(product, at, arrays, strides, score):
        return stage(before(product, at, arrays, strides, score), at, arrays, strides, score)

    return value


def _then_with_derivative(before, stage, stage_with_derivative):
    """The chain rule. A stage without a derivative of its own has derivative 1."""
    varies = stage_with_derivative is not None

    @cuda.jit(device=True)
    def with_derivative(product, at, arrays, strides, score):
        s, derivative = before(product, at, arrays, strides, score)
        if varies:
            s, own = stage_with_derivative(s, at, arrays, strides, score)
            return s, derivative * own
        return stage(s, at, arrays, strides, score), derivative

    return with_derivative
