"""Config: what one kernel is compiled for. Everything in it is a constant of the compiled code."""

from dataclasses import dataclass, field

ITEM_SIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Config:
    """The compile-time facts of one attention kernel; frozen, hashable, checked, part of the disk cache's key.

    tile_m query rows by tile_n keys is what a block works on at a time; v1 and v2 run one thread per
    query row, so tile_m is also the number of threads. `pad` is how many elements are added to each
    row of a shared tile that every thread reads its own row of: with pad 0 and a head_dim that is a
    multiple of 32 all 32 lanes of a warp hit one bank, which is the seeds' experiment.
    """

    kernel: str
    dtype: str  # of q, k, v and o
    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    pad: int = 1
    write_lse: bool = True
    softcap: bool = False
    alibi_dtype: str | None = None
    bias_dtype: str | None = None
    mask: bool = False
    seqlens_k: bool = False
    q_offset_source: str = "number"  # "number", "seqlens_k" or "array"
    shared_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.tile_m <= 1024:
            raise ValueError(f"tile_m is the number of threads of a block: 1 to 1024, not {self.tile_m}")
        if self.tile_n < 4 or self.tile_n % 4:
            raise ValueError(f"tile_n must be a multiple of 4, not {self.tile_n}")
        if self.pad < 0:
            raise ValueError(f"pad must be at least 0, not {self.pad}")
        object.__setattr__(self, "shared_bytes", self.shared_offsets()[-1] * ITEM_SIZE[self.compute_dtype])

    @property
    def compute_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def threads(self) -> int:
        """One for each query row of a tile."""
        return self.tile_m

    @property
    def k_row(self) -> int:
        """Elements from one row of a Q or K tile to the next, before pad: head_dim in whole 16-byte reads."""
        return (self.head_dim + 3) // 4 * 4

    @property
    def v_row(self) -> int:
        """The same for V tiles."""
        return (self.head_dim_v + 3) // 4 * 4

    def shared_offsets(self) -> tuple[int, ...]:
        """Where the tiles Q_i, K_j, V_j and S begin in shared memory, and the end, in elements."""
        sizes = [
            self.tile_m * (self.k_row + self.pad),  # Q_i: each thread reads its own row
            self.tile_n * self.k_row,  # K_j: all threads read the same element, nothing to pad
            self.tile_n * self.v_row,  # V_j: likewise
            self.tile_m * (self.tile_n + self.pad),  # S
        ]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + (size + 3) // 4 * 4)  # every tile starts at a multiple of 16 bytes
        return tuple(starts)


@dataclass(frozen=True)
class SoftmaxConfig:
    """The compile-time facts of one softmax kernel: one thread per row, or one block per row for "blocked"."""

    kernel: str  # "safe", "online" or "blocked"
    dtype: str
    threads: int

    @property
    def compute_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def shared_bytes(self) -> int:
        return 2 * self.threads * ITEM_SIZE[self.compute_dtype] if self.kernel == "blocked" else 0
