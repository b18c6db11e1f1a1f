"""Stand-ins for ptx.stmatrix. The lane that gives a row's address counts as its writer."""

import numpy as np

from .registers import bits
from .warp import together


def rows(registers, count, trans):
    """registers (32, count) uint32 -> rows (8 * count, 8) uint16, of matrix i from 8 * i on."""
    matrices = np.ascontiguousarray(registers.T).view(np.uint16).reshape(count, 8, 8)
    if trans:
        matrices = matrices.swapaxes(1, 2)
    return np.ascontiguousarray(matrices).reshape(8 * count, 8)


def _stmatrix(count, trans):
    name = f"stmatrix.x{count}{'_trans' if trans else ''}"

    def compute(warp, given):
        shared = warp.members[0].block.shared
        values = rows(np.stack([bits(registers)[at : at + count] for _, registers, at in given]), count, trans)
        for thread, (address, _, _), row in zip(warp.members, given, values, strict=False):
            shared.store(int(address), row.tobytes(), thread)

    def stmatrix(address, registers, at):
        return together((name, at), compute, (address, registers, at))

    return stmatrix


x1, x2, x4 = _stmatrix(1, False), _stmatrix(2, False), _stmatrix(4, False)
x1_trans, x2_trans, x4_trans = _stmatrix(1, True), _stmatrix(2, True), _stmatrix(4, True)
