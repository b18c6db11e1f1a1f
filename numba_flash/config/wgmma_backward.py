"""Configs of the Hopper backward (kernels/wgmma/backward_*.py): everything in them is a constant of the code."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..problem.options import BY_NAME, FUNCTIONS, SEEDED
from .forward import Config, panel_of_bias, tile_bytes
from .wgmma_forward import check_registers

BY_ELEMENT = (*FUNCTIONS, "bias", "mask", SEEDED)  # options that decide about each score or weight on its own


class SharedPlan(NamedTuple):
    """Where things begin in a block's shared memory, in bytes.

    own_*: the tile that the block owns; stream_*: the stages of the tiles that it walks over. a is of head_dim (K or
    Q), b of head_dim_v (V or dO).
    """

    own_a: int
    own_b: int
    stream_a: int
    stream_b: int
    bias: int  # of each stage of stream_a, where it comes in boxes
    ds: int  # two tiles of dS, in 16 bits
    dq: int  # parts of dQ on their way to global memory
    lse_delta: int  # lse and -delta of each stage's queries
    state: int  # what every role reads of the block's work
    barriers: int
    end: int


class Barriers(NamedTuple):
    """Where the mbarriers are, 8 bytes each; the rings have one of each kind for a stage."""

    own_full: int
    own_empty: int  # of a block that stays, as the next two
    state_full: int
    state_empty: int
    a_full: int
    a_empty: int
    b_full: int
    b_empty: int
    ds_full: int
    dq_full: int  # for each stage one for each consumer warpgroup
    dq_empty: int
    end: int


@dataclass(frozen=True)
class WgmmaBackwardConfig(Config):
    """What wgmma/backward_dkdv and wgmma/backward_dq share.

    A block is a producer warpgroup and own_rows / 64 consumer warpgroups, each of which owns 64 rows. stages_a and
    stages_b: how many tiles of either kind are in shared memory, in use or on their way. bias_pairs: bias can be read
    two keys at a time; bias_boxes: it comes by TMA, with a tile of stream_a (problem/option_checks.py, OptionArray).
    """

    stages_a: int = 2
    stages_b: int = 2
    blocks_per_sm: int = 1
    bias_pairs: bool = False
    bias_boxes: bool = False  # type: ignore[misc]

    whole_program: ClassVar[bool] = True
    waits: ClassVar[bool] = True
    group_size: ClassVar[int] = 1  # a tile is of one head
    key_tiles: ClassVar[int] = 0  # as of WgmmaFusedConfig
    stays: ClassVar[bool] = False
    ALIGNMENT: ClassVar[int] = 1024  # of panels; dynamic shared memory itself begins at a multiple of 16
    WIDEST: ClassVar[int] = 256  # columns that one product can be wide
    STATE_WORDS: ClassVar[int] = 16
    MOST_BARRIERS: ClassVar[int] = 24
    # consumers -> registers of a thread of the producer and of the consumers
    REGISTERS: ClassVar[dict[int, tuple[int, int]]] = {1: (56, 256), 2: (24, 240), 3: (32, 160)}

    def __post_init__(self) -> None:
        if self.dtype not in ("float16", "bfloat16"):
            raise ValueError(f"tensor-core kernels take float16 and bfloat16, not {self.dtype}")
        if self.own_rows % 64 or self.own_rows // 64 not in self.REGISTERS:
            raise ValueError(f"a block's own rows must be 64, 128 or 192, not {self.own_rows}")
        if not 16 <= self.stream_rows <= 128 or self.stream_rows % 16:
            raise ValueError(f"a block walks over tiles of 16 to 128 rows, in steps of 16, not {self.stream_rows}")
        if not (2 <= self.stages_a <= 4 and 1 <= self.stages_b <= 4):
            # S of the next tile is issued before the product with this one's first tile is done.
            raise ValueError(f"stages_a must be 2 to 4 and stages_b 1 to 4, not {self.stages_a} and {self.stages_b}")
        if max(self.head_dim, self.head_dim_v) > self.WIDEST:
            raise ValueError(f"head_dim must be at most {self.WIDEST}, not {self.head_dim} and {self.head_dim_v}")
        unknown = [name for name, _ in self.uses if not BY_NAME[name].on_tensor_cores]
        if unknown:
            raise ValueError(f"the tensor-core backward takes no {' and no '.join(unknown)}")
        check_registers(self.registers, self.consumers)
        object.__setattr__(self, "shared_bytes", self.ALIGNMENT + self.shared_layout().end)

    @property
    def tensor_maps(self) -> int:  # type: ignore[override]
        """Of q, k, v and do, and of a bias that comes in boxes."""
        return 4 + self.bias_boxes

    @property
    def by_element(self) -> bool:
        """Whether something decides about each score or weight on its own (kernels/wgmma/backward_scores.py)."""
        return any(name in BY_ELEMENT for name, _ in self.uses)

    @property
    def own_rows(self) -> int:
        """Rows of the tile that a block owns."""
        raise NotImplementedError

    @property
    def stream_rows(self) -> int:
        """Rows of the tiles that it walks over."""
        raise NotImplementedError

    @property
    def consumers(self) -> int:
        return self.own_rows // 64

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def registers(self) -> tuple[int, int]:
        """A thread's, of the producer and of the consumers."""
        return self.REGISTERS[self.consumers]

    @property
    def head_dim_padded(self) -> int:
        """head_dim in whole steps of a product; what is past head_dim is zero."""
        return (self.head_dim + 15) // 16 * 16

    @property
    def head_dim_v_padded(self) -> int:
        """head_dim_v in whole steps."""
        return (self.head_dim_v + 15) // 16 * 16

    @property
    def own_b_bytes(self) -> int:
        return tile_bytes(self.own_rows, self.head_dim_v_padded)

    @property
    def own_a_bytes(self) -> int:
        return tile_bytes(self.own_rows, self.head_dim_padded)

    @property
    def stream_a_bytes(self) -> int:
        """Of one stage."""
        return tile_bytes(self.stream_rows, self.head_dim_padded)

    @property
    def stream_b_bytes(self) -> int:
        return tile_bytes(self.stream_rows, self.head_dim_v_padded)

    @property
    def bias_panel(self) -> int:
        return panel_of_bias(self.tile_n)

    @property
    def bias_bytes(self) -> int:
        """Of one stage of stream_a."""
        return 2 * self.tile_m * self.tile_n if self.bias_boxes else 0

    @property
    def lse_delta_bytes(self) -> int:
        """Of one stage of stream_a."""
        return 0

    @property
    def state_bytes(self) -> int:
        """Of a tile that the block owns."""
        return 4 * self.STATE_WORDS

    @property
    def states(self) -> int:
        """How many tiles of a block have a state: the one at which it works, and the next one where it stays."""
        return 2 if self.stays else 1

    @property
    def ds_bytes(self) -> int:
        """Of one of two tiles of dS that go through shared memory."""
        return 0

    @property
    def dq_part_bytes(self) -> int:
        """Of what a consumer warpgroup makes of dQ at a time."""
        return 0

    @property
    def dq_places(self) -> int:
        """How many of these are in shared memory for each consumer warpgroup."""
        return 1

    @property
    def dq_stages(self) -> int:
        """How many of these may be on their way to the sums of dQ."""
        return 0

    def barriers(self) -> Barriers:
        told = self.states if self.stays else 0
        counts = [1, int(self.stays), told, told, self.stages_a, self.stages_a, self.stages_b, self.stages_b]
        parts = self.dq_stages * self.consumers
        counts += [int(self.ds_bytes > 0), parts, parts]
        at = [self.shared_layout().barriers]
        for count in counts:
            at.append(at[-1] + 8 * count)
        return Barriers(*at)

    def shared_layout(self) -> SharedPlan:
        own_b = self.own_a_bytes
        stream_a = own_b + self.own_b_bytes
        stream_b = stream_a + self.stages_a * self.stream_a_bytes
        bias = stream_b + self.stages_b * self.stream_b_bytes
        ds = bias + self.stages_a * self.bias_bytes
        dq = ds + 2 * self.ds_bytes
        lse_delta = dq + self.dq_places * self.consumers * self.dq_part_bytes
        state = lse_delta + self.stages_a * self.lse_delta_bytes
        barriers = state + self.state_bytes * self.states
        end = barriers + 8 * self.MOST_BARRIERS
        return SharedPlan(0, own_b, stream_a, stream_b, bias, ds, dq, lse_delta, state, barriers, end)


