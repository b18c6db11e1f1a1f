"""Config of the Hopper forward (kernels/wgmma/forward.py), and how its warpgroups share registers."""

from typing import Any, ClassVar

from ..abi import parameters as abi
from ..abi.tensor_maps import OperandMaps, TensorMap, bias_map, extents, map_of_rows
from ..arrays.dtypes import ITEM_SIZE
from .forward import AnyProblem, LaunchFacts, TensorConfig, check, layout, one_of, tile_bytes


def check_registers(registers: tuple[int, int], consumers: int) -> None:
    """Checks that the warpgroups of a block ask for no more registers than the block was launched with.

    registers: of a thread of the producer, and of the consumers. setmaxnreg waits until the block has enough free ones
    (PTX ISA 9.7.19.5). A multiprocessor has 65536, and a launch gives every thread the same multiple of 8. setmaxnreg
    can only move registers that the launch gave to the block: asking for more waits forever on some H200 machines.
    """
    producer, consumer = registers
    warpgroups = 1 + consumers
    launched = min(65536 // (128 * warpgroups) // 8 * 8, 256)
    check(
        producer + consumers * consumer <= launched * warpgroups,
        f"a producer of {producer} and {consumers} consumers of {consumer} registers a thread need more than the "
        f"{launched} that each of {warpgroups} warpgroups is launched with",
    )


class Warpgroups(LaunchFacts):
    """A block has one producer warpgroup and consumer warpgroups, each of which owns 64 rows. registers: of a thread of
    the producer, and of the consumers."""

    whole_program = True

    @property
    def consumers(self) -> int:
        return self.own_rows // 64  # type: ignore[attr-defined,no-any-return]

    @property
    def threads(self) -> int:  # type: ignore[override]
        return 128 * (1 + self.consumers)

    @property
    def bias_panel(self) -> int:
        """Keys of one panel of a bias that TMA loads."""
        return next(keys for keys in (64, 32, 16) if self.tile_n % keys == 0)  # type: ignore[attr-defined]


class WarpgroupsConfig(Warpgroups, TensorConfig):
    """The Hopper forwards. An element of Q, K and V has `element_parts` parts of 16 bits each."""

    counted = persistent = True
    element_parts: ClassVar[int] = 1
    stages: ClassVar[int] = 2  # tiles of K and of V in flight or in use
    q_buffers: ClassVar[int] = 1  # this and the next two: as in WgmmaConfig
    bias_stages: ClassVar[int] = 0
    parts: ClassVar[int] = 1

    @property
    def bias_bytes(self) -> int:
        """Bytes of a consumer's bias in one stage."""
        return 2 * 64 * self.tile_n

    def shared_layout(self) -> Any:
        boxes, tiles = self.bias_stages * self.consumers, self.stages * self.element_parts
        return layout(
            q=self.q_buffers * self.element_parts * tile_bytes(self.tile_m, self.head_dim_padded),
            k=tiles * tile_bytes(self.tile_n, self.head_dim_padded),
            v=tiles * tile_bytes(self.tile_n, self.head_dim_v_padded),
            bias=boxes * self.bias_bytes,
            barriers=112 + 32 * self.stages + 4 * 64 + 16 * boxes,  # barriers and work tiles
        )


class WgmmaConfig(WarpgroupsConfig, kernel="wgmma", module="wgmma.forward"):
    """A producer warpgroup and tile_m / 64 consumer warpgroups of 64 query rows each.

    q_buffers: tiles of Q in flight or in use; with two, the next one is loaded while this one is in use. bias_stages:
    tiles of a bias in flight or in use, for each consumer's rows; 0 if TMA does not load the bias. parts: how many
    blocks share the keys of a query tile (split-KV); with more than one, another kernel adds up the sums of these
    blocks.
    """

    q_buffers: int = 2  # type: ignore[misc]
    blocks_per_sm: int = 1
    bias_stages: int = 0  # type: ignore[misc]
    parts: int = 1  # type: ignore[misc]

    reads_mask_mod = clears_outside = True
    PARTS: ClassVar[tuple[int, ...]] = (1, 2, 4, 8, 16)
    REGISTERS: ClassVar[dict[int, tuple[int, int]]] = {1: (56, 256), 2: (40, 232), 3: (32, 160)}
    # If the scheduler reads which tiles a mask leaves:
    MASK_REGISTERS: ClassVar[dict[int, tuple[int, int]]] = {2: (56, 224), 3: (56, 152)}
    FINISHED_REGISTERS: ClassVar[dict[int, tuple[int, int]]] = {3: (56, 152)}  # with 32 registers the scheduler spills

    def __post_init__(self) -> None:
        self._check(64, 16, 256)
        one_of("tile_m", self.tile_m, 64, 128, 192)
        one_of("q_buffers", self.q_buffers, 1, 2)
        of_one = self.group_size == 1 or not self.bias_stages
        check(of_one, f"a bias comes by TMA for tiles of one head, not of {self.group_size}")
        known = self.parts == 1 or (self.parts in self.PARTS and not self.packed and not self.tile_states)
        check(known, f"parts must be one of {self.PARTS}, and 1 of packed sequences or with mask_mod, not {self.parts}")
        check_registers(self.registers, self.consumers)

    @property
    def takes(self) -> abi.Parameters:  # type: ignore[override]
        return abi.forward().plus("acc_o" if self.parts > 1 else "")

    def grid(self, problem: AnyProblem) -> int:
        """Packed sequences need enough blocks to write all rows, even if few rows are of a sequence."""
        p, grid = problem.forward, super().grid(problem) * self.parts
        return max(grid, p.heads * -(-p.packed[0] // self.tile_m)) if p.packed and p.batch else grid

    def workspace(self, problem: AnyProblem) -> abi.Workspace:
        if self.parts == 1:
            return {}
        return {"acc_o": ((self.grid(problem) * self.consumers * 512 * (self.head_dim_v_padded // 8 + 1),), "float32")}

    @property
    def tensor_maps(self) -> int:  # type: ignore[override]
        """One each for q, k and v, and one for a bias that TMA loads."""
        return 3 + self.bias_boxes

    def operand_maps(self, problem: AnyProblem) -> OperandMaps:
        p, group = problem.forward, self.group_size
        rows, keys, entries = extents(p)
        q_batch, q_head, q_row = (ITEM_SIZE[p.dtype] * stride for stride in p.q_strides[:3])
        # The heads of a group are a dimension of their own, so that a box has some queries with all of them.
        q_shape = (p.head_dim, group, rows, p.heads // group, entries)
        q = TensorMap(p.dtype, q_shape, (q_head, q_row, group * q_head, q_batch), (64, group, self.queries, 1, 1))
        given = ((1, p.k_strides, p.head_dim), (2, p.v_strides, p.head_dim_v))
        # Without keys the kernel loads a tile past the end, which is zeros; an element of q replaces the empty array.
        maps = [
            map_of_rows(p.dtype, operand, strides, (columns, keys, p.heads_kv, entries), (64, self.tile_n), 0)
            for operand, strides, columns in given
        ]
        return ((0, q), *maps, *([bias_map(self, p, 64, 0)] if self.bias_boxes else []))

    @property
    def bias_boxes(self) -> bool:  # type: ignore[override]
        return self.bias_stages > 0

    @property
    def registers(self) -> tuple[int, int]:
        registers = self.REGISTERS | (self.FINISHED_REGISTERS if self.scores_finished else {})
        registers |= self.MASK_REGISTERS if self.has("mask") or self.tile_states else {}
        return registers[self.consumers]
