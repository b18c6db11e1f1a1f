"""Configs of the kernels for the gradients of aux: one loops over all scores, two run before and after it."""

from typing import Any

from ..abi import parameters as abi
from ..abi.arguments import sizes_of_aux
from ..problem.options import daux_name
from .forward import LaunchFacts
from .simt_backward import SimtRowsConfig

PART = 24  # each word holds so many bits of a sum (kernels/score/aux_gradient.py)


def words(compute_dtype: str) -> int:
    """int64 words of the sum of an element: for all exponents, for the bits of a mantissa, and one for NaN and Inf."""
    exponents, mantissa = (2045, 53) if compute_dtype == "float64" else (253, 24)
    return exponents // PART + -(-(mantissa + PART - 1) // PART) + 1


class DauxConfig(SimtRowsConfig, kernel="v2_daux", module="simt.v2_backward_daux"):
    """One thread per query row."""

    wanted_aux: tuple[int, ...] = ()

    takes = abi.backward("", abi.ROWS, "mask").plus(abi.AUX_SUMS, abi.OF_AUX)

    def _tile_sizes(self) -> dict[str, int]:
        sizes = super()._tile_sizes()
        return sizes | dict(products=sizes["ds"])  # Q K^T


class AuxElementsConfig(LaunchFacts):
    """Kernels with one thread for each element of the arrays wanted_aux. dtype: of the sums' terms, float32 or float64;
    given: the dtypes of these arrays."""

    dtype: str
    given: tuple[str, ...]
    wanted_aux: tuple[int, ...] = ()
    threads: int = 256

    takes = abi.Parameters((abi.AUX_SUMS,), sizes=abi.words(abi.OF_AUX))

    def grid(self, problem: Any) -> int:
        return -(-self._elements(problem) // self.threads)

    def workspace(self, problem: Any) -> abi.Workspace:
        return {abi.AUX_SUMS: ((self._elements(problem) * words(self.dtype),), "int64")}

    @staticmethod
    def _elements(problem: Any) -> int:
        """Number of elements of all these arrays."""
        return sizes_of_aux(problem)["aux_begins"][-1]


class AuxStartConfig(AuxElementsConfig, kernel="daux_start", module="simt.daux_start"):
    """It clears the sums before other kernels add to them."""


class AuxRoundConfig(AuxElementsConfig, kernel="daux_round", module="simt.daux_round"):
    """It runs last, rounds the sums and writes the gradients."""

    @property
    def parameters(self) -> abi.Parameters:
        return self.takes._replace(arrays=(*self.takes.arrays, *map(daux_name, self.wanted_aux)))
