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


def _base(config, option):
    """The type in which a function computes (functions.compiled.BASES). Other kernels also call a mask_mod, and all
    must get the same answer."""
    quick = option == "score_mod" and ITEM_SIZE[config.dtype] == 2
    return "for 16 bits" if quick else config.compute_dtype


def _positions(config, option, base):
    """-> (row(at), where(at)): the integer arguments of a function; row: that of q, if it asks for it."""
    from ...functions import compiled

    whole, (query, key) = compiled.as_number("whole", base, config.narrow), compiled.as_positions(base, config.narrow)
    asks_row = config.function(option).asks_row

    @inlined
    def where(at):
        return whole(at.b), whole(at.h), query(at.q_pos, at.ahead), key(at.k_index)

    @inlined
    def row(at):
        return (whole(at.q_index),) if asks_row else ()

    return row, where


def _compiled(config, option, derivative):
    from ...functions import compiled

    function, base = config.function(option), _base(config, option)
    call = inlined(function.build(compiled.stand_ins(base), inlined))
    (row, where), tables = _positions(config, option, base), _tables(config, base)
    if option == "mask_mod":
        truth = compiled.truth_of(option, function)

        @inlined
        def visible(at, arrays, strides):
            return truth(call(*(row(at) + where(at) + tables(arrays, strides, ()))))

        return visible
    number = compiled.as_number("dual" if derivative else "real", base)
    result, slope = compiled.result(option, base, function), compiled.derivative(option, base, function)

    @inlined
    def changed(s, at, arrays, strides):
        y = call(*(row(at) + (number(s),) + where(at) + tables(arrays, strides, ())))
        return (result(y), slope(y)) if derivative else result(y)

    return changed


def recorded(config):
    """-> aux_gradient(s, at, read, arrays, strides, sizes): the result of score_mod, its derivative by the read-th
    number that it reads from the arrays config.wanted_aux, the index of that number, and how many numbers it reads.

    A function may read any number of numbers, in loops too: so it is called once for each.
    """
    return (_simulated_recorded if numba_config.ENABLE_CUDASIM else _compiled_recorded)(config)


def _compiled_recorded(config):
    from ...functions import compiled

    function, base = config.function("score_mod"), _base(config, "score_mod")
    call = inlined(function.build(compiled.stand_ins(base), inlined))
    row, where = _positions(config, "score_mod", base)
    number = compiled.as_number("real", base)
    result, slope = (make("score_mod", base, function) for make in (compiled.result, compiled.derivative))
    reads, tables = compiled.READS, _tables(config, base, config.wanted_aux)

    @inlined
    def aux_gradient(s, at, read, arrays, strides, sizes):
        state = local.array(reads, int64)  # in registers
        state[0], state[1], state[2] = 0, read, 0
        y = call(*(row(at) + (number(s),) + where(at) + tables(arrays, strides, (sizes, state))))
        return result(y), slope(y), state[2], state[0]

    return aux_gradient


@inlined
def _no_tables(arrays, strides, record):
    return ()


def _one_recorded_more(before, table, place, wanted):
    """record: the sizes of the kernel, and an array that notes what is read."""

    @inlined
    def tables(arrays, strides, record):
        sizes, state = record
        made = table(arrays[place], strides[place], sizes.aux_begins[wanted], state)
        return before(arrays, strides, record) + (made,)

    return tables


def _one_more(before, table, of_arrays, of_strides):
    @inlined
    def tables(arrays, strides, record):
        return before(arrays, strides, record) + (table(arrays[of_arrays], strides[of_strides]),)

    return tables


def _simulated_recorded(config):
    from ...functions import numbers

    function, base = config.function("score_mod"), np.dtype(config.compute_dtype).type
    count, wanted = len(config.aux), config.wanted_aux

    @cuda.jit(device=True)
    def aux_gradient(s, at, read, arrays, strides, sizes):
        own = arrays[len(arrays) - count :]
        tables = [
            numbers.RecordedTable(base, x.array, n) if n in wanted else numbers.Table(base, x.array)
            for n, x in enumerate(own)
        ]
        y, d = numbers.score_of(function, base, s, (at.b, at.h, at.q_pos, at.k_index, at.q_index), tables, False)
        parts = list(numbers.parts_of(d))
        if read >= len(parts):
            return y, base(0), np.int64(0), np.int64(len(parts))
        (n, place), slope = parts[read]
        return y, base(slope), np.int64(sizes.aux_begins[wanted.index(n)] + place), np.int64(len(parts))

    return aux_gradient


def _tables(config, base, recorded=()):
    """tables(arrays, strides, record) -> a tuple of all aux arrays. recorded: those of which `record` notes what is
    read."""
    from ...functions import compiled

    count, behind = len(config.aux), int(config.counted)  # the counters come after them
    tables = _no_tables
    for number, (dtype, ndim) in enumerate(config.aux):
        if number in recorded:
            table = compiled.as_recorded_table(dtype, ndim, base)
            tables = _one_recorded_more(tables, table, number - count, recorded.index(number))
        else:
            table = compiled.as_table(dtype, ndim, base, config.narrow and not recorded)
            tables = _one_more(tables, table, number - count - behind, number - count)
    return tables


def _simulated(config, option, derivative):
    from ...functions import numbers

    function, base = config.function(option), np.dtype(config.compute_dtype).type
    count, behind = len(config.aux), int(config.counted)

    def tables(arrays):
        own = arrays[len(arrays) - count - behind : len(arrays) - behind]
        return [numbers.Table(base, pointer.array) for pointer in own]

    def where(at):
        # Compiled functions use `ahead`, Python's use both positions: they must agree.
        assert at.ahead == at.q_pos - at.k_index, f"ahead is wrong: {at}"
        return at.b, at.h, at.q_pos, at.k_index, at.q_index

    @cuda.jit(device=True)
    def visible(at, arrays, strides):
        return numbers.mask_of(function, base, where(at), tables(arrays))

    @cuda.jit(device=True)
    def changed(s, at, arrays, strides):
        y = numbers.score_of(function, base, s, where(at), tables(arrays), derivative)
        return (y.x, base(0) if y.d is None else y.d) if derivative else y.x

    return visible if option == "mask_mod" else changed
