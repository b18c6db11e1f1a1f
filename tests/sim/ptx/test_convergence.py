"""Instructions of a whole warp or warpgroup that some of its lanes do not reach."""

import numpy as np
import pytest
from helpers.instructions import line_of, misuse
from numba import cuda

from numba_flash.ptx.sim import bar, elect, ldmatrix, local, mbarrier, shared, shfl, vote, wgmma


def test_lanes_at_different_instructions():
    def kernel():
        if cuda.threadIdx.x == 33:
            vote.any_lane(1)
        else:
            shfl.bfly_b32(1, 1)

    message = misuse(kernel, 64, match="must come to one instruction", thread=33, at="vote.any_lane")
    assert f"thread 32 (warp 1, lane 0) waits in shfl.bfly_b32 at {__file__}:{line_of(kernel, 'shfl')}" in message


def test_lanes_at_one_instruction_in_two_places():
    def kernel():
        if cuda.threadIdx.x < 16:
            vote.any_lane(1)
        else:
            vote.any_lane(0)

    misuse(kernel, 32, match="must come to one instruction", thread=16, at="vote.any_lane(0)")


def test_lanes_with_different_registers():
    def kernel():
        registers = local.array(4, np.dtype(np.uint32))
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        ldmatrix.x1(registers, cuda.threadIdx.x // 31, shared.address(smem))

    misuse(kernel, 32, match=r"ldmatrix.x1\(1,\) is reached while .* waits in ldmatrix.x1\(0,\)", shared_bytes=64)


def test_a_lane_that_has_left():
    def kernel(first):
        if cuda.threadIdx.x == first[0]:
            return
        elect.one_lane()

    for first in (0, 31):  # before the others come, and while they wait
        message = misuse(kernel, 32, np.array([first]), match="lea?[fv]e?[ts]? the kernel")
        assert f"thread {first} (warp 0, lane {first})" in message
        assert f"{__file__}:{line_of(kernel, 'elect')}: elect.one_lane()" in message


@pytest.mark.parametrize("elsewhere", ["cuda.syncthreads", "mbarrier.wait", "bar.sync"])
def test_a_lane_that_waits_elsewhere(elsewhere):
    def kernel():
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        mbarrier.init(shared.address(smem) + 8 * i, 1)
        if i != 5:
            vote.any_lane(1)
        elif elsewhere == "cuda.syncthreads":
            cuda.syncthreads()
        elif elsewhere == "mbarrier.wait":
            mbarrier.wait(shared.address(smem) + 8 * i, 0)
        else:
            bar.sync(3, 32)

    message = misuse(kernel, 32, match="all of a warp must come to one instruction", shared_bytes=256)
    assert f"thread 0 (warp 0, lane 0) waits in vote.any_lane at {__file__}:{line_of(kernel, 'vote')}" in message
    assert f"thread 5 (warp 0, lane 5) waits in {elsewhere}" in message
    assert f"threads 0 to 4, 6 to 31: in vote.any_lane at {__file__}" in message


def test_part_of_a_warp_or_warpgroup():
    def kernel():
        vote.any_lane(1)

    misuse(kernel, 40, match="a warp of 8 threads, not 32")

    def group():
        wgmma.commit_group()

    misuse(group, 96, match="a warpgroup of 96 threads, not 128")
