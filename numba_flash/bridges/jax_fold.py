"""Dimensions that jax.vmap mapped over become part of the batch, without a copy.

XLA hands over dense arrays with the mapped dimensions in front: (mapped ..., batch, ...). A dimension over which an
array is not mapped is 1 long in it. All arrays of a call are walked along these dimensions together. Neighbouring
dimensions can be one when every array steps through both with one stride. Stride 0 counts: with one batch entry an
array that is not mapped is read again for each entry. All other dimensions become a loop over problems.
"""

import itertools
import math
import operator
from typing import NamedTuple

from ..problem.options import RANKS


class Fold(NamedTuple):
    """The arrays of one attention problem, and where they begin in each turn of the loop."""

    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]  # strides of each array, in elements
    starts: tuple[tuple[int, ...], ...]  # starts[turn][array]: where the turn begins in the array, in elements


def fold(names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], mapped: int, alone: bool = False) -> Fold:
    """Folds mapped dimensions into the batch. names: the arrays' names in attention(); the first has a whole batch.

    shapes: the arrays' shapes in memory, with `mapped` dimensions in front. alone: no mapped dimension may become part
    of the batch; there may then be arrays without a batch, which RANKS does not know.
    """
    cores = [
        (1,) * (RANKS[name] + mapped - len(shape) if name in RANKS else 1) + shape[mapped:]
        for name, shape in zip(names, shapes, strict=True)
    ]
    walked = [(*shape[:mapped], core[0]) for shape, core in zip(shapes, cores, strict=True)]
    extents = [min(column) and max(column) for column in zip(*walked, strict=True)]
    steps = [_steps(walk, math.prod(core[1:])) for walk, core in zip(walked, cores, strict=True)]

    batch, stride = extents[-1], [step[-1] for step in steps]
    loops = mapped  # how many dimensions stay outside of the batch
    while (
        loops
        and not alone
        and _can_be_one(names, extents[loops - 1], [step[loops - 1] for step in steps], batch, stride)
    ):
        loops -= 1
        if batch == 1:
            stride = [step[loops] for step in steps]
        batch *= extents[loops]

    if batch == extents[-1]:  # every array as a call without mapped dimensions has it
        inner = tuple(shape[mapped:] for shape in shapes)
        strides = tuple(map(_dense, inner))
    else:
        inner = tuple((batch, *core[1:]) for core in cores)
        strides = tuple((first, *_dense(core[1:])) for first, core in zip(stride, cores, strict=True))
    turns = itertools.product(*map(range, extents[:loops]))
    starts = tuple(tuple(sum(map(operator.mul, turn, step)) for step in steps) for turn in turns)
    return Fold(inner, strides, starts)


def _can_be_one(names: tuple[str, ...], extent: int, outer: list[int], batch: int, inner: list[int]) -> bool:
    """Whether a dimension and the batch, which is inside of it, are one dimension of every array."""
    if extent == 1:
        return True
    if any(name == "lse" and not step for name, step in zip(names, outer, strict=True)):
        return False  # the kernels want lse without gaps or repetition
    return batch == 1 or all(far == near * batch for far, near in zip(outer, inner, strict=True))


def _steps(walk: tuple[int, ...], entry: int) -> list[int]:
    """Strides along the dimensions that are walked, over entries of `entry` elements."""
    return [math.prod(walk[axis + 1 :]) * entry if extent > 1 else 0 for axis, extent in enumerate(walk)]


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
