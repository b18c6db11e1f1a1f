"""The caller's own functions as device functions: of Numba's numbers, or in the simulator of Python's.

make(config, option, derivative) -> call(before, at, arrays, strides). `before` is (the score,) for a score_mod and ()
for a mask_mod. It gives (score, derivative by the score before) with a derivative, else the score or the truth.
"""

from typing import Any

import numpy as np
from numba import config as numba_config
from numba import cuda

from ..steps.inlined import inlined


def make(config: Any, option: str, derivative: bool = False) -> Any:
    return (_simulated if numba_config.ENABLE_CUDASIM else _compiled)(config, option, derivative)


def _compiled(config: Any, option: str, derivative: bool) -> Any:
    from ...functions import compiled

    function, base = config.function(option), config.compute_dtype
    call = inlined(function.build(compiled.stand_ins(base), inlined))
    whole, tables = compiled.as_number("whole", base), _tables(config)
    if option == "mask_mod":
        truth = compiled.truth_of(option, function)

        @inlined
        def visible(at, arrays, strides):
            where = (whole(at.b), whole(at.h), whole(at.q_pos), whole(at.k_index))
            return truth(call(*(where + tables(arrays, strides))))

        return visible
    number = compiled.as_number("dual" if derivative else "real", base)
    result, slope = compiled.result(option, base, function), compiled.derivative(option, base, function)

    @inlined
    def found(s, at, arrays, strides):
        given = (number(s), whole(at.b), whole(at.h), whole(at.q_pos), whole(at.k_index))
        return call(*(given + tables(arrays, strides)))

    @inlined
    def value(s, at, arrays, strides):
        return result(found(s, at, arrays, strides))

    @inlined
    def with_derivative(s, at, arrays, strides):
        y = found(s, at, arrays, strides)
        return result(y), slope(y)

    return with_derivative if derivative else value


def _tables(config: Any) -> Any:
    """tables(arrays, strides) -> a tuple of all aux arrays."""
    from ...functions import compiled

    count, behind = len(config.aux), int(config.counted)  # the counters come after them

    @inlined
    def tables(arrays, strides):
        return ()

    for number, (dtype, ndim) in enumerate(config.aux):
        table = compiled.as_table(dtype, ndim, config.compute_dtype)
        tables = _one_more(tables, table, number - count - behind, number - count)
    return tables


def _one_more(before: Any, table: Any, of_arrays: int, of_strides: int) -> Any:
    @inlined
    def tables(arrays, strides):
        return before(arrays, strides) + (table(arrays[of_arrays], strides[of_strides]),)

    return tables


def _simulated(config: Any, option: str, derivative: bool) -> Any:
    from ...functions import numbers

    function, base = config.function(option), np.dtype(config.compute_dtype).type
    count, behind = len(config.aux), int(config.counted)

    def tables(arrays):
        own = arrays[len(arrays) - count - behind : len(arrays) - behind]
        return [numbers.Table(base, pointer.array) for pointer in own]

    def where(at):
        return at.b, at.h, at.q_pos, at.k_index

    @cuda.jit(device=True)
    def visible(at, arrays, strides):
        return numbers.mask_of(function, base, where(at), tables(arrays))

    @cuda.jit(device=True)
    def value(s, at, arrays, strides):
        return numbers.score_of(function, base, s, where(at), tables(arrays), False).x

    @cuda.jit(device=True)
    def with_derivative(s, at, arrays, strides):
        y = numbers.score_of(function, base, s, where(at), tables(arrays), True)
        return y.x, base(0) if y.d is None else y.d

    if option == "mask_mod":
        return visible
    return with_derivative if derivative else value
