"""Configs of tile_states, which finds the tiles where a mask_mod removes no key, some or all, and of tile_order."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ..problem.options import Uses
from .forward import LaunchFacts
from .states_of_tiles import TILE_STATES, TILE_STATES_OF_KEYS, StatesTile

VISIBLE = ("mask", "mask_mod", "aux", "seqlens_k", "q_offset")  # the options that decide what is seen


@dataclass(frozen=True)
class TileStatesConfig(LaunchFacts):
    """The Config of tile_states, which runs before kernels that skip tiles.

    dtype: of the function's real numbers, float32 or float64. tile: the tile of the kernel that runs after it.
    """

    dtype: str
    tile: StatesTile
    uses: Uses
    q_offset_source: str = "number"
    threads: int = 512
    narrow: bool = False  # as of Config

    shared_bytes: ClassVar[int] = 0
    blocks_per_sm: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.threads < 32 or self.threads % 32:
            raise ValueError(f"threads must be a multiple of 32, not {self.threads}")

    @property
    def kept(self) -> bool:  # type: ignore[override]
        """Not where a mask has its part in the states: that is each call's own."""
        return not self.has("mask")

    @staticmethod
    def before(config: Any, threads: int) -> "TileStatesConfig":
        """Of what runs before the kernel of `config`."""
        used = tuple((name, given) for name, given in config.uses if name in VISIBLE)
        facts = config.states_tile, used, config.q_offset_source, threads, config.narrow
        return TileStatesConfig(config.compute_dtype, *facts)

    @property
    def kernel(self) -> str:
        return self.tile_states

    @property
    def tile_states(self) -> str:  # type: ignore[override]
        return TILE_STATES_OF_KEYS if self.tile.of_keys else TILE_STATES

    @property
    def states_tile(self) -> StatesTile:  # type: ignore[override]
        return self.tile

    @property
    def compute_dtype(self) -> str:
        return self.dtype

    def has(self, option: str) -> bool:
        return any(name == option for name, _ in self.uses)

    def dtype_of(self, option: str) -> str | None:
        return dict(self.uses).get(option)

    def function(self, option: str) -> Any:
        return dict(self.uses).get(option)

    @property
    def aux(self) -> tuple[tuple[str, int], ...]:  # type: ignore[override]
        return dict(self.uses).get("aux", ())


@dataclass(frozen=True)
class TileOrderConfig(LaunchFacts):
    """Of tile_order, which runs behind tile_states, for the same tile.

    of_mask: a mask has its part in the states, which are each call's own then.
    """

    tile: StatesTile
    of_mask: bool
    threads: int = 512

    compute_dtype: ClassVar[str] = "float32"
    shared_bytes: ClassVar[int] = 0
    blocks_per_sm: ClassVar[int] = 0

    @property
    def kept(self) -> bool:  # type: ignore[override]
        return not self.of_mask

    @staticmethod
    def behind(states: TileStatesConfig) -> "TileOrderConfig":
        return TileOrderConfig(states.tile, states.has("mask"), states.threads)

    @property
    def kernel(self) -> str:
        return "tile_order_of_keys" if self.tile.of_keys else "tile_order"

    @property
    def tile_states(self) -> str:  # type: ignore[override]
        return TILE_STATES_OF_KEYS if self.tile.of_keys else TILE_STATES

    @property
    def states_tile(self) -> StatesTile:  # type: ignore[override]
        return self.tile
