"""Configs of the backward on tensor cores in float32 and float64."""

from dataclasses import dataclass
from typing import Any, ClassVar

from .forward import ITEM_SIZE, Config, layout, tile_bytes
from .mma_forward import MmaConfig


@dataclass(frozen=True)
class WideBackwardConfig(Config):
    """What mma_dkdv_wide and mma_dq_wide share.

    A block owns a tile of rows and keeps it in shared memory; it walks over the tiles of the other side. Warps own
    `warp_rows` rows. column_groups, large_f64, unrolled, bias_pairs: as of MmaConfig.
    """

    warp_rows: int = 16
    column_groups: int = 1
    large_f64: bool = False
    bias_pairs: bool = False
    unrolled: bool = False

    ALIGNMENT: ClassVar[int] = 1024  # of panels; dynamic shared memory itself begins at a multiple of 16
    group_size: ClassVar[int] = 1  # a tile is of one head
    GROUPS: ClassVar[tuple[int, ...]] = (1, 2)
    stages: ClassVar[int] = 1  # these two: as of MmaBackwardConfig
    in_registers: ClassVar[bool] = False
    columns_in_order: ClassVar[bool] = False  # a lane's sums are of two columns of each 8, side by side
    SUMS: ClassVar[int] = 256  # of 32 bits: what a warp can keep in registers of a row of gradients

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"these kernels take float32 and float64, not {self.dtype}")
        if self.warp_rows not in (16, 32):
            raise ValueError(f"warp_rows must be 16 or 32, not {self.warp_rows}")
        if self.own_rows < self.warp_rows or self.own_rows % self.warp_rows:
            raise ValueError(f"a block's own rows must be a multiple of {self.warp_rows}, not {self.own_rows}")
        if self.other_rows not in MmaConfig.KEYS[self.dtype]:
            allowed = MmaConfig.KEYS[self.dtype]
            raise ValueError(f"the rows that a block walks over must be one of {allowed}, not {self.other_rows}")
        if self.column_groups not in self.GROUPS:
            raise ValueError(f"column_groups must be one of {self.GROUPS}, not {self.column_groups}")
        sums = self.summed_columns // self.column_groups * self.item_size // 4 * self.warp_rows // 16
        if sums > self.SUMS:
            raise ValueError(f"head_dim {self.head_dim} and {self.head_dim_v} need {sums} sums a row, not {self.SUMS}")
        object.__setattr__(self, "shared_bytes", self.ALIGNMENT + self.shared_layout().end)

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return ITEM_SIZE[self.dtype]

    @property
    def own_rows(self) -> int:
        """Rows of the tile that a block owns."""
        raise NotImplementedError

    @property
    def other_rows(self) -> int:
        """Rows of the tiles that it walks over."""
        raise NotImplementedError

    @property
    def summed_columns(self) -> int:
        """Of gradients, of one row."""
        raise NotImplementedError

    def summed(self, columns: int) -> int:
        """How many of a gradient's columns a warp sums up."""
        return columns // self.column_groups

    @property
    def threads(self) -> int:
        return self.own_rows // self.warp_rows * self.column_groups * 32

    @property
    def head_dim_padded(self) -> int:
        """head_dim in whole panels for each group of columns; what is past head_dim is zero."""
        return self._padded(self.head_dim)

    @property
    def head_dim_v_padded(self) -> int:
        return self._padded(self.head_dim_v)

    def _padded(self, columns: int) -> int:
        step = 128 // self.item_size * self.column_groups
        return -(-columns // step) * step

    def tiles(self) -> tuple[int, int, int, int]:
        """Bytes of the own tiles, for S and for dP, and of the other side's."""
        columns, rows = (self.head_dim_padded, self.head_dim_v_padded), (self.own_rows, self.other_rows)
        own_s, own_dp, other_s, other_dp = (tile_bytes(r, c, self.item_size) for r in rows for c in columns)
        return own_s, own_dp, other_s, other_dp

    @property
    def exchanged(self) -> int:
        """Bytes of P or dS where warps that own the same rows exchange it."""
        return self.own_rows * self.other_rows * self.item_size if self.column_groups > 1 else 0

    def shared_layout(self) -> Any:
        """Where in shared memory things begin, and the end, in bytes."""
        raise NotImplementedError


@dataclass(frozen=True)
class WideDkdvConfig(WideBackwardConfig):
    """A block owns tile_n keys and walks over tiles of tile_m queries. of_dk, of_dv: which of the two it computes."""

    of_dk: bool = True
    of_dv: bool = True

    def __post_init__(self) -> None:
        if not (self.of_dk or self.of_dv):
            raise ValueError("of_dk or of_dv must be True: there is nothing else to compute")
        super().__post_init__()

    @property
    def own_rows(self) -> int:
        return self.tile_n

    @property
    def other_rows(self) -> int:
        return self.tile_m

    def shared_layout(self) -> Any:
        """As of MmaDkdvConfig; P and dS each have a place."""
        k, v, q, do = self.tiles()
        p, ds, rows = self.exchanged * self.of_dv, self.exchanged * self.of_dk, self.tile_m * 2 * self.item_size
        return layout(k=k, v=v, q=q, do=do, rows=rows, p=p, ds=ds, seen=8 * self.tile_n, state=96)

    @property
    def summed_columns(self) -> int:
        return self.head_dim_padded * self.of_dk + self.head_dim_v_padded * self.of_dv


@dataclass(frozen=True)
class WideFusedConfig(WideBackwardConfig):
    """A block owns tile_n keys, walks over tiles of tile_m queries, and computes dK, dV and its parts of dQ.

    column_groups warps own the same keys, 2 or 4: one half computes S of them, the other dP, each with a part of the
    queries. Each sums up its part of the columns of dK and dV. Of dQ warps have `dq_columns` of 16 queries.
    """

    column_groups: int = 2

    GROUPS: ClassVar[tuple[int, ...]] = (2, 4)
    ABREAST: ClassVar[int] = 264  # about as many key tiles as a GPU works on at a time
    blocks: ClassVar[int] = 1  # that share the columns
    one_staging_buffer: ClassVar[bool] = False  # these two: as of WideCarriedConfig
    LOADERS: ClassVar[int] = 0
    registers: ClassVar[tuple[int, int]] = (24, 240)
    TURNS_AT: ClassVar[int] = 32  # as in kernels/steps/lse_delta.py

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers // 32 % (self.tile_m // 16):
            raise ValueError(f"strips of 16 of {self.tile_m} queries must divide {self.workers // 32} warps")
        if self.tile_m // 8 % (self.column_groups // 2):
            raise ValueError(f"{self.column_groups // 2} warps cannot share {self.tile_m} queries")

    @property
    def workers(self) -> int:
        """Threads that compute."""
        return self.own_rows // self.warp_rows * self.column_groups * 32

    @property
    def own_rows(self) -> int:
        return self.tile_n

    @property
    def other_rows(self) -> int:
        return self.tile_m

    @property
    def summed_columns(self) -> int:
        return self.head_dim_padded + self.head_dim_v_padded

    @property
    def head_dim_padded(self) -> int:
        """Of all tiles alike: what a warp does is then the same for S as for dP."""
        return self._padded(max(self.head_dim, self.head_dim_v))

    @property
    def head_dim_v_padded(self) -> int:
        return self.head_dim_padded

    @property
    def _column_parts(self) -> int:
        """In how many parts warps have the columns of dQ."""
        return max(self.workers // 32 // (self.tile_m // 16), 1)

    @property
    def dq_columns(self) -> int:
        return self.head_dim_padded // self._column_parts

    def _padded(self, columns: int) -> int:
        step = 128 // self.item_size * max(self.column_groups, self._column_parts)
        return -(-columns // step) * step

    @property
    def pitch(self) -> int:
        """Elements from a key of P^T or dS^T to the next (kernels/mma/shared_weights.py)."""
        return self.tile_m + (4 if self.item_size == 4 else 0)

    def own_places(self) -> tuple[int, int, int]:
        """Where V, P^T and dS^T are."""
        plan = self.shared_layout()
        return plan.v, plan.p, plan.ds

    def shared_layout(self) -> Any:
        """Where K, V, Q, dO, P^T, dS^T, lse with delta of the queries, the block's state, and the end are."""
        own, other = (tile_bytes(rows, self.head_dim_padded, self.item_size) for rows in (self.tile_n, self.tile_m))
        weights, rows = self.tile_n * self.pitch * self.item_size, self.tile_m * 2 * self.item_size
        return layout(k=own, v=own, q=other, do=other, p=weights, ds=weights, rows=rows, state=64, barriers=0)


@dataclass(frozen=True)
class WideCarriedConfig(WideFusedConfig):
    """Of mma_wide_carried: a further warpgroup loads tiles and adds parts of dQ in global memory.

    blocks: with 2, a cluster, each has half of the columns, which head_dim_padded then counts. one_staging_buffer:
    scores from the other block, P^T with dS^T, and the part of dQ follow each other in one buffer of shared memory, so
    that tiles of more queries fit. Without it the part of dQ has a buffer of its own.
    """

    blocks: int = 1  # type: ignore[misc]
    one_staging_buffer: bool = False  # type: ignore[misc]

    whole_program: ClassVar[bool] = True  # setmaxnreg wants that
    columns_in_order: ClassVar[bool] = True
    shared_alignment: ClassVar[int] = WideBackwardConfig.ALIGNMENT
    FEW: ClassVar[int] = 56  # registers of a thread of that warpgroup
    LOADERS: ClassVar[int] = 64  # threads that load tiles

    def __post_init__(self) -> None:
        if self.dtype != "float64":
            raise ValueError(f"parts of dQ are carried in float64, not in {self.dtype}")
        if self.blocks not in (1, 2):
            raise ValueError(f"blocks must be 1 or 2, not {self.blocks}")
        if self.blocks == 2 and not self.one_staging_buffer:
            raise ValueError("blocks=2 needs one_staging_buffer: there is no other place for the other block's scores")
        if self.own_rows > 4 * self.warp_rows:
            raise ValueError(f"{self.own_rows} keys are more than 4 times {self.warp_rows}: each has a named barrier")
        if self.one_staging_buffer and self.column_groups > 2:
            raise ValueError(
                f"one_staging_buffer is for column_groups=2, not {self.column_groups}: a warp puts the half that it "
                "gives where the other block's scores come to"
            )
        super().__post_init__()
        object.__setattr__(self, "shared_bytes", self.shared_layout().end)

    @property
    def threads(self) -> int:
        return self.workers + 128

    @property
    def cluster(self) -> int:  # type: ignore[override]
        return self.blocks

    @property
    def ptx_version(self) -> str:  # type: ignore[override]
        """st.async, by which blocks hand each other scores, has 8.1."""
        return "8.1" if self.blocks > 1 else ""

    @property
    def registers(self) -> tuple[int, int]:  # type: ignore[override]
        """Of a thread that fetches or carries, and of those that compute, to whom the others leave theirs."""
        launched = 65536 // max(self.blocks_per_sm, 1) // self.threads // 8 * 8
        return self.FEW, min((launched * self.threads - 128 * self.FEW) // self.workers // 8 * 8, 240)

    @property
    def head_dim_padded(self) -> int:
        """Of one block."""
        return self._padded(-(-max(self.head_dim, self.head_dim_v) // self.blocks))

    @property
    def pitch_dq(self) -> int:
        """Elements from a query of a part of dQ to the next (kernels/mma/backward_dq_carried.py)."""
        return self.head_dim_padded + 8

    def shared_layout(self) -> Any:
        """Where K, V, Q, dO, P^T, dS^T, lse with delta of the queries, the block's state, the part of dQ, mbarriers,
        those of scores from the other block (kernels/mma/shared_scores.py), and the end are."""
        own, other = (tile_bytes(rows, self.head_dim_padded, 8) for rows in (self.tile_n, self.tile_m))
        weights, part, one = self.tile_n * self.pitch * 8, self.tile_m * self.pitch_dq * 8, self.one_staging_buffer
        made = layout(
            k=own,
            v=own,
            q=other,
            do=other,
            p=weights,
            ds=max(weights, part - weights) if one else weights,
            rows=self.tile_m * 16,
            state=64,
            dq=0 if one else part,
            barriers=32,
            scores_barriers=(self.blocks - 1) * self.workers // 4,
        )
        return made._replace(dq=made.p) if one else made


@dataclass(frozen=True)
class WideDqFinishConfig(Config):
    """Of mma_dq_finish; tiles as in the WideFusedConfig whose parts it finishes."""

    group_size: ClassVar[int] = 1
    ROWS_OF_WARP: ClassVar[int] = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared_bytes", 0)

    @property
    def threads(self) -> int:
        return self.tile_m // self.ROWS_OF_WARP * 32


@dataclass(frozen=True)
class WideDqConfig(WideBackwardConfig):
    """A block owns tile_m queries of one head and walks over tiles of tile_n keys."""

    @property
    def own_rows(self) -> int:
        return self.tile_m

    @property
    def other_rows(self) -> int:
        return self.tile_n

    @property
    def summed_columns(self) -> int:
        return self.head_dim_padded

    def shared_layout(self) -> Any:
        """As of MmaDqConfig."""
        q, do, k, v = self.tiles()
        of_rows = self.tile_m * (16 if self.item_size == 4 else 32)
        return layout(q=q, do=do, k=k, v=v, ds=self.exchanged, of_rows=of_rows, state=96)
