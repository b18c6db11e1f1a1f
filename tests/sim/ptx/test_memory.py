"""Shared and global memory by address: what is read and written, and which accesses are errors."""

import numpy as np
import pytest
from helpers.instructions import holds, launch, misuse
from numba import cuda

from numba_flash.arrays.making import aligned_memory
from numba_flash.ptx.sim import (  # noqa: F401
    bar,
    cp_async,
    ld_st,
    ldmatrix,
    local,
    mbarrier,
    memory,
    setmaxnreg,
    shared,
    stmatrix,
    tma,
)


def test_shared_and_global_accesses():
    def kernel(out, half, atoms, two, wide):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint32))
        fixed = cuda.shared.array((4, 4), np.dtype(np.float32))
        values = local.array(5, np.dtype(np.uint32))
        at = shared.address(smem) + 16 * i
        for x in range(4):
            values[1 + x] = 4 * i + x
        ld_st.store_v4(at, values, 1)
        holds(smem[4 * i + 2] == 4 * i + 2)
        ld_st.store_b32(at + 4, 100 + i)
        values[0] = ld_st.load_b32(at + 4)
        ld_st.load_v4(values, 1, at)
        holds(values[0] == values[2] == 100 + i)
        ld_st.store_b32(shared.address(fixed) + 4 * i, 5)
        memory.store_v4(memory.address(out, 4 * i), values, 1)
        memory.store_b32(memory.address(out, 4 * i + 3), 7)
        memory.store_b16(memory.address(half, i), 0xABCD0000 + i)
        holds(memory.address(None, 3) == 0)
        memory.add(memory.address(atoms, 0), 2)
        memory.load_v4(values, 1, memory.address(two, 4))
        holds(values[1:].tolist() == [4, 5, 6, 7])
        memory.load_v2_if(values, 2, memory.address(two, 2), i < 4)
        holds(values[1:].tolist() == ([4, 2, 3, 7] if i < 4 else [4, 0, 0, 7]))
        # Behind the end nothing is read where the condition does not hold.
        holds(memory.load_b32_if(memory.address(two, i + 4), i < 4) == (i + 4 if i < 4 else 0))
        holds(memory.load_b16_if(memory.address(two, i), 1) == i)
        holds(memory.load_f64_if(memory.address(wide, i + 4), i < 4) == (i + 4.5 if i < 4 else 0))
        if i == 7:
            values[0] = memory.exchange(memory.address(atoms, 1), 9)
            holds(values[0] == 1)

    out, half, atoms = np.zeros((8, 4), np.uint32), np.zeros(8, np.uint16), np.array([1, 1], np.uint32)
    launch(kernel, 8, out, half, atoms, np.arange(8, dtype=np.uint32), np.arange(8) + 0.5, shared_bytes=128)
    np.testing.assert_array_equal(out, [[4 * i, 100 + i, 4 * i + 2, 7] for i in range(8)])
    np.testing.assert_array_equal(half, np.arange(8))
    assert atoms.tolist() == [17, 9]


def test_atomics_give_each_thread_its_number_and_can_be_polled():
    def kernel(out, counter):
        i = cuda.threadIdx.x
        if i == 0:
            while memory.add(memory.address(counter, 0), 0) < 31:
                pass
        out[i] = memory.add(memory.address(counter, 0), 1)

    counter, out = np.zeros(1, np.uint32), np.zeros(32, np.uint32)
    launch(kernel, 32, out, counter)
    assert out[0] == 31 and sorted(out) == list(range(32))


