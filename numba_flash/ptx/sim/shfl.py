"""Twins of ptx.shfl."""

import numpy as np

from .registers import check_float, u32
from .warp import together


def bfly(values, lane_masks):
    """values, lane_masks (32,): lane i gets the value of lane i ^ its mask; its own where there is none."""
    lanes = np.arange(32)
    others = lanes ^ np.asarray(lane_masks, dtype=np.int64)
    return values[np.where(others < 32, others, lanes)]


def idx(values, lanes):
    """values, lanes (32,): lane i gets the value of the lane that it names; the five lowest bits count."""
    return values[np.asarray(lanes, dtype=np.int64) & 31]


def bfly_f32(value, lane_mask):
    return together(("shfl.bfly_f32",), _bfly, (check_float(value), lane_mask))


def bfly_f64(value, lane_mask):
    return together(("shfl.bfly_f64",), _bfly, (np.float64(value), lane_mask))


def bfly_b32(value, lane_mask):
    return together(("shfl.bfly_b32",), _bfly, (u32(value), lane_mask))


def idx_b32(value, lane):
    return together(("shfl.idx_b32",), _idx, (u32(value), lane))


def _bfly(warp, given):
    values, masks = zip(*given, strict=True)
    return bfly(np.array(values), masks)


def _idx(warp, given):
    values, lanes = zip(*given, strict=True)
    return idx(np.array(values), lanes)
