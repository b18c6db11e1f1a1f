"""Configs of the one kernel that computes all gradients in float64, and of the kernel that finishes its dQ."""

from typing import Any, ClassVar

from ..abi import parameters as abi
from .backward import MmaBackwardConfig
from .forward import AnyProblem, Config, check, layout, one_of, tile_bytes


class MmaFusedConfig(MmaBackwardConfig, kernel="mma_fused", module="mma.backward_fused"):
    """A block owns tile_n keys, walks over tiles of tile_m queries, and computes dK, dV and its parts of dQ.

    Two warps own the same keys: one computes S of them, the other dP, and each sums up half of the columns of dK and
    dV. A warp computes `dq_columns` columns of dQ of 16 queries. A further warpgroup loads tiles and adds parts of dQ
    in global memory.

    blocks: 2 form a cluster; each has half of the columns, and head_dim_padded counts that half. Scores from the other
    block, P^T with dS^T, and the part of dQ use one buffer of shared memory in turn, so that tiles of more queries fit.
    """

    column_groups: int = 2
    blocks: int = 1

    takes = abi.backward("dq dk dv", abi.ROWS).plus("turns")
    of_keys = True
    of_p = True  # type: ignore[assignment]
    DTYPES = ("float64",)
    whole_program: ClassVar[bool] = True  # setmaxnreg needs it
    shared_alignment: ClassVar[int] = MmaBackwardConfig.ALIGNMENT
    GROUPS: ClassVar[tuple[int, ...]] = (2,)
    LOADERS: ClassVar[int] = 64  # threads that load tiles
    TURNS_AT: ClassVar[int] = 32  # as in kernels/steps/lse_delta.py

    def __post_init__(self) -> None:
        few = self.own_rows <= 4 * self.warp_rows
        one_of("blocks", self.blocks, 1, 2)
        check(few, f"{self.own_rows} keys are more than 4 times {self.warp_rows}: each has a named barrier")
        check(self.workers % 128 == 0, f"threads that compute must be whole warpgroups, not {self.workers}: setmaxnreg")
        super().__post_init__()

    @property
    def workers(self) -> int:
        """Threads that compute."""
        return super().threads

    @property
    def threads(self) -> int:  # type: ignore[override]
        return self.workers + 128

    @property
    def cluster(self) -> int:  # type: ignore[override]
        return self.blocks

    @property
    def ptx_version(self) -> str:  # type: ignore[override]
        """Blocks exchange scores by st.async, which needs PTX 8.1."""
        return "8.1" if self.blocks > 1 else ""

    @property
    def head_dim_padded(self) -> int:
        """Columns of a block. All tiles have as many, so a warp does the same work for S as for dP."""
        return self._padded(-(-max(self.head_dim, self.head_dim_v) // self.blocks))

    @property
    def head_dim_v_padded(self) -> int:
        return self.head_dim_padded

    @property
    def _column_parts(self) -> int:
        """How many warps share the columns of dQ."""
        return max(self.workers // 32 // (self.tile_m // 16), 1)

    @property
    def dq_columns(self) -> int:
        return self.head_dim_padded // self._column_parts

    def _padded(self, columns: int) -> int:
        step = 16 * max(self.column_groups, self._column_parts)
        return -(-columns // step) * step

    @property
    def pitch(self) -> int:
        """Bytes from a key of P^T or dS^T to the next (kernels/mma/shared_weights.py)."""
        return 8 * self.tile_m

    @property
    def pitch_dq(self) -> int:
        """Elements from a query of a part of dQ to the next (kernels/mma/backward_dq_parts.py)."""
        return self.head_dim_padded + 8

    def workspace(self, problem: AnyProblem) -> abi.Workspace:
        p = problem.forward
        return dict(turns=((self.TURNS_AT + p.batch * p.heads * -(-p.seqlen_q // self.tile_m),), "uint32"))

    def shared_layout(self) -> Any:
        """In this order: K, V, Q, dO, P^T, dS^T, lse with delta of the queries, the block's state, mbarriers, those of
        scores from the other block (kernels/mma/shared_scores.py), the end. The part of dQ begins at P^T."""
        own, other = (tile_bytes(rows, self.head_dim_padded, 8) for rows in (self.tile_n, self.tile_m))
        weights, part = self.tile_n * self.pitch, self.tile_m * self.pitch_dq * 8
        tiles, barriers = dict(k=own, v=own, q=other, do=other, p=weights), (self.blocks - 1) * self.workers // 4
        ds = max(weights, part - weights)
        made = layout(**tiles, ds=ds, rows=self.tile_m * 16, state=64, dq=0, barriers=32, scores_barriers=barriers)
        return made._replace(dq=made.p)


class MmaDqFinishConfig(Config, kernel="mma_dq_finish", module="mma.backward_dq_finish"):
    """Its tiles are those of the MmaFusedConfig whose parts it finishes."""

    takes = abi.backward("dq", abi.ROWS)
    ROWS_OF_WARP: ClassVar[int] = 4
    shared_bytes: ClassVar[int] = 0  # type: ignore[misc]

    @property
    def threads(self) -> int:  # type: ignore[override]
        return self.tile_m // self.ROWS_OF_WARP * 32
