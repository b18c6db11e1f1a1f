"""Configs of the kernels for the gradients of aux: two passes over all scores, and those before and after."""

from dataclasses import dataclass
from typing import ClassVar

from .forward import LaunchFacts
from .simt_backward import DqConfig


@dataclass(frozen=True)
class DauxConfig(DqConfig):
    """Of v2_daux, one thread per query row. wanted_aux: the numbers of the arrays that have a gradient. of_bounds: it
    finds the largest exponent of each element's terms; else it adds them up."""

    wanted_aux: tuple[int, ...] = ()  # type: ignore[misc]
    of_bounds: bool = False

    def _tile_sizes(self) -> dict[str, int]:
        sizes = super()._tile_sizes()
        return sizes | dict(products=sizes["ds"])  # Q K^T


@dataclass(frozen=True)
class AuxElementsConfig(LaunchFacts):
    """Of daux_start and daux_round, which have a thread for each element of the arrays wanted_aux. dtype: what sums are
    of, float32 or float64; given: the dtypes of these arrays."""

    kernel: str
    dtype: str
    given: tuple[str, ...]
    wanted_aux: tuple[int, ...] = ()  # type: ignore[misc]
    threads: int = 256

    shared_bytes: ClassVar[int] = 0
    blocks_per_sm: ClassVar[int] = 0

    @property
    def compute_dtype(self) -> str:
        return self.dtype
