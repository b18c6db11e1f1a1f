"""StaticCall: what is known of a call when a framework traces or records it."""

from typing import Any, NamedTuple

from ..arrays import Layout
from ..dispatch.call import PlanKey
from ..problem.options import Options


class StaticCall(NamedTuple):
    """A call without its arrays: Options without arrays and aux, with its functions as they were read when the
    framework traced, and the kernel. A seed is in it only if torch gets it as a number."""

    options: Options
    kernel: str
    key: Any = None  # of the Call

    def reads_entries(self, seed: Any) -> bool:
        """Whether the number of a batch entry matters: functions are told it, and a seed drops weights by it."""
        return not (self.options.functions is self.options.seed is seed is None)

    def plan_key(self, operands: Any, others: tuple[Layout | None, ...], **more: Any) -> PlanKey:
        causal, window, q_offset, numbers, _, functions, layout, _ = self.options
        options = causal, window, q_offset, numbers, functions, layout
        return PlanKey(operands, others, *options, kernel=self.kernel, **more)
