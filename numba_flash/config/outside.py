"""Config of outside, which writes what rows of no packed sequence have."""

from dataclasses import dataclass
from typing import Any

from ..abi import parameters as abi
from ..machine.target import Target
from ..problem.options import Uses
from .forward import AnyProblem, LaunchFacts

_READ = abi.words("seqlens_k q_offset")


@dataclass(frozen=True)
class OutsideConfig(LaunchFacts):
    """Of outside: a block, or `parts` blocks, for each gap in front of a packed sequence, and all for that at the end.
    written: the arrays, "o" and perhaps "lse", or gradients; dims: their columns, without those of lse.

    No other kernel reads or writes these rows. So where kernels may overlap (ptx/griddepcontrol.py), this one does:
    waits: it may start before the kernel before it has ended.
    """

    dtype: str
    written: tuple[str, ...]
    dims: tuple[int, ...]
    uses: Uses
    threads: int = 128
    blocks: int = 256  # about as many, for all gaps
    in_order: bool = False  # as of the other kernels
    waits: bool = False  # type: ignore[misc]

    kernel = "outside"
    module = "simt.outside"
    packed = True
    q_offset_source = "number"

    @staticmethod
    def of(p: Any, written: tuple[str, ...], target: Target, **order: bool) -> "OutsideConfig":
        """p: the Problem, or the Config of a forward kernel, which then runs behind it. order: the last fields."""
        dims = tuple(p.head_dim_v if name in ("o", "dv") else p.head_dim for name in written if name != "lse")
        uses = tuple((name, given) for name, given in p.uses if name in (*abi.CU_SEQLENS, "seqlens_k"))
        # A thread of the simulator takes as long to start as its work does.
        sizes: dict[str, Any] = dict(threads=32, blocks=8) if target.simulated else {}
        return OutsideConfig(p.dtype, written, dims, uses, **sizes, **order)

    @property
    def sides(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """(array, columns) of those that have a row for each query, then of those that have one for each key."""
        columns = iter(self.dims)
        named = [(name, 0 if name == "lse" else next(columns)) for name in self.written]
        of_keys = tuple(of for of in named if of[0] in ("dk", "dv"))
        return tuple(side for side in (tuple(of for of in named if of not in of_keys), of_keys) if side)

    @property
    def takes(self) -> abi.Parameters:  # type: ignore[override]
        strided = tuple(name for name in self.written if name != "lse")
        return abi.Parameters((*self.written, *_READ), (*strided, *_READ), (*abi.SIZES, "outside_parts"))

    def own_sizes(self, problem: AnyProblem) -> dict[str, Any]:
        return dict(outside_parts=self._parts(problem))

    def grid(self, problem: AnyProblem) -> int:
        return len(self.sides) * max(problem.forward.batch, 1) * self._parts(problem)

    def _parts(self, problem: AnyProblem) -> int:
        """Blocks that share a gap: many gaps are short, and few may be long."""
        return max(self.blocks // max(problem.forward.batch, 1), 1)
