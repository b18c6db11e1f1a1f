"""StaticCall: the parts of a call that are known when a framework traces or records it."""

from typing import Any, NamedTuple

from ..arrays import Layout
from ..dispatch.call import PlanKey
from ..functions.arguments import reads_argument
from ..problem.option_checks import ARGUMENTS
from ..problem.options import FUNCTIONS, Options, Packed
from ..select.rungs import RUNGS

NO_VMAP = "{}.vmap takes no attention_varlen: pack the sequences of all mapped entries, which is one call"


def numbered(functions: Any, label: str) -> str | None:
    """The option whose function reads the index of the batch entry ("b") or head ("h"); None if no function does."""
    for option, function in zip(FUNCTIONS, functions or (), strict=False):
        if function is not None and reads_argument(function, ARGUMENTS[option].split(", ").index(label)):
            return option
    return None


def kernel_of_backward(kernel: str) -> str:
    """The rung that a framework's backward asks for, where its forward asked for `kernel`."""
    return kernel if kernel in RUNGS and RUNGS[kernel].has_backward else "auto"


class StaticCall(NamedTuple):
    """A call without its arrays: Options without arrays and aux, the functions as they were read when the framework
    traced, and the kernel. It contains a seed only if torch gets it as a number."""

    options: Options
    kernel: str
    key: Any = None  # Call.key

    @property
    def packed(self) -> bool:
        """Whether it is a call of attention_varlen."""
        return isinstance(self.options.layout, Packed)

    def mapped(self, q: tuple[int, ...]) -> int:
        """The number of dimensions that jax.vmap has put in front of q's own."""
        return len(q) - (3 if self.packed else 4)

    def reads_entries(self, seed: Any) -> bool:
        """Whether a result depends on the index of the batch entry: functions may read it, and a seed uses it."""
        return not (self.options.functions is self.options.seed is seed is None)

    def plan_key(self, operands: Any, others: tuple[Layout | None, ...], **more: Any) -> PlanKey:
        causal, window, q_offset, numbers, _, functions, layout, _ = self.options
        options = causal, window, q_offset, numbers, functions, layout
        return PlanKey(operands, others, *options, kernel=self.kernel, **more)
