"""Configs of the backward kernels: like forward.py's, everything in them is a constant of the compiled code."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ..problem.options import BY_NAME
from .aux_gradients import AuxElementsConfig
from .forward import Config, LaunchFacts, layout, tile_bytes
from .mask_bits import MaskBitsConfig
from .simt_backward import DeltaConfig, HeadSumsConfig
from .tile_states import TileOrderConfig, TileStatesConfig


@dataclass(frozen=True)
class PreprocessConfig(LaunchFacts):
    """Of mma/backward_preprocess: `lanes` neighbours share a row. wide: rows of do and o begin at multiples of 16
    bytes.

    natural: lse is kept as it is, as scores with a bias need it (kernels/score/stage.py). turns_of: if the sums of dQ
    to be taken in turns (wgmma/backward_fused), of how many queries; else 0. dq_lines: how many sums these have.
    of_terms: what it finds goes into the gradient of a term of the sum, too. early: the kernel behind may start before
    this one has ended; cc 9.0.
    """

    dtype: str
    head_dim_v: int
    has_dlse: bool
    wide: bool
    threads: int = 256
    lanes: int = 8
    natural: bool = False
    turns_of: int = 0
    dq_lines: int = 1
    of_terms: bool = False
    early: bool = False

    kernel: ClassVar[str] = "backward_preprocess"
    compute_dtype: ClassVar[str] = "float32"
    shared_bytes: ClassVar[int] = 0
    blocks_per_sm: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.lanes not in (1, 2, 4, 8, 16, 32) or self.threads < 32 or self.threads % 32:
            raise ValueError(f"lanes must divide 32, and 32 threads, but they are {self.lanes} and {self.threads}")

    @property
    def rows(self) -> int:
        """Of one block."""
        return self.threads // self.lanes


@dataclass(frozen=True)
class MmaBackwardConfig(Config):
    """What mma/backward_dkdv and mma/backward_dq share.

    A block owns a tile of rows and keeps it in shared memory; it walks over the tiles of the other side.
    Warps own `warp_rows` rows. in_registers: fragments of the block's own tiles stay in registers instead of being read
    again for each tile that it walks over.
    column_groups: so many warps own the same rows. Each computes their scores with a part of the other rows and sums up
    `group_columns` columns of their gradients; in between, scores go through shared memory.
    stages: with two there is room for two tiles of the other side, one in use and one on its way. With one, a half of
    the only one (V of K and V, dO of Q and dO) comes while products use the other: room for tiles twice as large.
    bias_pairs: bias can be read two keys at a time (problem/option_checks.py, OptionArray).
    """

    warp_rows: int = 16
    in_registers: bool = False
    column_groups: int = 1
    stages: int = 2
    bias_pairs: bool = False

    ALIGNMENT: ClassVar[int] = 1024  # of panels; dynamic shared memory itself begins at a multiple of 16
    WIDEST: ClassVar[int] = 256  # columns of a gradient whose sums a warp can keep in registers
    group_size: ClassVar[int] = 1  # a tile is of one head
    item_size: ClassVar[int] = 2  # bytes of an element

    def __post_init__(self) -> None:
        if self.dtype not in ("float16", "bfloat16"):
            raise ValueError(f"tensor-core kernels take float16 and bfloat16, not {self.dtype}")
        if self.warp_rows not in (16, 32):
            raise ValueError(f"warp_rows must be 16 or 32, not {self.warp_rows}")
        if self.own_rows < self.warp_rows or self.own_rows % self.warp_rows:
            raise ValueError(f"a block's own rows must be a multiple of {self.warp_rows}, not {self.own_rows}")
        if self.other_rows < 16 or self.other_rows % 16:
            raise ValueError(f"the rows that a block walks over must be a multiple of 16, not {self.other_rows}")
        if self.stages not in (1, 2):
            raise ValueError(f"stages must be 1 or 2, not {self.stages}")
        if self.column_groups not in (1, 2, 4) or self.other_rows % (16 * self.column_groups):
            raise ValueError(f"column_groups must be 1, 2 or 4, with 16 rows for each, not {self.column_groups}")
        if self.other_rows > 128 * self.column_groups:
            raise ValueError(f"a warp's part of a tile has at most 128 rows, not {self.other_rows}: a mask is one word")
        if max(self.head_dim, self.head_dim_v) > self.WIDEST:
            raise ValueError(f"head_dim must be at most {self.WIDEST}, not {self.head_dim} and {self.head_dim_v}")
        unknown = [name for name, _ in self.uses if not BY_NAME[name].on_tensor_cores]
        if unknown:
            raise ValueError(f"the tensor-core backward takes no {' and no '.join(unknown)}")
        object.__setattr__(self, "shared_bytes", self.ALIGNMENT + self.shared_layout().end)

    @property
    def state_entries(self) -> int:
        """Of a block, 16 bytes each (kernels/steps/block_state.py); with bias or mask also where those begin."""
        return 6 if self.has("bias") or self.has("mask") else 5

    @property
    def group_columns(self) -> int:
        """Columns of gradients that a warp of a group sums up: whole panels of 64."""
        return -(-max(self.head_dim_padded, self.head_dim_v_padded) // (64 * self.column_groups)) * 64

    def summed(self, columns: int) -> int:
        """How many of a gradient's columns a warp sums up."""
        return columns if self.column_groups == 1 else self.group_columns

    @property
    def own_rows(self) -> int:
        """Rows of the tile that a block owns."""
        raise NotImplementedError

    @property
    def other_rows(self) -> int:
        """Rows of the tiles that it walks over."""
        raise NotImplementedError

    @property
    def threads(self) -> int:
        return self.own_rows // self.warp_rows * self.column_groups * 32

    @property
    def head_dim_padded(self) -> int:
        """head_dim in whole steps of a product; what is past head_dim is zero."""
        return (self.head_dim + 15) // 16 * 16

    @property
    def head_dim_v_padded(self) -> int:
        """head_dim_v in whole steps."""
        return (self.head_dim_v + 15) // 16 * 16

    def shared_layout(self) -> Any:
        """Where in shared memory things begin, and the end, in bytes."""
        raise NotImplementedError


