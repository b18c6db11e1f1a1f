"""Which tiles each kernel of a forward uses: a table of rows for each kernel, the best first.

The first row is taken whose head_dim is large enough and whose shared memory fits. docs/adding_a_tile_row.md explains
the columns, has the measurements behind the rows, and shows how to add one for another GPU.
"""

from typing import Any, NamedTuple

from ..machine.target import Target

MEASURED = "H200"  # the GPU of a row that names none
SIMULATOR = "simulator"  # small blocks, whose barriers are cheap, and few wasted rows: a thread is a Python thread


class Simt(NamedTuple):
    """Of v1 and v2, and of v2's backward. Rows that would be mostly past the last query, or key, are passed over."""

    tile_m: int
    tile_n: int
    gpu: str = MEASURED


class Mma(NamedTuple):
    head_dim: int  # up to this one
    tile_m: int
    tile_n: int
    warp_rows: int
    q_registers: bool
    blocks_per_sm: int
    rescale_threshold: int
    reads: bool = False  # for problems with a bias or a mask, whose words take registers
    gpu: str = MEASURED


class MmaWide(NamedTuple):
    """Of mma in float32 and float64."""

    head_dim: int
    tile_m: int
    tile_n: int
    warp_rows: int
    column_groups: int
    blocks_per_sm: int
    rescale_threshold: int
    plain: bool = False  # only for scores that no option changes
    unread: bool = False  # not where something is read or asked for each score
    unrolled: bool = False
    sliced: bool = False
    scalar_loads: bool = False
    above: int = 0  # for head_dim of q and k and of v that are both above this
    gpu: str = MEASURED


class Wgmma(NamedTuple):
    head_dim: int
    tile_m: int  # at most; TILE_COST decides
    tile_n: int
    ping_pong: bool
    q_buffers: int
    rescale_threshold: int
    plain: bool = False  # only for scores that no option changes
    unread: bool = False  # not where something is read or asked for each score
    masked: bool = False  # only where a mask is read for each score, and nothing else
    sloped: bool = False  # only for scores that ALiBi alone changes
    gpu: str = MEASURED


class WgmmaFloat32(NamedTuple):
    head_dim: int
    tile_m: int  # at most
    tile_n: int
    ping_pong: bool
    stages: int
    rescale_threshold: int
    plain: bool = False  # only for scores that no option changes
    gpu: str = MEASURED


_SIMULATED = tuple(Simt(m, n, SIMULATOR) for m, n in ((16, 16), (16, 8), (8, 8), (8, 4), (4, 4), (1, 4)))
_SIMT = tuple(
    Simt(m, n) for m, n in ((256, 16), (128, 16), (64, 16), (32, 16), (32, 8), (16, 8), (8, 8), (8, 4), (4, 4), (1, 4))
)

