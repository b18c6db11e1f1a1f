"""Configs of the Hopper backward in float32 with head_dim above 128 (kernels/wgmma/paired_tiles.py)."""

import itertools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from .wgmma_backward_float32 import WgmmaBackwardFloat32Config, WgmmaDkdvFloat32Config, WgmmaDqFloat32Config


class PairedPlan(NamedTuple):
    """Where things begin in a block's shared memory, in bytes; tiles are in parts, of the block's half of the columns.

    own_a, own_b: the tiles that the pair owns. stream: two places for tiles that it walks over, each of panels of 64
    columns: one has a tile of a, the other of b, and in the next step the other way around.
    """

    own_a: int
    own_b: int
    stream: int
    weights: int  # what the other block has of S, and then as in SharedPlan
    score_gradients: int  # what the other block has of dP
    struck: int  # rows of results that are not finite in the other block
    state: int
    barriers: int
    end: int


class PairedBarriers(NamedTuple):
    """Where the mbarriers are, 8 bytes each; tiles have one of each kind for each panel.

    The next tile of a comes while the last one is still read. So those of a are there twice.
    """

    a_full: int
    a_empty: int
    b_full: int
    b_empty: int
    scores_full: int
    scores_empty: int  # in the other block
    score_gradients_full: int
    score_gradients_empty: int  # in the other block
    weights_full: int
    end: int


class Paired(WgmmaBackwardFloat32Config):
    """Two blocks, a cluster, own the same 64 rows, and each has half of the columns of every tile: of a, and of b."""

    WIDEST: ClassVar[int] = 256
    cluster: ClassVar[int] = 2
    paired: ClassVar[bool] = True
    ptx_version: ClassVar[str] = "8.1"  # st.async

    def __post_init__(self) -> None:
        if (self.stages_a, self.stages_b) != (1, 1):
            raise ValueError(f"stages_a and stages_b must be 1, not {self.stages_a} and {self.stages_b}")
        super().__post_init__()

    @property
    def head_dim_padded(self) -> int:
        """Columns of a block, in whole steps of a product."""
        return (self.head_dim + 31) // 32 * 16

    @property
    def head_dim_v_padded(self) -> int:
        return (self.head_dim_v + 31) // 32 * 16

    @property
    def panels(self) -> int:
        """Of the tile that has more."""
        return -(-max(self.head_dim_padded, self.head_dim_v_padded) // 64)

    @property
    def panel_bytes(self) -> int:
        """Of 64 columns of a tile of the walk."""
        return self.parts_bytes(self.stream_rows, 64)

    def shared_layout(self) -> PairedPlan:  # type: ignore[override]
        tiles, scores = 2 * self.panels * self.panel_bytes, 4 * self.own_rows * self.stream_rows
        struck, state, barriers = self.threads // 32 * 4, 4 * self.STATE_WORDS, 8 * (6 * self.panels + 5)
        sizes = self.own_a_bytes, self.own_b_bytes, tiles, scores, scores, struck, state, barriers
        return PairedPlan(0, *itertools.accumulate(sizes))

    def barriers(self) -> PairedBarriers:  # type: ignore[override]
        n = self.panels
        starts = itertools.accumulate((2 * n, 2 * n, n, n, *[1] * 5), initial=0)
        return PairedBarriers(*(self.shared_layout().barriers + 8 * count for count in starts))


@dataclass(frozen=True)
class WgmmaPairedDkdvConfig(Paired, WgmmaDkdvFloat32Config):
    """Of wgmma_dkdv_paired."""


@dataclass(frozen=True)
class WgmmaPairedDqConfig(Paired, WgmmaDqFloat32Config):
    """Of wgmma_dq_paired."""
