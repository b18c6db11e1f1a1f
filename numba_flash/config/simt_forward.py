"""Config of v1 and v2 (kernels/simt), where a thread owns a row."""

from dataclasses import dataclass
from typing import Any

from .forward import ITEM_SIZE, Config, layout


@dataclass(frozen=True)
class SimtConfig(Config):
    """Of v1 and v2, which run one thread per query row: tile_m is also the number of threads.

    `pad` is how many elements are added to each row of a shared tile that every thread reads its own
    row of: with pad 0 and a head_dim that is a multiple of 32 all 32 lanes of a warp hit one bank, which
    shows bank conflicts (docs/tensor_cores.md).
    """

    pad: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.tile_m <= 1024:
            raise ValueError(f"tile_m is the number of threads of a block: 1 to 1024, not {self.tile_m}")
        if self.tile_n < 4 or self.tile_n % 4:
            raise ValueError(f"tile_n must be a multiple of 4, not {self.tile_n}")
        if self.pad < 0:
            raise ValueError(f"pad must be at least 0, not {self.pad}")
        object.__setattr__(self, "shared_bytes", self.shared_layout().end * ITEM_SIZE[self.compute_dtype])

    @property
    def threads(self) -> int:
        return self.tile_m

    @property
    def k_row(self) -> int:
        """Elements from one row of a Q or K tile to the next, before pad: head_dim in whole 16-byte reads."""
        return (self.head_dim + 3) // 4 * 4

    @property
    def v_row(self) -> int:
        """The same for V tiles."""
        return (self.head_dim_v + 3) // 4 * 4

    def shared_layout(self) -> Any:
        """Where the tiles Q_i, K_j, V_j and S begin in shared memory, and the end, in elements. Every tile begins at a
        multiple of 16 bytes."""
        return layout(
            4,
            q=self.tile_m * (self.k_row + self.pad),  # each thread reads its own row
            k=self.tile_n * self.k_row,  # all threads read the same element, nothing to pad
            v=self.tile_n * self.v_row,  # likewise
            s=self.tile_m * (self.tile_n + self.pad),
        )
