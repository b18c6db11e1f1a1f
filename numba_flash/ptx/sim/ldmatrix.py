"""Stand-ins for ptx.ldmatrix."""

import numpy as np

from .registers import bits
from .warp import together

_ROW = np.arange(16)
_ROW_WORDS = np.arange(4)


def fragments(rows, count, trans):
    """rows (8 * count, 8) uint16, of matrix i from 8 * i on -> registers (32, count) uint32."""
    matrices = rows.reshape(count, 8, 8)
    if trans:
        matrices = matrices.swapaxes(1, 2)
    return np.ascontiguousarray(matrices).view(np.uint32).reshape(count, 32).T


def _ldmatrix(count, trans):
    name = f"ldmatrix.x{count}{'_trans' if trans else ''}"

    def compute(warp, given):
        shared = warp.members[0].block.shared
        addresses = np.array([int(address) for _, _, address in given[: 8 * count]])
        for address in addresses.tolist():
            shared.words(address, 16, 16)
        shared.read((addresses[:, None] >> 2) + _ROW_WORDS, warp.numbers)
        rows = shared.data[addresses[:, None] + _ROW].view(np.uint16)
        for (registers, at, _), values in zip(given, fragments(rows, count, trans), strict=True):
            bits(registers)[at : at + count] = values

    def ldmatrix(registers, at, address):
        return together((name, at), compute, (registers, at, address))

    return ldmatrix


x1, x2, x4 = _ldmatrix(1, False), _ldmatrix(2, False), _ldmatrix(4, False)
x1_trans, x2_trans, x4_trans = _ldmatrix(1, True), _ldmatrix(2, True), _ldmatrix(4, True)
