"""Configs of mma's backward in 16 bits, and of the kernel before it, which wgmma's has, too."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ..abi import parameters as abi
from .forward import AnyProblem, WarpsConfig, check, layout, tile_bytes
from .simt_backward import OfAux, OfBias, OfDelta

BLOCK_ROWS = 16  # queries of a block of backward_preprocess' results (kernels/steps/lse_delta.py)


@dataclass(frozen=True)
class PreprocessConfig(OfDelta):
    """Of mma/backward_preprocess.

    natural: lse is kept as it is, as scores with a bias need it (kernels/steps/units.py). dq_partials: how many sums of
    dQ are taken in turns. early: the kernel behind may start before this one has ended; cc 9.0.
    """

    natural: bool = False
    dq_partials: int = 1
    early: bool = False
    in_order: bool = False  # as of the kernels behind

    kernel = "backward_preprocess"
    module = "mma.backward_preprocess"
    takes = abi.OF_PREPROCESS
    UNIT = BLOCK_ROWS

    def workspace(self, problem: AnyProblem) -> abi.Workspace:
        p = problem.forward
        rows = p.batch * self._padded(p.seqlen_q)
        if p.packed is not None:  # as kernels/steps/lse_delta.py says
            rows = self._padded(p.packed[0]) + p.batch * BLOCK_ROWS
        return dict(lse_delta=((p.heads * 2 * rows,), "float32"))

    @staticmethod
    def _padded(queries: int) -> int:
        return -(-queries // BLOCK_ROWS) * BLOCK_ROWS


class OfGradients:
    """Which of dK and dV a kernel computes that owns keys. of_dq: it computes dQ, too."""

    of_dk: bool
    of_dv: bool
    of_dq: ClassVar[bool] = False

    def _check_gradients(self) -> None:
        check(self.of_dk or self.of_dv, "of_dk or of_dv must be True: there is nothing else to compute")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class MmaBackwardConfig(WarpsConfig):
    """What mma/backward_dkdv and mma/backward_dq share.

    in_registers: fragments of the block's own tiles stay in registers instead of being read again for each tile that it
    walks over: 4 to 6 % at head_dim 64. column_groups: each of the warps that own the same rows computes their scores
    with a part of the other rows and sums up `group_columns` columns of their gradients; in between, scores go through
    shared memory: 4 to 5 % at head_dim 128, 44 to 57 % at 256. stages: with two there is room for two tiles of the
    other side, one in use and one on its way: 8 to 18 % at head_dim 64. With one, a half of the only one (V of K and V,
    dO of Q and dO) comes while products use the other: room for tiles twice as large. copy_bytes: as of MmaConfig.
    """

    in_registers: bool = False
    stages: int = 2
    copy_bytes: int = 16

    WIDEST: ClassVar[int] = 256  # columns of a gradient whose sums a warp can keep in registers

    def __post_init__(self) -> None:
        other, groups = self.other_rows, self.column_groups
        taken = self.dtype in ("float16", "bfloat16")
        check(taken, f"tensor-core kernels take float16 and bfloat16, not {self.dtype}")
        self._check_warps()
        whole = other >= 16 and other % 16 == 0
        check(whole, f"the rows that a block walks over must be a multiple of 16, not {other}")
        check(self.stages in (1, 2), f"stages must be 1 or 2, not {self.stages}")
        whole = groups in (1, 2, 4) and other % (16 * groups) == 0
        check(whole, f"column_groups must be 1, 2 or 4, with 16 rows for each, not {groups}")
        fits = other <= 128 * groups
        check(fits, f"a warp's part of a tile has at most 128 rows, not {other}: a mask is one word")
        self._check_widest()
        self._check_options("the tensor-core backward")
        self._set(self.ALIGNMENT + self.shared_layout().end)

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


@dataclass(frozen=True)
class MmaDkdvConfig(OfGradients, MmaBackwardConfig):
    """Of mma/backward_dkdv: a block owns tile_n keys and walks over tiles of tile_m queries.

    of_dk, of_dv: which of the two it computes. Both sums together fit into registers up to head_dim 128.
    """

    of_dk: bool = True
    of_dv: bool = True

    kernel = "mma_dkdv"
    module = "mma.backward_dkdv"
    takes = abi.backward("dk dv", mask=abi.MASK_BITS_OF_KEYS)
    of_keys = True
    reads_states = True

    def __post_init__(self) -> None:
        self._check_gradients()
        alone = self.column_groups == 1
        check(alone or (self.of_dk and self.of_dv), "column_groups need of_dk and of_dv")
        super().__post_init__()
        panels = [-(-columns // 64) for columns in (self.head_dim_padded, self.head_dim_v_padded)]
        check(
            alone or not any(count % (self.group_columns // 64) for count in panels),
            f"column_groups = {self.column_groups} gives a warp more columns than are left of head_dim "
            f"{self.head_dim} and {self.head_dim_v}, and those it would stage on top of another's",
        )

    def shared_layout(self) -> Any:
        """Where K, V, the stages of Q, of dO, of lse and delta, P or dS where warps exchange them, in one place, which
        queries see each key, the state of the block and the end are.

        dK and dV are staged in the place of K and V; without dK there is no V, and dV takes K's place.
        """
        k, v, q, do = self.tiles()
        tiles = dict(k=k, v=v) if self.of_dk else dict(k=max(k, v), v=0)
        tiles |= dict(q=self.stages * q, do=self.stages * do)
        rows = -(-self.stages * 8 * self.tile_m // self.ALIGNMENT) * self.ALIGNMENT
        ds = tile_bytes(self.tile_n, self.tile_m) if self.column_groups > 1 or self.of_dq else 0
        dq, seen, state = q if self.of_dq else 0, 8 * self.tile_n, self.state_entries * 16
        return layout(**tiles, rows=rows, p=0, ds=ds, dq=dq, seen=seen, state=state)


@dataclass(frozen=True)
class MmaOneKeyTileConfig(MmaDkdvConfig):
    """The same where a block's tile has all keys of a head: it computes dQ, too."""

    of_dq = True
    kernel = "mma_one_key_tile"
    takes = abi.backward("dq dk dv", mask=abi.MASK_BITS_OF_KEYS)
    reads_states = False

    def __post_init__(self) -> None:
        alone = self.of_dk and self.of_dv and self.column_groups == self.stages == 1
        check(alone, "one kernel needs of_dk, of_dv, column_groups=1 and stages=1")
        super().__post_init__()


