"""Stand-ins for ptx.shfl. 32 lanes one by one take a fifth of the time of an array of them."""

import numpy as np

from .registers import check_float, u32
from .warp import together

LANES = np.arange(32)


def bfly_f32(value, lane_mask):
    return together(("shfl.bfly_f32",), _bfly, (check_float(value), lane_mask))


def bfly_f64(value, lane_mask):
    return together(("shfl.bfly_f64",), _bfly, (np.float64(value), lane_mask))


def bfly_b32(value, lane_mask):
    return together(("shfl.bfly_b32",), _bfly, (u32(value), lane_mask))


def idx_b32(value, lane):
    return together(("shfl.idx_b32",), _idx, (u32(value), lane))


def idx_f32(value, lane):
    return together(("shfl.idx_f32",), _idx, (check_float(value), lane))


def idx_f64(value, lane):
    return together(("shfl.idx_f64",), _idx, (np.float64(value), lane))


def sum_s32(value):
    return together(("shfl.sum_s32",), _sum, np.int32(value))


def sum_f32(value):
    return together(("shfl.sum_f32",), _sum, check_float(value))


def sum_f64(value):
    return together(("shfl.sum_f64",), _sum, np.float64(value))


def _sum(warp, given):
    """Adds as five butterflies do, without five meetings of the lanes."""
    sums = np.array(given)
    with np.errstate(all="ignore"):
        for distance in (1, 2, 4, 8, 16):
            sums = sums + sums[LANES ^ distance]
    return list(sums)


def _bfly(warp, given):
    """Lane i gets the value of lane i ^ its mask; its own where there is none."""
    found = []
    for lane, (value, mask) in enumerate(given):
        other = lane ^ int(mask)
        found.append(given[other][0] if 0 <= other < 32 else value)
    return found


def _idx(warp, given):
    """Lane i gets the value of the lane that it names; the five lowest bits count."""
    return [given[int(lane) & 31][0] for _, lane in given]
