"""What a consumer of forward.py keeps between its steps."""

from typing import Any, NamedTuple


class Consumer(NamedTuple):
    """A consumer warpgroup."""

    me: Any  # its number
    following: Any  # the one whose turn comes next
    elected: Any  # whether this lane acts for its warp


class Rows(NamedTuple):
    """A consumer's rows: those of the query tile at work."""

    work_tile: Any  # where it is described
    seen: Any  # how many the consumer has had before
    q_desc: Any  # wgmma's descriptor of the consumer's rows of Q
    begin: Any  # its last key tile, since they come in descending order
    states: Any  # where the states of its key tiles begin (kernels/score/tile_walk.py)
    before: Any  # the first key tile that is not on one side of the queries (kernels/wgmma/one_side.py)
    behind: Any  # the first one that is again
    inverse_scale: Any  # 1 / scale, or 0 if no tile may be linear


class Registers(NamedTuple):
    """Local arrays of a lane."""

    scores: Any  # ScoreRegisters
    acc_o: Any  # (head_dim_v_padded / 8, 4)
    p_frag: Any  # (tile_n / 8, 2)
    m: Any  # (2,)
    l: Any  # (2,)
    alpha: Any  # (2,)
    shift: Any  # (2,) of the rows' scores (kernels/wgmma/one_side.py)
    kept: Any  # which weights count
