"""Intervals of a mask_mod in a tile: they hold all that the function says there, and decide where they can."""

import numpy as np
import pytest
from numba import cuda

from numba_flash import mods
from numba_flash.abi.arguments import tuple_class
from numba_flash.abi.parameters import StatesTile
from numba_flash.arrays import read
from numba_flash.config.tile_states import TileStatesConfig
from numba_flash.functions.function import Function
from numba_flash.kernels.score import tile_bounds
from numba_flash.problem.options import uses
from numba_flash.ptx.sim.launch import run

IDS = np.repeat(np.array([[7, -3, 2**40, 9]]), [34, 3, 29, 14], axis=1)
FLAGS = np.arange(80) < 40


def by_operators(b, h, q, k):
    return ((q - k) % 7 <= 3) & (q * -2 < k) | (min(q, 2 * k, 9) == 9)


def by_branches(b, h, q, k):
    if q // 16 == k // 16:
        return q >= k
    return k % 32 < 4 if h else abs(q - k) < 20 and q != 3


def of_large_numbers(b, h, q, k):
    return q * 2**40 - k * 2**40 > 5 and (q + 2**31) // 3 > k


def by_length(b, h, q, k, ids):
    return ids[0, -1] == 9 or k < ids.shape[1] - 30 or len(ids) > 1


def with_arrays(b, h, q, k, ids, flags):
    return ids[b, q] == ids[b, k] and (flags[q] or flags[max(k - 60, 0)])


# (function, arrays, whether its intervals must decide: (queries, keys) -> the truth, of some tiles)
CASES = {
    "causal": (mods.causal, (), {(0, 9, 10, 80): False, (10, 20, 0, 10): True}),
    "window": (mods.sliding_window(20, 3), (), {(0, 9, 40, 60): False, (30, 40, 20, 33): True}),
    "prefix": (mods.prefix_lm, (np.array([30]),), {(0, 9, 10, 29): True, (0, 9, 40, 60): False}),
    "neighborhood": (mods.neighborhood((8, 10), (3, 5)), (), {(0, 19, 40, 59): False}),
    "operators": (by_operators, (), {(9, 9, 40, 50): True, (0, 0, 0, 0): False}),
    "branches": (by_branches, (), {(0, 4, 8, 15): False, (8, 15, 0, 4): True, (48, 50, 1, 5): False}),
    "large numbers": (of_large_numbers, (), {}),
    "length": (by_length, (IDS,), {(0, 70, 0, 40): True}),
    "arrays": (with_arrays, (IDS, FLAGS), {(0, 20, 34, 36): False, (5, 20, 6, 21): True, (70, 74, 71, 75): True}),
}


def intervals(function, aux, tiles):
    """Of each tile (query, last query, key, last key), both ends included, of head 0."""
    used = uses(mask_mod=Function.of("mask_mod", function), aux=tuple((x.dtype.name, x.ndim) for x in aux))
    bounds = tile_bounds.make(TileStatesConfig(StatesTile(16, 16, 1), "float32", used))
    names = ("found", *(f"aux{number}" for number in range(len(aux))))
    arrays_of, strides_of = (tuple_class(kind, names) for kind in ("arrays", "strides"))
    found = np.zeros(2 * len(tiles), np.int64)

    @cuda.jit
    def kernel(arrays, strides):
        lane, zero = np.int32(cuda.threadIdx.x), (np.int64(0), np.int64(0))
        for n, (q, last_q, k, last_k) in enumerate(tiles):
            queries, keys = (np.int64(q), np.int64(last_q)), (np.int64(k), np.int64(last_k))
            low, high = bounds(zero, zero, queries, keys, queries, arrays, strides, lane)
            if lane == 0:
                arrays.found[2 * n], arrays.found[2 * n + 1] = low, high

    given = arrays_of(*(read(name, x) for name, x in zip(names, (found, *aux), strict=True)))
    steps = strides_of(0, *((*x.shape, *(step // x.itemsize for step in x.strides)) for x in aux))
    run(lambda: kernel, 1, 32, 0, given, (steps,))
    return found.reshape(-1, 2)


@pytest.mark.parametrize("name", CASES)
def test_intervals_hold_what_the_function_says(name):
    function, aux, decided = CASES[name]
    generator = np.random.default_rng(4)
    ends = np.sort(generator.integers(0, 80, (60, 2, 2)), axis=-1)
    ends[::3, :, 1] = np.minimum(ends[::3, :, 0] + 3, 79)  # small ones, which are decided more often
    tiles = [*decided, *(tuple(int(x) for x in tile.reshape(-1)) for tile in ends)]
    found = intervals(function, aux, tiles)
    for (q, last_q, k, last_k), (low, high) in zip(tiles, found, strict=True):
        truths = {bool(function(0, 0, i, j, *aux)) for i in range(q, last_q + 1) for j in range(k, last_k + 1)}
        assert not (low == high == 0 and True in truths), (q, last_q, k, last_k)
        assert not ((low > 0 or high < 0) and False in truths), (q, last_q, k, last_k)
    for truth, (low, high) in zip(decided.values(), found, strict=False):
        assert (low > 0 or high < 0) if truth else low == high == 0


@pytest.mark.parametrize("function", [lambda b, h, q, k: q / 2 > k, lambda b, h, q, k: q % (k + 1) == 0])
def test_what_has_no_rule_is_left_to_calls(function):
    used = uses(mask_mod=Function.of("mask_mod", function))
    assert tile_bounds.make(TileStatesConfig(StatesTile(16, 16, 1), "float32", used)) is None
