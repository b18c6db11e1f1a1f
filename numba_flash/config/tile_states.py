"""Config of tile_states, which finds the tiles where a mask_mod removes no key, some or all."""

from dataclasses import dataclass
from typing import Any

from ..abi import parameters as abi
from ..abi import tile_states
from ..abi.parameters import StatesTile
from ..problem.options import Uses
from .forward import AnyProblem, LaunchFacts, multiple_of

_READ = abi.words("mask seqlens_k q_offset")
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

    module = "score.tile_states"
    takes = abi.Parameters(_READ, _READ, abi.SIZES)
    names = abi.STATES

    def __post_init__(self) -> None:
        multiple_of("threads", self.threads, 32)

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
    def tile_states(self) -> str:  # type: ignore[override]
        return self.tile.array

    @property
    def states_tile(self) -> StatesTile:  # type: ignore[override]
        return self.tile

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return self.tile_states

    def grid(self, problem: AnyProblem) -> int:
        return tile_states.words(problem.forward, self.tile)

    def workspace(self, problem: AnyProblem) -> abi.Workspace:
        return {self.tile_states: ((tile_states.words(problem.forward, self.tile),), "uint32")}
