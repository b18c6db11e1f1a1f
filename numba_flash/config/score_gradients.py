"""Configs of the tensor-core kernels that stop at dS: the gradients of bias and of what a score_mod reads."""

from dataclasses import dataclass
from typing import Any, ClassVar

from .backward import MmaBackwardConfig
from .forward import layout, tile_bytes


@dataclass(frozen=True)
class MmaScoresConfig(MmaBackwardConfig):
    """Tiles of tile_m queries by tile_n keys, one behind the other. Q, dO, K and V have one place each: the next ones
    come while a tile's scores are finished."""

    SCORE_PAD: ClassVar[int] = 8  # floats behind a row of scores in shared memory, so that lanes meet no bank twice

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warp_rows != 16 or self.column_groups != 1 or self.in_registers:
            raise ValueError("warps of these kernels own 16 rows, each its own")
        if self.threads % self.tile_n:
            raise ValueError(f"tile_n must divide the {self.threads} threads, but is {self.tile_n}")

    @property
    def own_rows(self) -> int:
        return self.tile_m

    @property
    def other_rows(self) -> int:
        return self.tile_n

    def shared_layout(self) -> Any:
        """Where Q, dO, K, V, what is behind them and the end are."""
        return layout(
            q=tile_bytes(self.tile_m, self.head_dim_padded),
            do=tile_bytes(self.tile_m, self.head_dim_v_padded),
            k=tile_bytes(self.tile_n, self.head_dim_padded),
            v=tile_bytes(self.tile_n, self.head_dim_v_padded),
            **self._behind(),
        )

    def _behind(self) -> dict[str, int]:
        raise NotImplementedError


@dataclass(frozen=True)
class MmaDbiasConfig(MmaScoresConfig):
    """Of mma_dbias. rows_summed, keys_summed: bias is one row, or one column, for all. pairs: two neighbours of 16 bits
    in dbias lie in one word of 4 bytes. split: as of DbiasConfig."""

    rows_summed: bool = False
    keys_summed: bool = False
    pairs: bool = False
    split: bool = False

    def _behind(self) -> dict[str, int]:
        """A row of sums for each warp."""
        return dict(sums=self.threads // 32 * self.tile_n * 4)


@dataclass(frozen=True)
class MmaDauxConfig(MmaScoresConfig):
    """Of mma_daux, as DauxConfig."""

    wanted_aux: tuple[int, ...] = ()  # type: ignore[misc]
    of_bounds: bool = False

    @property
    def score_row(self) -> int:
        """Bytes from one row of scores in shared memory to the next."""
        return 4 * (self.tile_n + self.SCORE_PAD)

    def _behind(self) -> dict[str, int]:
        """Q K^T, dO V^T, and what is known of each query."""
        return dict(s=self.tile_m * self.score_row, dp=self.tile_m * self.score_row, rows=16 * self.tile_m)
