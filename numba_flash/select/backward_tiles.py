"""Which tiles each kernel of a backward uses, as tiles.py says it of a forward."""

from typing import Any, NamedTuple

from ..machine.target import Target
from .tiles import MEASURED, SIMULATOR, Simt, rows_of


class MmaDkdv(NamedTuple):
    head_dim: int
    plain: bool  # for scores that no option changes; those that do need registers of their own
    tile_m: int
    tile_n: int
    warp_rows: int
    in_registers: bool
    blocks_per_sm: int
    column_groups: int
    stages: int
    apart: bool = False  # dK and dV have a kernel each
    functions: bool = False  # for problems in which the caller's functions change or hide scores, and nothing else
    gpu: str = MEASURED


class MmaDq(NamedTuple):
    head_dim: int
    plain: bool
    tile_m: int
    tile_n: int
    warp_rows: int
    in_registers: bool
    blocks_per_sm: int
    column_groups: int
    stages: int
    gpu: str = MEASURED


class MmaScores(NamedTuple):
    """Of mma_dbias and mma_daux."""

    head_dim: int
    tile_m: int
    tile_n: int
    blocks_per_sm: int
    gpu: str = MEASURED


class WideBackward(NamedTuple):
    """Of mma's backward in float32 and float64: rows that a block owns, and those that it walks over."""

    head_dim: int
    own_rows: int
    other_rows: int
    warp_rows: int
    column_groups: int
    blocks_per_sm: int
    apart: bool = False  # dK and dV have a kernel each
    plain: bool = False  # only for scores that no option changes
    unread: bool = False  # as of MmaWide
    unrolled: bool = False
    gpu: str = MEASURED


class WideFused(NamedTuple):
    """Of mma's backward in float32 and float64 as one kernel, for scores that no option changes."""

    above: int  # head_dim, both of q and k and of v
    head_dim: int
    own_rows: int
    other_rows: int
    warp_rows: int
    column_groups: int
    blocks_per_sm: int
    least_keys: int  # of all heads of a batch entry: with fewer, its line of parts of dQ takes too long
    unrolled: bool = False
    plain: bool = True
    gpu: str = MEASURED


class WideCarried(NamedTuple):
    """The same in float64 on Hopper, whose parts of dQ are carried."""

    above: int
    head_dim: int
    own_rows: int
    other_rows: int
    warp_rows: int
    column_groups: int
    blocks_per_sm: int
    least_keys: int
    blocks: int = 1  # that share the columns
    one_staging_buffer: bool = False
    plain: bool = True
    gpu: str = MEASURED


# What decides about each score or weight on its own in wgmma's backward. Each takes more registers than the one before
# it: a mask_mod alone; a bias alone that TMA loads, a mask alone, or dropout; one kind of these, or functions, beside
# options of the score; several kinds, or a bias beside another option of the score.
BY_ELEMENT = ("mask_mod", "mask or dropped weights", "one kind", "several kinds")


class WgmmaDkdv(NamedTuple):
    head_dim: int
    plain: bool
    tile_m: int
    tile_n: int
    stages_a: int
    stages_b: int
    apart: bool = False  # dK and dV have a kernel each
    linear: bool = False  # only for scores whose derivative by the product is 1: nothing keeps another
    by_element: str = ""  # for problems in which something decides about each score: up to this one of BY_ELEMENT
    gpu: str = MEASURED


class WgmmaDq(NamedTuple):
    head_dim: int
    plain: bool
    tile_m: int
    tile_n: int
    stages_a: int
    stages_b: int
    linear: bool = False
    by_element: str = ""
    gpu: str = MEASURED


class WgmmaFused(NamedTuple):
    head_dim: int
    tile_m: int
    tile_n: int
    stages_a: int
    stages_b: int
    gpu: str = MEASURED


class WgmmaBackwardFloat32(NamedTuple):
    """Of wgmma_dkdv and wgmma_dq in float32, whose blocks own 64 rows."""

    head_dim: int
    tile_m: int
    tile_n: int
    stages_a: int
    stages_b: int
    unread: bool = False  # as of MmaWide
    plain: bool = False
    gpu: str = MEASURED


