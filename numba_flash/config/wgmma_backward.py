"""Configs of the Hopper backward (kernels/wgmma/backward_*.py): everything in them is a constant of the code."""

from typing import Any, ClassVar

from ..abi import parameters as abi
from ..abi.tensor_maps import OperandMaps, bias_map, extents, map_of_rows
from ..problem.forward import Problem
from ..problem.groups import parts_of
from ..problem.options import FUNCTIONS, SEEDED, changes_scores
from .backward import OfGradients, Sums
from .blocks import heads_in_flight
from .forward import AnyProblem, Config, check, layout, one_of, tile_bytes, tiles_of_all
from .wgmma_forward import Warpgroups, check_registers


def all_parts(p: Problem, members: int) -> int:
    """The number of parts of `members` query heads in the groups of all batch entries."""
    return p.batch * p.heads_kv * parts_of(p.group, members)


class StreamingConfig(Sums, Config):
    """A block owns a tile of rows. Its producer warpgroup loads the tiles that it walks over.

    Tiles a have head_dim columns (K or Q), tiles b have head_dim_v (V or dO). stages_a, stages_b: how many of each are
    in flight or in use in shared memory. bias_pairs: bias can be read two keys at a time
    (problem/option_checks.py, OptionArray).
    """

    stages_a: int = 2
    stages_b: int = 2
    blocks_per_sm: int = 1
    bias_pairs: bool = False

    whole_program = True
    in_order: ClassVar[bool] = True  # type: ignore[misc]
    key_tiles: ClassVar[int] = 0  # this and the next two: as in WgmmaFusedConfig
    bias_in_ds: ClassVar[bool] = False
    bidirectional: ClassVar[bool] = False  # blocks walk in both directions; the state says which
    keys_first: ClassVar[bool] = False  # K and V are loaded before the block finds the queries that see them
    PARTS: ClassVar[int] = 1  # parts of 16 bits that an element has (kernels/wgmma/parts.py)
    STATE_WORDS: ClassVar[int] = 16  # words of the block's state, which every role reads
    OWN_ROWS: ClassVar[tuple[int, ...]] = (64, 128, 192)
    LONGEST: ClassVar[int] = 128  # the most rows of a tile that a block walks over
    LEAST_STAGES_A: ClassVar[int] = 2  # the next S is issued before the product with this tile's a ends

    def __post_init__(self) -> None:
        other, a, b = self.other_rows, self.stages_a, self.stages_b
        most, least = self.LONGEST, self.LEAST_STAGES_A
        self._check_taken(self.WIDEST)  # type: ignore[attr-defined]
        one_of("a block's own rows", self.own_rows, *self.OWN_ROWS)
        whole = 16 <= other <= most and other % 16 == 0
        check(whole, f"a block walks over tiles of 16 to {most} rows, in steps of 16, not {other}")
        enough = least <= a <= 4 and 1 <= b <= 4
        check(enough, f"stages_a must be {least} to 4 and stages_b 1 to 4, not {a} and {b}")
        check_registers(self.registers, self.consumers)  # type: ignore[attr-defined]

    def parts_bytes(self, rows: int, columns: int) -> int:
        return self.PARTS * tile_bytes(rows, columns)

    @property
    def stream_a_bytes(self) -> int:
        """Bytes of one stage of tiles a."""
        return self.parts_bytes(self.other_rows, self.head_dim_padded)

    @property
    def stream_b_bytes(self) -> int:
        return self.parts_bytes(self.other_rows, self.head_dim_v_padded)

    def barriers(self) -> Any:
        """Where the mbarriers begin, 8 bytes each."""
        counts = {name: 8 * count for name, count in self._barrier_counts().items()}
        return layout(begin=self.shared_layout().barriers, **counts)

    def _rings(self) -> dict[str, int]:
        """How many mbarriers the stages have: a full one and an empty one for each."""
        return dict(a_full=self.stages_a, a_empty=self.stages_a, b_full=self.stages_b, b_empty=self.stages_b)

    def _barrier_counts(self) -> dict[str, int]:
        raise NotImplementedError

    def _own_tile(self) -> dict[str, int]:
        a, b = (self.parts_bytes(self.own_rows, n) for n in (self.head_dim_padded, self.head_dim_v_padded))
        return dict(own_a=a, own_b=b)

    def _tiles(self) -> dict[str, int]:
        """The tile that the block owns, and the stages of the tiles that it walks over."""
        stream_a, stream_b = self.stages_a * self.stream_a_bytes, self.stages_b * self.stream_b_bytes
        return self._own_tile() | dict(stream_a=stream_a, stream_b=stream_b)


