"""Configs of mma's backward, and of backward_preprocess, which runs before mma's and wgmma's in 16 bits."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..abi import parameters as abi
from .forward import ITEM_SIZE, AnyProblem, Config, check, layout, multiple_of, one_of, tile_bytes
from .mma_forward import MmaConfig
from .simt_backward import OfBias, OfDelta

BLOCK_ROWS = 16  # backward_preprocess writes blocks of so many queries (kernels/steps/lse_delta.py)


class PreprocessConfig(OfDelta, kernel="backward_preprocess", module="mma.backward_preprocess"):
    """natural: lse stays a natural logarithm, as scores with a bias need it (kernels/steps/units.py). dq_partials: sums
    of dQ of a query tile, each with turn counters. early: the next kernel may start before this one ends (cc 9.0)."""

    natural: bool = False
    dq_partials: int = 1
    early: bool = False

    takes = abi.OF_PREPROCESS
    UNIT = BLOCK_ROWS

    def workspace(self, problem: AnyProblem) -> abi.Workspace:
        p = problem.forward
        blocks = p.batch * -(-p.seqlen_q // BLOCK_ROWS)
        if p.packed is not None:  # as kernels/steps/lse_delta.py says
            blocks = -(-p.packed[0] // BLOCK_ROWS) + p.batch
        return dict(lse_delta=((p.heads * 2 * blocks * BLOCK_ROWS,), "float32"))


@dataclass(frozen=True, init=False, repr=False, eq=False)
class OfGradients:
    """of_dk, of_dv: which of dK and dV a kernel computes whose blocks own keys."""

    of_dk: bool = True
    of_dv: bool = True

    def __post_init__(self) -> None:
        check(self.of_dk or self.of_dv, "of_dk or of_dv must be True: there is nothing else to compute")
        super().__post_init__()  # type: ignore[misc]


class Sums:
    """The gradients that a block sums up: dK and dV (of_dk, of_dv) if it owns keys, dQ if it owns queries."""

    @property
    def of_ds(self) -> bool:
        """Whether it sums up dS times rows of the other side, which gives dK or dQ."""
        return getattr(self, "of_dk", True)

    @property
    def of_p(self) -> bool:
        """Whether it sums up P times rows of the other side, which gives dV."""
        return getattr(self, "of_dv", False)


class MmaBackwardConfig(Sums, Config):
    """In all dtypes a block owns a tile of rows, keeps it in shared memory, and walks over the tiles of the other side.

    Each warp owns `warp_rows` rows. column_groups: so many warps own the same rows; each computes their scores with a
    part of the other rows, they exchange them through shared memory, and each sums up a part of the gradients' columns:
    4 to 5 % at head_dim 128, 44 to 57 % at 256. bias_pairs: bias can be read two keys at a time
    (problem/option_checks.py, OptionArray). large_f64, copy_bytes: as in MmaConfig. with_dq: a block that owns keys
    computes dQ, too. of_product: dS is the gradient of scale * q . k, otherwise that of the finished score.

    In 16 bits: in_registers: fragments of the block's own tiles stay in registers instead of being read again for each
    tile that it walks over: 4 to 6 % at head_dim 64. stages: with two, one tile of the other side is in use while the
    next is in flight: 8 to 18 % at head_dim 64. With one, one half of the only tile (V of K and V, dO of Q and dO)
    is loaded while products use the other half, so tiles can be twice as large.
    """

    warp_rows: int = 16
    column_groups: int = 1
    bias_pairs: bool = False
    in_order: bool = False
    in_registers: bool = False
    stages: int = 1
    large_f64: bool = False
    copy_bytes: int = 16

    DTYPES: ClassVar[tuple[str, ...]] = MmaConfig.DTYPES
    GRADIENTS: ClassVar[str]  # that it writes
    GROUPS: ClassVar[tuple[int, ...]] = (1, 2)  # column_groups allowed in more than 16 bits
    WIDEST: ClassVar[int] = 256  # columns of a gradient whose 32-bit sums a warp can keep in registers
    with_dq = False
    only_tile = False
    of_product = True

    def __post_init__(self) -> None:
        self._check_taken(self.WIDEST if self.item_size == 2 else math.inf)
        one_of("warp_rows", self.warp_rows, 16, 32)
        multiple_of("a block's own rows", self.own_rows, self.warp_rows)
        if self.item_size == 2:
            self._check_16_bits()
        else:
            self._check_others()

    def _check_16_bits(self) -> None:
        other, groups = self.other_rows, self.column_groups
        multiple_of("the rows that a block walks over", other, 16)
        one_of("stages", self.stages, 1, 2)
        whole = groups in (1, 2, 4) and other % (16 * groups) == 0
        check(whole, f"column_groups must be 1, 2 or 4, with 16 rows for each, not {groups}")
        fits = other <= 128 * groups
        check(fits, f"a warp's part of a tile has at most 128 rows, not {other}: a mask is one word")

    def _check_others(self) -> None:
        one_of("the rows that a block walks over", self.other_rows, *MmaConfig.KEYS[self.dtype])
        one_of("column_groups", self.column_groups, *self.GROUPS)
        one_of(f"stages for {self.dtype}", self.stages, 1)
        check(not self.in_registers, f"in_registers is for 16-bit elements, not for {self.dtype}")
        summed = self.head_dim_padded * self.of_ds + self.head_dim_v_padded * self.of_p  # columns of gradients
        sums, most = summed // self.column_groups * self.item_size // 4 * self.strips, self.WIDEST
        check(sums <= most, f"head_dim {self.head_dim} and {self.head_dim_v} need {sums} sums a row, not {most}")

    @property
    def takes(self) -> abi.Parameters:  # type: ignore[override]
        mask = abi.MASK_BITS_OF_KEYS if self.of_keys else abi.MASK_BITS
        return abi.backward(self.GRADIENTS, "lse_delta" if self.item_size == 2 else abi.ROWS, mask)

    @property
    def reads_states(self) -> bool:  # type: ignore[override]
        return self.item_size == 2 and self.of_product and not self.with_dq

    def _padded(self, columns: int) -> int:
        """In more than 16 bits each group of columns has whole panels."""
        step = 16 if self.item_size == 2 else 128 // self.item_size * self.column_groups
        return -(-columns // step) * step

    @property
    def group_columns(self) -> int:
        """How many columns of a gradient a warp of a group sums up in 16 bits: whole panels of 64."""
        return -(-max(self.head_dim_padded, self.head_dim_v_padded) // (64 * self.column_groups)) * 64

    def summed(self, columns: int) -> int:
        """How many of a gradient's columns a warp sums up."""
        return self.group_columns if self.item_size == 2 and self.column_groups > 1 else columns // self.column_groups

    @property
    def strips(self) -> int:
        """Strips of 16 rows that a warp owns."""
        return self.warp_rows // 16

    @property
    def part(self) -> int:
        """Rows of a tile of the other side for which a warp computes scores."""
        return self.other_rows // self.column_groups

    @property
    def threads(self) -> int:  # type: ignore[override]
        return self.own_rows // self.warp_rows * self.column_groups * 32

    def tiles(self) -> tuple[int, int, int, int]:
        """Bytes of the block's own tiles, for S and for dP, and of the other side's, for S and for dP."""
        columns, rows = (self.head_dim_padded, self.head_dim_v_padded), (self.own_rows, self.other_rows)
        own_s, own_dp, other_s, other_dp = (tile_bytes(r, c, self.item_size) for r in rows for c in columns)
        return own_s, own_dp, other_s, other_dp

    @property
    def delta_first(self) -> bool:
        """Whether the accumulators of dP begin with -delta."""
        return self.item_size == 2 and not self.seeded

    def shared_layout(self) -> Any:
        """In this order: the block's own tiles, for S and for dP (K and V, or Q and dO); the stages of the other side's
        tiles; P and dS if warps exchange them, or for dQ; the bias of a tile; lse and delta of the other side's
        queries; a RowState for each own row (kernels/mma/backward_scores.py); the state of the block; the end.

        Without dS there is no V. With only_tile dS overwrites V, whose rows no other warp reads.
        """
        own_s, own_dp, other_s, other_dp = self.tiles()
        own = dict(own_s=own_s, own_dp=own_dp * self.of_ds)
        other, size = dict(other_s=self.stages * other_s, other_dp=self.stages * other_dp), self.item_size
        scores = self.own_rows * self.other_rows * size if size > 2 else tile_bytes(self.own_rows, self.other_rows)
        scores *= self.column_groups > 1 or self.with_dq
        p = scores * self.of_p * (size > 2)  # in 16 bits P and dS have one place
        rows = self.stages * 2 * max(size, 4) * self.tile_m * self.of_keys
        bias = self.bias_boxes * tile_bytes(self.tile_m, self.tile_n)
        of_rows = (8 if self.of_keys else 16 * max(size // 4, 1)) * self.own_rows
        behind = dict(bias=bias, rows=rows, of_rows=of_rows, state=6 * 16)
        if self.only_tile:
            plan = layout(**own | dict(own_dp=max(own_dp, scores)), **other, p=0, ds=0, **behind)
            return plan._replace(ds=plan.own_dp)
        return layout(**own, **other, p=p, ds=scores * self.of_ds, **behind)


class MmaDkdvConfig(OfGradients, MmaBackwardConfig, kernel="mma_dkdv", module="mma.backward"):
    """A block owns tile_n keys and walks over tiles of tile_m queries. In 16 bits the sums of dK and dV fit into
    registers together up to head_dim 128."""

    of_keys = True
    GRADIENTS = "dk dv"

    def __post_init__(self) -> None:
        alone = self.column_groups == 1 or self.item_size > 2
        check(alone or (self.of_dk and self.of_dv), "column_groups need of_dk and of_dv")
        super().__post_init__()
        panels = [-(-columns // 64) for columns in (self.head_dim_padded, self.head_dim_v_padded)]
        check(
            alone or not any(count % (self.group_columns // 64) for count in panels),
            f"column_groups = {self.column_groups} gives a warp more columns than are left of head_dim "
            f"{self.head_dim} and {self.head_dim_v}",
        )


class MmaOneKeyTileConfig(MmaDkdvConfig, kernel="mma_one_key_tile"):
    """The same for heads with one tile of keys: a block computes dQ, too.

    delta: the Config of backward_preprocess if the block does its work, for heads with one tile of queries. with_dbias:
    the block stores dbias, too; each element belongs to one score. pairs: as in MmaDbiasConfig. bias_boxes: rows of a
    bias can be copied 16 bytes at a time (kernels/mma/query_columns.py).
    """

    delta: PreprocessConfig | None = None
    with_dbias: bool = False
    pairs: bool = False
    bias_boxes: bool = False  # type: ignore[misc]

    DTYPES = ("float16", "bfloat16")
    with_dq = True

    def __post_init__(self) -> None:
        alone = self.of_dk and self.of_dv and self.column_groups == self.stages == 1
        check(alone, "one kernel needs of_dk, of_dv, column_groups=1 and stages=1")
        super().__post_init__()

    @property
    def takes(self) -> abi.Parameters:  # type: ignore[override]
        own = abi.backward("dq dk dv" + " dbias" * self.with_dbias, mask=abi.MASK_BITS_OF_KEYS)
        return own.plus("o lse dlse", strides="o dlse") if self.only_tile else own

    @property
    def only_tile(self) -> bool:  # type: ignore[override]
        """Whether a head has one tile of queries, too; then the block does the work of backward_preprocess."""
        return self.delta is not None

    @property
    def own_delta(self) -> PreprocessConfig:
        """`delta` with the block's threads. most_rows is so small that every warp has rows."""
        assert self.delta is not None
        most = self.tile_m * self.delta.lanes // self.threads
        return replace(self.delta, threads=self.threads, most_rows=min(max(most, 1), 4))

    def workspace(self, problem: AnyProblem) -> abi.Workspace:
        return self.delta.workspace(problem) if self.delta else {}


class MmaDqConfig(MmaBackwardConfig, kernel="mma_dq", module="mma.backward"):
    """A block owns tile_m queries of one head and walks over tiles of tile_n keys."""

    GRADIENTS = "dq"


class MmaScoresConfig(MmaBackwardConfig):
    """The kernels that stop at dS. They process one tile of tile_m queries by tile_n keys after the other."""

    DTYPES = ("float16", "bfloat16")
    of_product = False
    ROW_BYTES: ClassVar[int] = 8  # bytes of a query's lse and delta
    SCORE_PAD: ClassVar[int] = 8  # floats after a row of scores in shared memory, against bank conflicts

    def __post_init__(self) -> None:
        super().__post_init__()
        own = self.warp_rows == 16 and self.column_groups == 1 and not self.in_registers
        check(own, "warps of these kernels own 16 rows, each its own")
        check(self.threads % self.tile_n == 0, f"tile_n must divide the {self.threads} threads, but is {self.tile_n}")

    @property
    def rows_bytes(self) -> int:
        """Bytes of the rows (lse, delta) of a stage's queries."""
        return self.ROW_BYTES * self.tile_m

    def _layout(self, **behind: int) -> Any:
        """Q, dO, K, V, then the parts named in `behind`, and the end."""
        tiles = zip(("q", "do", "k", "v"), self.tiles(), strict=True)
        return layout(**{name: self.stages * size for name, size in tiles}, **behind)


class MmaDbiasConfig(OfBias, MmaScoresConfig, kernel="mma_dbias", module="mma.backward_dbias"):
    """pairs: two neighbours of 16 bits in dbias lie in one word of 4 bytes."""

    pairs: bool = False

    takes = abi.backward("dbias").plus("dbias_sums", OfBias.SIZES)

    def shared_layout(self) -> Any:
        """After the tiles: lse and delta of the queries, the bias, and a row of sums for each warp."""
        bias = self.tile_m * self.tile_n * ITEM_SIZE[self.dtype_of("bias") or self.dtype]
        return self._layout(rows=self.stages * self.rows_bytes, bias=bias, sums=self.threads // 32 * self.tile_n * 4)


class MmaDauxConfig(MmaScoresConfig, kernel="mma_daux", module="mma.backward_daux"):
    """With two stages no barrier would separate a tile's products from their readers."""

    wanted_aux: tuple[int, ...] = ()

    takes = abi.backward("").plus(abi.AUX_SUMS, abi.OF_AUX)
    ROW_BYTES = 16  # its range of keys, too

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("stages", self.stages, 1)

    @property
    def score_row(self) -> int:
        """Bytes from one row of scores in shared memory to the next."""
        return 4 * (self.tile_n + self.SCORE_PAD)

    def shared_layout(self) -> Any:
        """After the tiles: Q K^T, dO V^T, and the rows of the queries."""
        scores = self.tile_m * self.score_row
        return self._layout(s=scores, dp=scores, rows=self.rows_bytes)
