"""The threads of a block: errors, and what a block finds in shared memory."""

import numpy as np
import pytest
from helpers.instructions import lanes, launch, misuse
from numba import cuda

from numba_flash.ptx.sim import vote


def test_errors_of_other_kinds_keep_their_type():
    def kernel(out):
        if cuda.threadIdx.x == 3:
            out[10]
        vote.any_lane(1)

    with pytest.raises(IndexError, match=r"tid=\[3, 0, 0\] ctaid=\[0, 0, 0\]: element 10 lies outside"):
        launch(kernel, 32, np.zeros(3))


def test_everything_goes_on_after_an_error():
    def wrong():
        if cuda.threadIdx.x != 40:
            vote.any_lane(1)
        cuda.syncthreads()

    def right(out):
        out[cuda.threadIdx.x] = vote.any_lane(1)

    for _ in range(3):
        misuse(wrong, 64, match="must come to one instruction")
        assert lanes(right).sum() == 32


def test_shared_memory_holds_garbage_in_every_block():
    def kernel(out):
        smem = cuda.shared.array(0, np.dtype(np.float32))
        out[cuda.blockIdx.x] = smem[0]
        smem[0] = 1

    out = np.zeros(2, np.float32)
    launch(kernel, 1, out, blocks=2, shared_bytes=16)
    assert np.isnan(out).all()


def test_outside_of_a_kernel():
    with pytest.raises(RuntimeError, match="in kernels that sim.launch.run launches"):
        vote.any_lane(1)