class WgmmaBackwardConfig(Warpgroups, StreamingConfig):
    """wgmma/backward and wgmma/backward_fused.

    A block has a producer warpgroup and own_rows / 64 consumer warpgroups, each of which owns 64 rows. bias_boxes: TMA
    loads a bias, together with a tile of stream_a (problem/option_checks.py, OptionArray).
    """

    bias_boxes: bool = False  # type: ignore[misc]

    waits = reads_mask_mod = True
    stays: ClassVar[bool] = False
    WIDEST: ClassVar[int] = 256  # the most columns of one product
    MOST_BARRIERS: ClassVar[int] = 24
    # consumers -> registers of a thread: (of the producer, of the consumers)
    REGISTERS: ClassVar[dict[int, tuple[int, int]]] = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
    lse_first: ClassVar[bool] = False  # this and the next: as in WgmmaFusedConfig
    delta_first: ClassVar[bool] = False
    # The defaults of these are for blocks that have none.
    lse_delta_bytes: ClassVar[int] = 0  # bytes of lse and -delta in one stage of stream_a
    ds_bytes: ClassVar[int] = 0  # bytes of a tile of dS; shared memory has two
    dq_part_bytes: ClassVar[int] = 0  # bytes of the part of dQ that a consumer warpgroup computes at a time
    dq_places: ClassVar[int] = 1  # such parts that shared memory holds for each consumer warpgroup
    dq_stages: ClassVar[int] = 0  # such parts that may be in flight to the sums of dQ

    @property
    def tensor_maps(self) -> int:  # type: ignore[override]
        """One each for q, k, v and do, and one for a bias that TMA loads."""
        return 4 + self.bias_boxes

    def operand_maps(self, problem: AnyProblem) -> OperandMaps:
        p, do_strides = problem.forward, problem.do_strides  # type: ignore[union-attr]
        rows, keys, entries = extents(p)
        given = (
            (0, p.q_strides, (p.head_dim, rows, p.heads, entries), self.tile_m),
            (1, p.k_strides, (p.head_dim, keys, p.heads_kv, entries), self.tile_n),
            (2, p.v_strides, (p.head_dim_v, keys, p.heads_kv, entries), self.tile_n),
            (3, do_strides, (p.head_dim_v, rows, p.heads, entries), self.tile_m),
        )
        present = 1 if keys and not rows else 0  # an array that is not empty
        maps = [map_of_rows(p.dtype, n, strides, shape, (64, tile), present) for n, strides, shape, tile in given]
        return (*maps, *([bias_map(self, p, self.tile_m, present)] if self.bias_boxes else []))

    @property
    def registers(self) -> tuple[int, int]:
        return self.REGISTERS[self.consumers]

    @property
    def bias_bytes(self) -> int:
        """Bytes of the bias in one stage of stream_a; 0 with bias_in_ds, because it then overlays dS."""
        return 2 * self.tile_m * self.tile_n if self.bias_boxes and not self.bias_in_ds else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of a tile that the block owns. Packed sequences with key_tiles need 16 more."""
        return 4 * self.STATE_WORDS + 16 * (self.packed and self.key_tiles > 0)

    @property
    def states(self) -> int:
        """How many states a block has: one for the tile in work and, if it stays, one for the next tile."""
        return 2 if self.stays else 1

    def _barrier_counts(self) -> dict[str, int]:
        """Only a block that stays has own_empty, state_full and state_empty. dq_full and dq_empty have one mbarrier for
        each stage and consumer warpgroup."""
        told, parts = self.states if self.stays else 0, self.dq_stages * self.consumers
        counts = dict(own_full=1, own_empty=int(self.stays), state_full=told, state_empty=told) | self._rings()
        return counts | dict(ds_full=int(self.ds_bytes > 0), dq_full=parts, dq_empty=parts)

    def shared_layout(self) -> Any:
        """bias: one for each stage of stream_a, if TMA loads it. ds: two tiles of dS in 16 bits. dq: parts of dQ in
        flight to global memory. lse_delta: lse and -delta of each stage's queries."""
        return layout(
            **self._tiles(),
            bias=self.stages_a * self.bias_bytes,
            ds=2 * self.ds_bytes,
            dq=self.dq_places * self.consumers * self.dq_part_bytes,
            lse_delta=self.stages_a * self.lse_delta_bytes,
            state=self.state_bytes * self.states,
            barriers=8 * self.MOST_BARRIERS,
        )


