"""Configs of the softmax kernels (kernels/softmax)."""

from ..abi.parameters import Parameters
from .forward import ITEM_SIZE, LaunchFacts


class SoftmaxConfig(LaunchFacts):
    """The compile-time facts of one softmax kernel: one thread per row."""

    dtype: str
    threads: int

    takes = Parameters(("x", "y"), ("x", "y"), ("rows", "n"))


class SafeConfig(SoftmaxConfig, kernel="safe", module="softmax.safe"):
    """It reads a row three times."""


class OnlineConfig(SoftmaxConfig, kernel="online", module="softmax.online"):
    """It reads a row twice."""


class BlockedConfig(SoftmaxConfig, kernel="blocked", module="softmax.blocked"):
    """One block per row."""

    @property
    def shared_bytes(self) -> int:  # type: ignore[override]
        return 2 * self.threads * ITEM_SIZE[self.compute_dtype]


SOFTMAX = {kind.kernel: kind for kind in (SafeConfig, OnlineConfig, BlockedConfig)}
