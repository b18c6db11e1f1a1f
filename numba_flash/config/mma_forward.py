"""Config of mma's forward (kernels/mma/forward.py)."""

from typing import Any, ClassVar

from .forward import TensorConfig, check, layout, one_of, places, tile_bytes


class MmaConfig(TensorConfig, kernel="mma", module="mma.forward"):
    """Each warp owns `warp_rows` query rows.

    warp_rows 32 reads each K and V fragment from shared memory once for two strips of 16 rows, which halves that
    traffic; the registers allow it up to 128 columns of O. q_registers: Q's fragments stay in registers instead of
    being read again for each tile: 4 to 8 % at head_dim 64. float32 and float64 have two more fields. column_groups: so
    many warps own the same rows; each computes the scores of its part of a tile's keys, they exchange them, and each
    computes its part of O's columns. large_f64: float64 products are m16n8k16, which sm_90 has and which is twice as
    fast there as m8n8k4. copy_bytes: bytes of one copy of Q, K or V to shared memory. only_tile: all keys are in one
    tile, whose V is copied together with its K.
    """

    warp_rows: int = 16
    q_registers: bool = False
    column_groups: int = 1  # type: ignore[misc]
    large_f64: bool = False
    copy_bytes: int = 16
    only_tile: bool = False
    in_order: bool = False

    DTYPES: ClassVar[tuple[str, ...]] = ("float16", "bfloat16", "float32", "float64")
    KEYS: ClassVar[dict[str, tuple[int, ...]]] = dict(float32=(16, 32, 64), float64=(16, 32))

    def __post_init__(self) -> None:
        one_of("warp_rows", self.warp_rows, 16, 32)
        self._check(self.warp_rows, 16)
        narrow, groups, keys = self.item_size == 2, self.column_groups, self.KEYS.get(self.dtype, (self.tile_n,))
        check(narrow or not self.q_registers, f"q_registers is for 16-bit elements, not for {self.dtype}")
        allowed = groups == 1 or groups == 2 and not narrow
        check(allowed, f"column_groups must be 1, or 2 for float32 and float64, not {groups}")
        check(self.tile_n in keys, f"tile_n must be one of {keys} for {self.dtype}, not {self.tile_n}")

    @property
    def threads(self) -> int:  # type: ignore[override]
        return self.tile_m // self.warp_rows * self.column_groups * 32

    @property
    def whole_program(self) -> bool:  # type: ignore[override]
        """The driver assembles it if nvJitLink's code spills and the driver's does not (tests/unit/test_gates.py)."""
        return self.dtype == "float64" and not self.large_f64 or self.dtype == "float32" and self.head_dim <= 128

    @property
    def widest(self) -> int:  # type: ignore[override]
        """A float64 number takes two registers."""
        return 128 * self.column_groups if self.dtype == "float64" else 256

    @property
    def columns_step(self) -> int:  # type: ignore[override]
        """In more than 16 bits each group of columns has whole panels."""
        return 16 if self.item_size == 2 else 128 // self.item_size * self.column_groups

    @property
    def splits_columns(self) -> bool:  # type: ignore[override]
        """Whether warps that share rows compute all scores with a half of head_dim's columns each, and add them up:
        20 to 27 % in float64."""
        return self.dtype == "float64" and self.column_groups > 1

    def shared_layout(self) -> Any:
        size = self.item_size
        tile_q, tile_k = (tile_bytes(rows, self.head_dim_padded, size) for rows in (self.tile_m, self.tile_n))
        v_at = tile_q + tile_k
        behind = v_at + tile_bytes(self.tile_n, self.head_dim_v_padded, size)
        exchanged = self.tile_m * self.tile_n * size * (1 + self.splits_columns) if self.column_groups > 1 else 0
        # The block's state has notes of 16 bytes (kernels/steps/block_state.py). bias, mask and in_order need two more.
        entries = 4 if self.has("bias") or self.has("mask") or self.in_order else 2
        states = layout(begin=behind, tile_state=entries * 16, exchange=exchanged)
        return places(q=0, k=tile_q, v=v_at, **states._asdict())

    @property
    def exchange_at(self) -> int:  # type: ignore[override]
        """Where the scores that warps exchange begin in shared memory."""
        return self.shared_layout().exchange
