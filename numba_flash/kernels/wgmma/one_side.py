"""Scores less slope * |q_pos - k_pos|, in a tile whose keys all lie on one side of its queries: linear in k_pos.

With d the distance of a row from the lane's first column, and c a column counted from there, slope * |q_pos - k_pos| is
slope * d - slope * c for keys before the queries, and slope * c - slope * d for keys behind. What the scores of a row
share, `shift`, waits until the softmax, as the scale does. So a score takes one FFMA, by a constant:

    product <- product + steepness * c        score = product * factor + shift

with steepness = slope / scale, or -slope / scale behind: the change of the product from one column to the next. The
general form takes three instructions for each score, and shares one of them between two. Without this a forward takes 8
to 9 % longer at head_dim 64, 5 to 7 % at 128, and as long at 256 (4 x 16 heads of 4096, H200).
"""

from typing import Any, NamedTuple

from numba import float32, int32, int64, uint32

from ...ptx import vote
from ..steps.basics import divide, inlined, named
from ..steps.units import LOG2_E

LEAST_SCALE, STEEPEST = 1e-30, 1e30  # within these limits no number overflows
FAR = 2**30  # a position: tiles further away are not linear


class Sides(NamedTuple):
    """Which key tiles are linear for a warp's rows: those before `before`, and those from `behind` on."""

    before: Any
    behind: Any
    inverse_scale: Any  # 1 / scale; 0 if no tile is linear


def make(config):
    """-> device functions, for rows in fragments as in fragments.py: tiles of config.tile_n keys, of which a warp has
    16 rows. Its rows alone decide: a row's bits must not depend on how many rows a block has. side: 1 if all keys are
    before the queries, -1 behind, 0 both. present: whether the distance is all that changes the kernel's scores."""
    tile_n, group = config.tile_n, config.group_size
    least_scale, steepest, log2_e = float32(LEAST_SCALE), float32(STEEPEST), float32(LOG2_E)

    @inlined
    def inverse_scale(terms, score):
        """1 / scale; 0 for a whole warp if no tile may be linear."""
        # A scale that is not above 0 cannot wait: the largest product would not be the largest score.
        found = float32(1) / score.scale if score.scale > least_scale else float32(0)
        steep = uint32(0)
        for r in range(2):
            steep |= uint32(0) if abs(terms[r]) * found < steepest else uint32(1)  # or NaN
        return found if vote.any_lane(steep) == 0 else float32(0)

    @inlined
    def ends(tile_pos, first_row, inverse_scale):
        """-> Sides of the rows from first_row on."""
        first, last = tile_pos + divide(first_row, group), tile_pos + divide(first_row + 15, group)
        before, behind = int32(0), int32(FAR)
        if inverse_scale != 0:
            before = divide(int32(min(max(first + 1, int64(0)), int64(FAR))), tile_n)
            if last <= FAR - tile_n:
                behind = divide(int32(max(last, int64(0))) + int32(tile_n - 1), tile_n)
        return Sides(before, behind, inverse_scale)

    @inlined
    def of_tile(j, sides, terms, distance, shift):
        """-> side of the queries on which key tile j lies; shift (2,) <- what the rows' scores share. distance: as
        tile_scores.py finds it with the bits of the tile."""
        side = int32(1) if j < sides.before else int32(-1) if j >= sides.behind else int32(0)
        for r in range(2):
            shifted = -(terms[r] * float32(side) * log2_e) * distance[r]
            shift[r] = shifted if side != 0 else float32(0)  # also if the slope is not finite
        return side

    @inlined
    def to_linear(acc_s, terms, side, inverse_scale):
        for r in range(2):
            steepness = terms[r] * float32(side) * inverse_scale
            for n in range(tile_n // 8):
                for i in range(2):
                    acc_s[4 * n + 2 * r + i] += steepness * float32(8 * n + i)

    return named(inverse_scale, ends, of_tile, to_linear, present=config.by_distance_alone)
