"""Twin of ptx.vote."""

import numpy as np

from .warp import together


def any_lane(flag):
    return together(("vote.any_lane",), _any, flag)


def _any(warp, flags):
    return [np.uint32(any(flags))] * 32
