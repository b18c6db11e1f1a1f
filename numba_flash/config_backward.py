"""Configs of the backward kernels: like config.py's, everything in them is a constant of the compiled code."""

from dataclasses import dataclass
from typing import ClassVar

from .config import Config, tile_bytes


@dataclass(frozen=True)
class MmaBackwardConfig(Config):
    """What mma_backward_dkdv and mma_backward_dq share.

    A block owns a tile of rows and keeps it in shared memory; it walks over the tiles of the other side, two of
    which have room: one in use, one on its way. Warps own `warp_rows` rows. in_registers: fragments of the block's
    own tiles stay in registers instead of being read again for each tile that it walks over.
    """

    warp_rows: int = 16
    in_registers: bool = False

    ALIGNMENT: ClassVar[int] = 1024  # of panels; dynamic shared memory itself begins at a multiple of 16
    WIDEST: ClassVar[int] = 256  # columns of a gradient whose sums a warp can keep in registers
    STAGES: ClassVar[int] = 2
    group: ClassVar[int] = 1  # a tile is of one head

    def __post_init__(self) -> None:
        if self.dtype not in ("float16", "bfloat16"):
            raise ValueError(f"tensor-core kernels take float16 and bfloat16, not {self.dtype}")
        if self.warp_rows not in (16, 32):
            raise ValueError(f"warp_rows must be 16 or 32, not {self.warp_rows}")
        if self.own_rows < self.warp_rows or self.own_rows % self.warp_rows:
            raise ValueError(f"a block's own rows must be a multiple of {self.warp_rows}, not {self.own_rows}")
        if self.other_rows < 16 or self.other_rows % 16:
            raise ValueError(f"the rows that a block walks over must be a multiple of 16, not {self.other_rows}")
        if max(self.head_dim, self.head_dim_v) > self.WIDEST:
            raise ValueError(f"head_dim must be at most {self.WIDEST}, not {self.head_dim} and {self.head_dim_v}")
        if self.bias_dtype is not None or self.mask:
            raise ValueError("the tensor-core backward takes no bias and no mask")
        object.__setattr__(self, "shared_bytes", self.ALIGNMENT + self.shared_offsets()[-1])

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
        return self.own_rows // self.warp_rows * 32

    @property
    def depth(self) -> int:
        """head_dim in whole steps of a product; what is past head_dim is zero."""
        return (self.head_dim + 15) // 16 * 16

    @property
    def width(self) -> int:
        """head_dim_v in whole steps."""
        return (self.head_dim_v + 15) // 16 * 16

    def shared_offsets(self) -> tuple[int, ...]:
        """Where in shared memory things begin, and the end, in bytes."""
        raise NotImplementedError


@dataclass(frozen=True)
class MmaDkdvConfig(MmaBackwardConfig):
    """Of mma_backward_dkdv: a block owns tile_n keys and walks over tiles of tile_m queries.

    of_dk, of_dv: which of the two it computes. Both sums together fit into registers up to head_dim 128.
    of_dq: it also adds its share to the sums of dQ in global memory, which MmaDqRowsConfig's kernel then rounds.
    """

    of_dk: bool = True
    of_dv: bool = True
    of_dq: bool = False

    def __post_init__(self) -> None:
        if not (self.of_dk or self.of_dv):
            raise ValueError("of_dk or of_dv must be True: there is nothing else to compute")
        if self.of_dq and (not self.of_dk or self.tile_m // self.dq_rows > self.threads // 32):
            raise ValueError("of_dq needs of_dk, and a warp for every strip of queries")
        super().__post_init__()

    @property
    def dq_rows(self) -> int:
        """Queries of a tile whose dQ one warp computes."""
        return 32 if self.tile_m % 32 == 0 else 16

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that one warp computes: the warps beside each other share all of them, in steps of 16."""
        beside = self.threads // 32 // (self.tile_m // self.dq_rows)
        return -(-self.depth // (16 * beside)) * 16

    @property
    def dq_tile(self) -> int:
        """Numbers that the sums of one tile's dQ take in global memory."""
        return self.threads * self.dq_rows * self.dq_columns // 32

    @property
    def own_rows(self) -> int:
        return self.tile_n

    @property
    def other_rows(self) -> int:
        return self.tile_m

    def shared_offsets(self) -> tuple[int, ...]:
        """Where K, V, the stages of Q and of dO, dS, the stages of lse and delta, the block's number and the end are.

        dK and dV are staged in the place of K and V; without dK there is no V, and dV takes K's place.
        """
        v_at = tile_bytes(self.tile_n, self.depth if self.of_dk else max(self.depth, self.width))
        q_at = v_at + (tile_bytes(self.tile_n, self.width) if self.of_dk else 0)
        do_at = q_at + self.STAGES * tile_bytes(self.tile_m, self.depth)
        ds_at = do_at + self.STAGES * tile_bytes(self.tile_m, self.width)
        rows_at = ds_at + (tile_bytes(self.tile_n, self.tile_m) if self.of_dq else 0)
        number_at = rows_at + self.STAGES * 8 * self.tile_m
        return 0, v_at, q_at, do_at, ds_at, rows_at, number_at, number_at + (16 if self.of_dq else 0)


@dataclass(frozen=True)
class MmaDqRowsConfig(MmaDkdvConfig):
    """Of mma_backward_dq_rows, which rounds the sums of dQ that mma_backward_dkdv left: facts of that kernel."""

    def shared_offsets(self) -> tuple[int, ...]:
        """Where dQ, a word for each of its rows, and the end are."""
        notes_at = tile_bytes(self.tile_m, self.depth)
        return 0, notes_at, notes_at + 4 * self.tile_m


@dataclass(frozen=True)
class MmaDqConfig(MmaBackwardConfig):
    """Of mma_backward_dq: a block owns tile_m queries of one head and walks over tiles of tile_n keys."""

    @property
    def own_rows(self) -> int:
        return self.tile_m

    @property
    def other_rows(self) -> int:
        return self.tile_n

    def shared_offsets(self) -> tuple[int, ...]:
        """Where Q, dO, the stages of K, those of V, and the end are. dQ is staged in Q's place."""
        do_at = tile_bytes(self.tile_m, self.depth)
        k_at = do_at + tile_bytes(self.tile_m, self.width)
        v_at = k_at + self.STAGES * tile_bytes(self.tile_n, self.depth)
        return 0, do_at, k_at, v_at, v_at + self.STAGES * tile_bytes(self.tile_n, self.width)
