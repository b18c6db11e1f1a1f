"""The gradient of aux, the arrays that a score_mod reads, as docs/stages.md derives it. Its bits do not depend on
the order of the additions.

A term is dS of a score times the derivative of score_mod by one number that it read for that score. No bound of it is
known before: |dS| is at most p (|do| |v| + |delta|), but a caller's function may have any derivative. So the sums are
exact, and then no order matters.

A thread adds up consecutive terms of one element of an array, in their order. Which these are follows from the shapes
alone. Their total is m * 2^(s - least), with s >= 0 and 2^-least the smallest number of the type. It goes into the
element's words, integers of 64 bits, each of PART bits more than the one before:

    word w counts 2^(PART w - least)       m * 2^(s % PART) is added to the words from s // PART on, PART bits to each

So a word has room for 2^(63 - PART) totals. The last word counts totals that are NaN or infinite. daux_round.py makes
a number of the words. They lie word after word, each with its numbers of all elements.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, float64, int32, int64, uint32, uint64

from ...config.aux_gradients import PART, words
from ...ptx import bits, memory, special, vote
from ..steps import elements, numbers
from ..steps.basics import inlined, named
from . import user


class Run(NamedTuple):
    """A thread's current element of each array, and the sum that it owes to it, in registers.

    A kernel creates these local arrays itself: if a device function created and returned one, the array would end with
    that function, and the compiler would discard its contents.
    """

    place: Any  # (arrays,) int64; -1: none
    total: Any  # (arrays,) of the computing type


def _parts_of(compute_dtype):
    """-> parts(x): (sign, m, s, whether x is NaN or infinite)."""
    is_double = compute_dtype == "float64"

    @inlined
    def parts(x):
        if is_double:
            word = float64(x).view(np.uint64)
            exponent, mantissa, most = int32((word >> uint64(52)) & uint64(2047)), word & uint64(2**52 - 1), int32(2047)
        else:
            word = float32(x).view(np.uint32)
            exponent, most = int32((word >> uint32(23)) & uint32(255)), int32(255)
            mantissa = uint64(word & uint32(2**23 - 1))
        if exponent != 0:
            mantissa |= uint64(2**52 if is_double else 2**23)
        return int64(-1 if x < 0 else 1), mantissa, max(exponent - int32(1), int32(0)), exponent == most

    return parts


def make(config):
    count, last_word, ask = len(config.wanted_aux), words(config.compute_dtype) - 1, user.recorded(config)
    parts_of, zero = _parts_of(config.compute_dtype), elements.COMPUTE_TYPES[config.dtype](0)
    warp_sum = numbers.of(config.compute_dtype).warp_sum

    @inlined
    def add_to(word, number, place, arrays, sizes):
        memory.add_i64(memory.address(arrays.aux_sums, word * sizes.aux_begins[-1] + place), number)

    @inlined
    def store(place, total, arrays, sizes):
        """Adds a run's total to its element."""
        if place >= 0 and total != zero:
            sign, mantissa, shift, special = parts_of(total)
            if special:
                add_to(int64(last_word), int64(1), place, arrays, sizes)
            else:
                word = int64(uint32(shift) // uint32(PART))
                up = uint64(shift - int32(word) * int32(PART))
                part, left = (mantissa << up) & uint64(2**PART - 1), mantissa >> (uint64(PART) - up)
                while part | left != 0:
                    add_to(word, sign * int64(part), place, arrays, sizes)
                    part, left = left & uint64(2**PART - 1), left >> uint64(PART)
                    word += 1

    @inlined
    def plus(total, ds, slope):
        """total + ds * slope, rounded once in whatever code it stands. A 0 adds nothing, also beside an infinity."""
        return cuda.fma(ds, slope, total) if ds != zero and slope != zero else total

    @inlined
    def start(run):
        for number in range(count):
            run.place[number], run.total[number] = -1, zero

    @inlined
    def add(run, ds, s, slope, place, reads, at, arrays, strides, sizes):
        """ds: of score_mod's result for s, not 0; slope to reads: what user.recorded returns for the first number that
        it read."""
        read = int64(0)
        while read < reads:
            if read > 0:
                _, slope, place, _ = ask(s, at, read, arrays, strides, sizes)
            for number in range(count):
                if place == run.place[number]:
                    run.total[number] = plus(run.total[number], ds, slope)
                # Nobody checks the bounds of a function's reads; but nothing is written out of bounds.
                elif slope != zero and sizes.aux_begins[number] <= place and place < sizes.aux_begins[number + 1]:
                    store(run.place[number], run.total[number], arrays, sizes)
                    run.place[number], run.total[number] = place, plus(zero, ds, slope)
            read += 1

    @inlined
    def is_same(run, place, reads):
        """Whether `add` would add one term to the run's total, and do nothing else."""
        return count == 1 and reads == 1 and place == run.place[0]

    @inlined
    def add_same(run, ds, slope):
        run.total[0] = plus(run.total[0], ds, slope)

    @inlined
    def finish(run, arrays, sizes):
        for number in range(count):
            store(run.place[number], run.total[number], arrays, sizes)

    @inlined
    def finish_warp(run, arrays, sizes):
        """finish for one array, where all lanes that have an element have the same one."""
        there = vote.ballot(uint32(run.place[0] >= 0))
        total = warp_sum(run.total[0])
        if there != 0 and (special.thread_index() & int32(31)) == bits.highest(there):
            if sizes.aux_begins[0] <= run.place[0] and run.place[0] < sizes.aux_begins[1]:
                store(run.place[0], total, arrays, sizes)

    return named(start, add, is_same, add_same, finish, finish_warp)
