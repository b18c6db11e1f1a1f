"""Stand-ins for ptx.mma. Sums in float64, rounded once; those of tf32 are cut off, as GPUs do."""

import functools

import numpy as np

from .. import fragments
from .registers import check, halves, table
from .warp import together

# The places in a matrix of the elements that each lane has.
_TABLES = {
    "a": table(fragments.a_element, 8),
    "b": table(fragments.b_element, 4),
    "a_word": table(fragments.a_word, 8),
    "b_word": table(fragments.b_word, 4),
    "c": table(fragments.c_element, 4),
}


def m16n8k16(acc, a, b, kind):
    """acc (32, 4) float32, a (32, 4) and b (32, 2) uint32 -> acc + A . B."""
    a, b = _matrix(halves(a, kind), "a"), _matrix(halves(b, kind), "b")
    return _of_lanes(_matrix(acc, "c") + a @ b, "c", 4).astype(np.float32)


def words(acc, a, b):
    """acc (32, c), a (32, n) and b (32, m) in float64, an element a register -> acc + A . B in float64.

    A has 16 rows, or 8 where a lane has one element of it.
    """
    c = _matrix(acc, "c") + _matrix(a, "a_word") @ _matrix(b, "b_word")
    return _of_lanes(c, "c", acc.shape[1])


def _matrix(values, which):
    """(32, count) -> the matrix. One index for each element takes half of the time of two."""
    return values.ravel()[_places(which, values.shape[1])[0]]


def _of_lanes(matrix, which, count):
    return matrix.ravel()[_places(which, count)[1]]


@functools.cache
def _places(which, count):
    """(of each place in the matrix its place in the lanes, of each place in the lanes that in the matrix)"""
    rows, columns = (x[:, :count] for x in _TABLES[which])
    in_matrix = np.ravel_multi_index((rows, columns), (rows.max() + 1, columns.max() + 1))
    in_lanes = np.argsort(in_matrix, axis=None).reshape(rows.max() + 1, columns.max() + 1)
    return in_lanes, in_matrix


def tf32(acc, a, b):
    """acc (32, 4) float32, a (32, 4) and b (32, 2) uint32 -> acc + A . B."""
    a, b = ((x & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64) for x in (a, b))
    return cut_off(words(acc.astype(np.float64), a, b))


def cut_off(x):
    """float64 -> float32, rounded towards zero."""
    near = x.astype(np.float32)
    size = np.abs(near)
    too_large = (size > np.abs(x)) & (size < np.inf)
    return (near.view(np.int32) - too_large).view(np.float32)  # as integers they are in order of size


def _instruction(name, product, c_count, a_count, b_count):
    name = f"mma.{name}"

    def compute(warp, given):
        of_c, of_a, of_b = given[0][1::2]  # the same in all lanes
        acc = _registers([x[0] for x in given], of_c, c_count)
        a = _registers([x[2] for x in given], of_a, a_count)
        b = _registers([x[4] for x in given], of_b, b_count)
        for values in (acc, a, b):
            if values.itemsize == 4:
                check(values)
        for (registers, *_), values in zip(given, product(acc, a, b), strict=True):
            registers[of_c : of_c + c_count] = values

    def mma(acc, acc_at, a, a_at, b, b_at):
        at = int(acc_at), int(a_at), int(b_at)
        return together((name, *at), compute, (acc, at[0], a, at[1], b, at[2]))

    return mma


def _registers(arrays, at, count):
    """(32, count): the registers of all lanes from `at` on. np.stack takes three times as long."""
    return np.concatenate(arrays).reshape(len(arrays), -1)[:, at : at + count]


m16n8k16_f16 = _instruction("m16n8k16_f16", functools.partial(m16n8k16, kind="f16"), 4, 4, 2)
m16n8k16_bf16 = _instruction("m16n8k16_bf16", functools.partial(m16n8k16, kind="bf16"), 4, 4, 2)
m16n8k8_tf32 = _instruction("m16n8k8_tf32", tf32, 4, 4, 2)
m16n8k16_f64 = _instruction("m16n8k16_f64", words, 4, 8, 4)
m8n8k4_f64 = _instruction("m8n8k4_f64", words, 2, 1, 1)
