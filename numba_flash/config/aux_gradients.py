"""Configs of the kernels for the gradients of aux: two passes over all scores, and those before and after."""

from dataclasses import dataclass
from typing import Any

from ..abi import parameters as abi
from ..abi.arguments import sizes_of_aux
from ..problem.options import daux_name
from .forward import LaunchFacts
from .simt_backward import OfAux, SimtRowsConfig


@dataclass(frozen=True)
class DauxConfig(OfAux, SimtRowsConfig):
    """Of v2_daux, one thread per query row."""

    module = "simt.v2_backward_daux"
    takes = abi.backward("", abi.ROWS, "mask").plus("aux_bounds aux_sums", abi.OF_AUX)
    names = ("v2_daux_bounds", "v2_daux_sums")

    def _tile_sizes(self) -> dict[str, int]:
        sizes = super()._tile_sizes()
        return sizes | dict(products=sizes["ds"])  # Q K^T


@dataclass(frozen=True, init=False, repr=False, eq=False)
class AuxElementsConfig(LaunchFacts):
    """Of kernels that have a thread for each element of the arrays wanted_aux. dtype: what sums are of, float32 or
    float64; given: the dtypes of these arrays."""

    dtype: str
    given: tuple[str, ...]
    wanted_aux: tuple[int, ...] = ()
    threads: int = 256

    takes = abi.Parameters((abi.AUX_BOUNDS, abi.AUX_SUMS), sizes=abi.words(abi.OF_AUX))

    def grid(self, problem: Any) -> int:
        return -(-self._elements(problem) // self.threads)

    def workspace(self, problem: Any) -> abi.Workspace:
        elements, words = self._elements(problem), 2 if self.dtype == "float64" else 1
        return {abi.AUX_BOUNDS: ((elements + 1,), "uint32"), abi.AUX_SUMS: ((elements * words,), "int64")}

    @staticmethod
    def _elements(problem: Any) -> int:
        """Number of elements of all these arrays."""
        return sizes_of_aux(problem)["aux_begins"][-1]


@dataclass(frozen=True)
class AuxStartConfig(AuxElementsConfig):
    """Of daux_start, which runs before all others."""

    kernel = "daux_start"
    module = "simt.daux_start"


@dataclass(frozen=True)
class AuxRoundConfig(AuxElementsConfig):
    """Of daux_round, which runs after them and writes the gradients."""

    kernel = "daux_round"
    module = "simt.daux_round"

    @property
    def parameters(self) -> abi.Parameters:
        return self.takes._replace(arrays=(*self.takes.arrays, *map(daux_name, self.wanted_aux)))
