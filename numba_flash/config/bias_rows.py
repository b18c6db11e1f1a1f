"""Config of bias_rows (kernels/score/bias_rows.py)."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from ..abi import parameters as abi
from ..arrays.dtypes import ITEM_SIZE
from ..problem.backward import BackwardProblem
from .forward import LaunchFacts

PIECE = 8  # numbers of 16 bits in the 16 bytes of which TMA takes a multiple


@dataclass(frozen=True)
class BiasRowsConfig(LaunchFacts):
    """Of bias_rows, which runs before Hopper's backward where TMA cannot load rows of a bias in 16 bits. The kernels
    behind it read its copy. pairs: as of OptionArray."""

    dtype: str
    pairs: bool = False
    threads: int = 256

    kernel = "bias_rows"
    module = "score.bias_rows"
    takes = abi.Parameters(("bias", abi.BIAS_ROWS), ("bias",), abi.words("batch bias_shape"))
    replaces = "bias", abi.BIAS_ROWS

    @staticmethod
    def before(problem: BackwardProblem, threads: int) -> "BiasRowsConfig | None":
        """None where TMA can load the rows, where queries share one, or where no kernel would load them."""
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
        """batch: of the bias; bias_shape: its heads, rows, numbers of a row of the copy, and keys."""
        batch, *shape = self._shape(problem)
        return dict(batch=batch, bias_shape=(*shape, problem.forward.seqlen_k))

    def workspace(self, problem: Any) -> abi.Workspace:
        return {abi.BIAS_ROWS: (self._shape(problem), self.dtype)}

    def problem_behind(self, problem: BackwardProblem) -> BackwardProblem:
        """With the copy's strides."""
        p, (batch, heads, rows, row) = problem.forward, self._shape(problem)
        strides = heads * rows * row if batch > 1 else 0, rows * row if heads > 1 else 0, row, 1
        arrays = tuple(
            array._replace(strides=strides, pairs=True, boxes=True) if array.name == "bias" else array
            for array in p.arrays
        )
        return dataclasses.replace(problem, forward=dataclasses.replace(p, arrays=arrays))

    @staticmethod
    def _shape(problem: Any) -> tuple[int, int, int, int]:
        """Of the copy."""
        p = problem.forward
        by_batch, by_head, *_ = p.array("bias").strides
        return p.batch if by_batch else 1, p.heads if by_head else 1, p.seqlen_q, -(-p.seqlen_k // PIECE) * PIECE