@dataclass(frozen=True)
class MmaDkdvConfig(MmaBackwardConfig):
    """Of mma/backward_dkdv: a block owns tile_n keys and walks over tiles of tile_m queries.

    of_dk, of_dv: which of the two it computes. Both sums together fit into registers up to head_dim 128.
    """

    of_dk: bool = True
    of_dv: bool = True

    def __post_init__(self) -> None:
        if not (self.of_dk or self.of_dv):
            raise ValueError("of_dk or of_dv must be True: there is nothing else to compute")
        if self.column_groups > 1 and not (self.of_dk and self.of_dv):
            raise ValueError("column_groups need of_dk and of_dv")
        super().__post_init__()
        shared_out = self.column_groups > 1
        if shared_out and any(
            -(-columns // 64) % (self.group_columns // 64) for columns in (self.head_dim_padded, self.head_dim_v_padded)
        ):
            raise ValueError(
                f"column_groups = {self.column_groups} gives a warp more columns than are left of head_dim "
                f"{self.head_dim} and {self.head_dim_v}, and those it would stage on top of another's"
            )

    @property
    def own_rows(self) -> int:
        return self.tile_n

    @property
    def other_rows(self) -> int:
        return self.tile_m

    def shared_layout(self) -> Any:
        """Where K, V, the stages of Q, of dO, of lse and delta, P or dS where warps exchange them, in one place, which
        queries see each key, the state of the block and the end are.

        dK and dV are staged in the place of K and V; without dK there is no V, and dV takes K's place.
        """
        k_columns = self.head_dim_padded if self.of_dk else max(self.head_dim_padded, self.head_dim_v_padded)
        rows = self.stages * 8 * self.tile_m
        return layout(
            k=tile_bytes(self.tile_n, k_columns),
            v=tile_bytes(self.tile_n, self.head_dim_v_padded) if self.of_dk else 0,
            q=self.stages * tile_bytes(self.tile_m, self.head_dim_padded),
            do=self.stages * tile_bytes(self.tile_m, self.head_dim_v_padded),
            rows=-(-rows // self.ALIGNMENT) * self.ALIGNMENT,
            p=0,
            ds=tile_bytes(self.tile_n, self.tile_m) if self.column_groups > 1 else 0,
            seen=8 * self.tile_n,
            state=self.state_entries * 16,
        )


@dataclass(frozen=True)
class MmaDqConfig(MmaBackwardConfig):
    """Of mma/backward_dq: a block owns tile_m queries of one head and walks over tiles of tile_n keys."""

    @property
    def own_rows(self) -> int:
        return self.tile_m

    @property
    def other_rows(self) -> int:
        return self.tile_n

    def shared_layout(self) -> Any:
        """Where Q, dO, the stages of K, those of V, dS where warps exchange it, what each query needs (which keys it
        sees, lse, -delta), the state of the block and the end are.

        dQ is staged in Q's place.
        """
        return layout(
            q=tile_bytes(self.tile_m, self.head_dim_padded),
            do=tile_bytes(self.tile_m, self.head_dim_v_padded),
            k=self.stages * tile_bytes(self.tile_n, self.head_dim_padded),
            v=self.stages * tile_bytes(self.tile_n, self.head_dim_v_padded),
            ds=tile_bytes(self.tile_m, self.tile_n) if self.column_groups > 1 else 0,
            of_rows=16 * self.tile_m,
            state=self.state_entries * 16,
        )


BackwardConfig = (
    AuxElementsConfig
    | Config
    | DeltaConfig
    | HeadSumsConfig
    | MaskBitsConfig
    | PreprocessConfig
    | TileStatesConfig
    | TileOrderConfig
)  # that of every kernel of a backward
