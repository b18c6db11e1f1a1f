"""Stand-in for ptx.vote."""

import numpy as np

from .warp import together


def any_lane(flag):
    return together(("vote.any_lane",), _any, flag)


def ballot(flag):
    return together(("vote.ballot",), _ballot, flag)


def _ballot(warp, flags):
    return [np.uint32(sum(1 << lane for lane, flag in enumerate(flags) if flag))] * 32


def _any(warp, flags):
    return [np.uint32(any(flags))] * 32
