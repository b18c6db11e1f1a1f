"""Config of mask_bits (kernels/score/mask_bits.py)."""

from typing import ClassVar

from ..abi import mask_bits, parameters as abi
from .forward import AnyProblem, LaunchFacts, multiple_of


class MaskBitsConfig(LaunchFacts, module="score.mask_bits"):
    """It runs before tensor-core kernels that read a mask. of_keys: its rows are keys. waits: it may overlap with the
    previous kernel and with the next one (cc 9.0)."""

    of_keys: bool = False  # type: ignore[misc]
    threads: int = 512
    waits: bool = False  # type: ignore[misc]

    names = (abi.MASK_BITS, abi.MASK_BITS_OF_KEYS)
    dtype: ClassVar[str] = "bool"  # type: ignore[misc]
    # Two blocks give a multiprocessor 32 reading warps; a thread then has 64 registers.
    blocks_per_sm: ClassVar[int] = 2  # type: ignore[misc]

    def __post_init__(self) -> None:
        multiple_of("threads", self.threads, 32)

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return self.names[self.of_keys]

    @property
    def takes(self) -> abi.Parameters:  # type: ignore[override]
        return abi.Parameters(("mask", self.kernel), ("mask",), abi.words("batch heads seqlen_q seqlen_k"))

    def dtype_of(self, option: str) -> str:
        return self.dtype

    def grid(self, problem: AnyProblem) -> int:
        pieces, (*_, row_words) = mask_bits.layout(problem.forward, self.of_keys)
        warps = self.threads // 32
        return -(-pieces // (warps // max(min(row_words // 4, warps), 1)))  # row_words // 4 warps share a piece

    def workspace(self, problem: AnyProblem) -> abi.Workspace:
        return {self.kernel: ((mask_bits.words(problem.forward, self.of_keys),), "uint32")}
