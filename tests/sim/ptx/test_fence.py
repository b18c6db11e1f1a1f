"""fence.proxy.async: what threads wrote, before wgmma reads it."""

import numpy as np
import pytest
from helpers.instructions import launch, misuse
from numba import cuda

from numba_flash.ptx.sim import bar, fence, ld_st, local, shared, wgmma


@pytest.mark.parametrize("same", [True, False])
def test_two_warpgroups_may_set_the_same_rows_to_zero(same):
    """Each for its own product, while the other's runs; other numbers are a race."""

    def kernel():
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        at, acc = shared.address(smem), local.array(4, np.dtype(np.float32))
        ld_st.store_b32(at + 1024 + 4 * (i % 128), 0 if same else i // 128)
        fence.proxy_async()
        bar.sync(1 + i // 128, 128)
        wgmma.product_shared(8, "f16", (0,), (0,), 0)(acc, describe(at + 1024), describe(at + 1024), 0)
        wgmma.commit_group()
        wgmma.wait_group(0)()

    describe = wgmma.descriptor(128, 128, 0)
    if same:
        launch(kernel, 256, shared_bytes=4096)
    else:
        match = "with no barrier in between|while wgmma or a TMA store still reads it"
        misuse(kernel, 256, match=match, shared_bytes=4096)


@pytest.mark.parametrize("fenced", ["all", "own alone", "none"])
def test_a_fence_is_of_all_that_a_thread_wrote_last(fenced):
    """In words of four; thread 1 writes over what thread 0 wrote, which the fence of thread 0 is not for."""

    def kernel():
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        at, acc, four = shared.address(smem), local.array(4, np.dtype(np.float32)), np.full(4, i, np.uint32)
        ld_st.store_v4(at + 16 * i, four, 0)
        bar.sync(1, 128)
        if i == 1:
            ld_st.store_v4(at, four, 0)
        bar.sync(1, 128)
        if fenced == "all" or (fenced == "own alone" and i != 1):
            fence.proxy_async()
        bar.sync(1, 128)
        wgmma.product_shared(8, "f16", (0,), (0,), 0)(acc, describe(at), describe(at), 0)
        wgmma.commit_group()
        wgmma.wait_group(0)()

    describe = wgmma.descriptor(128, 256, 0)
    if fenced == "all":
        launch(kernel, 128, shared_bytes=2048)
    else:
        misuse(kernel, 128, match="0x400, written by thread 1, is read by .*fence.proxy_async", shared_bytes=2048)
