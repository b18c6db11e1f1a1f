"""Configs of the Hopper backward in float32 (kernels/wgmma/backward_float32.py); with
head_dim above 128 two blocks share the columns (kernels/wgmma/paired_tiles.py)."""

from typing import Any, ClassVar

from ..abi import parameters as abi
from ..problem.options import FUNCTIONS, SEEDED
from .backward import OfGradients
from .forward import check, layout
from .wgmma_backward import StreamingConfig

NOT_TAKEN = (*FUNCTIONS, SEEDED)  # yet


class WgmmaBackwardFloat32Config(StreamingConfig):
    """A block owns 64 rows. It has a producer warpgroup and two consumer warpgroups, one for S and one for dP."""

    stages_b: int = 1

    members: ClassVar[int] = 0  # a block that owns keys takes all query heads of a group
    DTYPES = ("float32",)
    PARTS = 3
    paired: ClassVar[bool] = False  # whether two blocks own the same rows and share the columns
    WIDEST: ClassVar[int] = 128  # a consumer keeps the sums of so many columns at most
    LONGEST = 64  # one sum covers so many rows at most: a longer sum would drift
    OWN_ROWS = (64,)
    LEAST_STAGES_A = 1
    NOT_TAKEN = NOT_TAKEN
    consumers: ClassVar[int] = 2
    threads: ClassVar[int] = 128 * (1 + consumers)  # type: ignore[misc]
    registers: ClassVar[tuple[int, int]] = 104, 200  # of a thread: (of the producer, of the consumers)

    @property
    def weights_bytes(self) -> int:
        """Bytes of a float32 tile of scores that one consumer, or one block, hands to the other."""
        return 4 * self.own_rows * self.other_rows

    def _barrier_counts(self) -> dict[str, int]:
        return self._rings() | dict(weights_full=1, weights_empty=1)

    def shared_layout(self) -> Any:
        return layout(
            **self._tiles(),
            weights=self.weights_bytes,
            state=4 * self.STATE_WORDS,
            barriers=8 * sum(self._barrier_counts().values()),
        )


class WgmmaDkdvFloat32Config(
    OfGradients, WgmmaBackwardFloat32Config, kernel="wgmma_dkdv_float32", module="wgmma.backward_float32"
):
    """A block owns tile_n keys and walks over tiles of tile_m queries."""

    takes = abi.backward("dk dv", abi.ROWS, abi.MASK_BITS_OF_KEYS)
    of_keys = True


class WgmmaDqFloat32Config(WgmmaBackwardFloat32Config, kernel="wgmma_dq_float32", module="wgmma.backward_float32"):
    """A block owns tile_m queries of one head and walks over tiles of tile_n keys."""

    takes = abi.backward("dq", abi.ROWS)


class Paired(WgmmaBackwardFloat32Config):
    """A cluster of two blocks owns 64 rows. Each block has half of the columns of every tile a and b."""

    WIDEST = 256
    cluster = 2
    paired = True
    ptx_version = "8.1"  # st.async

    def __post_init__(self) -> None:
        one = (self.stages_a, self.stages_b) == (1, 1)
        check(one, f"stages_a and stages_b must be 1, not {self.stages_a} and {self.stages_b}")
        super().__post_init__()

    def _padded(self, columns: int) -> int:
        """Columns of a tile that one block has."""
        return -(-columns // 32) * 16

    @property
    def panels(self) -> int:
        """Panels of the wider of tiles a and b."""
        return -(-max(self.head_dim_padded, self.head_dim_v_padded) // 64)

    @property
    def panel_bytes(self) -> int:
        """Bytes of 64 columns of a tile that the block walks over."""
        return self.parts_bytes(self.other_rows, 64)

    def _barrier_counts(self) -> dict[str, int]:
        """Each panel has a full and an empty mbarrier. The next tile a is loaded while the last one is still read, so
        a has two sets. scores_empty, score_gradients_empty: whether the other block's buffer is free."""
        counts = dict(a_full=2 * self.panels, a_empty=2 * self.panels, b_full=self.panels, b_empty=self.panels)
        counts |= dict(scores_full=1, scores_empty=1, score_gradients_full=1, score_gradients_empty=1)
        return counts | dict(weights_full=1)

    def shared_layout(self) -> Any:
        """Tiles have the block's half of the columns.

        stream: two places for tiles that it walks over, in panels of 64 columns. One has a tile a, the other a tile b,
        and they swap in the next step. weights: the other block's half of S, and then the weights for the other
        consumer. score_gradients: the other block's half of dP. nonfinite: rows of results that are not finite in the
        other block.
        """
        return layout(
            **self._own_tile(),
            stream=2 * self.panels * self.panel_bytes,
            weights=self.weights_bytes,
            score_gradients=self.weights_bytes,
            nonfinite=self.threads // 32 * 4,
            state=4 * self.STATE_WORDS,
            barriers=8 * sum(self._barrier_counts().values()),
        )


class WgmmaPairedDkdvConfig(Paired, WgmmaDkdvFloat32Config, kernel="wgmma_dkdv_paired"):
    """The same for two blocks."""


class WgmmaPairedDqConfig(Paired, WgmmaDqFloat32Config, kernel="wgmma_dq_paired"):
    """The same for two blocks."""
