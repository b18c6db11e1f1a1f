"""Config of decode, which reads caches on tensor cores (kernels/mma/decode.py)."""

import dataclasses
import functools
from typing import Any, ClassVar

from ..abi import parameters as abi
from .forward import ITEM_SIZE, TensorConfig, check, layout, multiple_of, one_of, tile_bytes
from .kvcache import page_arrays


class DecodeConfig(TensorConfig, kernel="decode", module="mma.decode"):
    """A block has up to tile_m rows, which are all query heads of a KV head, query after query.

    tile_n: keys of a warp's tile; key_warps warps have neighbouring tiles. stages: tiles of K and V in flight or in
    use. blocks: how many blocks run at a time. pages: how a sequence's pages are found (kernels/steps/pages.py).
    stack_levels: levels of the tree whose nodes wait in shared memory for their neighbours; stack_rows: rows of each
    such node. Nodes of level 0 may wait in registers, and those of higher levels in global memory. copy_bytes,
    large_f64: as in MmaConfig. members: how many sequences may have rows in the tile of a prefix that they share, a
    power of 2; 1: no prefix is shared (kernels/mma/decode_prefixes.py).
    """

    warp_rows: int = 16
    copy_bytes: int = 16
    stages: int = 3
    blocks: int = 1
    pages: str = "own"
    stack_rows: int = 16
    stack_levels: int = 0
    members: int = 1
    large_f64: bool = False

    CHUNK: ClassVar[int] = 256  # keys of a leaf of the tree; bits depend on it, on tile_n and on key_warps
    ROW_STATE_BYTES: ClassVar[int] = 4  # bytes of a row's flag in shared memory: whether its O is finite
    STAGE_BYTES: ClassVar[dict[str, int]] = dict(float32=32 * 1024)  # at most; other dtypes: 64 KB
    DTYPES: ClassVar[tuple[str, ...]] = ("float16", "bfloat16", "float32", "float64")

    takes = abi.forward().plus("partials", sizes="page pages levels")
    reads_states = False
    counted = True

    def __post_init__(self) -> None:
        self._check_taken(self.widest)
        check(self.tile_n == 16, f"tile_n must be 16, not {self.tile_n}: other tiles give other bits")
        one_of("warp_rows", self.warp_rows, 16, 32)
        multiple_of("tile_m", self.tile_m, self.warp_rows)
        check(self.stages >= 2, f"stages must be at least 2, not {self.stages}")
        fits = self.tile_m * self.head_dim_v_padded * self.number_size <= self.stage_bytes
        check(fits, f"tile_m = {self.tile_m} rows of O do not fit into a tile of K and V")

    @property
    def q_registers(self) -> bool:  # type: ignore[override]
        return self.item_size == 2 and self.warp_rows == 16 and self.head_dim_padded <= 128

    @property
    def number_size(self) -> int:
        """Bytes of a number of O, m and l."""
        return ITEM_SIZE[self.compute_dtype]

    @functools.cached_property
    def key_warps(self) -> int:
        """Warps that share the keys of a tile: four, or fewer if rows are wide, so that several tiles fit."""
        of_16 = 16 * 128 * sum(-(-columns * self.item_size // 128) for columns in (self.head_dim, self.head_dim_v))
        return next(n for n in (4, 2, 1) if n == 1 or n * of_16 <= self.STAGE_BYTES.get(self.dtype, 64 * 1024))

    @property
    def threads(self) -> int:  # type: ignore[override]
        return self.tile_m // self.warp_rows * self.key_warps * 32

    @property
    def keys(self) -> int:
        """Keys of a block's tile."""
        return self.key_warps * self.tile_n

    @property
    def counter_words(self) -> int:  # type: ignore[override]
        """A counter for each group of blocks that share a row tile."""
        return self.blocks

    def counters(self, problem: Any) -> int:
        return self.counter_words + self._sharing(problem.forward)

    def _sharing(self, p: Any) -> int:
        """How many pairs of a sequence and a KV head may have part of a shared prefix."""
        return p.batch * p.heads_kv if self.members > 1 else 0

    @property
    def columns_step(self) -> int:  # type: ignore[override]
        """Each key warp joins its part of O's columns; products of more than 16 bits take whole panels."""
        return max(8 * self.key_warps, 128 // self.item_size if self.item_size > 2 else 16)

    @property
    def aux(self) -> tuple[tuple[str, int], ...]:
        return (*page_arrays(self.pages), *(("int32", 1),) * (2 if self.members > 1 else 0), *super().aux)

    @functools.cached_property
    def scores(self) -> "DecodeConfig":
        """The Config that the stages of a score read: its aux has only the arrays of functions."""
        return dataclasses.replace(self, pages="own", members=1)

    @property
    def lane_rows(self) -> int:
        """Rows of a node that a lane holds: two of each 16 of its warp, or one if a tile has 8 rows at most. With one,
        a lane's numbers of O differ by column alone."""
        few = self.stack_rows <= 8 and self.head_dim_v_padded % (16 * self.key_warps) == 0
        return 1 if few else self.warp_rows // 8

    @property
    def stage_bytes(self) -> int:
        columns = self.head_dim_padded, self.head_dim_v_padded
        return sum(tile_bytes(self.keys, of_row, self.item_size) for of_row in columns)

    @property
    def parts_at_once(self) -> int:
        """How many of the columns' key_warps parts are exchanged at a time in a stage of K and V."""
        part = self.tile_m * self.head_dim_v_padded * self.number_size
        return next(n for n in (4, 2, 1) if n == 1 or n <= self.key_warps and n * part <= self.stage_bytes)

    def shared_layout(self) -> Any:
        return layout(
            q=tile_bytes(self.tile_m, self.head_dim_padded, self.item_size),
            ring=self.stages * self.stage_bytes,
            places=self.stages * 2 * self.keys * 8,  # where rows of K and V lie in global memory
            states=self.key_warps * self.tile_m * 2 * self.number_size,  # m and l of key warps
            flags=self.ROW_STATE_BYTES * self.tile_m,
            stack=self.stack_levels * self.shared_stack[1],
            last=max(16, 4 * self.members),  # words that warps exchange
        )

    def grid(self, problem: Any) -> int:
        p = problem.forward
        rows = p.seqlen_q * max(p.group, 1)
        items = p.batch * p.heads_kv * -(-rows // self.tile_m) * max(-(-p.seqlen_k // self.CHUNK), 1)
        return min(self.blocks, items)

    def levels(self, seqlen_k: int) -> int:
        """Levels of the tree over the chunks of a sequence."""
        return max(-(-seqlen_k // self.CHUNK) - 1, 1).bit_length()

    @property
    def pair_registers(self) -> bool:
        return self.node_numbers * self.number_size <= 96

    @property
    def shared_stack(self) -> tuple[int, int, int]:
        """(levels, bytes of a level, bytes of one float32 number of every thread). Four lanes of each key warp share
        a row of O; each has m and l."""
        number_bytes = 4 * 4 * self.key_warps * self.stack_rows
        return self.stack_levels, (self.head_dim_v_padded // (4 * self.key_warps) + 2) * number_bytes, number_bytes

    @property
    def node_numbers(self) -> int:
        """How many numbers of a node a thread holds: its part of O, and m and l of its rows."""
        return self.lane_rows * (self.head_dim_v_padded // (4 * self.key_warps) + 2)

    @property
    def slot_numbers(self) -> int:
        """How many numbers a node has in global memory: O of all rows, then their m and l."""
        return self.tile_m * (self.head_dim_v_padded + 2)

    def own_sizes(self, problem: Any) -> dict[str, Any]:
        p = problem.forward
        size, total = (p.pages.size, p.pages.total) if p.pages else (1, p.batch)
        return dict(page=max(size, 1), pages=total, levels=self.levels(p.seqlen_k))

    def workspace(self, problem: Any) -> abi.Workspace:
        """Slots for the nodes that blocks share, one slot for each block's own node, a slot and two words for each
        sequence behind a prefix, and each block's stack."""
        stacks = self.blocks * self.levels(problem.forward.seqlen_k) * self.node_numbers * self.threads
        slots, sharing = 2 * self.blocks, self._sharing(problem.forward)
        numbers = slots * self.slot_numbers + sharing * (self.slot_numbers + 2) + stacks
        return dict(partials=((numbers,), self.compute_dtype))
