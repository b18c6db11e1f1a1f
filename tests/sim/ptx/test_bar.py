"""Named barriers, and races that a barrier would prevent."""

import numpy as np
import pytest
from helpers.instructions import launch, misuse
from numba import cuda

from numba_flash.ptx.sim import bar, ld_st, ldmatrix, local, mbarrier, shared


def test_named_barriers_hand_over_in_both_directions():
    def kernel(out):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint32))
        at = shared.address(smem)
        for step in range(3):
            if i < 32:
                bar.sync(1, 64)  # empty
                ld_st.store_b32(at + 4 * i, 100 * step + i)
                bar.arrive(2, 64)  # full
            else:
                bar.arrive(1, 64)
                bar.sync(2, 64)
                out[step * 32 + i - 32] = ld_st.load_b32(at + 4 * (63 - i))

    out = np.zeros((3, 32), np.uint32)
    launch(kernel, 64, out, shared_bytes=128)
    np.testing.assert_array_equal(out, [[100 * step + 31 - i for i in range(32)] for step in range(3)])


def test_misused_named_barriers():
    def twice():
        bar.arrive(1, 64)
        bar.arrive(1, 64)

    misuse(twice, 64, match="came a second time to barrier 1", thread=0)

    def counts():
        bar.sync(1, 64 if cuda.threadIdx.x < 32 else 32)

    misuse(counts, 64, match="barrier 1 for 32 threads, but .*thread 0 .*came for 64", thread=32)


def test_stores_are_read_by_others_behind_a_barrier():
    def kernel(out):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        ld_st.store_b32(shared.address(smem) + 4 * i, i)
        bar.warp_sync()
        out[i] = ld_st.load_b32(shared.address(smem) + 4 * (i ^ 1))
        if i >= 32:
            ld_st.load_b32(shared.address(smem) + 4 * (i - 32))

    match = "written by thread 31, is read with no barrier in between"
    misuse(kernel, 64, np.zeros(64, np.uint32), match=match, at="(i - 32)", thread=63, shared_bytes=256)


@pytest.mark.parametrize("barrier", ["cuda.syncthreads", "elected", "too early", None])
def test_a_tile_is_written_over_when_everyone_has_read_it(barrier):
    """A warp reads with ldmatrix, another one writes; one lane may tell for its warp, after the read."""

    def kernel():
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        at, values = shared.address(smem), local.array(1, np.dtype(np.uint32))
        if i == 0:
            mbarrier.init(at + 256, 1)
        cuda.syncthreads()
        if i < 32:
            if barrier == "too early" and i == 9:
                mbarrier.arrive(at + 256)
            ldmatrix.x1(values, 0, at + 16 * (i % 8))
            if barrier == "elected" and i == 9:
                mbarrier.arrive(at + 256)
        if barrier == "cuda.syncthreads":
            cuda.syncthreads()
        if i >= 32:
            if barrier in ("elected", "too early"):
                mbarrier.wait(at + 256, 0)
            ld_st.store_b32(at + 4 * (i - 32), i)

    if barrier in ("cuda.syncthreads", "elected"):
        launch(kernel, 64, shared_bytes=512)
    elif barrier == "too early":
        match = "shared address 0x400, read by warp 0, is written over with no barrier in between"
        misuse(kernel, 64, match=match, at="ld_st.store_b32", thread=32, shared_bytes=512)
    else:  # here the other warp was first
        misuse(kernel, 64, match="written by thread 63, is read with no barrier in between", shared_bytes=512)


def test_a_number_is_written_over_when_everyone_has_read_it():
    def kernel():
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        at = shared.address(smem)
        if i == 3:
            ld_st.load_b32(at)
        elif i == 5:
            ld_st.store_b32(at, 1)

    misuse(kernel, 6, match="read by thread 3, is written over with no barrier", thread=5, shared_bytes=64)
