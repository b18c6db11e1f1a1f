"""Votes, and the election of one lane."""

import numpy as np
from helpers.instructions import lanes
from numba import cuda

from numba_flash.ptx.sim import elect, vote


def test_vote_and_elect():
    def kernel(out):
        i = cuda.threadIdx.x
        out[i] = vote.any_lane(i == 40) + 2 * elect.one_lane()

    out = lanes(kernel, threads=64)
    np.testing.assert_array_equal(out, [2] + [0] * 31 + [3] + [1] * 31)


def test_a_ballot_is_that_of_a_warp():
    def kernel(out):
        i = cuda.threadIdx.x
        out[i] = vote.ballot(i % 3 == 0)

    bits = [sum(1 << lane for lane in range(32) if (32 * warp + lane) % 3 == 0) for warp in range(2)]
    np.testing.assert_array_equal(lanes(kernel, threads=64), np.repeat(np.array(bits, np.uint32), 32))
