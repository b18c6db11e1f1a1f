"""Configs of tile_states, tile_order and mask_mod_bits, which find and record the scores that a mask_mod leaves."""

from typing import Any, ClassVar

from ..abi import mask_bits, parameters as abi, tile_states
from ..abi.parameters import StatesTile
from ..problem.forward import Problem
from ..problem.options import Uses
from .forward import AnyProblem, LaunchFacts, multiple_of

_READ = abi.words("mask seqlens_k q_offset")
VISIBLE = ("mask", "mask_mod", "aux", "seqlens_k", "q_offset")  # the options that decide which scores are seen


class OfTile(LaunchFacts):
    """tile: the tile of the kernel that runs after it."""

    tile: StatesTile

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return self.names[self.tile.of_keys]

    @property
    def tile_states(self) -> str:  # type: ignore[override]
        return self.tile.array

    @property
    def states_tile(self) -> StatesTile:  # type: ignore[override]
        return self.tile


class TileStatesConfig(OfTile, module="score.tile_states"):
    """It runs before kernels that skip tiles. dtype: of the function's real numbers, float32 or float64."""

    dtype: str
    uses: Uses
    q_offset_source: str = "number"
    threads: int = 512
    narrow: bool = False  # as in Config

    takes = abi.Parameters(_READ, _READ, abi.SIZES)
    names = abi.STATES

    def __post_init__(self) -> None:
        multiple_of("threads", self.threads, 32)

    @property
    def kept(self) -> str:  # type: ignore[override]
        """Nothing, if the states also depend on a mask, which each call gives anew."""
        return "" if self.has("mask") else self.tile_states

    @classmethod
    def before(cls, config: Any, p: Problem, threads: int) -> "TileStatesConfig":
        """The Config of the kernel that runs before that of `config`."""
        used = tuple((name, given) for name, given in p.uses if name in VISIBLE)
        return cls(config.states_tile, config.compute_dtype, used, p.q_offset_source, threads, p.narrow)

    def grid(self, problem: AnyProblem) -> int:
        return tile_states.blocks(problem.forward, self.tile)

    def workspace(self, problem: AnyProblem) -> abi.Workspace:
        return {self.tile_states: ((tile_states.words(problem.forward, self.tile),), "uint32")}


class MaskModBitsConfig(TileStatesConfig, module="score.mask_mod_bits"):
    """It runs after tile_states, for the same tile."""

    names = ("mask_mod_bits", "mask_mod_bits_of_keys")

    @property
    def kept(self) -> str:  # type: ignore[override]
        return (abi.MASK_BITS, abi.MASK_BITS_OF_KEYS)[self.tile.of_keys]

    @property
    def takes(self) -> abi.Parameters:  # type: ignore[override]
        read = abi.words("seqlens_k q_offset")
        return abi.Parameters((*read, self.kept), (*read, self.kept), abi.SIZES)

    def grid(self, problem: AnyProblem) -> int:
        p, of_keys = problem.forward, self.tile.of_keys
        pieces, (*_, row_words) = mask_bits.layout(p, of_keys)
        return -(-pieces * 2 * (row_words // 4) // (self.threads // 32))

    def workspace(self, problem: AnyProblem) -> abi.Workspace:
        return {self.kept: ((mask_bits.words(problem.forward, self.tile.of_keys),), "uint32")}


class TileOrderConfig(OfTile, module="score.tile_order"):
    """It runs after tile_states, for the same tile. of_mask: the states also depend on a mask, so they cannot be kept
    for the next call."""

    of_mask: bool
    threads: int = 512

    takes = abi.Parameters((), sizes=abi.words("seqlen_q seqlen_k"))
    names = ("tile_order", "tile_order_of_keys")
    dtype: ClassVar[str] = "uint32"  # type: ignore[misc]

    @property
    def kept(self) -> str:  # type: ignore[override]
        return "" if self.of_mask else self.tile_states

    @staticmethod
    def behind(states: TileStatesConfig) -> "TileOrderConfig":
        return TileOrderConfig(states.tile, states.has("mask"), states.threads)

    def grid(self, problem: AnyProblem) -> int:
        return tile_states.order_blocks(problem.forward, self.tile, self.threads)
