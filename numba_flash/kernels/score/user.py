"""The caller's own functions as device functions: compiled by Numba, or as Python functions in the simulator.

make(config, option, derivative) -> call(before, at, arrays, strides). `before` is (the score,) for a score_mod and ()
for a mask_mod. With a derivative, call returns (score, derivative by the score before); otherwise the score or the
truth. at: an At.
"""

import functools

import numpy as np
from numba import config as numba_config, cuda, int64

from ...arrays.dtypes import ITEM_SIZE
from ...ptx import local
from ..steps import elements
from ..steps.basics import inlined


def make(config, option, derivative=False):
    return (_simulated if numba_config.ENABLE_CUDASIM else _compiled)(config, option, derivative)


def calls_mask_mod(config):
    return config.function("mask_mod") is not None


def present(config):
    """Whether the kernel calls a score_mod or mask_mod."""
    return config.has("score_mod") or calls_mask_mod(config)


@functools.cache
def both(config, derivative):
    """Both functions on one score: apply(product, at, needs_mask, arrays, strides, score) -> (product, slope, whether
    it counts). With a score_mod, product is its result for scale * product. slope: its derivative, or 1 without
    `derivative`. needs_mask: whether mask_mod decides here (tile_walk.py)."""
    has_score_mod, has_mask_mod = config.has("score_mod"), calls_mask_mod(config)
    one = elements.COMPUTE_TYPES[config.dtype](1)
    changed = make(config, "score_mod", derivative) if has_score_mod else None
    visible = make(config, "mask_mod") if has_mask_mod else None

    @inlined
    def apply(product, at, needs_mask, arrays, strides, score):
        seen, slope = True, one
        if has_mask_mod:
            if needs_mask:
                seen = visible(at, arrays, strides)
        if has_score_mod:
            if seen:
                if derivative:
                    product, slope = changed(product * score.scale, at, arrays, strides)
                else:
                    product = changed(product * score.scale, at, arrays, strides)
        return product, slope, seen

    return apply


def recorded(config):
    """-> aux_gradient(s, at, read, arrays, strides, sizes): the result of score_mod, its derivative by the read-th
    number that it reads from the arrays config.wanted_aux, the index of that number, and how many numbers it reads.

    A function may read any number of numbers, in loops too: so it is called once for each.
    """
    return (_simulated_recorded if numba_config.ENABLE_CUDASIM else _compiled_recorded)(config)


def _applier(config, option, recorded=()):
    """-> apply(before, at, arrays, strides, record), a device function; the Function; the type in which it computes.
    recorded: of which aux arrays `record`, the kernel's sizes and an array, notes what is read."""
    from ...functions import compiled

    # Other kernels also call a mask_mod, and all must get the same answer (functions.compiled.BASES).
    quick = option == "score_mod" and ITEM_SIZE[config.dtype] == 2
    function, base = config.function(option), "for 16 bits" if quick else config.compute_dtype
    whole, (query, key) = compiled.as_number("whole", base, config.narrow), compiled.as_positions(base, config.narrow)
    compute, asks_row = inlined(function.build(compiled.stand_ins(base), inlined)), function.asks_row
    count, behind = len(config.aux), int(config.counted)  # the counters come after the arrays

    def and_table(before, number, dtype, ndim):
        of_arrays, of_strides, is_recorded = number - count - behind, number - count, number in recorded
        wanted = recorded.index(number) if is_recorded else 0
        table = compiled.as_table(dtype, ndim, base, config.narrow and not recorded)
        if is_recorded:
            table = compiled.as_recorded_table(dtype, ndim, base)

        @inlined
        def tables(arrays, strides, record):
            if is_recorded:
                sizes, state = record
                made = table(arrays[of_arrays], strides[of_strides], sizes.aux_begins[wanted], state)
            else:
                made = table(arrays[of_arrays], strides[of_strides])
            return before(arrays, strides, record) + (made,)

        return tables

    @inlined
    def tables(arrays, strides, record):
        return ()

    for number, (dtype, ndim) in enumerate(config.aux):
        tables = and_table(tables, number, dtype, ndim)

    @inlined
    def row(at):
        return (whole(at.q_index),) if asks_row else ()

    @inlined
    def apply(before, at, arrays, strides, record):
        where = whole(at.b), whole(at.h), query(at.q_pos, at.ahead), key(at.k_index)
        return compute(*(row(at) + before + where + tables(arrays, strides, record)))

    return apply, function, base


def _compiled(config, option, derivative):
    from ...functions import compiled

    apply, function, base = _applier(config, option)
    if option == "mask_mod":
        truth = compiled.truth_of(option, function)

        @inlined
        def visible(at, arrays, strides):
            return truth(apply((), at, arrays, strides, ()))

        return visible
    number = compiled.as_number("dual" if derivative else "real", base)
    result, slope = compiled.result(option, base, function), compiled.derivative(option, base, function)

    @inlined
    def changed(s, at, arrays, strides):
        y = apply((number(s),), at, arrays, strides, ())
        return (result(y), slope(y)) if derivative else result(y)

    return changed


def _compiled_recorded(config):
    from ...functions import compiled

    apply, function, base = _applier(config, "score_mod", config.wanted_aux)
    number, reads = compiled.as_number("real", base), compiled.READS
    result, slope = (make("score_mod", base, function) for make in (compiled.result, compiled.derivative))

    @inlined
    def aux_gradient(s, at, read, arrays, strides, sizes):
        state = local.array(reads, int64)  # in registers
        state[0], state[1], state[2] = 0, read, 0
        y = apply((number(s),), at, arrays, strides, (sizes, state))
        return result(y), slope(y), state[2], state[0]

    return aux_gradient


def _python(config, option, recorded=()):
    """-> (the Function, the type in which it computes, where(at), tables(arrays)), for the simulator."""
    from ...functions import numbers

    base, count, behind = np.dtype(config.compute_dtype).type, len(config.aux), int(config.counted)

    def where(at):
        # Compiled functions use `ahead`, Python's use both positions: they must agree.
        assert at.ahead == at.q_pos - at.k_index, f"ahead is wrong: {at}"
        return at.b, at.h, at.q_pos, at.k_index, at.q_index

    def tables(arrays):
        own = arrays[len(arrays) - count - behind : len(arrays) - behind]
        return [
            numbers.RecordedTable(base, x.array, n) if n in recorded else numbers.Table(base, x.array)
            for n, x in enumerate(own)
        ]

    return config.function(option), base, where, tables


def _simulated(config, option, derivative):
    from ...functions import numbers

    function, base, where, tables = _python(config, option)

    @cuda.jit(device=True)
    def visible(at, arrays, strides):
        return numbers.mask_of(function, base, where(at), tables(arrays))

    @cuda.jit(device=True)
    def changed(s, at, arrays, strides):
        y = numbers.score_of(function, base, s, where(at), tables(arrays), derivative)
        return (y.x, base(0) if y.d is None else y.d) if derivative else y.x

    return visible if option == "mask_mod" else changed


def _simulated_recorded(config):
    from ...functions import numbers

    function, base, where, tables = _python(config, "score_mod", config.wanted_aux)

    @cuda.jit(device=True)
    def aux_gradient(s, at, read, arrays, strides, sizes):
        y, d = numbers.score_of(function, base, s, where(at), tables(arrays), False)
        parts = list(numbers.parts_of(d))
        if read >= len(parts):
            return y, base(0), np.int64(0), np.int64(len(parts))
        (n, place), slope = parts[read]
        index = np.int64(sizes.aux_begins[config.wanted_aux.index(n)] + place)
        return y, base(slope), index, np.int64(len(parts))

    return aux_gradient
