"""Config of mask_bits (kernels/score/mask_bits.py)."""

from dataclasses import dataclass
from typing import ClassVar

from .forward import LaunchFacts


@dataclass(frozen=True)
class MaskBitsConfig(LaunchFacts):
    """Of mask_bits, which runs before tensor-core kernels where there is a mask. of_keys: its rows are keys."""

    of_keys: bool = False
    threads: int = 512

    dtype: ClassVar[str] = "bool"
    compute_dtype: ClassVar[str] = "float32"
    shared_bytes: ClassVar[int] = 0
    blocks_per_sm: ClassVar[int] = 2  # so that 32 warps read at a time; a thread then has 64 registers

    def __post_init__(self) -> None:
        if self.threads < 32 or self.threads % 32:
            raise ValueError(f"threads must be a multiple of 32, not {self.threads}")

    @property
    def kernel(self) -> str:
        return "mask_bits_of_keys" if self.of_keys else "mask_bits"

    def dtype_of(self, option: str) -> str:
        return self.dtype
