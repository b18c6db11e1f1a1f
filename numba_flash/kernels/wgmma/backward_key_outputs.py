"""Writes dK and dV of a key tile from a block's sums, in 16 bits. Rows that are not finite are computed again.

dK is multiplied by scale. Where weights are dropped, dV is multiplied by how often a kept weight counts.
"""

from numba import float32, int32, uint32

from ...ptx import bar
from ..recompute import keys as recompute
from ..steps import gradient_rows
from ..steps.inlined import inlined
from ..steps.sequence import key_row


def make(config, rows, dk_at, dv_at):
    """-> write, a device function. rows: keys of the tile; dk_at, dv_at: where in shared memory the gradients are
    staged, in bytes from `base`."""
    stage_dk, store_dk = gradient_rows.make(config.dtype, rows, 16, config.head_dim, config.head_dim % 8 == 0)
    stage_dv, store_dv = gradient_rows.make(config.dtype, rows, 16, config.head_dim_v, config.head_dim_v % 8 == 0)
    recompute_keys, drops = recompute.make(config, config.of_dk, config.of_dv), config.seeded
    packed = config.packed
    in_turn, warp_sync = config.of_dk and config.of_dv and dk_at == dv_at, bar.warp_sync

    @inlined
    def write(base, acc_dk, acc_dv, first_row, lane, sequence, h_kv, first_key, arrays, strides, sizes, score):
        """A warp writes its rows of the tile at first_key; the first of them is first_row."""
        keys_left = int32(min(sequence.keys - first_key, rows))
        rows_left = keys_left  # outside.py writes what is behind the valid keys of packed sequences
        if not packed:
            rows_left = int32(min(sizes.seqlen_k - first_key, rows))
        nonfinite = uint32(0)
        kept_count = score.kept_count if drops else float32(1)
        if config.of_dk:
            nonfinite |= stage_dk(acc_dk, score.scale, base + dk_at, first_row, lane, keys_left)
        if config.of_dv and not in_turn:
            nonfinite |= stage_dv(acc_dv, kept_count, base + dv_at, first_row, lane, keys_left)
        if config.of_dk:
            to, row = key_row(strides.dk, sequence, h_kv, first_key), strides.dk[2]
            store_dk(base + dk_at, first_row, lane, arrays.dk, to, row, rows_left, config.head_dim, nonfinite)
        if in_turn:
            warp_sync()  # all lanes have read dK
            nonfinite |= stage_dv(acc_dv, kept_count, base + dv_at, first_row, lane, keys_left)
        if config.of_dv:
            to, row = key_row(strides.dv, sequence, h_kv, first_key), strides.dv[2]
            store_dv(base + dv_at, first_row, lane, arrays.dv, to, row, rows_left, config.head_dim_v, nonfinite)
        if nonfinite != 0:
            recompute_keys(nonfinite, first_row, lane, sequence, h_kv, first_key, arrays, strides, sizes, score)

    return write