@dataclass(frozen=True)
class WgmmaDkdvConfig(WgmmaBackwardConfig):
    """Of wgmma/backward_dkdv: a block owns tile_n keys and walks over tiles of tile_m queries.

    of_dk, of_dv: which of the two it computes. Both sums together fit into registers up to head_dim 128.
    members: how many of the query heads of a group it takes, and then it leaves sums in float32; 0: all.
    """

    of_dk: bool = True
    of_dv: bool = True
    members: int = 0

    both_ways: ClassVar[bool] = False  # a block is told which way to walk
    lse_first: ClassVar[bool] = False  # as of WgmmaFusedConfig
    delta_first: ClassVar[bool] = False

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

    @property
    def own_a_bytes(self) -> int:
        """Of K, in whose place a block without dK stages dV."""
        return tile_bytes(
            self.tile_n, self.head_dim_padded if self.of_dk else max(self.head_dim_padded, self.head_dim_v_padded)
        )

    @property
    def own_b_bytes(self) -> int:
        """dV alone needs no V."""
        return tile_bytes(self.tile_n, self.head_dim_v_padded) if self.of_dk else 0

    @property
    def lse_delta_bytes(self) -> int:
        return 8 * self.tile_m


@dataclass(frozen=True)
class WgmmaDqConfig(WgmmaBackwardConfig):
    """Of wgmma/backward_dq: a block owns tile_m queries of one head and walks over tiles of tile_n keys."""

    @property
    def own_rows(self) -> int:
        return self.tile_m

    @property
    def stream_rows(self) -> int:
        return self.tile_n


