"""Twins of ptx.mma. Sums in float64, rounded once."""

import numpy as np

from ..ptx import fragments
from .registers import check, halves, table
from .warp import together

_A, _B, _C = table(fragments.a_element, 8), table(fragments.b_element, 4), table(fragments.c_element, 4)


def m16n8k16(acc, a, b, kind):
    """acc (32, 4) float32, a (32, 4) and b (32, 2) uint32 -> acc + A . B."""
    a_matrix, b_matrix, c = np.empty((16, 16)), np.empty((16, 8)), np.empty((16, 8))
    a_matrix[_A], b_matrix[_B], c[_C] = halves(a, kind), halves(b, kind), acc
    return (c + a_matrix @ b_matrix)[_C].astype(np.float32)


def _m16n8k16(kind):
    name = f"mma.m16n8k16_{kind}"

    def compute(warp, given):
        acc = np.stack([x[0][x[1] : x[1] + 4] for x in given])
        a = np.stack([x[2][x[3] : x[3] + 4] for x in given])
        b = np.stack([x[4][x[5] : x[5] + 2] for x in given])
        for values in (acc, a, b):
            check(values)
        for (registers, at, *_), values in zip(given, m16n8k16(acc, a, b, kind), strict=True):
            registers[at : at + 4] = values

    def mma(acc, acc_at, a, a_at, b, b_at):
        together((name, acc_at, a_at, b_at), compute, (acc, acc_at, a, a_at, b, b_at))

    return mma


m16n8k16_f16 = _m16n8k16("f16")
m16n8k16_bf16 = _m16n8k16("bf16")
