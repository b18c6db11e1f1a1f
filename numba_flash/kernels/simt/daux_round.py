"""Behind the walks over all scores: the sums of each array that has a gradient, in its dtype
(kernels/score/aux_gradient.py).

Launch: grid (elements / threads, rounded up), block (config.threads).
"""

import math

from numba import cuda, int64

from ..score import aux_gradient
from ..steps import elements
from ..steps.inlined import inlined, nothing


def make(config):
    dtype, words = config.compute_dtype, aux_gradient.words(config.compute_dtype)
    special, bias = aux_gradient.Exponents.of(dtype)
    compute, power = elements.COMPUTE_TYPES[dtype], aux_gradient.powers(dtype)
    nan, double = compute(math.nan), words == 2

    @inlined
    def scaled(total, up):
        """total * 2^up, by two powers: one may be too small or too large a number."""
        half = up >> int64(1)
        return compute(total) * power(half) * power(up - half)

    @inlined
    def value_of(at, arrays, sizes):
        bound = int64(arrays.aux_bounds[at + 1])
        room = sizes.term_bits + aux_gradient.read_bits(arrays)
        up = bound - bias - aux_gradient.ROOM + room
        found = nan
        if bound != special:
            found = scaled(arrays.aux_sums[at * words], up)
            if double:
                found += scaled(arrays.aux_sums[at * words + words - 1], up - (aux_gradient.ROOM + 1 - room))
        return found

    def and_array(before, number, kind):
        store = elements.storer(kind)
        place = 2 + number  # behind bounds and sums

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