TABLES: dict[str, tuple[Any, ...]] = {
    "v1": _SIMT + _SIMULATED,
    "v2": _SIMT + _SIMULATED,
    "mma": (
        Mma(64, 128, 64, warp_rows=32, q_registers=True, blocks_per_sm=2, rescale_threshold=0),
        Mma(128, 128, 64, warp_rows=32, q_registers=False, blocks_per_sm=2, rescale_threshold=8),
        Mma(128, 64, 64, warp_rows=16, q_registers=False, blocks_per_sm=2, rescale_threshold=0),
        Mma(256, 64, 64, warp_rows=16, q_registers=False, blocks_per_sm=2, rescale_threshold=0),
        Mma(256, 64, 32, warp_rows=16, q_registers=False, blocks_per_sm=1, rescale_threshold=0),
        Mma(512, 64, 32, warp_rows=16, q_registers=False, blocks_per_sm=1, rescale_threshold=0),
        Mma(512, 32, 32, warp_rows=16, q_registers=False, blocks_per_sm=1, rescale_threshold=0),
        Mma(64, 64, 64, warp_rows=16, q_registers=True, blocks_per_sm=2, rescale_threshold=0, reads=True),
        Mma(128, 64, 64, warp_rows=16, q_registers=False, blocks_per_sm=2, rescale_threshold=0, reads=True),
        Mma(256, 64, 64, warp_rows=16, q_registers=False, blocks_per_sm=2, rescale_threshold=0, reads=True),
        Mma(256, 64, 32, warp_rows=16, q_registers=False, blocks_per_sm=1, rescale_threshold=0, reads=True),
        Mma(512, 64, 32, warp_rows=16, q_registers=False, blocks_per_sm=1, rescale_threshold=0, reads=True),
        Mma(512, 32, 32, warp_rows=16, q_registers=False, blocks_per_sm=1, rescale_threshold=0, reads=True),
    ),
    # All queries and keys of a head in one tile, which shrinks to the lengths (select/forward.py).
    "mma_short": (
        Mma(64, 64, 64, warp_rows=16, q_registers=True, blocks_per_sm=4, rescale_threshold=0),
        Mma(128, 64, 64, warp_rows=16, q_registers=False, blocks_per_sm=2, rescale_threshold=0),
        Mma(64, 64, 64, warp_rows=16, q_registers=True, blocks_per_sm=4, rescale_threshold=0, reads=True),
        Mma(128, 64, 64, warp_rows=16, q_registers=False, blocks_per_sm=2, rescale_threshold=0, reads=True),
    ),
    "mma_float32": (
        MmaWide(64, 64, 64, warp_rows=16, column_groups=1, blocks_per_sm=2, rescale_threshold=8),
        MmaWide(128, 64, 32, warp_rows=16, column_groups=1, blocks_per_sm=2, rescale_threshold=8),
        MmaWide(256, 64, 64, 16, column_groups=2, blocks_per_sm=1, rescale_threshold=8, plain=True, unrolled=True),
        MmaWide(256, 128, 32, warp_rows=16, column_groups=1, blocks_per_sm=1, rescale_threshold=8, unread=True),
        MmaWide(256, 64, 32, warp_rows=16, column_groups=2, blocks_per_sm=1, rescale_threshold=8),
        MmaWide(256, 32, 16, warp_rows=16, column_groups=1, blocks_per_sm=1, rescale_threshold=8),
        MmaWide(512, 32, 16, warp_rows=16, column_groups=1, blocks_per_sm=1, rescale_threshold=8),
        MmaWide(512, 16, 16, warp_rows=16, column_groups=1, blocks_per_sm=1, rescale_threshold=8),
    ),
    "mma_float64": (
        MmaWide(64, 64, 16, warp_rows=16, column_groups=1, blocks_per_sm=3, rescale_threshold=8),
        MmaWide(128, 128, 32, warp_rows=16, column_groups=1, blocks_per_sm=1, rescale_threshold=8, plain=True),
        MmaWide(128, 128, 16, warp_rows=16, column_groups=1, blocks_per_sm=1, rescale_threshold=8),
        MmaWide(128, 64, 16, warp_rows=16, column_groups=1, blocks_per_sm=1, rescale_threshold=8),
        MmaWide(192, 64, 32, warp_rows=16, column_groups=2, blocks_per_sm=1, rescale_threshold=8, plain=True),
        MmaWide(256, 64, 32, 16, 2, 1, rescale_threshold=8, plain=True, sliced=True, scalar_loads=True, above=192),
        MmaWide(256, 64, 16, warp_rows=16, column_groups=2, blocks_per_sm=1, rescale_threshold=8),
        MmaWide(256, 32, 16, warp_rows=16, column_groups=1, blocks_per_sm=1, rescale_threshold=8),
        MmaWide(512, 16, 16, warp_rows=16, column_groups=1, blocks_per_sm=1, rescale_threshold=8),
    ),
    "wgmma": (
        Wgmma(64, 192, 128, ping_pong=True, q_buffers=2, rescale_threshold=8, plain=True),
        Wgmma(64, 192, 112, ping_pong=True, q_buffers=2, rescale_threshold=8, unread=True, sloped=True),
        Wgmma(64, 192, 96, ping_pong=True, q_buffers=2, rescale_threshold=8, unread=True),
        Wgmma(64, 192, 112, ping_pong=True, q_buffers=2, rescale_threshold=8, masked=True),
        Wgmma(64, 128, 128, ping_pong=True, q_buffers=2, rescale_threshold=8),
        Wgmma(128, 128, 128, ping_pong=True, q_buffers=2, rescale_threshold=8),
        Wgmma(192, 128, 128, ping_pong=True, q_buffers=1, rescale_threshold=8),
        Wgmma(192, 128, 96, ping_pong=True, q_buffers=1, rescale_threshold=8),
        Wgmma(256, 128, 64, ping_pong=True, q_buffers=1, rescale_threshold=8),
    ),
    "wgmma_float32": (
        WgmmaFloat32(64, 128, 64, ping_pong=True, stages=2, rescale_threshold=8),
        WgmmaFloat32(128, 128, 64, ping_pong=True, stages=1, rescale_threshold=8, plain=True),
        WgmmaFloat32(128, 128, 32, ping_pong=True, stages=2, rescale_threshold=8),
        WgmmaFloat32(192, 128, 32, ping_pong=True, stages=1, rescale_threshold=8, plain=True),
        WgmmaFloat32(192, 64, 32, ping_pong=True, stages=1, rescale_threshold=8),
        WgmmaFloat32(256, 64, 32, ping_pong=True, stages=1, rescale_threshold=8),
    ),
}

