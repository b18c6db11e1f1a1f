"""The gradient of aux, the arrays that a score_mod reads, as docs/stages.md derives it. Its bits do not depend on
the order of the additions.

A term is dS of a score times the derivative of score_mod by one number that it read for that score. The loop over all
scores runs twice: the first run finds the largest exponent of each element's terms (of_bounds), the second adds the
terms as fixed-point numbers.

    exponent  e: all terms of the element are below 2^e        room  h: there are at most 2^h terms
    sum       of round(term * 2^(61 - h - e)); in float64 a second sum of the remainders, times 2^(62 - h) more

A thread adds up consecutive terms of one element before it adds them to the sum; in float32 with all the bits for which
its own terms leave room.

sizes.term_bits is h if each score reads one number, sizes.run_bits the same for one thread's terms. aux_bounds[0] is
the largest number of numbers that score_mod read for a score.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import float32, float64, int32, int64, uint32, uint64

from ...ptx import cvt, memory
from ..steps import elements
from ..steps.inlined import inlined
from ..steps.named import named
from . import user

ROOM = 61  # bits of a sum before its sign, less one for exponents that differ by a rounding between the walks


class Exponents(NamedTuple):
    """Of a type of real numbers: a number is below 2^(its stored exponent - bias); special: the exponent of NaN and
    Inf."""

    special: int
    bias: int

    @staticmethod
    def of(compute_dtype):
        return Exponents(2047, 1022) if compute_dtype == "float64" else Exponents(255, 126)


def words(compute_dtype):
    """int64 words of the sum of an element."""
    return 2 if compute_dtype == "float64" else 1


class Run(NamedTuple):
    """A thread's current element and the sum that it owes to it, in registers.

    A kernel creates these local arrays itself: if a device function created and returned one, the array would end with
    that function, and the compiler would discard its contents.
    """

    place: Any  # (1,) int64; -1: none
    terms: Any  # (words,) int64: the largest exponent, or the sum
    factors: Any  # (2,) the factors of a term
    reads: Any  # (1,) int64, the most numbers that score_mod read for a score


def powers(compute_dtype):
    """-> power(n): 2^n of the type, if it is a normal number."""
    is_double = compute_dtype == "float64"

    @inlined
    def power(n):
        if is_double:
            return uint64(int64(n + 1023) << int64(52)).view(np.float64)
        return uint32(int32(n + 127) << int32(23)).view(np.float32)

    return power


def _exponent_of(compute_dtype):
    """-> exponent(term), as stored; at least 1, which also stands for smaller numbers."""
    is_double = compute_dtype == "float64"

    @inlined
    def exponent(term):
        if is_double:
            return max(uint32((float64(term).view(np.uint64) >> uint64(52)) & uint64(2047)), uint32(1))
        return max((float32(term).view(np.uint32) >> uint32(23)) & uint32(255), uint32(1))

    return exponent


@inlined
def bits_of(count):
    """The least h with count <= 2^h."""
    h = int64(0)
    while (int64(1) << h) < count:
        h += 1
    return h


@inlined
def read_bits(arrays):
    """Bits of room that are needed because score_mod reads several numbers for one score."""
    return bits_of(int64(arrays.aux_bounds[0]))


def make(config):
    made, is_double = Exponents.of(config.compute_dtype), config.compute_dtype == "float64"
    real, count = elements.COMPUTE_TYPES[config.dtype], words(config.compute_dtype)
    ask, power, of_bounds = user.recorded(config), powers(config.compute_dtype), config.of_bounds
    exponent, zero = _exponent_of(config.compute_dtype), real(0)
    whole = cvt.whole_f64 if is_double else cvt.whole_f32

    @inlined
    def raise_bound(place, found, arrays):
        if arrays.aux_bounds[place + 1] < found:  # a value just stored by another thread may be missed, nothing else
            memory.maximum(memory.address(arrays.aux_bounds, place + 1), found)

    @inlined
    def store(run, arrays, sizes):
        """Adds the run's sum to its element."""
        place = run.place[0]
        if place >= 0:
            if of_bounds:
                raise_bound(place, uint32(run.terms[0]), arrays)
            elif is_double:
                for word in range(count):
                    memory.add_i64(memory.address(arrays.aux_sums, place * count + word), run.terms[word])
            else:
                drop = sizes.term_bits - sizes.run_bits
                half = (int64(1) << drop) >> int64(1)
                memory.add_i64(memory.address(arrays.aux_sums, place), (run.terms[0] + half) >> drop)

    @inlined
    def take(run, place, arrays, sizes):
        """The following terms belong to this element."""
        store(run, arrays, sizes)
        run.place[0] = place
        for word in range(count):
            run.terms[word] = 0
        if not of_bounds:
            bound = int64(arrays.aux_bounds[place + 1])
            room = sizes.term_bits if is_double else sizes.run_bits
            up = ROOM - room - read_bits(arrays) - (bound - made.bias)
            run.factors[0] = power(up >> int64(1))  # 2^up itself may be too large
            run.factors[1] = power(up - (up >> int64(1)))

    @inlined
    def one(run, term, arrays, sizes):
        """Adds a term that is not 0."""
        if of_bounds:
            run.terms[0] = max(run.terms[0], int64(exponent(term)))
        else:
            scaled = term * run.factors[0] * run.factors[1]
            if abs(scaled) < real(2.0**62):
                fixed = whole(scaled)
                run.terms[0] += fixed
                if is_double:
                    room = sizes.term_bits + read_bits(arrays)
                    run.terms[1] += whole((scaled - real(fixed)) * power(ROOM + 1 - room))
            else:  # NaN, which the first run has found; or too large only now, by a rounding
                raise_bound(run.place[0], uint32(made.special), arrays)

    @inlined
    def start(run):
        run.place[0], run.reads[0] = -1, 1
        for word in range(count):
            run.terms[word] = 0

    @inlined
    def add(run, ds, s, slope, place, reads, at, arrays, strides, sizes):
        """ds: of score_mod's result for s, not 0; slope to reads: what user.recorded returns for the first number that
        it read."""
        if of_bounds:
            run.reads[0] = max(run.reads[0], reads)
        read = int64(0)
        while read < reads:
            if read > 0:
                _, slope, place, _ = ask(s, at, read, arrays, strides, sizes)
            term = ds * slope
            # Nobody checks the bounds of a function's reads; but nothing is written out of bounds.
            if slope != zero and term != zero and place >= 0 and place < sizes.aux_begins[-1]:
                if place != run.place[0]:
                    take(run, place, arrays, sizes)
                one(run, term, arrays, sizes)
            read += 1

    @inlined
    def finish(run, arrays, sizes):
        store(run, arrays, sizes)
        if of_bounds:
            if arrays.aux_bounds[0] < uint32(run.reads[0]):
                memory.maximum(memory.address(arrays.aux_bounds, 0), uint32(run.reads[0]))

    return named(start, add, finish)
