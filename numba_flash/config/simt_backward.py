"""Configs of the kernels of v2's backward, of which delta runs first."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ..problem.options import GRADIENT_OF
from .forward import ITEM_SIZE, Config, LaunchFacts, layout


@dataclass(frozen=True)
class DeltaConfig(LaunchFacts):
    """Of delta: `lanes` threads share a row, so that a warp reads whole sectors of memory."""

    dtype: str
    head_dim_v: int
    has_dlse: bool
    threads: int = 256
    lanes: int = 16
    of_terms: bool = False  # what it finds goes into the gradient of a term of the sum, too
    turns_of: int = 0  # of how many queries the parts of dQ are that are added up in turns; 0: none are

    kernel: ClassVar[str] = "delta"
    blocks_per_sm: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.lanes < 1 or self.threads < 1 or self.threads % self.lanes:
            raise ValueError(f"threads must be a multiple of lanes, but are {self.threads} and {self.lanes}")

    @property
    def compute_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def rows(self) -> int:
        """Of one block."""
        return self.threads // self.lanes

    @property
    def shared_bytes(self) -> int:
        return self.threads * ITEM_SIZE[self.compute_dtype]


@dataclass(frozen=True)
class SimtBackwardConfig(Config):
    """Of v2's kernels: tiles of tile_m queries by tile_n keys, `pad` as in SimtConfig.

    wanted: what the kernel writes, of its gradients.
    """

    wanted: tuple[str, ...] = ()
    pad: int = 1

    def __post_init__(self) -> None:
        if self.tile_m < 4 or self.tile_m % 4 or self.tile_n < 4 or self.tile_n % 4:
            raise ValueError(f"tile_m and tile_n must be multiples of 4, not {self.tile_m} and {self.tile_n}")
        if not 1 <= self.threads <= 1024:
            raise ValueError(f"a block has 1 to 1024 threads, not {self.threads}")
        if self.pad < 0:
            raise ValueError(f"pad must be at least 0, not {self.pad}")
        object.__setattr__(self, "shared_bytes", self.shared_layout().end * ITEM_SIZE[self.compute_dtype])

    @property
    def k_row(self) -> int:
        """Elements from one row of a Q or K tile to the next, before pad: head_dim in whole 16-byte reads."""
        return (self.head_dim + 3) // 4 * 4

    @property
    def v_row(self) -> int:
        """The same for tiles of V and dO."""
        return (self.head_dim_v + 3) // 4 * 4

    def shared_layout(self) -> Any:
        """Where the kernel's tiles begin in shared memory, and the end, in elements. Every tile begins at a multiple of
        16 bytes."""
        return layout(4, **self._tile_sizes())

    def _tile_sizes(self) -> dict[str, int]:
        raise NotImplementedError


@dataclass(frozen=True)
class DkdvConfig(SimtBackwardConfig):
    """Of v2_dkdv, in which a key has two threads, which run the same code on rows of one length; wanted: dk, dv or
    both."""

    @property
    def threads(self) -> int:
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


@dataclass(frozen=True)
class DqConfig(SimtBackwardConfig):
    """Of v2_dq, one thread per query row; wanted: dq, the gradient of which head_sums adds up each row's share, or
    both."""

    @property
    def threads(self) -> int:
        return self.tile_m

    def _tile_sizes(self) -> dict[str, int]:
        return dict(
            q=self.tile_m * (self.k_row + self.pad),  # Q_i and dO_i: each thread reads its own row
            do=self.tile_m * (self.v_row + self.pad),
            k=self.tile_n * self.k_row,  # K_j and V_j: all threads read the same element
            v=self.tile_n * self.v_row,
            ds=self.tile_m * (self.tile_n + self.pad),
        )


@dataclass(frozen=True)
class DbiasConfig(DqConfig):
    """Of v2_dbias, one thread per query row. rows_summed, keys_summed: bias is one row, or one column, for all. split:
    several blocks share the sum of an element, and dbias_sum adds theirs up."""

    rows_summed: bool = False
    keys_summed: bool = False
    split: bool = False


@dataclass(frozen=True)
class DbiasSumConfig(LaunchFacts):
    """Of dbias_sum, one thread per element of dbias. dtype: that of the problem; given: that of dbias."""

    dtype: str
    given: str
    threads: int = 256

    kernel: ClassVar[str] = "dbias_sum"
    shared_bytes: ClassVar[int] = 0
    blocks_per_sm: ClassVar[int] = 0

    def dtype_of(self, option: str) -> str:
        return self.given

    @property
    def compute_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"


@dataclass(frozen=True)
class HeadSumsConfig(LaunchFacts):
    """Of head_sums, with which every rung's backward ends where the gradient of one number for each head is wanted.

    gradient: its name. given: the dtype of it and of its option. batch_summed: the numbers are those of all entries.
    of_blocks: delta comes from backward_preprocess, in its order, and not from delta.
    """

    dtype: str
    gradient: str
    given: str
    batch_summed: bool
    of_blocks: bool = False
    threads: int = 1024

    blocks_per_sm: ClassVar[int] = 1  # registers must suffice for its many threads

    def __post_init__(self) -> None:
        if not 1 <= self.threads <= 1024 or self.threads & (self.threads - 1):
            raise ValueError(f"threads must be a power of two, at most 1024, not {self.threads}")

    @property
    def kernel(self) -> str:
        return f"{self.gradient}_of_blocks" if self.of_blocks else self.gradient

    @property
    def option(self) -> str:
        """Of which it is the gradient."""
        return GRADIENT_OF[self.gradient]

    def dtype_of(self, option: str) -> str | None:
        """As of every Config."""
        return self.given if option == self.option else None

    @property
    def compute_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def shared_bytes(self) -> int:
        return self.threads * ITEM_SIZE[self.compute_dtype]