# What wgmma takes for a tile of keys, by query rows. Of those up to a row's tile_m the one is taken by which all is
# done soonest (cost_model.py).
TILE_COST = {64: 0.75, 128: 1.0, 192: 1.3}

# How many keys a tile of wgmma has at most where something is read for each score, which takes registers: {(bytes of a
# number of bias, 0 with a mask alone; whether nothing else changes or hides scores): ((up to head_dim, keys), ...)}.
READING_KEYS = {
    (0, True): ((128, 128), (192, 80), (256, 64)),
    (0, False): ((64, 128), (128, 112), (192, 80), (256, 64)),
    (2, True): ((128, 128), (256, 64)),
    (2, False): ((128, 96), (256, 48)),
    (4, True): ((64, 128), (128, 112), (256, 64)),
    (4, False): ((128, 96), (256, 32)),
}


def table_of(kernel: str, dtype: str) -> str:
    """The table of a kernel: tiles on tensor cores depend on the size of elements."""
    return f"{kernel}_{dtype}" if kernel.startswith(("mma", "wgmma")) and dtype in ("float32", "float64") else kernel


def rows_for(kernel: str, target: Target) -> tuple[Any, ...]:
    """The rows of a kernel's table for this machine."""
    return rows_of(TABLES[kernel], target)


def rows_of(table: tuple[Any, ...], target: Target) -> tuple[Any, ...]:
    """Those of a table for this machine: its GPU's own, or else those of the GPU that was measured."""
    gpu = SIMULATOR if target.simulated else next((row.gpu for row in table if row.gpu in target.name), MEASURED)
    return tuple(row for row in table if row.gpu == gpu) or tuple(row for row in table if row.gpu == MEASURED)


NOT_COLUMNS = (
    "head_dim",
    "plain",
    "reads",
    "apart",
    "functions",
    "unread",
    "masked",
    "sloped",
    "by_element",
    "linear",
    "gpu",
    "above",
    "least_keys",
    "own_rows",
    "other_rows",
)


def columns(row: Any) -> dict[str, Any]:
    """What a row says, by the names of a Config's fields; for which problems it is comes apart."""
    return {name: value for name, value in row._asdict().items() if name not in NOT_COLUMNS}
