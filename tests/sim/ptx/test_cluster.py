"""Clusters: blocks that meet, and that write into each other's shared memory."""

import inspect

import numpy as np
import pytest
from helpers.instructions import compiled, launch, misuse
from numba import cuda

from numba_flash.ptx.sim import cluster, ld_st, mbarrier, memory, shared
from numba_flash.ptx.sim.errors import InstructionError


def test_blocks_of_a_cluster_meet_and_know_their_number():
    def kernel(out):
        i, smem = cuda.threadIdx.x, cuda.shared.array(0, np.dtype(np.uint32))
        smem[i] = 10 * cuda.blockIdx.x + i  # each block has shared memory of its own
        cluster.sync()
        out[4 * cuda.blockIdx.x + 2 * i] = smem[1 - i]
        out[4 * cuda.blockIdx.x + 2 * i + 1] = cluster.rank()

    out = np.zeros(24, np.uint32)
    launch(kernel, 2, out, shared_bytes=8, blocks=6, in_cluster=3)
    expected = [[10 * block + 1, block % 3, 10 * block, block % 3] for block in range(6)]
    np.testing.assert_array_equal(out, np.ravel(expected))


def give_each_other(out):
    """A thread of each block gives four numbers to the other block, twice; another one there reads them."""
    i, rank = cuda.threadIdx.x, int(cluster.rank())
    at, other = shared.address(cuda.shared.array(0, np.dtype(np.uint32))), 1 - rank
    full, empty, left = at + 64, at + 72, at + 80
    if i == 0:
        mbarrier.init(full, 1)
        mbarrier.init(empty, 1)
    cluster.sync()
    for step in range(2):
        if i == 0:
            four = np.arange(4, dtype=np.uint32) + np.uint32(100 * rank + 10 * step)
            mbarrier.wait(empty, 1 - step)
            cluster.store_v4(cluster.place_in(at, other), four, 0, cluster.place_in(full, other))
        else:
            mbarrier.arrive_expect_tx_if(full, 99, 0)
            mbarrier.arrive_expect_tx_if(full, 16, 1)
            mbarrier.wait(full, step)
            for x in range(4):
                out[9 * rank + 4 * step + x] = ld_st.load_b32(at + 4 * x)
            mbarrier.arrive_there_if(cluster.place_in(empty, other), 1)
    if i == 1:
        cluster.store_b32(cluster.place_in(left, other), 7 + rank)
    cluster.sync()
    if i == 0:
        out[9 * rank + 8] = ld_st.load_b32(left)


def test_blocks_of_a_cluster_give_each_other_numbers():
    out = np.zeros((2, 9), np.uint32)
    launch(give_each_other, 2, out, shared_bytes=96, blocks=2, in_cluster=2)
    np.testing.assert_array_equal(out, [[100, 101, 102, 103, 110, 111, 112, 113, 8], [0, 1, 2, 3, 10, 11, 12, 13, 7]])


@pytest.mark.parametrize(
    ("right", "wrong", "match"),
    [
        ("mbarrier.wait(empty, 1 - step)", "pass", "is written|an arrival more"),
        (
            "place_in(full, other)",
            "place_in(full, rank)",
            "to block [01] of the cluster, their mbarrier is of block [01]",
        ),
        ("16, 1)", "32, 1)", "waits for ever"),
        ("    cluster.sync()\n    if i == 0:", "    if i == 0:", "no barrier in between|has left the kernel"),
    ],
    ids=["wait", "mbarrier", "bytes", "sync"],
)
def test_what_is_forgotten_when_blocks_give_is_named(right, wrong, match):
    text = inspect.getsource(give_each_other)
    assert text.count(right) == 1
    names = dict(globals())
    compiled(text.replace(right, wrong), names)
    with pytest.raises(InstructionError, match=match):
        launch(names["give_each_other"], 2, np.zeros((2, 9), np.uint32), shared_bytes=96, blocks=2, in_cluster=2)


def test_threads_of_a_cluster_are_named_by_their_block():
    """They have one clock, and numbers in it that nobody else knows."""

    def kernel(how):
        i, at = cuda.threadIdx.x, shared.address(cuda.shared.array(0, np.dtype(np.uint32)))
        if cluster.rank() == 1:
            if i == 3:
                ld_st.load_b32(at + 4)
                ld_st.store_b32(at, 7)
            if i == 5 and how[0] == 0:
                ld_st.load_b32(at)
            if i == 5 and how[0] == 1:
                ld_st.store_b32(at + 4, 7)
            if i == 5:
                mbarrier.init(at + 8, 1)
                mbarrier.wait(at + 8, 0)

    options = dict(shared_bytes=64, blocks=4, in_cluster=2)
    who = r"^block \(1, 0, 0\), thread 5 \(.*\n"
    for how, match in (
        (0, who + "shared address 0x400, written by thread 3, is read with no barrier in between"),
        (1, who + "shared address 0x404, read by thread 3, is written over with no barrier in between"),
        (2, r"\n  block \(1, 0, 0\), threads 5: in mbarrier.wait"),
    ):
        message = misuse(kernel, 6, np.full(1, how, np.uint32), match=match, **options)
    assert "block (0, 0, 0), threads 0 to 5: have left" in message and "threads 0 to 4: have left" in message


def test_a_block_that_has_left_its_cluster():
    def arrives(out):
        at = shared.address(cuda.shared.array(0, np.dtype(np.uint32)))
        mbarrier.init(at, 1)
        cluster.sync()
        if cluster.rank() == 0:
            memory.add(memory.address(out, 0), 1)  # the other one goes on
            mbarrier.arrive_there_if(cluster.place_in(at, 1), 1)

    with pytest.raises(InstructionError, match="block 1 of the cluster has left the kernel"):
        launch(arrives, 1, np.zeros(1, np.uint32), shared_bytes=8, blocks=2, in_cluster=2)
