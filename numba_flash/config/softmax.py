"""Config of the softmax kernels (kernels/softmax)."""

from dataclasses import dataclass
from typing import ClassVar

from .forward import ITEM_SIZE, LaunchFacts


@dataclass(frozen=True)
class SoftmaxConfig(LaunchFacts):
    """The compile-time facts of one softmax kernel: one thread per row, or one block per row for "blocked"."""

    kernel: str  # "safe", "online" or "blocked"
    dtype: str
    threads: int

    blocks_per_sm: ClassVar[int] = 0

    @property
    def compute_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def shared_bytes(self) -> int:
        return 2 * self.threads * ITEM_SIZE[self.compute_dtype] if self.kernel == "blocked" else 0
