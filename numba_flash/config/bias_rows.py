"""Config of bias_rows (kernels/score/bias_rows.py)."""

import dataclasses
import math
from typing import Any

from ..abi import parameters as abi
from ..arrays.dtypes import ITEM_SIZE
from ..problem.backward import BackwardProblem
from .forward import LaunchFacts

PIECE = 8  # TMA needs rows of a multiple of 16 bytes: so many numbers of 16 bits


class BiasRowsConfig(LaunchFacts, kernel="bias_rows", module="score.bias_rows"):
    """It copies a 16-bit bias whose rows TMA cannot load. Hopper's backward reads the copy. pairs: as in
    OptionArray."""

    dtype: str
    pairs: bool = False
    threads: int = 256

    takes = abi.Parameters(("bias", abi.BIAS_ROWS), ("bias",), abi.words("batch bias_shape"))
    replaces = "bias", abi.BIAS_ROWS

    @staticmethod
    def before(problem: BackwardProblem, threads: int) -> "BiasRowsConfig | None":
        """The Config; None if TMA can load the rows, if all queries share one row, or if no kernel would load them."""
        p, bias = problem.forward, problem.forward.array("bias")
        loads = (
            {"dq", "dk", "dv"} & {*problem.wanted} and p.packed is None and 0 not in (p.batch, p.seqlen_q, p.seqlen_k)
        )
        if not loads or bias is None or bias.boxes or bias.strides[2] == 0 or ITEM_SIZE[bias.dtype] != 2:
            return None
        return BiasRowsConfig(bias.dtype, bias.pairs, threads)

    def dtype_of(self, option: str) -> str:
        return self.dtype

    def grid(self, problem: Any) -> int:
        return -(-math.prod(self._shape(problem)) // (PIECE * self.threads))

    def own_sizes(self, problem: Any) -> dict[str, Any]:
        """batch: that of the copy; bias_shape: its heads, its rows, the numbers in a row, and the keys."""
        batch, *shape = self._shape(problem)
        return dict(batch=batch, bias_shape=(*shape, problem.forward.seqlen_k))

    def workspace(self, problem: Any) -> abi.Workspace:
        return {abi.BIAS_ROWS: (self._shape(problem), self.dtype)}

    def problem_behind(self, problem: BackwardProblem) -> BackwardProblem:
        """The problem with the copy's strides in place of the bias's."""
        p, (batch, heads, rows, row) = problem.forward, self._shape(problem)
        strides = heads * rows * row if batch > 1 else 0, rows * row if heads > 1 else 0, row, 1
        arrays = tuple(
            array._replace(strides=strides, pairs=True, boxes=True) if array.name == "bias" else array
            for array in p.arrays
        )
        return dataclasses.replace(problem, forward=dataclasses.replace(p, arrays=arrays))

    @staticmethod
    def _shape(problem: Any) -> tuple[int, int, int, int]:
        """(batch, heads, rows, numbers in a row) of the copy."""
        p = problem.forward
        by_batch, by_head, *_ = p.array("bias").strides
        return p.batch if by_batch else 1, p.heads if by_head else 1, p.seqlen_q, -(-p.seqlen_k // PIECE) * PIECE
