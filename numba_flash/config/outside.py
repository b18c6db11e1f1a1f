"""Config of outside, which writes the rows that are in no packed sequence."""

from typing import Any

from ..abi import parameters as abi
from ..machine.target import Target
from ..problem.options import Uses
from .forward import AnyProblem, LaunchFacts

_READ = abi.words("seqlens_k q_offset")


class OutsideConfig(LaunchFacts, kernel="outside", module="simt.outside"):
    """Some blocks share the gap in front of each packed sequence, and all share the one at the end. No other kernel
    reads or writes these rows, so it may overlap with others (ptx/griddepcontrol.py). waits: it may start before the
    previous kernel ends. written: (array, its columns): "o" and perhaps "lse", or gradients."""

    dtype: str
    written: tuple[tuple[str, int], ...]
    uses: Uses
    threads: int = 128
    blocks: int = 256  # about so many for all gaps together
    in_order: bool = False  # as in the other kernels
    waits: bool = False  # type: ignore[misc]

    packed = True
    q_offset_source = "number"

    @staticmethod
    def of(p: Any, names: tuple[str, ...], target: Target, **order: bool) -> "OutsideConfig":
        """p: the Problem, or the Config of the forward kernel that runs next. order: in_order and waits."""
        columns = dict(o=p.head_dim_v, lse=1, dq=p.head_dim, dk=p.head_dim, dv=p.head_dim_v)
        uses = tuple((name, given) for name, given in p.uses if name in (*abi.CU_SEQLENS, "seqlens_k"))
        # A thread of the simulator takes as long to start as its work does.
        sizes: dict[str, Any] = dict(threads=32, blocks=8) if target.simulated else {}
        return OutsideConfig(p.dtype, tuple((name, columns[name]) for name in names), uses, **sizes, **order)

    @property
    def sides(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """`written`, split into arrays with a row for each query and arrays with a row for each key."""
        sides = (tuple(of for of in self.written if (of[0] in ("dk", "dv")) == keys) for keys in (False, True))
        return tuple(filter(None, sides))

    @property
    def takes(self) -> abi.Parameters:  # type: ignore[override]
        names = tuple(name for name, _ in self.written)
        strided = tuple(name for name in names if name != "lse")
        return abi.Parameters((*names, *_READ), (*strided, *_READ), (*abi.SIZES, "outside_parts"))

    def own_sizes(self, problem: AnyProblem) -> dict[str, Any]:
        return dict(outside_parts=self._parts(problem))

    def grid(self, problem: AnyProblem) -> int:
        return len(self.sides) * max(problem.forward.batch, 1) * self._parts(problem)

    def _parts(self, problem: AnyProblem) -> int:
        """Blocks that share a gap: if there are many gaps they are short, and if there are few they may be long."""
        return max(self.blocks // max(problem.forward.batch, 1), 1)