@dataclass(frozen=True)
class WgmmaFusedConfig(WgmmaDkdvConfig):
    """Of wgmma/backward_fused: as WgmmaDkdvConfig, and the block's parts of dQ.

    Two warpgroups share dQ: each has 64 queries of a tile of 128, or a panel of 64 columns of a tile of 64.

    ordered: the parts of dQ are added in the order of their keys, so that equal calls give equal bits. key_tiles: this
    many tiles hold all keys of a head; the block owns one after the other, adds up dQ in shared memory and writes it in
    16 bits. With 0 the block owns tiles of many heads. stays: the block is persistent. It takes one tile after another,
    and stages dK and dV in the place of dS while the next K and V arrive. lse_first: the accumulators of S begin with
    -lse / scale instead of 0, so that nothing waits for lse afterwards; for a scale that is not 0, and only if no
    weights are dropped. dq_lines: the number of sums of dQ, to which key tiles add in turn.
    """

    ordered: bool = True
    key_tiles: int = 0  # type: ignore[misc]
    stays: bool = False  # type: ignore[misc]
    lse_first: bool = True  # type: ignore[misc]
    dq_lines: int = 1

    both_ways: ClassVar[bool] = True
    shared_alignment: ClassVar[int] = 1024
    KEYS: ClassVar[int] = 128  # of a tile
    TURNS_AT: ClassVar[int] = 32  # as in kernels/steps/lse_delta.py
    KEPT: ClassVar[int] = 2  # tiles of queries whose dQ shared memory has room for, with more than one key tile
    MOST_KEY_TILES: ClassVar[int] = 4  # that a block owns one after the other
    MOST_LINES: ClassVar[int] = 4

    def __post_init__(self) -> None:
        if self.tile_m not in (64, 128) or self.tile_n != self.KEYS:
            raise ValueError(f"tiles are of 64 or 128 queries and 128 keys, not {self.tile_m} and {self.tile_n}")
        widest = 64 * self.dq_panels
        if max(self.head_dim, self.head_dim_v) > widest:
            raise ValueError(
                f"head_dim must be at most {widest} with tiles of {self.tile_m} queries, not {self.head_dim} and "
                f"{self.head_dim_v}"
            )
        if self.key_tiles > 1 and self.tile_m != 128:
            raise ValueError(f"key_tiles must be 0 or 1 with tiles of {self.tile_m} queries, not {self.key_tiles}")
        if self.key_tiles and self.stays and self.tile_m != 128:  # products would wait for each other (C7515)
            raise ValueError(f"with key_tiles blocks stay with tiles of 128 queries, not {self.tile_m}")
        if self.key_tiles > 1 and not self.stays:
            raise ValueError(f"a block with {self.key_tiles} key tiles stays")
        if not 0 <= self.key_tiles <= self.MOST_KEY_TILES:
            raise ValueError(f"key_tiles must be 0 to {self.MOST_KEY_TILES}, not {self.key_tiles}")
        most = self.MOST_LINES if self.tile_m == 64 and not self.key_tiles else 1
        if not 1 <= self.dq_lines <= most:
            raise ValueError(
                f"dq_lines must be 1 to {most} with tiles of {self.tile_m} queries and key_tiles {self.key_tiles}, not "
                f"{self.dq_lines}"
            )
        if any(name in BY_ELEMENT and name != SEEDED for name, _ in self.uses):
            raise ValueError(f"of {', '.join(BY_ELEMENT)} it takes {SEEDED} alone")
        if self.seeded and (self.tile_m != 64 or self.lse_first):
            raise ValueError(f"with {SEEDED} tiles are of 64 queries, and lse_first is False: registers are few")
        super().__post_init__()
        # Where the tiles begin is said to the assembler, because nothing is left for a gap (compiled.to_ptx).
        object.__setattr__(self, "shared_bytes", self.shared_layout().end)

    @property
    def delta_first(self) -> bool:  # type: ignore[override]
        """Whether dP begins with -delta. Where weights are dropped, dP is multiplied before delta is taken away."""
        return not self.seeded

    @property
    def registers(self) -> tuple[int, int]:
        """The threads that add keep more in mind than a producer's others, and most of all where they stay."""
        return (56, 224) if self.stays else (40, 232)

    @property
    def dq_panels(self) -> int:
        """Panels of 64 columns of dQ: the warpgroups own one each, or half of the rows of the only one."""
        return 128 // self.tile_m

    @property
    def dq_columns(self) -> int:
        """Of the sums of dQ, and of K's panels."""
        return 64 * self.dq_panels

    @property
    def head_dim_padded(self) -> int:
        """K has dq_panels panels where head_dim_v alone is wide, too."""
        return max(super().head_dim_padded, self.dq_columns - 48)

    @property
    def ds_bytes(self) -> int:
        return tile_bytes(self.tile_m, self.tile_n)

    @property
    def dq_part_bytes(self) -> int:
        return 64 * 64 * (2 if self.key_tiles == 1 else 4)

    @property
    def dq_places(self) -> int:
        return 1 if self.key_tiles == 1 else self.KEPT if self.key_tiles else self.dq_stages

    @property
    def dq_stages(self) -> int:
        return 0 if self.key_tiles else 2


