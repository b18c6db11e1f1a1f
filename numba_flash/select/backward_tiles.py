"""Which tiles each kernel of a backward uses, as tiles.py says it of a forward."""

from .tiles import ANY, SIMULATOR, Row, at, table

_MMA = "tile_m tile_n warp_rows in_registers blocks_per_sm column_groups stages"
_WIDE = "tile_m tile_n warp_rows column_groups blocks_per_sm"
_WGMMA = "tile_m tile_n stages_a stages_b"
# per_score of rows that serve problems with these options, too (tiles.BY_ELEMENT)
_MASK_MOD, _MASK, _ONE, _SEVERAL = "mask_mod", "mask or dropped weights", "one kind", "several kinds"

TABLES: dict[str, tuple[Row, ...]] = {
    # A key has two threads in v2_dkdv. These two are not measured yet. Rows that would be mostly past the last key, or
    # query, are passed over.
    "v2_dkdv": table(
        "tile_m tile_n",
        *(at(ANY, *sizes) for sizes in ((16, 64), (16, 32), (8, 32), (8, 16), (8, 8), (4, 4))),
        *(at(ANY, *sizes, gpu=SIMULATOR) for sizes in ((16, 16), (8, 8), (4, 4))),
    ),
    "v2_dq": table(
        "tile_m tile_n",
        *(at(ANY, *sizes) for sizes in ((128, 16), (64, 16), (32, 16), (32, 8), (16, 8), (8, 8), (4, 4))),
        *(at(ANY, *sizes, gpu=SIMULATOR) for sizes in ((16, 16), (8, 8), (4, 4))),
    ),
    "mma_dkdv": table(
        _MMA,
        at(64, 32, 128, 32, False, 2, 1, 2, plain=True),
        at(64, 64, 128, 16, False, 1, 1, 2),
        at(128, 64, 64, 32, False, 2, 2, 2, plain=True),
        at(128, 64, 64, 16, False, 2, 1, 2, plain=True),
        at(128, 32, 64, 16, False, 2, 1, 2, plain=True),
        at(128, 32, 64, 16, False, 2, 1, 2, functions=True),
        at(128, 32, 64, 16, False, 2, 1, 2, apart=True),
        at(128, 32, 64, 16, False, 1, 1, 2, apart=True),
        at(256, 128, 64, 32, False, 1, 4, 1, plain=True),
        at(256, 32, 128, 16, False, 1, 1, 2, apart=True, plain=True),
        at(256, 32, 64, 16, False, 1, 1, 2, apart=True),
        at(256, 16, 32, 16, False, 1, 1, 2, apart=True),
        at(128, 32, 32, 16, False, 0, 1, 2, gpu=SIMULATOR),
        at(256, 32, 32, 16, False, 0, 1, 2, apart=True, gpu=SIMULATOR),
    ),
    # All keys of a head in one tile, which shrinks to the lengths: dK, dV and dQ in one kernel.
    "mma_one_key_tile": table(
        _MMA,
        at(32, 64, 64, 16, False, 3, 1, 1),
        at(64, 64, 64, 16, False, 2, 1, 1),
        at(128, 32, 64, 16, False, 2, 1, 1, plain=True),
        at(128, 32, 64, 16, False, 1, 1, 1),
        at(128, 16, 16, 16, False, 0, 1, 1, gpu=SIMULATOR),
    ),
    "mma_dq": table(
        _MMA,
        at(64, 128, 32, 32, True, 2, 1, 2, plain=True),
        at(64, 128, 32, 32, False, 2, 1, 2),
        at(128, 128, 32, 32, False, 2, 1, 2, plain=True),
        at(128, 64, 32, 16, False, 2, 1, 2),
        at(128, 64, 32, 16, False, 1, 1, 2),
        at(256, 128, 64, 32, False, 1, 2, 1, plain=True),
        at(256, 64, 64, 32, False, 1, 2, 1, plain=True),
        at(256, 64, 32, 16, False, 1, 1, 2),
        at(256, 32, 16, 16, False, 1, 1, 2),
        at(256, 32, 32, 16, False, 0, 1, 2, gpu=SIMULATOR),
    ),
    "mma_dbias": table(
        "tile_m tile_n blocks_per_sm",
        at(64, 64, 64, 3),
        at(128, 64, 64, 2),
        at(256, 64, 64, 1),
        at(256, 64, 32, 1),
        at(256, 32, 16, 1),
        at(256, 32, 16, 0, gpu=SIMULATOR),
    ),
    "mma_daux": table(
        "tile_m tile_n blocks_per_sm",
        at(64, 64, 32, 4),
        at(128, 64, 32, 3),
        at(256, 64, 64, 1),
        at(256, 64, 32, 1),
        at(256, 32, 16, 1),
        at(256, 32, 16, 0, gpu=SIMULATOR),
    ),
    "mma_dkdv_float32": table(
        _WIDE,
        at(64, 32, 64, 16, 1, 1),
        at(128, 64, 64, 16, 2, 1),
        at(128, 32, 32, 16, 2, 1),
        at(256, 32, 64, 16, 2, 1, plain=True),
        at(256, 16, 32, 16, 2, 1, plain=True),
        at(256, 16, 16, 16, 2, 1, plain=True),
        at(256, 32, 64, 16, 2, 1, apart=True),
        at(256, 16, 16, 16, 2, 1, apart=True),
        at(256, 16, 32, 16, 2, 0, gpu=SIMULATOR),
    ),
    "mma_dkdv_float64": table(
        _WIDE,
        at(64, 16, 64, 16, 1, 1),
        at(128, 32, 64, 16, 2, 1),
        at(128, 16, 32, 16, 2, 1),
        at(256, 16, 32, 16, 2, 1, apart=True),
        at(256, 16, 16, 16, 2, 1, apart=True),
        at(256, 16, 32, 16, 2, 0, apart=True, gpu=SIMULATOR),
    ),
    "mma_dq_float32": table(
        _WIDE,
        at(64, 64, 64, 16, 1, 1, plain=True),
        at(64, 64, 32, 16, 1, 1),
        at(128, 64, 64, 16, 2, 1, plain=True),
        at(128, 64, 16, 16, 1, 1),
        at(256, 64, 32, 16, 2, 1, unread=True),
        at(256, 64, 16, 16, 2, 1),
        at(256, 32, 16, 16, 2, 1),
        at(256, 16, 16, 16, 2, 1),
        at(256, 32, 16, 16, 1, 0, gpu=SIMULATOR),
    ),
    "mma_dq_float64": table(
        _WIDE,
        at(64, 64, 32, 16, 1, 1),
        at(128, 64, 32, 16, 2, 1),
        at(128, 32, 16, 16, 2, 1),
        at(256, 32, 16, 16, 2, 1),
        at(256, 16, 16, 16, 2, 1),
        at(256, 32, 16, 16, 2, 0, gpu=SIMULATOR),
    ),
    # One kernel of all gradients: 1.30 to 1.54 times as fast as two. least_keys: with fewer, its line of parts of dQ
    # takes too long.
    "mma_wide_fused_float32": table(
        _WIDE,
        at(128, 32, 128, 32, 2, 1, above=64, least_keys=16384, plain=True),
        at(256, 32, 64, 32, 4, 1, above=128, least_keys=8192, plain=True),
    ),
    "mma_wide_fused_float64": table(_WIDE, at(256, 16, 32, 16, 4, 1, above=160, least_keys=8192, plain=True)),
    # For GPUs whose m16n8k16 of float64 is one instruction: 1.3 to 2 times as fast as two kernels, at head_dim 256
    # 2.7 to 3.1 times.
    "mma_wide_carried_float64": table(
        "tile_m tile_n warp_rows column_groups blocks_per_sm blocks",
        at(64, 32, 32, 16, 2, 2, 1, above=32, least_keys=32768, plain=True),
        at(128, 32, 64, 16, 2, 1, 1, above=64, least_keys=16384, plain=True),
        at(256, 32, 64, 16, 2, 1, 2, above=128, least_keys=8192, plain=True),
    ),
    "wgmma_dkdv": table(
        _WGMMA,
        at(64, 128, 128, 2, 2, linear=True, per_score=_MASK_MOD),
        at(64, 112, 128, 2, 2, linear=True, per_score=_MASK),
        at(64, 80, 128, 2, 2, linear=True, per_score=_ONE),
        at(64, 64, 128, 2, 2, per_score=_SEVERAL),
        at(96, 80, 128, 2, 2, plain=True),
        at(128, 64, 128, 3, 3, linear=True),
        at(128, 64, 128, 2, 2, linear=True, per_score=_MASK),
        at(128, 48, 128, 2, 2, per_score=_ONE),
        at(128, 32, 128, 2, 2, per_score=_SEVERAL),
        at(192, 80, 128, 2, 2, apart=True, plain=True),
        at(256, 64, 128, 2, 1, apart=True, per_score=_MASK),
        at(256, 48, 128, 2, 1, apart=True, per_score=_ONE),
        at(256, 32, 128, 2, 1, apart=True, per_score=_SEVERAL),
        at(128, 32, 64, 2, 2, per_score=_SEVERAL, gpu=SIMULATOR),
        at(256, 32, 64, 2, 1, apart=True, per_score=_SEVERAL, gpu=SIMULATOR),
    ),
    "wgmma_dq": table(
        _WGMMA,
        at(64, 128, 128, 2, 2, linear=True, per_score=_MASK),
        at(64, 128, 64, 2, 2, per_score=_SEVERAL),
        at(96, 128, 128, 2, 2, plain=True),
        at(128, 128, 128, 2, 2, functions=True, per_score=_MASK_MOD),
        at(128, 128, 112, 2, 2, linear=True, per_score=_MASK),
        at(128, 128, 80, 2, 2, linear=True, per_score=_ONE),
        at(128, 128, 64, 2, 2, per_score=_SEVERAL),
        at(192, 128, 80, 2, 2, plain=True),
        at(256, 128, 64, 2, 1, per_score=_MASK),
        at(256, 128, 48, 2, 1, per_score=_ONE),
        at(256, 128, 32, 2, 1, per_score=_SEVERAL),
        at(256, 64, 32, 2, 2, per_score=_SEVERAL, gpu=SIMULATOR),
    ),
    # With head_dim above 64 two places for 64 rows of a do not fit, nor do two of both kinds for 48. Above 128 two
    # blocks share the columns (config/wgmma_backward_float32.py).
    "wgmma_dkdv_float32": table(
        _WGMMA,
        at(64, 64, 64, 2, 2),
        at(128, 48, 64, 2, 1, unread=True),
        at(128, 32, 64, 2, 2),
        at(256, 64, 64, 1, 1, plain=True),
        at(256, 48, 64, 1, 1),
        at(128, 32, 64, 2, 1, gpu=SIMULATOR),
        at(256, 32, 64, 1, 1, gpu=SIMULATOR),
    ),
    "wgmma_dq_float32": table(
        _WGMMA,
        at(64, 64, 64, 2, 2),
        at(128, 64, 48, 2, 1),
        at(256, 64, 64, 1, 1),
        at(128, 64, 32, 2, 1, gpu=SIMULATOR),
        at(256, 64, 32, 1, 1, gpu=SIMULATOR),
    ),
    "wgmma_fused": table(_WGMMA, at(64, 128, 128, 2, 2), at(128, 64, 128, 2, 2)),  # gains_by_one_kernel says for what
}
