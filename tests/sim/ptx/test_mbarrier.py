"""mbarriers."""

import numpy as np
import pytest
from helpers.instructions import BASE, compiled, launch, misuse
from numba import cuda

from numba_flash.ptx.sim import ld_st, mbarrier, shared


def test_mbarrier_phases_and_their_parity():
    def kernel(out):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint32))
        at = shared.address(smem)
        full, empty = at + 64, at + 72
        if i == 0:
            mbarrier.init(full, 1)
            mbarrier.init(empty, 3)
        cuda.syncthreads()
        for step in range(4):
            if i == 3:
                mbarrier.wait(empty, 1 - step % 2)  # a fresh one lets through
                ld_st.store_b32(at, 10 * step)
                mbarrier.arrive(full)
            else:
                mbarrier.wait(full, step % 2)
                out[3 * step + i] = ld_st.load_b32(at) + i
                mbarrier.arrive(empty)

    out = np.zeros((4, 3), np.uint32)
    launch(kernel, 4, out, shared_bytes=128)
    np.testing.assert_array_equal(out, [[10 * step + i for i in range(3)] for step in range(4)])


@pytest.mark.parametrize(
    ("steps", "match"),
    [
        ("init(b, 2); init(b, 2)", "initialised a second time"),
        ("init(b, 1); arrive_expect_tx(b, 16); arrive(b)", "an arrival more than the phase has"),
        ("init(b, 1); wait(b, 2)", "parity 0 or 1, not 2"),
        ("init(b, 1); arrive_expect_tx(b, 1 << 20)", "0 to 1048575 bytes can be expected"),
    ],
)
def test_misused_mbarriers(steps, match):
    names = dict(vars(mbarrier))
    compiled(f"def steps(b): {steps}", names)
    does = names["steps"]

    def kernel():
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        does(shared.address(smem))

    misuse(kernel, 1, match=match, thread=0, shared_bytes=64)


def test_an_mbarrier_that_others_cannot_know_of():
    def kernel():
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        if cuda.threadIdx.x == 0:
            mbarrier.init(shared.address(smem), 2)
        mbarrier.arrive(shared.address(smem))

    misuse(kernel, 2, match="was initialised by .*thread 0 .*with no barrier in between", thread=1, shared_bytes=64)


def test_nobody_can_go_on():
    def kernel():
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        if cuda.threadIdx.x == 0:
            mbarrier.init(shared.address(smem), 2)
        cuda.syncthreads()
        mbarrier.arrive(shared.address(smem)) if cuda.threadIdx.x == 0 else None
        mbarrier.wait(shared.address(smem), 0)

    message = misuse(kernel, 3, match="waits for ever", shared_bytes=64)
    assert f"threads 0 to 2: in mbarrier.wait, parity 0, on mbarrier {BASE:#x}" in message
    assert "1 of 2 arrivals and 0 bytes are missing" in message and "mbarrier.wait(shared.address(smem), 0)" in message
