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
    """Of outside: a block, or `parts` blocks, for each gap between two sequences. written: the arrays, "o" and perhaps
    "lse", "dq", or "dk" and "dv", or one of them; dims: their columns, without those of lse.

    No other kernel reads or writes these rows. So where kernels may overlap (ptx/griddepcontrol.py), this one does:
    early: the kernel behind may start before this one has ended; waits: this one before the kernel before it has.
    """

    dtype: str
    written: tuple[str, ...]
    dims: tuple[int, ...]
    uses: Uses
    threads: int = 128
    blocks: int = 256  # about as many, for all gaps
    in_order: bool = False  # as of the other kernels
    early: bool = False
    waits: bool = False  # type: ignore[misc]

    module = "simt.outside"
    names = ("outside_of_queries", "outside_of_keys", "outside_of_dq")
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
    def of_keys(self) -> bool:  # type: ignore[override]
        return self.written[0] in ("dk", "dv")

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return self.names[1 if self.of_keys else 2 if self.written == ("dq",) else 0]

    @property
    def takes(self) -> abi.Parameters:  # type: ignore[override]
        strided = tuple(name for name in self.written if name != "lse")
        return abi.Parameters((*self.written, *_READ), (*strided, *_READ), (*abi.SIZES, "outside_parts"))

    def own_sizes(self, problem: AnyProblem) -> dict[str, Any]:
        return dict(outside_parts=self._parts(problem))

    def grid(self, problem: AnyProblem) -> int:
        return (problem.forward.batch + 1) * self._parts(problem)

    def _parts(self, problem: AnyProblem) -> int:
        """Blocks that share a gap: many gaps are short, and few may be long."""
        return max(self.blocks // (problem.forward.batch + 1), 1)
