"""Rounds the sums of each array that has a gradient to its dtype, behind the loop over all scores
(kernels/score/aux_gradient.py).

Launch: grid (elements / threads, rounded up), block (config.threads).
"""

import math

import numpy as np
from numba import cuda, float64, int32, int64, uint64

from ...config.aux_gradients import PART, words
from ...ptx import local
from ..steps import elements
from ..steps.basics import inlined, nothing

LEAST = dict(float32=149, float64=1074)  # 2^-least: the smallest number of a type
ENOUGH = float64(2**60)  # adding a number below 1 changes no digit of it


@inlined
def power(n):
    """2^n, if it is a normal number."""
    return uint64(int64(n + 1023) << int64(52)).view(np.float64)


def make(config):
    compute, count, least = elements.COMPUTE_TYPES[config.dtype], words(config.dtype) - 1, LEAST[config.dtype]

    @inlined
    def value_of(at, arrays, sizes):
        sums, step = arrays.aux_sums, sizes.aux_begins[-1]
        if sums[count * step + at] != 0:
            return compute(math.nan)
        # Each word gets PART bits that are not negative, and the rest goes to the next one: so nothing cancels.
        parts = local.array(count, int64)
        for word in range(count):
            parts[word] = sums[word * step + at]
        for word in range(count - 1):
            parts[word + 1] += parts[word] >> int64(PART)
            parts[word] &= int64(2**PART - 1)
        word, found = int32(count), float64(0)
        while word > 0 and abs(found) < ENOUGH:
            word = int32(word - 1)
            found = found * float64(2**PART) + float64(parts[word])
        up = int32(word * PART - least)  # two powers: 2^up may be too small or too large a number
        half = up >> int32(1)
        return compute(found * power(half) * power(up - half))

    def and_array(before, number, kind):
        store = elements.storer(kind)
        place = 1 + number  # behind the sums

        @inlined
        def stored(at, arrays, sizes):
            before(at, arrays, sizes)
            if sizes.aux_begins[number] <= at and at < sizes.aux_begins[number + 1]:
                store(arrays[place], at - sizes.aux_begins[number], value_of(at, arrays, sizes))

        return stored

    store_at = nothing
    for number, kind in enumerate(config.given):
        store_at = and_array(store_at, number, kind)

    @cuda.jit
    def daux_round(arrays, sizes):
        at = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        if at < sizes.aux_begins[-1]:
            store_at(at, arrays, sizes)

    return daux_round
