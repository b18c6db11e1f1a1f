"""Config of the Hopper forward in float32 (kernels/wgmma/forward_float32.py)."""

from typing import ClassVar

from .forward import one_of
from .wgmma_forward import WarpgroupsConfig, check_registers


class WgmmaFloat32Config(WarpgroupsConfig, kernel="wgmma_float32", module="wgmma.forward_float32"):
    """A producer warpgroup and tile_m / 64 consumer warpgroups of 64 query rows each.

    Elements are kept as three parts in bfloat16 (kernels/wgmma/parts.py). stages: tiles of K and V in parts; with one,
    the next K is split while P . V is computed, and the next V while S is computed.
    """

    stages: int = 1  # type: ignore[misc]
    blocks_per_sm: int = 1

    DTYPES = ("float32",)
    element_parts = 3
    columns_in_order = True  # type: ignore[assignment]
    KEYS: ClassVar[tuple[int, ...]] = (32, 64)  # one sum covers a tile's keys: a longer sum would drift
    # By (consumers, keys). A tile of 32 keys is for many columns of O; the producer splits it in few registers.
    REGISTERS: ClassVar[dict[tuple[int, int], tuple[int, int]]] = {
        (1, 32): (128, 256),
        (1, 64): (128, 256),
        (2, 32): (88, 208),
        (2, 64): (104, 200),
    }

    def __post_init__(self) -> None:
        self._check(64, 16, 256)
        one_of("tile_m", self.tile_m, 64, 128)
        one_of("tile_n", self.tile_n, *self.KEYS)
        one_of("stages", self.stages, 1, 2)
        check_registers(self.registers, self.consumers)

    @property
    def registers(self) -> tuple[int, int]:
        return self.REGISTERS[self.consumers, self.tile_n]

    @property
    def v_panels(self) -> int:
        """Panels of V: each is a product of its own, they are equally wide, and have at most 64 columns."""
        return -(-self.head_dim_v // 64)

    @property
    def v_columns(self) -> int:
        """Columns of a panel of V."""
        return -(-self.head_dim_v // (8 * self.v_panels)) * 8

    @property
    def head_dim_v_padded(self) -> int:
        return self.v_panels * self.v_columns
