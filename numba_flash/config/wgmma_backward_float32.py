"""Configs of the Hopper backward in float32 (kernels/wgmma/backward_float32.py)."""

import itertools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..problem.options import BY_NAME, FUNCTIONS, SEEDED
from .forward import Config, tile_bytes
from .wgmma_forward import check_registers

NOT_TAKEN = (*FUNCTIONS, SEEDED)  # yet


class SharedPlan(NamedTuple):
    """Where things begin in a block's shared memory, in bytes; tiles are in parts (kernels/wgmma/parts.py).

    own_*: the tile that the block owns; stream_*: the stages of the tiles that it walks over. a is of head_dim (K or
    Q), b of head_dim_v (V or dO).
    """

    own_a: int
    own_b: int
    stream_a: int
    stream_b: int
    weights: int  # of one tile, in float32, on their way from one consumer to the other
    state: int  # what every role reads of the block's work
    barriers: int
    end: int


class Barriers(NamedTuple):
    """Where the mbarriers are, 8 bytes each; the rings have one of each kind for a stage."""

    a_full: int
    a_empty: int
    b_full: int
    b_empty: int
    weights_full: int
    weights_empty: int
    end: int


@dataclass(frozen=True)
class WgmmaBackwardFloat32Config(Config):
    """What wgmma_dkdv_float32 and wgmma_dq_float32 share.

    A block owns 64 rows. It is a producer warpgroup and two consumer warpgroups, one for S and one for dP. stages_a and
    stages_b: how many tiles of either kind have a place in shared memory. bias_pairs: bias can be read two keys
    at a time (problem/option_checks.py, OptionArray).
    """

    stages_a: int = 2
    stages_b: int = 1
    bias_pairs: bool = False
    blocks_per_sm: int = 1

    whole_program: ClassVar[bool] = True
    group_size: ClassVar[int] = 1  # a tile is of one head
    members: ClassVar[int] = 0  # a block that owns keys takes all query heads of a group
    key_tiles: ClassVar[int] = 0  # as of WgmmaFusedConfig
    ALIGNMENT: ClassVar[int] = 1024  # of panels; dynamic shared memory itself begins at a multiple of 16
    PARTS: ClassVar[int] = 3
    paired: ClassVar[bool] = False  # two blocks own the same rows, and share the columns (wgmma_paired_float32.py)
    WIDEST: ClassVar[int] = 128  # columns of a gradient whose sums a consumer keeps
    OWN_ROWS: ClassVar[int] = 64
    LONGEST: ClassVar[int] = 64  # rows that are one sum: a longer one would drift
    CONSUMERS: ClassVar[int] = 2
    STATE_WORDS: ClassVar[int] = 16
    threads: ClassVar[int] = 128 * (1 + CONSUMERS)  # type: ignore[assignment]
    registers: ClassVar[tuple[int, int]] = 104, 200  # a thread's, of the producer and of the consumers

    def __post_init__(self) -> None:
        if self.dtype != "float32":
            raise ValueError(f"these kernels take float32, not {self.dtype}")
        if self.own_rows != self.OWN_ROWS:
            raise ValueError(f"a block's own rows must be {self.OWN_ROWS}, not {self.own_rows}")
        if not 16 <= self.stream_rows <= self.LONGEST or self.stream_rows % 16:
            raise ValueError(
                f"a block walks over tiles of 16 to {self.LONGEST} rows, in steps of 16, not {self.stream_rows}"
            )
        if not (1 <= self.stages_a <= 4 and 1 <= self.stages_b <= 4):
            raise ValueError(f"stages_a and stages_b must be 1 to 4, not {self.stages_a} and {self.stages_b}")
        if max(self.head_dim, self.head_dim_v) > self.WIDEST:
            raise ValueError(f"head_dim must be at most {self.WIDEST}, not {self.head_dim} and {self.head_dim_v}")
        not_taken = [name for name, _ in self.uses if name in NOT_TAKEN or not BY_NAME[name].on_tensor_cores]
        if not_taken:
            raise ValueError(f"wgmma's backward in float32 takes no {' and no '.join(not_taken)}")
        check_registers(self.registers, self.CONSUMERS)
        object.__setattr__(self, "shared_bytes", self.ALIGNMENT + self.shared_layout().end)

    @property
    def own_rows(self) -> int:
        """Rows of the tile that a block owns."""
        raise NotImplementedError

    @property
    def stream_rows(self) -> int:
        """Rows of the tiles that it walks over."""
        raise NotImplementedError

    @property
    def head_dim_padded(self) -> int:
        """head_dim in whole steps of a product; what is past head_dim is zero."""
        return (self.head_dim + 15) // 16 * 16

    @property
    def head_dim_v_padded(self) -> int:
        """head_dim_v in whole steps."""
        return (self.head_dim_v + 15) // 16 * 16

    def parts_bytes(self, rows: int, columns: int) -> int:
        """Of a tile in parts."""
        return self.PARTS * tile_bytes(rows, columns)

    @property
    def own_a_bytes(self) -> int:
        return self.parts_bytes(self.own_rows, self.head_dim_padded)

    @property
    def own_b_bytes(self) -> int:
        return self.parts_bytes(self.own_rows, self.head_dim_v_padded)

    @property
    def stream_a_bytes(self) -> int:
        """Of one of the tiles that a block walks over."""
        return self.parts_bytes(self.stream_rows, self.head_dim_padded)

    @property
    def stream_b_bytes(self) -> int:
        return self.parts_bytes(self.stream_rows, self.head_dim_v_padded)

    def shared_layout(self) -> SharedPlan:
        streamed = self.stages_a * self.stream_a_bytes, self.stages_b * self.stream_b_bytes
        weights, state = 4 * self.own_rows * self.stream_rows, 4 * self.STATE_WORDS
        barriers = 8 * (2 * self.stages_a + 2 * self.stages_b + 2)
        sizes = self.own_a_bytes, self.own_b_bytes, *streamed, weights, state, barriers
        return SharedPlan(0, *itertools.accumulate(sizes))

    def barriers(self) -> Barriers:
        a, b = self.stages_a, self.stages_b
        starts = itertools.accumulate((a, a, b, b, 1, 1), initial=0)
        return Barriers(*(self.shared_layout().barriers + 8 * count for count in starts))


@dataclass(frozen=True)
class WgmmaDkdvFloat32Config(WgmmaBackwardFloat32Config):
    """Of wgmma_dkdv_float32: a block owns tile_n keys and walks over tiles of tile_m queries. of_dk, of_dv: which of
    the two it computes."""

    of_dk: bool = True
    of_dv: bool = True

    of_keys: ClassVar[bool] = True

    @property
    def has_second(self) -> bool:
        """Whether the second consumer has anything to do: dV needs the first alone."""
        return self.of_dk

    def __post_init__(self) -> None:
        if not (self.of_dk or self.of_dv):
            raise ValueError("of_dk or of_dv must be True: there is nothing else to compute")
        super().__post_init__()

    @property
    def own_rows(self) -> int:
        return self.tile_n

    @property
    def stream_rows(self) -> int:
        return self.tile_m


@dataclass(frozen=True)
class WgmmaDqFloat32Config(WgmmaBackwardFloat32Config):
    """Of wgmma_dq_float32: a block owns tile_m queries of one head and walks over tiles of tile_n keys."""

    of_keys: ClassVar[bool] = False
    of_dv: ClassVar[bool] = False
    has_second: ClassVar[bool] = True

    @property
    def own_rows(self) -> int:
        return self.tile_m

    @property
    def stream_rows(self) -> int:
        return self.tile_n