@dataclass(frozen=True)
class WgmmaRoundConfig(Config):
    """Of wgmma/backward_round; tiles and columns as in the WgmmaFusedConfig whose sums it takes."""

    dq_columns: int = 128
    dq_lines: int = 1

    waits: ClassVar[bool] = True
    group_size: ClassVar[int] = 1
    ALIGNMENT: ClassVar[int] = 1024

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared_bytes", self.ALIGNMENT + tile_bytes(64, self.head_dim))

    @property
    def threads(self) -> int:
        return 128


@dataclass(frozen=True)
class WgmmaAddPartsConfig(Config):
    """Of wgmma/backward_add_parts; tiles, depths and members as in the WgmmaDkdvConfigs whose sums it takes."""

    head_dim_padded: int = 128
    head_dim_v_padded: int = 128
    of_dk: bool = True
    of_dv: bool = True
    members: int = 1

    waits: ClassVar[bool] = True
    group_size: ClassVar[int] = 1
    ALIGNMENT: ClassVar[int] = 1024

    def __post_init__(self) -> None:
        end = self.dv_at + (tile_bytes(64, self.head_dim_v) if self.of_dv else 0)
        object.__setattr__(self, "shared_bytes", self.ALIGNMENT + end)

    @property
    def dv_at(self) -> int:
        """Where dV is put together, behind dK."""
        return tile_bytes(64, self.head_dim) if self.of_dk else 0

    @property
    def threads(self) -> int:
        return 128
