"""Stand-ins for ptx.mma. Sums in float64, rounded once; those of tf32 are cut off, as GPUs do."""

import functools

import numpy as np

from .. import fragments
from .registers import check, halves, table
from .warp import together

_A, _B, _C = table(fragments.a_element, 8), table(fragments.b_element, 4), table(fragments.c_element, 4)
_A_WORDS, _B_WORDS = table(fragments.a_word, 8), table(fragments.b_word, 4)


def m16n8k16(acc, a, b, kind):
    """acc (32, 4) float32, a (32, 4) and b (32, 2) uint32 -> acc + A . B."""
    a_matrix, b_matrix, c = np.empty((16, 16)), np.empty((16, 8)), np.empty((16, 8))
    a_matrix[_A], b_matrix[_B], c[_C] = halves(a, kind), halves(b, kind), acc
    return (c + a_matrix @ b_matrix)[_C].astype(np.float32)


def words(acc, a, b):
    """acc (32, c), a (32, n) and b (32, m) in float64, an element a register -> acc + A . B in float64.

    A has 16 rows, or 8 where a lane has one element of it.
    """
    depth = 4 * b.shape[1]
    a_matrix, b_matrix, c = np.zeros((16, depth)), np.empty((depth, 8)), np.zeros((16, 8))
    a_matrix[_places("a", a.shape[1])] = a
    b_matrix[_places("b", b.shape[1])] = b
    places = _places("c", acc.shape[1])
    c[places] = acc
    return (c + a_matrix @ b_matrix)[places]


@functools.cache
def _places(which, count):
    """The places of the first `count` registers of each lane in a matrix."""
    return tuple(x[:, :count] for x in dict(a=_A_WORDS, b=_B_WORDS, c=_C)[which])


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


def _of_lanes(registers):
    """What np.stack gives, in a third of the time."""
    return np.concatenate(registers).reshape(len(registers), -1)


def _instruction(name, product, c_count, a_count, b_count):
    name = f"mma.{name}"

    def compute(warp, given):
        acc = _of_lanes([x[0][x[1] : x[1] + c_count] for x in given])
        a = _of_lanes([x[2][x[3] : x[3] + a_count] for x in given])
        b = _of_lanes([x[4][x[5] : x[5] + b_count] for x in given])
        for values in (acc, a, b):
            if values.itemsize == 4:
                check(values)
        for (registers, at, *_), values in zip(given, product(acc, a, b), strict=True):
            registers[at : at + c_count] = values

    def mma(acc, acc_at, a, a_at, b, b_at):
        together((name, acc_at, a_at, b_at), compute, (acc, acc_at, a, a_at, b, b_at))

    return mma


m16n8k16_f16 = _instruction("m16n8k16_f16", functools.partial(m16n8k16, kind="f16"), 4, 4, 2)
m16n8k16_bf16 = _instruction("m16n8k16_bf16", functools.partial(m16n8k16, kind="bf16"), 4, 4, 2)
m16n8k8_tf32 = _instruction("m16n8k8_tf32", tf32, 4, 4, 2)
m16n8k16_f64 = _instruction("m16n8k16_f64", words, 4, 8, 4)
m8n8k4_f64 = _instruction("m8n8k4_f64", words, 2, 1, 1)