class WgmmaDkdvConfig(OfGradients, WgmmaBackwardConfig, kernel="wgmma_dkdv", module="wgmma.backward"):
    """A block owns tile_n keys and walks over tiles of tile_m queries.

    The sums of dK and dV fit into registers together up to head_dim 128. members: how many query heads of a group a
    block takes, and then it writes partial sums in float32; 0: all heads, and it writes dK and dV.
    """

    members: int = 0

    takes = abi.backward("dk dv", mask=abi.MASK_BITS_OF_KEYS).plus("dk_sums dv_sums")
    of_keys = reads_states = True

    def grid(self, problem: AnyProblem) -> int:
        p = problem.forward
        if p.packed is not None and not self.key_tiles:
            return super().grid(problem)
        return all_parts(p, self.members) * (1 if self.key_tiles else self._tiles_of_keys(problem))

    def workspace(self, problem: AnyProblem) -> abi.Workspace:
        if not self.members:
            return {}
        rows = all_parts(problem.forward, self.members) * self._tiles_of_keys(problem) * self.tile_n
        columns = dict(dk_sums=self.of_dk * self.head_dim_padded, dv_sums=self.of_dv * self.head_dim_v_padded)
        return {name: ((rows * count,), "float32") for name, count in columns.items() if count}

    def _tiles_of_keys(self, problem: AnyProblem) -> int:
        return -(-problem.forward.seqlen_k // self.tile_n)

    def _own_tile(self) -> dict[str, int]:
        """dV alone needs no V."""
        return super()._own_tile() | ({} if self.of_dk else dict(own_b=0))

    @property
    def lse_delta_bytes(self) -> int:  # type: ignore[override]
        return 8 * self.tile_m


class WgmmaDqConfig(WgmmaBackwardConfig, kernel="wgmma_dq", module="wgmma.backward"):
    """A block owns tile_m queries of one head and walks over tiles of tile_n keys. wanted_aux: the index of an array
    whose gradient it computes too, if all scores of a head read one element of it."""

    wanted_aux: tuple[int, ...] = ()

    reads_states = True

    @property
    def takes(self) -> abi.Parameters:  # type: ignore[override]
        own = abi.backward("dq")
        return own.plus(abi.AUX_SUMS, abi.OF_AUX) if self.wanted_aux else own


class WgmmaFusedConfig(WgmmaDkdvConfig, kernel="wgmma_fused", module="wgmma.backward_fused"):
    """It computes dK and dV as WgmmaDkdvConfig says, and parts of dQ.

    Two warpgroups share dQ: each computes 64 queries of a tile of 128, or a panel of 64 columns of a tile of 64.

    key_tiles: so many tiles hold all keys of a head; the block owns one after the other, adds up dQ in shared memory
    and writes it in 16 bits. With 0 blocks add up dQ in global memory. stays: the block is persistent. It takes one
    tile after another, and stages dK and dV over dS while the next K and V are loaded. lse_first: the accumulators of S
    begin with -lse / scale instead of 0, so that nothing waits for lse afterwards; it needs a scale that is not 0, no
    dropped weights and no bias. dq_partials: the number of sums of dQ, to which key tiles add in rotation; with one, a
    head of 32k causal queries takes 9 % longer, and two heads of 16k take 14 % longer (H200).
    """

    key_tiles: int = 0  # type: ignore[misc]
    stays: bool = False  # type: ignore[misc]
    lse_first: bool = True  # type: ignore[misc]
    dq_partials: int = 1

    takes = abi.backward("dq dk dv", mask=abi.MASK_BITS_OF_KEYS).plus(
        "turns dq_sums dk_sums dv_sums", "heads_in_flight"
    )
    reads_states = False
    bidirectional: ClassVar[bool] = True
    shared_alignment: ClassVar[int] = Config.ALIGNMENT  # shared memory has no room for a gap (compiled.to_ptx)
    KEYS: ClassVar[int] = 128  # keys of a tile
    TURNS_AT: ClassVar[int] = 32  # as in kernels/steps/lse_delta.py
    KEPT: ClassVar[int] = 2  # with more than one key tile: query tiles whose dQ shared memory holds
    MOST_KEY_TILES: ClassVar[int] = 4  # key tiles that a block may own, one after the other
    MOST_LINES: ClassVar[int] = 8

    def __post_init__(self) -> None:
        queries, tiles, widest = self.tile_m, self.key_tiles, 64 * self.dq_panels
        right = queries in (64, 128) and self.tile_n == self.KEYS
        check(right, f"tiles are of 64 or 128 queries and 128 keys, not {queries} and {self.tile_n}")
        check(
            max(self.head_dim, self.head_dim_v) <= widest,
            f"head_dim must be at most {widest} with tiles of {queries} queries, not {self.head_dim} and "
            f"{self.head_dim_v}",
        )
        large = queries == 128
        check(large or tiles <= 1, f"key_tiles must be 0 or 1 with tiles of {queries} queries, not {tiles}")
        apart = large or not (tiles and self.stays)  # else products would wait for each other (C7515)
        check(apart, f"with key_tiles blocks stay with tiles of 128 queries, not {queries}")
        check(self.stays or tiles <= 1, f"a block with {tiles} key tiles stays")
        check(0 <= tiles <= self.MOST_KEY_TILES, f"key_tiles must be 0 to {self.MOST_KEY_TILES}, not {tiles}")
        most = 1 if tiles else self.MOST_LINES
        check(
            1 <= self.dq_partials <= most,
            f"dq_partials must be 1 to {most} with key_tiles {tiles}, not {self.dq_partials}",
        )
        others = tuple(use for use in self.uses if use[0] != "bias")
        alone = not changes_scores(others) and not any(name in FUNCTIONS for name, _ in others)
        check(alone, f"it takes no option that changes scores but a bias, and none of {', '.join(FUNCTIONS)}")
        read = self.has("mask") or self.has("bias")
        check(not (self.seeded and read), f"with {SEEDED} it takes no mask and no bias: registers are few")
        meets = self.key_tiles > 1 and not self.packed  # some query sees each key tile of a block
        boxed = self.bias_boxes and (meets or not self.stays) and not self.lse_first
        needs = "with a bias it needs bias_boxes and no lse_first, and stays with key_tiles alone"
        check(boxed or not self.has("bias"), needs)
        room = not self.seeded or not (large or self.lse_first)
        check(room, f"with {SEEDED} tiles are of 64 queries, and lse_first is False: registers are few")
        super().__post_init__()

    @property
    def persistent(self) -> bool:  # type: ignore[override]
        return self.stays

    @property
    def bias_in_ds(self) -> bool:  # type: ignore[override]
        """Whether a bias overlays the tile's dS, which is as large and not written yet."""
        return self.bias_boxes

    def own_sizes(self, problem: AnyProblem) -> dict[str, Any]:
        return dict(heads_in_flight=heads_in_flight(problem.forward, self.KEYS, self.dq_partials))

    def workspace(self, problem: AnyProblem) -> abi.Workspace:
        made, p = super().workspace(problem), problem.forward
        if not self.key_tiles:
            sums = p.heads * tiles_of_all(p, self.tile_m) * self.dq_partials
            made["turns"] = (self.TURNS_AT + 2 * sums,), "uint32"
            made["dq_sums"] = (sums * self.tile_m * self.dq_columns,), "float32"
        return made

    @property
    def delta_first(self) -> bool:  # type: ignore[override]
        """Whether the accumulators of dP begin with -delta. Dropout scales dP before it subtracts delta."""
        return not self.seeded

    @property
    def registers(self) -> tuple[int, int]:
        """Threads that add up dQ need more registers than the other producer threads, and most of all in a block that
        stays. Blocks that stay with a bias have no such threads, so consumers get their registers."""
        return (56, 224) if self.stays and not self.bias_boxes else (40, 232)

    @property
    def keys_first(self) -> bool:  # type: ignore[override]
        """Whether K and V are loaded first: the block's number gives its only tile. Unpacked, this gains nothing."""
        return self.packed and self.key_tiles > 0 and not self.stays

    @property
    def dq_panels(self) -> int:
        """Panels of 64 columns of dQ: each warpgroup owns one, or half of the rows of the only one."""
        return 128 // self.tile_m

    @property
    def dq_columns(self) -> int:
        """Columns of the sums of dQ, and of K's panels."""
        return 64 * self.dq_panels

    @property
    def head_dim_padded(self) -> int:
        """K has dq_panels panels even if only head_dim_v is wide."""
        return max(super().head_dim_padded, self.dq_columns - 48)

    @property
    def ds_bytes(self) -> int:  # type: ignore[override]
        return tile_bytes(self.tile_m, self.tile_n)

    @property
    def dq_part_bytes(self) -> int:  # type: ignore[override]
        return 64 * 64 * 4

    @property
    def in_order(self) -> bool:  # type: ignore[override]
        """Not with key_tiles: then no block waits for another, and the block's number says the sequence."""
        return not self.key_tiles

    @property
    def dq_places(self) -> int:  # type: ignore[override]
        return self.KEPT if self.key_tiles > 1 else self.dq_stages

    @property
    def dq_stages(self) -> int:  # type: ignore[override]
        return 0 if self.key_tiles else 2
