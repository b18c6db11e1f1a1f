"""Config: what one kernel is compiled for. All its fields are constants of the compiled code."""

import collections
import functools
import itertools
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..problem.options import BY_NAME, SEEDED, Uses, changes_by_distance_alone, changes_scores
from .states_of_tiles import READERS, TILE_STATES_OF_KEYS, StatesTile

L2_BYTES = 16 * 2**20  # of K and V on which all blocks of the GPU work at the same time, so that they stay in L2
ITEM_SIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "uint32": 4, "float64": 8, "int64": 8}


# Tiles for tensor cores are stored as swizzled panels with 128 bytes per row, 64 columns of 16 bits (ptx/fragments.py).


def tile_bytes(rows: int, columns: int, item_size: int = 2) -> int:
    """The bytes of a tile that is stored as panels."""
    return rows * 128 * -(-columns * item_size // 128)


def panel_of_bias(tile_n: int) -> int:
    """The keys of a panel of a bias that TMA loads, for tiles of tile_n keys."""
    return next(keys for keys in (64, 32, 16) if tile_n % keys == 0)


def places(**starts: int) -> Any:
    """A NamedTuple of these numbers, which a kernel reads as constants."""
    return _type(tuple(starts))(**starts)


def layout(step: int = 1, **sizes: int) -> Any:
    """Parts that follow each other: a NamedTuple of where each of them begins, and `end`. A part takes a multiple of
    `step`."""
    starts = itertools.accumulate((-(-size // step) * step for size in sizes.values()), initial=0)
    return places(**dict(zip((*sizes, "end"), starts, strict=True)))


@functools.cache
def _type(names: tuple[str, ...]) -> Any:
    return collections.namedtuple("Places", names)  # type: ignore[misc]


class LaunchFacts:
    """The facts that a launch needs from a Config, with the values that hold for most kernels."""

    tensor_maps: ClassVar[int] = 0  # how many TMA descriptors the kernel takes
    whole_program: ClassVar[bool] = False  # assembled by the driver (compiled.to_code)
    waits: ClassVar[bool] = False  # it executes griddepcontrol.wait: it may start before the kernel before has ended
    cluster: ClassVar[int] = 1  # how many neighbouring blocks run together and reach each other's shared memory
    aux: ClassVar[tuple[tuple[str, int], ...]] = ()  # (dtype, dimensions) of each array that functions read
    wanted_aux: ClassVar[tuple[int, ...]] = ()  # the numbers of those whose gradients it is about
    seeded: ClassVar[bool] = False  # it takes a seed, and which weights count follows from it
    counted: ClassVar[bool] = False  # its blocks take their work by a counter, the last of its pointers
    shared_alignment: ClassVar[int] = 0  # where dynamic shared memory has to begin at a multiple of; 0: of 16
    bias_boxes: ClassVar[bool] = False  # a bias comes by TMA (problem/option_checks.py, OptionArray)
    tile_states: ClassVar[str] = ""  # the array that says which tiles a mask_mod leaves; "" = it asks for none
    states_tile: ClassVar[StatesTile | None] = None  # what has a state there
    ptx_version: ClassVar[str] = ""  # the first with its instructions; "": its GPU's (compiled.PTX_VERSIONS)
    kept: ClassVar[bool] = False  # a BlockMask keeps what it makes, for the next call


# This class and TensorConfig have no instances of their own. So they do without the methods of a dataclass, which each
# class below them has anew: making these would take longer than the rest of this module.
@dataclass(frozen=True, init=False, repr=False, eq=False)
class Config(LaunchFacts):
    """The compile-time facts that every attention kernel has; frozen, hashable, part of the disk cache's key.

    tile_m query rows by tile_n keys is what a block works on at a time.
    """

    kernel: str
    dtype: str  # of q, k, v and o
    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    write_lse: bool = True
    uses: Uses = ()  # options.uses(...): what else the problem uses
    q_offset_source: str = "number"  # "number", "seqlens_k" or "array"
    narrow: bool = False  # as of Problem: where functions are told positions
    blocks_per_sm: int = 0  # how many blocks the registers must suffice for; 0 leaves it to the assembler
    shared_bytes: int = field(init=False)

    @property
    def compute_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    def has(self, option: str) -> bool:
        """Whether the problem uses an option (options.py)."""
        return any(name == option for name, _ in self.uses)

    def dtype_of(self, option: str) -> str | None:
        """The dtype of an array given as an option; None where there is none."""
        return dict(self.uses).get(option)

    def function(self, option: str) -> Any:
        """The Function given as an option; None where there is none."""
        return dict(self.uses).get(option)

    @property
    def aux(self) -> tuple[tuple[str, int], ...]:  # type: ignore[override]
        """(dtype, dimensions) of each array that functions read."""
        return dict(self.uses).get("aux", ())

    @property
    def seeded(self) -> bool:  # type: ignore[override]
        """Whether each call brings a seed."""
        return self.has(SEEDED)

    @property
    def tile_states(self) -> str:  # type: ignore[override]
        """The array that says which tiles a mask_mod leaves; "" without one."""
        return READERS.get(self.kernel, "") if self.has("mask_mod") else ""

    @property
    def states_tile(self) -> StatesTile:  # type: ignore[override]
        """What has a state there."""
        return StatesTile(self.tile_m, self.tile_n, 1, self.tile_states == TILE_STATES_OF_KEYS)

    @property
    def derivative_varies(self) -> bool:
        """Whether the derivative of a score by scale * q . k is anything but 1."""
        return any(BY_NAME[name].derivative for name, _ in self.uses)

    @property
    def by_distance_alone(self) -> bool:
        """Whether scores change by the distance of a query and a key, and by nothing else."""
        return changes_by_distance_alone(self.uses)

    @property
    def threads(self) -> int:
        raise NotImplementedError


@dataclass(frozen=True, init=False, repr=False, eq=False)
class TensorConfig(Config):
    """What the tensor-core kernels share.

    group_size: how many query heads of one KV head lie in a tile as rows of one query (1: a tile is of one head).
    scores_finished: scores are finished before the softmax, because an option that changes them or a scale that is not
    above 0 forbids folding the scale into the exponent. o_vectorized: rows of o can be written 16 bytes at a time.
    bias_pairs: bias can be read two keys at a time (problem/option_checks.py, OptionArray). rescale_threshold: how many
    powers of two a row's running maximum may be behind (kernels/score/fragment_softmax.py); 0 = none.
    """

    group_size: int = 1
    scores_finished: bool = False
    o_vectorized: bool = True
    rescale_threshold: float = 0.0
    bias_pairs: bool = False

    DTYPES: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")
    MAX_RESCALE_THRESHOLD: ClassVar[int] = 12  # 2^12 is far from float16's largest number, 65504
    ALIGNMENT: ClassVar[int] = 1024  # of panels; dynamic shared memory itself begins at a multiple of 16
    ROW_STATE_BYTES: ClassVar[int] = 8  # for a row of O that waits in shared memory: is it finite, and its lse

    def _check(self, rows_step: int, keys_step: int) -> None:
        if self.dtype not in self.DTYPES:
            raise ValueError(f"{self.kernel} takes {', '.join(self.DTYPES)}, not {self.dtype}")
        if self.tile_m < rows_step or self.tile_m % rows_step:
            raise ValueError(f"tile_m must be a multiple of {rows_step}, not {self.tile_m}")
        if self.tile_n < keys_step or self.tile_n % keys_step:
            raise ValueError(f"tile_n must be a multiple of {keys_step}, not {self.tile_n}")
        if self.group_size < 1 or self.tile_m % self.group_size:
            raise ValueError(f"group_size must divide tile_m = {self.tile_m}, but is {self.group_size}")
        if changes_scores(self.uses) and not self.scores_finished:
            named = ", ".join(name for name, _ in self.uses)
            raise ValueError(f"{named}: options that change scores need scores_finished=True")
        if any(not BY_NAME[name].on_tensor_cores for name, _ in self.uses):
            raise ValueError(f"the tensor-core kernels do not take all of {', '.join(name for name, _ in self.uses)}")
        if not 0 <= self.rescale_threshold <= self.MAX_RESCALE_THRESHOLD:
            most, given = self.MAX_RESCALE_THRESHOLD, self.rescale_threshold
            raise ValueError(f"rescale_threshold must be 0 to {most}, not {given}: P may be held in 16 bits")

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return ITEM_SIZE[self.dtype]

    @property
    def widest(self) -> int:
        """Columns of O that a block keeps in registers."""
        return 256

    @property
    def queries(self) -> int:
        """Queries in a tile; with a group of heads each of them is several rows."""
        return self.tile_m // self.group_size

    @property
    def states_tile(self) -> StatesTile:  # type: ignore[override]
        return StatesTile(self.queries, self.tile_n, self.group_size)

    @property
    def head_dim_padded(self) -> int:
        """head_dim in whole steps of a product; what is past head_dim is zero."""
        return (self.head_dim + 15) // 16 * 16

    @property
    def v_parts(self) -> int:
        """Blocks that share one tile's columns of O, each computing the scores anew: registers end at `widest`."""
        return -(-self.head_dim_v // self.widest)

    @property
    def columns_step(self) -> int:
        return 16

    @property
    def head_dim_v_padded(self) -> int:
        """Columns of O that a block computes, in whole steps."""
        step = self.columns_step
        return (-(-self.head_dim_v // self.v_parts) + step - 1) // step * step

    @property
    def group_columns(self) -> int:
        """Columns of O that a warp has."""
        return self.head_dim_v_padded
