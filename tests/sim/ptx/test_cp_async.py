"""cp.async: copies to shared memory, and copies that are read or written over too early."""

import numpy as np
from helpers.instructions import holds, launch, misuse
from numba import cuda

from numba_flash.arrays.making import aligned_memory
from numba_flash.ptx.sim import cp_async, ld_st, memory, shared, vote


def test_cp_async():
    source = np.arange(64, dtype=np.uint8)

    def kernel(source, out):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        at = shared.address(smem) + 16 * i
        # What does not exist is not read, wherever the address points.
        count = (16, 5, 0, 16)[i]
        cp_async.copy16(at, memory.address(source, 10**9 if i == 2 else 16 * i), count)
        cp_async.commit_group()
        cp_async.copy16(at + 64, memory.address(source, 16 * i), 16)
        cp_async.commit_group()
        cp_async.wait_group(1)()
        cuda.syncthreads()
        holds(smem[64 + 16 * i] == 0xFF)  # the newer group is not there
        for x in range(16):
            out[16 * i + x] = smem[16 * (3 - i) + x]
        cp_async.wait_group(0)()
        holds(smem[64 + 16 * i] == 16 * i)

    out = np.zeros((4, 16), np.uint8)
    launch(kernel, 4, source, out, shared_bytes=128)
    rows = source.reshape(4, 16).copy()
    rows[1, 5:] = rows[2] = 0
    np.testing.assert_array_equal(out, rows[::-1])


def test_cp_async_of_a_few_bytes():
    source = np.arange(32, dtype=np.uint8)

    def kernel(source, out):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        at = shared.address(smem)
        cp_async.small_copy(8)(at + 8 * i, memory.address(source, 10**9 if i == 2 else 8 * i), (8, 4, 0, 8)[i])
        cp_async.small_copy(4)(at + 32 + 4 * i, memory.address(source, 4 * i), 4)
        cp_async.commit_group()
        holds(smem[8 * i] == smem[32 + 4 * i] == 0xFF)
        cp_async.wait_group(0)()
        cuda.syncthreads()
        for x in range(12):
            out[12 * i + x] = smem[12 * i + x]

    out = np.zeros(48, np.uint8)
    launch(kernel, 4, source, out, shared_bytes=48)
    np.testing.assert_array_equal(out, [*range(12), *[0] * 12, *range(24, 32), *range(16)])


def copies(after, other=1):
    """A kernel in which each thread copies 16 bytes to shared memory, does `after`, and reads those of another."""

    def kernel(source, out):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        at = shared.address(smem)
        cp_async.copy16(at + 16 * i, memory.address(source, 4 * i), 16)
        after(at + 16 * i)
        out[i] = ld_st.load_b32(at + 16 * (i ^ other))

    return kernel, 32, aligned_memory((32, 4), np.dtype(np.uint32)), np.zeros(32, np.uint32)


def wait_for_copies():
    cp_async.commit_group()
    cp_async.wait_group(0)()


def test_what_cp_async_brings_is_read_by_others_behind_a_barrier():
    def right(at):
        wait_for_copies()
        cuda.syncthreads()

    kernel, threads, source, out = copies(right)
    source[:, 0] = np.arange(32)
    launch(kernel, threads, source, out, shared_bytes=512)
    np.testing.assert_array_equal(out, np.arange(32) ^ 1)


def test_what_cp_async_brings_is_read_too_early():
    match = "is read before it arrived"
    misuse(*copies(lambda at: None, 0), match=match, at="ld_st.load_b32", thread=0, shared_bytes=512)
    misuse(*copies(lambda at: cuda.syncthreads()), match=match, shared_bytes=512)
    misuse(*copies(lambda at: cp_async.wait_group(0)(), 0), match=match, shared_bytes=512)  # never committed

    def one_group_too_new(at):
        cp_async.commit_group()
        cp_async.wait_group(1)()
        cuda.syncthreads()

    misuse(*copies(one_group_too_new), match=match, shared_bytes=512)


def test_a_barrier_is_missing():
    def no_barrier(at):
        wait_for_copies()
        vote.any_lane(1)  # is none, though all have come

    misuse(*copies(no_barrier), match="written by thread 30, is read with no barrier in between", shared_bytes=512)

    def barrier_too_early(at):
        cuda.syncthreads()
        wait_for_copies()
        vote.any_lane(1)

    misuse(*copies(barrier_too_early), match="with no barrier in between", shared_bytes=512)


def test_a_copy_is_written_over():
    match = "is written while a copy to it is under way"
    misuse(*copies(lambda at: ld_st.store_b32(at, 1)), match=match, shared_bytes=512)
    misuse(*copies(lambda at: cp_async.copy16(at, 0, 0)), match=match, shared_bytes=512)
