"""Special registers."""

import numpy as np
from helpers.instructions import launch

from numba_flash.ptx.sim import special


def test_special_registers():
    def kernel(out):
        out[special.block_index() * 4 + special.thread_index()] = 10 * special.block_index() + special.thread_index()

    out = np.zeros(8, np.int32)
    launch(kernel, 4, out, blocks=2)
    assert out.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
