"""Finds the bounds of a mask_mod in a tile, without calling it for every score: interval arithmetic on its expression
(functions/expression.py).

An interval (least, largest) holds every number that the expression has in the tile, and maybe others: so what holds
for all of it holds for the tile. Numbers up to MOST are known; ANY stands for all others. An array is read from the
first to the last index, by the lanes of a warp together.
"""

from numba import int64, uint32, uint64

from ...functions.expression import Node, expression_of, made_of, source_of
from ...ptx import shfl
from ..steps.basics import inlined

MOST = 2**31 - 2
ANY = (-MOST - 1, MOST + 1)
LONGEST = 1024  # a read of more elements than these is taken for ANY


class _Unsupported(Exception):
    """The expression has an operation without a rule here."""


@inlined
def _known(least, largest):
    inside = least >= -MOST and largest <= MOST
    return int64(least if inside else ANY[0]), int64(largest if inside else ANY[1])


@inlined
def _floor(x, by):
    up = int64((MOST + by) // by)  # the dividend is not negative then
    return int64(uint64(x + up * by) // uint64(by)) - up


@inlined
def mul(x, y):
    a, b, c, d = x[0] * y[0], x[0] * y[1], x[1] * y[0], x[1] * y[1]
    return _known(min(min(a, b), min(c, d)), max(max(a, b), max(c, d)))


@inlined
def floordiv(x, by):
    inside = x[0] >= -MOST
    return int64(_floor(x[0], by) if inside else ANY[0]), int64(_floor(x[1], by) if inside else ANY[1])


@inlined
def mod(x, by):
    first, last = _floor(x[0], by), _floor(x[1], by)
    return int64(x[0] - first * by if first == last else 0), int64(x[1] - last * by if first == last else by - 1)


@inlined
def eq(x, y):
    return int64(x[0] == x[1] and y[0] == y[1] and x[0] == y[0]), int64(x[0] <= y[1] and y[0] <= x[1])


@inlined
def ne(x, y):
    no, maybe = eq(x, y)
    return int64(1) - maybe, int64(1) - no


@inlined
def never(x):
    """Whether it is 0 in the whole tile."""
    return x[0] == 0 and x[1] == 0


@inlined
def always(x):
    """Whether it is 0 nowhere in the tile."""
    return x[0] > 0 or x[1] < 0


@inlined
def choose(condition, x, y):
    first, second = not never(condition), not always(condition)
    low = min(x[0] if first else y[0], y[0] if second else x[0])
    return low, max(x[1] if first else y[1], y[1] if second else x[1])


RULES = dict(
    add=inlined(lambda x, y: _known(x[0] + y[0], x[1] + y[1])),
    sub=inlined(lambda x, y: _known(x[0] - y[1], x[1] - y[0])),
    min=inlined(lambda x, y: _known(min(x[0], y[0]), min(x[1], y[1]))),
    max=inlined(lambda x, y: _known(max(x[0], y[0]), max(x[1], y[1]))),
    lt=inlined(lambda x, y: (int64(x[1] < y[0]), int64(x[0] < y[1]))),
    le=inlined(lambda x, y: (int64(x[1] <= y[0]), int64(x[0] <= y[1]))),
    **dict(mul=mul, floordiv=floordiv, mod=mod, eq=eq, ne=ne, choose=choose),
)


def _reader(of_arrays, of_strides, ndim):
    """-> read(indices, arrays, strides, lane): the elements of an array at intervals of indices, by a whole warp."""

    @inlined
    def read(indices, arrays, strides, lane):
        array, sizes = arrays[of_arrays], strides[of_strides]  # shape, and strides in elements
        at, known = int64(0), True
        for axis in range(ndim - 1):
            index = indices[axis]
            known = known and index[0] == index[1] and index[0] >= 0 and index[0] < sizes[axis]
            at += index[0] * sizes[ndim + axis]
        first, last = indices[ndim - 1][0], min(indices[ndim - 1][1], sizes[ndim - 1] - 1)
        known = known and first >= 0 and first <= last and last - first < LONGEST
        low, high = uint32(2**32 - 1), uint32(0)
        if known:
            index = first + lane
            while index <= last:
                value = int64(array[at + index * sizes[2 * ndim - 1]])
                shifted = uint32(min(max(value, ANY[0]), ANY[1]) + 2**31)
                low, high = min(low, shifted), max(high, shifted)
                index += 32
        for distance in (1, 2, 4, 8, 16):
            low, high = min(low, shfl.bfly_b32(low, distance)), max(high, shfl.bfly_b32(high, distance))
        return _known(int64(low if known else 0) - 2**31, int64(high) - 2**31)

    return read


def make(config):
    """-> bounds(b, h, query, key, row, arrays, strides, lane) -> interval, for intervals, by a whole warp; None if the
    function has operations that have no rule."""

    def text_of(part, name_of):
        if not isinstance(part, Node):
            low, high = (part, part) if -MOST <= part <= MOST else ANY
            return f"(int64({low}), int64({high}))"
        name, of = part
        if not of:
            return name
        if name == "read":
            number, *indices = of
            dtype, ndim = config.aux[number]
            if "float" in dtype or not ndim:
                raise _Unsupported
            names[f"read{number}"] = _reader(number - count, number - count, ndim)
            return f"read{number}(({', '.join(map(name_of, indices))},), arrays, strides, lane)"
        if name == "length":
            return "(int64({0}), int64({0}))".format(f"strides[{of[0] - count}][{of[1]}]")
        if name in ("floordiv", "mod"):
            if isinstance(of[1], Node) or not 0 < of[1] <= MOST:
                raise _Unsupported
            return f"{name}({name_of(of[0])}, {of[1]})"
        return f"{name}({', '.join(map(name_of, of))})"

    names, count = RULES | dict(int64=int64), len(config.aux)
    expression = expression_of(config.function("mask_mod"), tuple(ndim for _, ndim in config.aux))
    if expression is None:
        return None
    try:
        body = source_of(expression, text_of)
    except _Unsupported:
        return None
    return inlined(made_of(f"def bounds(b, h, query, key, row, arrays, strides, lane):\n{body}", names))