@dataclass(frozen=True)
class MmaDqConfig(MmaBackwardConfig):
    """Of mma/backward_dq: a block owns tile_m queries of one head and walks over tiles of tile_n keys."""

    kernel = "mma_dq"
    module = "mma.backward_dq"
    takes = abi.backward("dq")
    reads_states = True

    def shared_layout(self) -> Any:
        """Where Q, dO, the stages of K, those of V, dS where warps exchange it, what each query needs (which keys it
        sees, lse, -delta), the state of the block and the end are.

        dQ is staged in Q's place.
        """
        (q, do, k, v), stages = self.tiles(), self.stages
        ds = tile_bytes(self.tile_m, self.tile_n) if self.column_groups > 1 else 0
        of_rows, state = 16 * self.tile_m, self.state_entries * 16
        return layout(q=q, do=do, k=stages * k, v=stages * v, ds=ds, of_rows=of_rows, state=state)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class MmaScoresConfig(MmaBackwardConfig):
    """Of the kernels that stop at dS. Tiles of tile_m queries by tile_n keys, one behind the other. Q, dO, K and V have
    one place each: the next ones come while a tile's scores are finished."""

    SCORE_PAD: ClassVar[int] = 8  # floats behind a row of scores in shared memory, so that lanes meet no bank twice

    def __post_init__(self) -> None:
        super().__post_init__()
        own = self.warp_rows == 16 and self.column_groups == 1 and not self.in_registers
        check(own, "warps of these kernels own 16 rows, each its own")
        check(self.threads % self.tile_n == 0, f"tile_n must divide the {self.threads} threads, but is {self.tile_n}")

    def _layout(self, **behind: int) -> Any:
        """Where Q, dO, K, V, what is behind them and the end are."""
        q, do, k, v = self.tiles()
        return layout(q=q, do=do, k=k, v=v, **behind)


@dataclass(frozen=True)
class MmaDbiasConfig(OfBias, MmaScoresConfig):
    """Of mma_dbias. pairs: two neighbours of 16 bits in dbias lie in one word of 4 bytes."""

    pairs: bool = False

    kernel = "mma_dbias"
    module = "mma.backward_dbias"
    takes = abi.backward("dbias").plus("dbias_sums", OfBias.SIZES)

    def shared_layout(self) -> Any:
        """A row of sums for each warp is behind the tiles."""
        return self._layout(sums=self.threads // 32 * self.tile_n * 4)


@dataclass(frozen=True)
class MmaDauxConfig(OfAux, MmaScoresConfig):
    """Of mma_daux."""

    module = "mma.backward_daux"
    takes = abi.backward("").plus("aux_bounds aux_sums", abi.OF_AUX)
    names = ("mma_daux_bounds", "mma_daux_sums")

    @property
    def score_row(self) -> int:
        """Bytes from one row of scores in shared memory to the next."""
        return 4 * (self.tile_n + self.SCORE_PAD)

    def shared_layout(self) -> Any:
        """Q K^T, dO V^T, and what is known of each query are behind the tiles."""
        scores = self.tile_m * self.score_row
        return self._layout(s=scores, dp=scores, rows=16 * self.tile_m)
