"""Configs of v1 and v2 (kernels/simt), in which a thread owns a row."""

from typing import Any, ClassVar

from ..abi import parameters as abi
from .forward import ITEM_SIZE, AnyProblem, Config, check, layout, multiple_of


class SimtRows(Config):
    """Tiles lie in shared memory; a row has head_dim elements, padded to whole 16-byte reads.

    pad: elements added to each row of a tile in which every thread reads its own row. With pad 0 and a head_dim that is
    a multiple of 32 all 32 lanes of a warp hit one bank, which shows bank conflicts (docs/tensor_cores.md).
    """

    pad: int = 1

    reads_order: ClassVar[bool] = False
    READ: ClassVar[tuple[str, ...]] = ("tile_n",)  # kernels read rows of these tiles four at a time

    def __post_init__(self) -> None:
        check(1 <= self.threads <= 1024, f"a block has 1 to 1024 threads, not {self.threads}")
        for name in self.READ:
            multiple_of(name, getattr(self, name), 4)
        check(self.pad >= 0, f"pad must be at least 0, not {self.pad}")

    @property
    def shared_bytes(self) -> int:  # type: ignore[override]
        return self.shared_layout().end * ITEM_SIZE[self.compute_dtype]  # type: ignore[no-any-return]

    @property
    def threads(self) -> int:  # type: ignore[override]
        return self.tile_m

    @property
    def k_row(self) -> int:
        """Elements from one row of a Q or K tile to the next, before pad."""
        return (self.head_dim + 3) // 4 * 4

    @property
    def v_row(self) -> int:
        """The same for tiles of V and dO."""
        return (self.head_dim_v + 3) // 4 * 4

    def shared_layout(self) -> Any:
        """In elements; every tile begins at a multiple of 16 bytes."""
        return layout(4, **self._tile_sizes())

    def _tile_sizes(self) -> dict[str, int]:
        raise NotImplementedError


class SimtConfig(SimtRows):
    """v1 and v2, which run one thread per query row. pages: how v2 finds pages of keys; "" = keys are not in pages."""

    reads_states = True
    pages: ClassVar[str] = ""

    @property
    def scores(self) -> "SimtConfig":
        """The Config whose options the scores have."""
        return self

    def _tile_sizes(self) -> dict[str, int]:
        return dict(
            q=self.tile_m * (self.k_row + self.pad),  # Q_i: each thread reads its own row
            k=self.tile_n * self.k_row,  # K_j: all threads read the same element, nothing to pad
            v=self.tile_n * self.v_row,  # V_j: likewise
            s=self.tile_m * (self.tile_n + self.pad),
        )


class V1Config(SimtConfig, kernel="v1", module="simt.v1"):
    """A block for each head, which loops over all queries."""

    takes = abi.forward("mask").plus("acc_o row_sum row_max")

    def grid(self, problem: AnyProblem) -> int:
        return problem.forward.batch * problem.forward.heads

    def workspace(self, problem: AnyProblem) -> abi.Workspace:
        """O before rounding, l and m."""
        rows, dtype = problem.forward.lse_shape, self.compute_dtype
        return dict(acc_o=((*rows, self.head_dim_v), dtype), row_sum=(rows, dtype), row_max=(rows, dtype))


class V2Config(SimtConfig, kernel="v2", module="simt.v2"):
    takes = abi.forward("mask")