TABLES: dict[str, tuple[Any, ...]] = {
    # A key has two threads in v2_dkdv. These two are not measured yet.
    "v2_dkdv": (
        *(Simt(m, n) for m, n in ((16, 64), (16, 32), (8, 32), (8, 16), (8, 8), (4, 4))),
        *(Simt(m, n, SIMULATOR) for m, n in ((16, 16), (8, 8), (4, 4))),
    ),
    "v2_dq": (
        *(Simt(m, n) for m, n in ((128, 16), (64, 16), (32, 16), (32, 8), (16, 8), (8, 8), (4, 4))),
        *(Simt(m, n, SIMULATOR) for m, n in ((16, 16), (8, 8), (4, 4))),
    ),
    "mma_dkdv": (
        MmaDkdv(64, True, 32, 128, warp_rows=32, in_registers=False, blocks_per_sm=2, column_groups=1, stages=2),
        MmaDkdv(64, False, 64, 128, warp_rows=16, in_registers=False, blocks_per_sm=1, column_groups=1, stages=2),
        MmaDkdv(128, True, 64, 64, warp_rows=32, in_registers=False, blocks_per_sm=2, column_groups=2, stages=2),
        MmaDkdv(128, True, 64, 64, warp_rows=16, in_registers=False, blocks_per_sm=2, column_groups=1, stages=2),
        MmaDkdv(128, True, 32, 64, warp_rows=16, in_registers=False, blocks_per_sm=2, column_groups=1, stages=2),
        MmaDkdv(128, False, 32, 64, 16, False, blocks_per_sm=2, column_groups=1, stages=2, functions=True),
        MmaDkdv(128, False, 32, 64, 16, False, blocks_per_sm=2, column_groups=1, stages=2, apart=True),
        MmaDkdv(128, False, 32, 64, 16, False, blocks_per_sm=1, column_groups=1, stages=2, apart=True),
        MmaDkdv(256, True, 128, 64, warp_rows=32, in_registers=False, blocks_per_sm=1, column_groups=4, stages=1),
        MmaDkdv(256, True, 32, 128, 16, False, blocks_per_sm=1, column_groups=1, stages=2, apart=True),
        MmaDkdv(256, False, 32, 64, 16, False, blocks_per_sm=1, column_groups=1, stages=2, apart=True),
        MmaDkdv(256, False, 16, 32, 16, False, blocks_per_sm=1, column_groups=1, stages=2, apart=True),
        MmaDkdv(128, False, 32, 32, 16, False, 0, column_groups=1, stages=2, gpu=SIMULATOR),
        MmaDkdv(256, False, 32, 32, 16, False, 0, column_groups=1, stages=2, apart=True, gpu=SIMULATOR),
    ),
    # All keys of a head in one tile: dK, dV and dQ in one kernel. Tiles shrink to the lengths (backward_kernels.py).
    "mma_one_key_tile": (
        MmaDkdv(32, False, 64, 64, warp_rows=16, in_registers=False, blocks_per_sm=3, column_groups=1, stages=1),
        MmaDkdv(64, False, 64, 64, warp_rows=16, in_registers=False, blocks_per_sm=2, column_groups=1, stages=1),
        MmaDkdv(128, True, 32, 64, warp_rows=16, in_registers=False, blocks_per_sm=2, column_groups=1, stages=1),
        MmaDkdv(128, False, 32, 64, warp_rows=16, in_registers=False, blocks_per_sm=1, column_groups=1, stages=1),
        MmaDkdv(128, False, 16, 16, 16, False, 0, column_groups=1, stages=1, gpu=SIMULATOR),
    ),
    "mma_dq": (
        MmaDq(64, True, 128, 32, warp_rows=32, in_registers=True, blocks_per_sm=2, column_groups=1, stages=2),
        MmaDq(64, False, 128, 32, warp_rows=32, in_registers=False, blocks_per_sm=2, column_groups=1, stages=2),
        MmaDq(128, True, 128, 32, warp_rows=32, in_registers=False, blocks_per_sm=2, column_groups=1, stages=2),
        MmaDq(128, False, 64, 32, warp_rows=16, in_registers=False, blocks_per_sm=2, column_groups=1, stages=2),
        MmaDq(128, False, 64, 32, warp_rows=16, in_registers=False, blocks_per_sm=1, column_groups=1, stages=2),
        MmaDq(256, True, 128, 64, warp_rows=32, in_registers=False, blocks_per_sm=1, column_groups=2, stages=1),
        MmaDq(256, True, 64, 64, warp_rows=32, in_registers=False, blocks_per_sm=1, column_groups=2, stages=1),
        MmaDq(256, False, 64, 32, warp_rows=16, in_registers=False, blocks_per_sm=1, column_groups=1, stages=2),
        MmaDq(256, False, 32, 16, warp_rows=16, in_registers=False, blocks_per_sm=1, column_groups=1, stages=2),
        MmaDq(256, False, 32, 32, 16, False, 0, column_groups=1, stages=2, gpu=SIMULATOR),
    ),
    "mma_dbias": (
        MmaScores(64, 64, 64, blocks_per_sm=3),
        MmaScores(128, 64, 64, blocks_per_sm=2),
        MmaScores(256, 64, 64, blocks_per_sm=1),
        MmaScores(256, 64, 32, blocks_per_sm=1),
        MmaScores(256, 32, 16, blocks_per_sm=1),
        MmaScores(256, 32, 16, blocks_per_sm=0, gpu=SIMULATOR),
    ),
    "mma_daux": (
        MmaScores(64, 64, 32, blocks_per_sm=4),
        MmaScores(128, 64, 32, blocks_per_sm=3),
        MmaScores(256, 64, 64, blocks_per_sm=1),
        MmaScores(256, 64, 32, blocks_per_sm=1),
        MmaScores(256, 32, 16, blocks_per_sm=1),
        MmaScores(256, 32, 16, blocks_per_sm=0, gpu=SIMULATOR),
    ),
    "mma_dkdv_float32": (
        WideBackward(64, 64, 32, warp_rows=16, column_groups=1, blocks_per_sm=1),
        WideBackward(128, 64, 64, warp_rows=16, column_groups=2, blocks_per_sm=1),
        WideBackward(128, 32, 32, warp_rows=16, column_groups=2, blocks_per_sm=1),
        WideBackward(256, 64, 32, warp_rows=16, column_groups=2, blocks_per_sm=1, plain=True),
        WideBackward(256, 32, 16, warp_rows=16, column_groups=2, blocks_per_sm=1, plain=True),
        WideBackward(256, 16, 16, warp_rows=16, column_groups=2, blocks_per_sm=1, plain=True),
        WideBackward(256, 64, 32, warp_rows=16, column_groups=2, blocks_per_sm=1, apart=True),
        WideBackward(256, 16, 16, warp_rows=16, column_groups=2, blocks_per_sm=1, apart=True),
        WideBackward(256, 32, 16, warp_rows=16, column_groups=1, blocks_per_sm=0, gpu=SIMULATOR),
    ),
    "mma_dkdv_float64": (
        WideBackward(64, 64, 16, warp_rows=16, column_groups=1, blocks_per_sm=1),
        WideBackward(128, 64, 32, warp_rows=16, column_groups=2, blocks_per_sm=1),
        WideBackward(128, 32, 16, warp_rows=16, column_groups=2, blocks_per_sm=1),
        WideBackward(256, 32, 16, warp_rows=16, column_groups=2, blocks_per_sm=1, apart=True),
        WideBackward(256, 16, 16, warp_rows=16, column_groups=2, blocks_per_sm=1, apart=True),
        WideBackward(256, 32, 16, warp_rows=16, column_groups=1, blocks_per_sm=0, gpu=SIMULATOR),
    ),
    "mma_wide_fused_float32": (
        WideFused(32, 64, 64, 64, warp_rows=16, column_groups=2, blocks_per_sm=2, least_keys=65536),
        WideFused(64, 128, 128, 32, warp_rows=32, column_groups=2, blocks_per_sm=1, least_keys=16384, unrolled=True),
        WideFused(128, 256, 64, 32, warp_rows=32, column_groups=4, blocks_per_sm=1, least_keys=8192),
    ),
    "mma_wide_fused_float64": (
        WideFused(160, 256, 32, 16, warp_rows=16, column_groups=4, blocks_per_sm=1, least_keys=8192),
    ),
    # for GPUs whose m16n8k16 of float64 is one instruction
    "mma_wide_carried_float64": (
        WideCarried(32, 64, 32, 32, 16, 2, blocks_per_sm=2, least_keys=32768),
        WideCarried(64, 128, 64, 32, 16, 2, 1, least_keys=16384, one_staging_buffer=True),
        WideCarried(128, 256, 64, 32, 16, 2, 1, least_keys=8192, blocks=2, one_staging_buffer=True),
    ),
    "mma_dq_float32": (
        WideBackward(64, 64, 64, warp_rows=16, column_groups=1, blocks_per_sm=1, plain=True),
        WideBackward(64, 64, 32, warp_rows=16, column_groups=1, blocks_per_sm=1),
        WideBackward(128, 64, 64, warp_rows=16, column_groups=2, blocks_per_sm=1, plain=True),
        WideBackward(128, 64, 16, warp_rows=16, column_groups=1, blocks_per_sm=1),
        WideBackward(256, 64, 32, warp_rows=16, column_groups=2, blocks_per_sm=1, unread=True),
        WideBackward(256, 64, 16, warp_rows=16, column_groups=2, blocks_per_sm=1),
        WideBackward(256, 32, 16, warp_rows=16, column_groups=2, blocks_per_sm=1),
        WideBackward(256, 16, 16, warp_rows=16, column_groups=2, blocks_per_sm=1),
        WideBackward(256, 32, 16, warp_rows=16, column_groups=1, blocks_per_sm=0, gpu=SIMULATOR),
    ),
    "mma_dq_float64": (
        WideBackward(64, 64, 32, warp_rows=16, column_groups=1, blocks_per_sm=1),
        WideBackward(128, 64, 32, warp_rows=16, column_groups=2, blocks_per_sm=1),
        WideBackward(128, 32, 16, warp_rows=16, column_groups=2, blocks_per_sm=1),
        WideBackward(256, 32, 16, warp_rows=16, column_groups=2, blocks_per_sm=1),
        WideBackward(256, 16, 16, warp_rows=16, column_groups=2, blocks_per_sm=1),
        WideBackward(256, 32, 16, warp_rows=16, column_groups=1, blocks_per_sm=0, gpu=SIMULATOR),
    ),
    "wgmma_dkdv": (
        WgmmaDkdv(64, True, 128, 128, stages_a=2, stages_b=2),
        WgmmaDkdv(64, False, 128, 128, stages_a=2, stages_b=2, linear=True),
        WgmmaDkdv(64, False, 64, 128, stages_a=2, stages_b=2),
        WgmmaDkdv(96, True, 80, 128, stages_a=2, stages_b=2),
        WgmmaDkdv(128, True, 64, 128, stages_a=3, stages_b=3),
        WgmmaDkdv(128, False, 64, 128, stages_a=3, stages_b=3, linear=True),
        WgmmaDkdv(128, False, 48, 128, stages_a=2, stages_b=2),
        WgmmaDkdv(192, True, 80, 128, stages_a=2, stages_b=2, apart=True),
        WgmmaDkdv(256, False, 64, 128, stages_a=2, stages_b=1, apart=True),
        WgmmaDkdv(64, False, 128, 128, stages_a=2, stages_b=2, by_element="mask_mod"),
        WgmmaDkdv(64, False, 112, 128, stages_a=2, stages_b=2, by_element="mask or dropped weights"),
        WgmmaDkdv(64, False, 80, 128, stages_a=2, stages_b=2, by_element="one kind"),
        WgmmaDkdv(64, False, 64, 128, stages_a=2, stages_b=2, by_element="several kinds"),
        WgmmaDkdv(128, False, 64, 128, stages_a=2, stages_b=2, by_element="mask or dropped weights"),
        WgmmaDkdv(128, False, 48, 128, stages_a=2, stages_b=2, by_element="one kind"),
        WgmmaDkdv(128, False, 32, 128, stages_a=2, stages_b=2, by_element="several kinds"),
        WgmmaDkdv(256, False, 64, 128, stages_a=2, stages_b=1, apart=True, by_element="mask or dropped weights"),
        WgmmaDkdv(256, False, 48, 128, stages_a=2, stages_b=1, apart=True, by_element="one kind"),
        WgmmaDkdv(256, False, 32, 128, stages_a=2, stages_b=1, apart=True, by_element="several kinds"),
        WgmmaDkdv(128, False, 32, 64, stages_a=2, stages_b=2, by_element="several kinds", gpu=SIMULATOR),
        WgmmaDkdv(256, False, 32, 64, stages_a=2, stages_b=1, apart=True, by_element="several kinds", gpu=SIMULATOR),
        WgmmaDkdv(128, False, 32, 64, stages_a=2, stages_b=2, gpu=SIMULATOR),
        WgmmaDkdv(256, False, 32, 64, stages_a=2, stages_b=1, apart=True, gpu=SIMULATOR),
    ),
    "wgmma_dq": (
        WgmmaDq(64, True, 128, 128, stages_a=2, stages_b=2),
        WgmmaDq(64, False, 128, 128, stages_a=2, stages_b=2, linear=True),
        WgmmaDq(64, False, 128, 64, stages_a=2, stages_b=2),
        WgmmaDq(96, True, 128, 128, stages_a=2, stages_b=2),
        WgmmaDq(128, True, 128, 112, stages_a=2, stages_b=2),
        WgmmaDq(128, False, 128, 112, stages_a=2, stages_b=2, linear=True),
        WgmmaDq(128, False, 128, 64, stages_a=2, stages_b=2),
        WgmmaDq(192, True, 128, 80, stages_a=2, stages_b=2),
        WgmmaDq(256, False, 128, 64, stages_a=2, stages_b=1),
        WgmmaDq(64, False, 128, 128, stages_a=2, stages_b=2, by_element="mask or dropped weights"),
        WgmmaDq(64, False, 128, 64, stages_a=2, stages_b=2, by_element="several kinds"),
        WgmmaDq(128, False, 128, 128, stages_a=2, stages_b=2, by_element="mask_mod"),
        WgmmaDq(128, False, 128, 112, stages_a=2, stages_b=2, by_element="mask or dropped weights"),
        WgmmaDq(128, False, 128, 80, stages_a=2, stages_b=2, by_element="one kind"),
        WgmmaDq(128, False, 128, 64, stages_a=2, stages_b=2, by_element="several kinds"),
        WgmmaDq(256, False, 128, 64, stages_a=2, stages_b=1, by_element="mask or dropped weights"),
        WgmmaDq(256, False, 128, 48, stages_a=2, stages_b=1, by_element="one kind"),
        WgmmaDq(256, False, 128, 32, stages_a=2, stages_b=1, by_element="several kinds"),
        WgmmaDq(256, False, 64, 32, stages_a=2, stages_b=2, by_element="several kinds", gpu=SIMULATOR),
        WgmmaDq(256, False, 64, 32, stages_a=2, stages_b=2, gpu=SIMULATOR),
    ),
    # With head_dim above 64 two places for 64 rows of a do not fit, nor do two of both kinds for 48. Above 128 two
    # blocks share the columns (config/wgmma_paired_float32.py).
    "wgmma_dkdv_float32": (
        WgmmaBackwardFloat32(64, 64, 64, stages_a=2, stages_b=2),
        WgmmaBackwardFloat32(128, 48, 64, stages_a=2, stages_b=1, unread=True),
        WgmmaBackwardFloat32(128, 32, 64, stages_a=2, stages_b=2),
        WgmmaBackwardFloat32(256, 64, 64, stages_a=1, stages_b=1, plain=True),
        WgmmaBackwardFloat32(256, 48, 64, stages_a=1, stages_b=1),
        WgmmaBackwardFloat32(128, 32, 64, stages_a=2, stages_b=1, gpu=SIMULATOR),
        WgmmaBackwardFloat32(256, 32, 64, stages_a=1, stages_b=1, gpu=SIMULATOR),
    ),
    "wgmma_dq_float32": (
        WgmmaBackwardFloat32(64, 64, 64, stages_a=2, stages_b=2),
        WgmmaBackwardFloat32(128, 64, 48, stages_a=2, stages_b=1),
        WgmmaBackwardFloat32(256, 64, 64, stages_a=1, stages_b=1),
        WgmmaBackwardFloat32(128, 64, 32, stages_a=2, stages_b=1, gpu=SIMULATOR),
        WgmmaBackwardFloat32(256, 64, 32, stages_a=1, stages_b=1, gpu=SIMULATOR),
    ),
    # backward_kernels.gains_by_one_kernel: for what
    "wgmma_fused": (
        WgmmaFused(64, 128, 128, stages_a=2, stages_b=2),
        WgmmaFused(128, 64, 128, stages_a=2, stages_b=2),
    ),
}


def rows_for(kernel: str, target: Target) -> tuple[Any, ...]:
    """The rows of a kernel's table for this machine."""
    return rows_of(TABLES[kernel], target)
