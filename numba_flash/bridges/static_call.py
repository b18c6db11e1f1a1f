"""StaticCall: what is known of a call when a framework traces or records it."""

from typing import Any, NamedTuple

from ..arrays import Layout
from ..dispatch.call import PlanKey
from ..problem.options import Options, Packed

NO_VMAP = "{}.vmap takes no attention_varlen: pack the sequences of all mapped entries, which is one call"


class StaticCall(NamedTuple):
    """A call without its arrays: Options without arrays and aux, with its functions as they were read when the
    framework traced, and the kernel. A seed is in it only if torch gets it as a number."""

    options: Options
    kernel: str
    key: Any = None  # of the Call

    @property
    def packed(self) -> bool:
        """Whether it is one of attention_varlen."""
        return isinstance(self.options.layout, Packed)

    def mapped(self, q: tuple[int, ...]) -> int:
        """How many dimensions jax.vmap has put in front of those that q has in a call."""
        return len(q) - (3 if self.packed else 4)

    def reads_entries(self, seed: Any) -> bool:
        """Whether the number of a batch entry matters: functions are told it, and a seed drops weights by it."""
        return not (self.options.functions is self.options.seed is seed is None)

    def plan_key(self, operands: Any, others: tuple[Layout | None, ...], **more: Any) -> PlanKey:
        causal, window, q_offset, numbers, _, functions, layout, _ = self.options
        options = causal, window, q_offset, numbers, functions, layout
        return PlanKey(operands, others, *options, kernel=self.kernel, **more)
