"""Configs of the softmax kernels (kernels/softmax)."""

from dataclasses import dataclass

from ..abi.parameters import Parameters
from .forward import ITEM_SIZE, LaunchFacts


@dataclass(frozen=True, init=False, repr=False, eq=False)
class SoftmaxConfig(LaunchFacts):
    """The compile-time facts of one softmax kernel: one thread per row."""

    dtype: str
    threads: int

    takes = Parameters(("x", "y"), ("x", "y"), ("rows", "n"))


@dataclass(frozen=True)
class SafeConfig(SoftmaxConfig):
    kernel = "safe"
    module = "softmax.safe"


@dataclass(frozen=True)
class OnlineConfig(SoftmaxConfig):
    kernel = "online"
    module = "softmax.online"


@dataclass(frozen=True)
class BlockedConfig(SoftmaxConfig):
    """One block per row."""

    kernel = "blocked"
    module = "softmax.blocked"

    @property
    def shared_bytes(self) -> int:  # type: ignore[override]
        return 2 * self.threads * ITEM_SIZE[self.compute_dtype]


SOFTMAX = {kind.kernel: kind for kind in (SafeConfig, OnlineConfig, BlockedConfig)}
