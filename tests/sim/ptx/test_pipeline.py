"""A warpgroup that TMA feeds, with whatever is left out or done wrong."""

import numpy as np
import pytest
from helpers.instructions import TILE, launch, misuse, random, wide
from numba import cuda

from numba_flash.ptx.sim import bar, cvt, fence, ld_st, local, mbarrier, shared, tma, wgmma

DESCRIBE = (16, 1024, 128)


def pipeline(wrong=""):
    """A kernel of 256 threads: one loads two tiles by TMA, a warpgroup multiplies them and TMA stores the result."""

    def kernel(tensor_maps, a, b, out):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        a_smem = shared.address(smem)
        b_smem = a_smem + 8192
        full, empty = a_smem + 16384, a_smem + 16392
        maps = tma.parameter("kernel")()
        if i == 0:
            mbarrier.init(full, 1)
            mbarrier.init(empty, 128)
            if wrong != "init fence":
                fence.mbarrier_init()
        if wrong != "init barrier":
            cuda.syncthreads()
        if i >= 128:
            if i == 128:
                for step in range(2):
                    mbarrier.wait(empty, 1 - step)
                    mbarrier.arrive_expect_tx(full, 16384 + 16 * (wrong == "bytes"))
                    tma.load_2d(a_smem, maps, full, 0, 0)
                    tma.load_2d(b_smem, maps + 128, full, 0, 0)
        else:
            acc = local.array(32, np.dtype(np.float32))
            for x in range(32):
                acc[x] = 0
            for step in range(2):
                if wrong != "full":
                    mbarrier.wait(full, step)
                if wrong == "early":
                    mbarrier.arrive(empty)
                    bar.sync(1, 128)
                multiply(acc, describe(a_smem), describe(b_smem), step)
                if wrong == "overwrite":
                    ld_st.store_b32(a_smem + 4 * i, 0)
                if wrong != "commit":
                    wgmma.commit_group()
                if wrong == "touch":
                    acc[3] = 0
                if wrong == "scale":
                    acc[3] *= np.float32(0.5)
                if wrong == "product wait" and step == 1:
                    return
                wait()
                pin(acc)
                if wrong != "early":
                    mbarrier.arrive(empty)
            bar.sync(1, 128)
            for x in range(16):
                row, column = 16 * (i // 32) + i % 32 // 4 + 8 * (x % 2), 8 * (x // 2) + 2 * (i % 4)
                offset = row * 128 + 2 * column
                at = 4 * (x // 2) + 2 * (x % 2)
                ld_st.store_b32(a_smem + (offset ^ (offset >> 7 & 7) << 4), cvt.pack_f16x2(acc[at], acc[at + 1]))
            if wrong != "fence":
                fence.proxy_async()
            if wrong != "fence barrier":
                bar.sync(1, 128)
            if i == 0:
                tma.store_2d(maps + 256, a_smem, 0, 0)
                if wrong == "reuse":
                    ld_st.store_b32(a_smem, 0)
                if wrong != "store wait":
                    tma.commit_group()
                    tma.wait_group_read(0)()

    multiply = wgmma.product_shared(64, "f16", (0, 2, 4, 6), (0, 2, 4, 6), 0)
    describe, wait, pin = wgmma.descriptor(*DESCRIBE), wgmma.wait_group(0), wgmma.pin(32)
    return kernel


def fed(wrong=""):
    a, b, out = random(64, 64), random(64, 64), np.zeros((64, 64), np.float16)
    options = dict(shared_bytes=16384 + 1024, maps=((0, TILE), (1, TILE), (2, TILE)))
    return (pipeline(wrong), 256, a, b, out), options


def test_a_warpgroup_fed_by_tma():
    arguments, options = fed()
    launch(*arguments, **options)
    _, _, a, b, out = arguments
    np.testing.assert_allclose(wide(out), 2 * wide(a) @ wide(b).T, rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("wrong", "at", "match"),
    [
        ("init fence", "tma.load_2d(a_smem", "fence.mbarrier_init is missing"),
        ("init barrier", "mbarrier.wait(full", "there is no mbarrier|no barrier in between"),
        ("bytes", None, r"Nobody can go on(.|\n)*0 of 1 arrivals and 16 bytes are missing"),
        # whichever comes first, the read or the copy
        (
            "full",
            None,
            "is read before it arrived|with no barrier in between|while wgmma or a TMA store still reads it",
        ),
        ("early", None, "is read before it arrived|while wgmma or a TMA store still reads it"),
        ("overwrite", "ld_st.store_b32(a_smem + 4", "while wgmma or a TMA store still reads it"),
        ("commit", "pin(acc)", "accumulator is read before its wgmma.wait_group .or without commit_group"),
        (
            "touch",
            "wait()",
            r"accumulators were written while the product at .*test_pipeline.py:\d+: multiply.* ran",
        ),
        ("scale", "wait()", "accumulators were written while the product"),
        ("product wait", None, "leaves the kernel without wgmma.wait_group for all products"),
        ("fence", "tma.store_2d", "fence.proxy_async is missing"),
        ("fence barrier", "tma.store_2d", "fence.proxy_async is missing|with no barrier in between"),
        ("reuse", "ld_st.store_b32(a_smem, 0)", "while wgmma or a TMA store still reads it"),
        ("store wait", None, "leaves the kernel without tma.wait_group_read"),
    ],
)
def test_what_is_forgotten_between_tma_and_wgmma_is_named(wrong, at, match):
    (kernel, *arguments), options = fed(wrong)
    misuse(kernel, *arguments, match=match, at=at, **options)
