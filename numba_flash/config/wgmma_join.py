"""Config of the kernel that follows the Hopper forward if blocks share keys (kernels/wgmma/forward_join.py)."""

from typing import Any

from ..abi import parameters as abi
from ..abi.tensor_maps import OperandMaps
from .forward import AnyProblem, Config, fields_of, layout
from .wgmma_forward import WgmmaConfig


class WgmmaJoinConfig(WgmmaConfig, kernel="wgmma_join", module="wgmma.forward_join"):
    """It adds up the parts of wgmma/forward, and has the fields of its Config."""

    waits = True
    whole_program = counted = persistent = False
    tensor_maps = 0  # type: ignore[assignment]

    @classmethod
    def behind(cls, config: Config) -> "WgmmaJoinConfig":
        return cls(**fields_of(config, WgmmaConfig) | dict(bias_stages=0))

    def grid(self, problem: AnyProblem) -> int:
        return super().grid(problem) // self.parts

    def operand_maps(self, problem: AnyProblem) -> OperandMaps:
        return ()

    def workspace(self, problem: AnyProblem) -> abi.Workspace:
        return {}

    def shared_layout(self) -> Any:
        """The layout of WgmmaConfig without tiles."""
        own = super().shared_layout()
        return layout(q=0, k=0, v=0, bias=0, barriers=own.end - own.barriers)
