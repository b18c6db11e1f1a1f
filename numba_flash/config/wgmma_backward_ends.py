"""Configs of the kernels that follow wgmma's backward: they round dQ, or add up parts of dK and dV."""

from typing import ClassVar

from ..abi import parameters as abi
from .forward import AnyProblem, Config, tiles_by_bound, tiles_of_all
from .wgmma_backward import WgmmaDkdvConfig


class WgmmaRoundConfig(Config, kernel="wgmma_round", module="wgmma.backward_round"):
    """Its tiles and columns are those of the WgmmaFusedConfig whose sums it reads."""

    dq_columns: int = 128
    dq_partials: int = 1

    in_order = True
    takes = abi.backward("dq", mask=abi.MASK_BITS_OF_KEYS).plus("turns dq_sums")
    waits = True
    threads: ClassVar[int] = 128  # type: ignore[misc]

    shared_bytes: ClassVar[int] = 0  # type: ignore[misc]

    def grid(self, problem: AnyProblem) -> int:
        p = problem.forward
        rows = 64 if p.packed is None else self.tile_m
        return p.heads * tiles_of_all(p, rows) * (rows // 64)


class WgmmaAddPartsConfig(Config, kernel="wgmma_add_parts", module="wgmma.backward_add_parts"):
    """Its fields are those of the WgmmaDkdvConfig whose sums it reads."""

    head_dim_padded: int = 128
    head_dim_v_padded: int = 128
    of_dk: bool = True
    of_dv: bool = True
    members: int = 1

    takes = WgmmaDkdvConfig.takes
    waits = True
    threads: ClassVar[int] = 128  # type: ignore[misc]

    shared_bytes: ClassVar[int] = 0  # type: ignore[misc]

    def grid(self, problem: AnyProblem) -> int:
        return problem.forward.heads_kv * tiles_by_bound(problem.forward, 64, of_keys=True)
