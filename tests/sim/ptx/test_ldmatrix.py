"""ldmatrix and stmatrix."""

import numpy as np
import pytest
from helpers.instructions import launch, rng
from numba import cuda

from numba_flash.ptx.sim import ldmatrix, local, shared, stmatrix


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix_are_each_others_inverse(count, trans):
    source = rng.integers(0, 2**16, (8 * count, 8)).astype(np.uint16)
    suffix = f"x{count}{'_trans' if trans else ''}"

    def kernel(source, registers_out, back):
        lane = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint16))
        if lane == 0:
            for i in range(64 * count):
                smem[i] = source[i]
        cuda.syncthreads()
        registers = local.array(6, np.dtype(np.uint32))
        address = shared.address(smem) + lane % (8 * count) * 16
        getattr(ldmatrix, suffix)(registers, 1, address)
        for i in range(count):
            registers_out[lane * count + i] = registers[1 + i]
        getattr(stmatrix, suffix)(address + 1024, registers, 1)
        cuda.syncthreads()
        if lane == 0:
            for i in range(64 * count):
                back[i] = smem[512 + i]

    registers, back = np.zeros((32, count), np.uint32), np.zeros_like(source)
    launch(kernel, 32, source, registers, back, shared_bytes=2048)
    np.testing.assert_array_equal(back, source)
    for lane in range(32):
        for i in range(count):
            matrix = source[8 * i : 8 * i + 8]
            matrix = matrix.T if trans else matrix
            low, high = matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2].astype(int)
            assert registers[lane, i] == low | high << 16