def test_addresses_of_views_and_backward_strides():
    whole = np.zeros((4, 8), np.float32)

    def kernel(out):
        memory.store_b32(memory.address(out, -8 * cuda.threadIdx.x), cuda.threadIdx.x + 1)

    launch(kernel, 4, whole[::-1])
    np.testing.assert_array_equal(whole.view(np.uint32)[:, 0], [4, 3, 2, 1])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("ld_st.load_b32(at + 2)", "shared address 0x402 is no multiple of 4"),
        ("ld_st.load_v4(values, 0, at + 8)", "is no multiple of 16"),
        ("ld_st.load_b32(at + 64)", "4 bytes at shared address 0x440, but shared memory is 0x400 to 0x440"),
        ("ld_st.store_b32(16, 1)", "4 bytes at shared address 0x10, but"),
        ("ld_st.store_v4(at + 56, values, 0)", "16 bytes at shared address 0x438"),
        ("ldmatrix.x1(values, 0, at + 8)", "is no multiple of 16"),
        ("ldmatrix.x4(values, 0, at + 16 * i)", "16 bytes at shared address 0x440"),
        ("stmatrix.x1(at + 4, values, 0)", "is no multiple of 16"),
        ("cp_async.copy16(at + 4, g, 16)", "shared address 0x404 is no multiple of 16"),
        ("cp_async.copy16(at, g + 4, 16)", "global address .* is no multiple of 16"),
        ("cp_async.copy16(at, g, 17)", "copies 0 to 16 bytes, not 17"),
        ("cp_async.small_copy(8)(at + 4, g, 8)", "shared address 0x404 is no multiple of 8"),
        ("cp_async.small_copy(4)(at, g, 5)", "small_copy.4. copies 0 to 4 bytes, not 5"),
        ("cp_async.copy16(at, g + 64, 1)", "0x.* lie outside of every operand; they begin 64 bytes after .*operand 0"),
        ("cp_async.copy16(at, g - 16, 16)", "they begin 16 bytes before the beginning of operand 0, uint32"),
        ("memory.store_b32(12, 0)", "lie outside of every operand$"),
        ("memory.store_b32(r, 0)", "lie in operand 1, uint32 .16,., which is read-only"),
        ("memory.store_b16(g + 1, 0)", "is no multiple of 2"),
        ("memory.store_v4(g + 8, values, 0)", "is no multiple of 16"),
        ("memory.add(g + 2, 0)", "is no multiple of 4"),
        ("memory.exchange(g + 64, 0)", "outside of every operand"),
        ("shared.address(values)", "not the block's shared memory"),
        ("mbarrier.arrive(at)", "there is no mbarrier at shared address 0x400"),
        ("mbarrier.init(at + 4, 1)", "is no multiple of 8"),
        ("mbarrier.init(at, 0)", "counts 1 to 1048575 arrivals, not 0"),
        ("bar.sync(16, 32)", "barriers are 0 to 15"),
        ("bar.sync(1, 48)", "threads whole warps"),
        ("bar.arrive(1, 64)", "threads whole warps of the block's"),
        ("setmaxnreg.increase(260)()", "a multiple of 8 from 24 to 256, not 260"),
        ("setmaxnreg.decrease(20)()", "a multiple of 8 from 24 to 256, not 20"),
        ("tma.prefetch(g)", "there is no tensor map at address"),
        ("tma.prefetch(tma.parameter('k')())", "there is no tensor map at address .*: 0 maps lie"),
    ],
)
def test_an_access_that_is_none(text, match):
    def kernel(g_pointer, r_pointer):
        i = cuda.threadIdx.x
        values = local.array(4, np.dtype(np.uint32))
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        at, g, r = shared.address(smem), memory.address(g_pointer, 0), memory.address(r_pointer, 0)
        wrong(at, g, r, i, values)

    wrong = eval(f"lambda at, g, r, i, values: {text}", globals())
    memory_of_both = aligned_memory((4096,), np.dtype(np.uint32))
    operand, constant = memory_of_both[1024:1040], memory_of_both[3072:3088]
    constant.flags.writeable = False
    misuse(kernel, 32, operand, constant, match=match, shared_bytes=64)


# As elements and by address; what blocks add up or exchange in turns is for all of them.
@pytest.mark.parametrize("how", ["element", "store_b32", "store_v4", "add"])
@pytest.mark.parametrize("apart", [True, False])
def test_blocks_do_not_store_the_same_element(how, apart):
    def kernel(out):
        at = (8 if apart else 4) * cuda.blockIdx.x + 4 * cuda.threadIdx.x
        words = local.array(4, np.dtype(np.uint32))
        if how == "element":
            out[at] = 1
        elif how == "store_v4":
            memory.store_v4(memory.address(out, at), words, 0)
        else:
            getattr(memory, how)(memory.address(out, at), 1)

    out = np.zeros(16, np.uint32)
    if apart or how == "add":
        launch(kernel, 2, out, blocks=2)
    else:
        message = misuse(
            kernel, 2, out, blocks=2, match=r"element 4 of an array of shape \(16,\) was stored by block 0"
        )
        assert message.startswith("block (1, 0, 0), thread 0 (")


def test_a_loop_that_polls_memory_for_ever(monkeypatch):
    monkeypatch.setattr("numba_flash.ptx.sim.scheduler.POLLS", 1000)

    def kernel(flag):
        if cuda.threadIdx.x < 2:
            while memory.add(memory.address(flag, 0), 0) == 0:
                pass

    misuse(kernel, 3, np.zeros(1, np.uint32), match="looks at memory for the 1000th time", at="while memory.add")
