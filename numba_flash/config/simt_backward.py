"""Configs of the kernels of v2's backward; delta runs first."""

import math
from typing import Any, ClassVar

from ..abi import parameters as abi
from ..problem.options import GRADIENT_OF, HEAD_GRADIENTS, Option
from .forward import ITEM_SIZE, AnyProblem, Config, LaunchFacts, check, multiple_of, tiles_of_all
from .simt_forward import SimtRows


class OfDelta(LaunchFacts):
    """The fields that delta and backward_preprocess share. load_bytes: bytes of one load of do and o, whose rows begin
    and end at multiples of it; those of one element if rows are not contiguous. most_rows: the most rows that lanes
    share. of_terms: delta also feeds the gradient of a term of every row's sum. turns_of: queries of a tile of dQ whose
    parts are added in turns, so that its turn counters are cleared; 0: there are none."""

    dtype: str
    head_dim_v: int
    has_dlse: bool
    threads: int = 256
    load_bytes: int = 16
    most_rows: int = 4
    of_terms: bool = False
    turns_of: int = 0
    packed: bool = False
    in_order: bool = False  # as in the kernels that follow

    UNIT: ClassVar[int]  # rows of a head are padded to a multiple of it, so lanes share rows of one head

    def __post_init__(self) -> None:
        multiple_of("threads", self.threads, 32)
        size, copied = ITEM_SIZE[self.dtype], self.load_bytes
        taken = copied in (2, 4, 8, 16) and copied >= size and (copied == size or self.head_dim_v * size % copied == 0)
        check(taken, f"loads of {copied} bytes are not for rows of {self.head_dim_v} numbers of {size} bytes")

    @property
    def lanes(self) -> int:
        """Lanes that share a row: a power of two. Each reads 16 bytes of it, or several times 16."""
        return min(1 << (-(-self.head_dim_v * ITEM_SIZE[self.dtype] // 16) - 1).bit_length(), 32)

    @property
    def rows_of_lanes(self) -> int:
        """Rows that these lanes share: in the end a lane has the sum of one row at most."""
        return min(self.lanes, self.most_rows)

    def grid(self, problem: AnyProblem) -> int:
        p = problem.forward
        of_head = tiles_of_all(p, self.UNIT) if self.in_order else p.batch * -(-p.seqlen_q // self.UNIT)
        return -(-p.heads * of_head * self.UNIT // (self.threads // self.lanes * self.rows_of_lanes))


class DeltaConfig(OfDelta, kernel="delta", module="simt.delta"):
    takes = abi.OF_DELTA
    UNIT = 4

    def workspace(self, problem: AnyProblem) -> abi.Workspace:
        return dict(delta=(problem.forward.lse_shape, self.compute_dtype))


class SimtBackwardConfig(SimtRows):
    """v2's kernels: tiles of tile_m queries by tile_n keys. wanted: the gradients that the kernel writes."""

    wanted: tuple[str, ...] = ()

    READ = ("tile_m", "tile_n")


class DkdvConfig(SimtBackwardConfig, kernel="v2_dkdv", module="simt.v2_backward_dkdv"):
    """A key has two threads, which run the same code on rows of one length. wanted: dk, dv or both."""

    takes = abi.backward("dk dv", abi.ROWS, "mask")
    of_keys = True
    reads_states = True

    @property
    def threads(self) -> int:  # type: ignore[override]
        return 2 * self.tile_n

    @property
    def row(self) -> int:
        """Elements from one row to the next, before pad, of all tiles of Q, K, V and dO."""
        return max(self.k_row, self.v_row)

    def _tile_sizes(self) -> dict[str, int]:
        scores = self.tile_n * (self.tile_m + self.pad)
        return dict(
            kv=2 * self.tile_n * (self.row + self.pad),  # K_j, V_j: each thread reads its own row
            qdo=2 * self.tile_m * self.row,  # Q_i, dO_i: all threads of a half read the same element, nothing to pad
            weights=2 * scores,  # P, dS
            derivative=scores if self.derivative_varies else 0,  # the scores' derivative
        )


class SimtRowsConfig(SimtBackwardConfig):
    """The kernels that have one thread per query row."""

    def _tile_sizes(self) -> dict[str, int]:
        return dict(
            q=self.tile_m * (self.k_row + self.pad),  # Q_i and dO_i: each thread reads its own row
            do=self.tile_m * (self.v_row + self.pad),
            k=self.tile_n * self.k_row,  # K_j and V_j: all threads read the same element
            v=self.tile_n * self.v_row,
            ds=self.tile_m * (self.tile_n + self.pad),
        )


class DqConfig(SimtRowsConfig, kernel="v2_dq", module="simt.v2_backward_dq"):
    """wanted: dq, a gradient whose shares of rows head_sums adds up, or both."""

    takes = abi.backward("dq", abi.ROWS, "mask").plus("row_shares")
    reads_states = True

    def workspace(self, problem: AnyProblem) -> abi.Workspace:
        return dict(row_shares=(problem.forward.lse_shape, self.compute_dtype))


class OfBias(Config):
    """A kernel of dbias, in which a block owns a tile of dbias. rows_summed, keys_summed: bias has one row for all
    queries, or one column for all keys. split: several blocks share an element's sum, and dbias_sum adds up theirs."""

    rows_summed: bool = False
    keys_summed: bool = False
    split: bool = False

    SIZES: ClassVar[str] = "dbias_shape dbias_splits"

    def grid(self, problem: Any) -> int:
        batch, heads, rows, keys = problem.dbias_shape
        splits = problem.dbias_splits if self.split else 1
        return splits * batch * heads * -(-rows // self.tile_m) * -(-keys // self.tile_n)


class DbiasConfig(OfBias, SimtRowsConfig, kernel="v2_dbias", module="simt.v2_backward_dbias"):
    takes = abi.backward("dbias", abi.ROWS, "mask").plus("dbias_sums", OfBias.SIZES)


class DbiasSumConfig(LaunchFacts, kernel="dbias_sum", module="simt.dbias_sum"):
    """dtype: that of the problem; given: that of dbias; splits: a power of two, not less than the number of splits.
    More splits give an element more threads, so that few elements keep a GPU busy, too."""

    dtype: str
    given: str
    threads: int = 256
    splits: int = 16

    MOST_PARTS: ClassVar[int] = 16
    takes = abi.Parameters(("dbias_sums", "dbias"), ("dbias",), abi.words(OfBias.SIZES))

    def dtype_of(self, option: str) -> str | None:
        return self.given if option == "bias" else None

    def grid(self, problem: Any) -> int:
        return -(-math.prod(problem.dbias_shape) // self.elements)

    @property
    def loads(self) -> int:
        """How many loads a thread issues before it adds."""
        return min(self.splits, 16)

    @property
    def parts(self) -> int:
        """Threads that share an element."""
        return min(self.splits // self.loads, self.MOST_PARTS)

    @property
    def elements(self) -> int:
        """Elements of a block."""
        return self.threads // self.parts

    @property
    def shared_bytes(self) -> int:  # type: ignore[override]
        return self.threads * ITEM_SIZE[self.compute_dtype]

    def workspace(self, problem: Any) -> abi.Workspace:
        count = problem.dbias_splits * math.prod(problem.dbias_shape)
        return dict(dbias_sums=((count,), self.compute_dtype))


class HeadSumsConfig(LaunchFacts, module="simt.head_sums"):
    """It ends every rung's backward if the gradient of one number for each head is wanted.

    gradient: its name. given: the dtype of it and of its option. batch_summed: all batch entries share the numbers.
    of_blocks: backward_preprocess wrote delta, in its own order; otherwise the kernel delta did.
    """

    dtype: str
    gradient: str
    given: str
    batch_summed: bool
    of_blocks: bool = False
    threads: int = 1024
    packed: bool = False

    names = (*HEAD_GRADIENTS, *(f"{name}_of_blocks" for name, x in HEAD_GRADIENTS.items() if x.acts_on == "sum"))
    blocks_per_sm: ClassVar[int] = 1  # type: ignore[misc]  # registers must suffice for its many threads

    def __post_init__(self) -> None:
        power_of_two = 1 <= self.threads <= 1024 and not self.threads & (self.threads - 1)
        check(power_of_two, f"threads must be a power of two, at most 1024, not {self.threads}")

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return f"{self.gradient}_of_blocks" if self.of_blocks else self.gradient

    @property
    def option(self) -> str:
        """The option whose gradient it computes."""
        return GRADIENT_OF[self.gradient]

    @property
    def takes(self) -> abi.Parameters:  # type: ignore[override]
        option: Option = HEAD_GRADIENTS[self.gradient]
        sizes = abi.words("batch heads seqlen_q")
        if option.acts_on == "score":
            return abi.Parameters(("row_shares", self.gradient), (self.gradient,), sizes)
        own = option.name, self.gradient
        return abi.Parameters(("lse", "lse_delta" if self.of_blocks else "delta", *own), own, sizes)

    def dtype_of(self, option: str) -> str | None:
        return self.given if option == self.option else None

    @property
    def shared_bytes(self) -> int:  # type: ignore[override]
        return self.threads * ITEM_SIZE[self.compute_dtype]

    def grid(self, problem: Any) -> int:
        return math.prod(problem.shape_of(self.gradient))
