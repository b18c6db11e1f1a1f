"""Config: what one kernel is compiled for, and what selecting, compiling and launching need to know of the kernel.

A Config's fields are constants of the compiled code. Its class states the kernel's name and file, the parameters that
it takes, how many blocks it is launched with, and the workspace that it needs.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..abi import parameters as abi
from ..abi.parameters import Parameters, StatesTile, Workspace
from ..arrays.dtypes import COMPUTE_DTYPE, ITEM_SIZE
from ..problem.options import BY_NAME, SEEDED, Uses, changes_scores

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    from ..abi.tensor_maps import OperandMaps
    from ..problem.backward import BackwardProblem
    from ..problem.forward import Problem

    AnyProblem = Problem | BackwardProblem
else:
    AnyProblem = Any

    def dataclass_transform(**_: Any) -> Any:
        return lambda kind: kind


L2_BYTES = 16 * 2**20  # all blocks of the GPU work on so much of K and V at a time that it stays in L2


# Tiles for tensor cores are stored as swizzled panels with 128 bytes per row, 64 columns of 16 bits (ptx/fragments.py).


def tile_bytes(rows: int, columns: int, item_size: int = 2) -> int:
    """The bytes of a tile that is stored as panels."""
    return rows * 128 * -(-columns * item_size // 128)


def places(**starts: int) -> Any:
    """A NamedTuple of these numbers, which a kernel reads as constants."""
    return _type(tuple(starts))(**starts)


def layout(step: int = 1, begin: int = 0, **sizes: int) -> Any:
    """Parts that follow each other from `begin` on, each a multiple of `step`: a NamedTuple of where each of them
    begins, and `end`."""
    starts = itertools.accumulate((-(-size // step) * step for size in sizes.values()), initial=begin)
    return places(**dict(zip((*sizes, "end"), starts, strict=True)))


@functools.cache
def _type(names: tuple[str, ...]) -> Any:
    return collections.namedtuple("Places", names)  # type: ignore[misc]


def check(holds: object, message: str) -> None:
    if not holds:
        raise ValueError(message)


def one_of(name: str, value: Any, *allowed: Any) -> None:
    *first, last = map(str, allowed)
    words = f"{', '.join(first)} or {last}" if first else last
    check(value in allowed, f"{name} must be {words}, not {value}")


def multiple_of(name: str, value: int, step: int) -> None:
    check(value >= step and value % step == 0, f"{name} must be a multiple of {step}, not {value}")


def fields_of(config: Any, kind: Any) -> dict[str, Any]:
    """The fields of a Config that Configs of this kind are made with."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(kind) if field.init}


def tiles_of_all(p: Any, rows: int, of_keys: bool = False) -> int:
    """How many tiles of `rows` queries or keys one head has in all batch entries; for packed sequences, how many tile
    numbers (kernels/steps/tile_numbers.py)."""
    if p.packed is None:
        return tiles_by_bound(p, rows, of_keys)
    return p.packed[of_keys] // rows + p.batch if p.batch and p.packed[of_keys] else 0


def tiles_by_bound(p: Any, rows: int, of_keys: bool = False) -> int:
    """The same, if every sequence is as long as the bound of the lengths."""
    return p.batch * -(-(p.seqlen_k if of_keys else p.seqlen_q) // rows)  # type: ignore[no-any-return]


def with_problems(configs: Iterable[Any], problem: Any) -> Iterator[tuple[Any, Any]]:
    """Each kernel with its problem, in which an earlier kernel may have replaced an array."""
    for config in configs:
        yield config, problem
        problem = config.problem_behind(problem)


@dataclass_transform(frozen_default=True)
class LaunchFacts:
    """The facts that selecting, compiling and launching a kernel need. The defaults hold for most kernels.

    Every subclass is a frozen dataclass. Its head names the kernel and its file, below numba_flash/kernels. A class
    that names neither is a base of others. It gets none of the methods that a dataclass generates: they would take
    longer than the rest of its module.
    """

    kernel: str
    module: ClassVar[str]
    takes: ClassVar[Parameters]  # its own parameters; options add more
    names: ClassVar[tuple[str, ...]] = ()  # all names of a kernel that has several

    dtype: str  # of q, k, v and o
    threads: int
    shared_bytes: int = 0
    blocks_per_sm: int = 0  # the registers must suffice for so many blocks; 0 leaves it to the assembler
    uses: Uses = ()  # options.uses(...): the options that the problem uses
    wanted_aux: tuple[int, ...] = ()  # the indices in aux of the arrays whose gradients it computes

    of_keys: ClassVar[bool] = False  # a block owns keys and walks over queries
    tensor_maps: ClassVar[int] = 0  # how many TMA descriptors the kernel takes
    whole_program: ClassVar[bool] = False  # assembled by the driver (compiled.to_code)
    waits: ClassVar[bool] = False  # it executes griddepcontrol.wait: it may start before the previous kernel ends
    cluster: ClassVar[int] = 1  # how many neighbouring blocks run together and reach each other's shared memory
    counted: ClassVar[bool] = False  # its blocks share counters, the last of its pointers
    counter_words: ClassVar[int] = 2  # words of them; the default is one tile counter (gpu/tile_counters.py)
    persistent: ClassVar[bool] = False  # a block takes one piece of work after the other
    shared_alignment: ClassVar[int] = 0  # dynamic shared memory begins at a multiple of this; 0: of 16
    bias_boxes: ClassVar[bool] = False  # TMA loads the bias (problem/option_checks.py, OptionArray)
    tile_states: ClassVar[str] = ""  # the array of the states of tiles under a mask_mod; "" = it reads none
    states_tile: ClassVar[StatesTile | None] = None  # the kind of tile that has a state there
    ptx_version: ClassVar[str] = ""  # the first version with its instructions; "": its GPU's (compiled.PTX_VERSIONS)
    kept: ClassVar[str] = ""  # the array that it writes and a BlockMask keeps for the next call; "" = none
    replaces: ClassVar[tuple[str, str] | None] = None  # (an array, its copy that later kernels read instead)
    packed: bool = False  # sequences are packed (problem/packed.py)
    clears_outside: ClassVar[bool] = False  # it also writes rows of no sequence (kernels/steps/outside_rows.py)
    in_order: bool = False  # tiles of packed sequences have numbers (kernels/steps/tile_numbers.py)

    def __init_subclass__(cls, kernel: str = "", module: str = "") -> None:
        for name, given in dict(kernel=kernel, module=module).items():
            if given:
                setattr(cls, name, given)
        is_base = not (kernel or module)
        dataclass(frozen=True, init=not is_base, repr=not is_base, eq=not is_base)(cls)

    @property
    def compute_dtype(self) -> str:
        return COMPUTE_DTYPE.get(self.dtype, "float32")

    def counters(self, problem: Any) -> int:
        """Words of the counters of a launch, if there are any."""
        return self.counter_words

    def has(self, option: str) -> bool:
        """Whether the problem uses an option (options.py)."""
        return any(name == option for name, _ in self.uses)

    def dtype_of(self, option: str) -> str | None:
        """The dtype of an array given as an option; None where there is none."""
        return dict(self.uses).get(option)

    def function(self, option: str) -> Any:
        """The Function given as an option that the kernel calls; None where there is none."""
        given = dict(self.uses).get(option)
        return None if given == abi.AS_BITS else given

    @property
    def mask_mod_as_bits(self) -> bool:
        """Whether it reads a mask_mod as bits and does not call it."""
        return dict(self.uses).get("mask_mod") == abi.AS_BITS

    @property
    def mask_bits(self) -> bool:
        """Whether it reads bits of a mask or of a mask_mod."""
        return self.has("mask") or self.mask_mod_as_bits

    @property
    def aux(self) -> tuple[tuple[str, int], ...]:
        """(dtype, dimensions) of each array that functions read."""
        return dict(self.uses).get("aux", ())

    @property
    def seeded(self) -> bool:
        """Whether it takes a seed: weights are dropped at random."""
        return self.has(SEEDED)

    @property
    def parameters(self) -> Parameters:
        """All parameters of the kernel as it is compiled."""
        return abi.complete(self.takes, len(self.aux), self.seeded, self.tile_states, self.counted, self.packed)

    def own_sizes(self, problem: AnyProblem) -> dict[str, Any]:
        """The values of the sizes that only this kernel takes."""
        return {}

    def problem_behind(self, problem: Any) -> Any:
        """The problem of later kernels, with the strides of the array that this kernel replaces."""
        return problem

    def grid(self, problem: AnyProblem) -> int:
        """Number of blocks, or of pieces of work of a persistent kernel; 0 if there is nothing to do."""
        raise NotImplementedError

    def workspace(self, problem: AnyProblem) -> Workspace:
        """Shapes and dtypes of the workspace arrays that it needs beside those of the next kernel."""
        return {}

    def operand_maps(self, problem: AnyProblem) -> "OperandMaps":
        """(operand, its tensor map) for each of the kernel's TMA descriptors, in the kernel's order."""
        return ()


class Config(LaunchFacts):
    """The compile-time facts that every attention kernel has; frozen, hashable, part of the disk cache's key. A block
    works on a tile of tile_m query rows by tile_n keys at a time."""

    dtype: str
    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    write_lse: bool = True
    uses: Uses = ()
    q_offset_source: str = "number"  # as in Problem
    narrow: bool = False  # as in Problem, if functions are called; else False
    blocks_per_sm: int = 0

    DTYPES: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")  # the dtypes of most tensor-core kernels
    NOT_TAKEN: ClassVar[tuple[str, ...]] = ()  # options that other kernels on tensor cores take
    ALIGNMENT: ClassVar[int] = 1024  # bytes, of panels; dynamic shared memory begins at a multiple of 16 alone
    group_size: ClassVar[int] = 1  # query heads of one KV head in a tile
    v_parts: ClassVar[int] = 1  # blocks that share a tile's columns of O
    reads_mask_mod: ClassVar[bool] = False  # it reads a mask_mod as bits, too, where it can (abi/mask_bits.py)
    reads_states: ClassVar[bool] = False  # it skips tiles in which a mask_mod leaves nothing
    reads_order: ClassVar[bool] = True  # it takes tiles in the order that tile_order makes of the states

    @classmethod
    def behind(cls, config: "Config") -> "Config":
        """The Config of a kernel that continues the work of that of `config`, with the same tiles."""
        return cls(**fields_of(config, cls) | dict(blocks_per_sm=0))

    def shared_layout(self) -> Any:
        """Where things begin in a block's shared memory, and the end, in bytes."""
        raise NotImplementedError

    @functools.cached_property
    def shared_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the layout, and of a gap in front unless the assembler knows where shared memory begins."""
        return self.shared_layout().end + (0 if self.shared_alignment else self.ALIGNMENT)  # type: ignore[no-any-return]

    def _check_taken(self, widest: float = math.inf) -> None:
        """Checks what tensor cores take: the dtype, head_dim up to `widest`, the options."""
        check(self.dtype in self.DTYPES, f"{self.kernel} takes {' and '.join(self.DTYPES)}, not {self.dtype}")
        fits = max(self.head_dim, self.head_dim_v) <= widest
        check(fits, f"head_dim must be at most {widest}, not {self.head_dim} and {self.head_dim_v}")
        unknown = [name for name, _ in self.uses if name in self.NOT_TAKEN or not BY_NAME[name].on_tensor_cores]
        check(not unknown, f"{self.kernel} takes no {' and no '.join(unknown)}")

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return ITEM_SIZE[self.dtype]

    @property
    def tile_states(self) -> str:  # type: ignore[override]
        """The array of the states of tiles under a mask_mod; "" if it reads none."""
        reads = self.reads_states and self.has("mask_mod") and not self.packed
        return self.states_tile.array if reads else ""

    @property
    def packed(self) -> bool:  # type: ignore[override]
        return self.has(abi.CU_SEQLENS[0])

    @property
    def states_tile(self) -> StatesTile:  # type: ignore[override]
        """The kind of tile that has a state there."""
        return StatesTile(self.queries, self.tile_n, self.group_size, self.of_keys)

    @property
    def queries(self) -> int:
        """Queries in a tile; with a group of heads each of them is several rows."""
        return self.tile_m // self.group_size

    @property
    def own_rows(self) -> int:
        """Rows of the tile that a block owns."""
        return self.tile_n if self.of_keys else self.tile_m

    @property
    def other_rows(self) -> int:
        """Rows of the tiles that it walks over."""
        return self.tile_m if self.of_keys else self.tile_n

    @property
    def head_dim_padded(self) -> int:
        """Columns of a tile on tensor cores, in whole steps of a product; columns past head_dim are zero."""
        return self._padded(self.head_dim)

    @property
    def head_dim_v_padded(self) -> int:
        return self._padded(self.head_dim_v)

    def _padded(self, columns: int) -> int:
        return -(-columns // 16) * 16

    @property
    def columns_in_order(self) -> bool:
        """Whether a lane sums up two neighbouring columns of each 8 (kernels/steps/row_writers.py)."""
        return self.dtype == "float64"

    @property
    def derivative_varies(self) -> bool:
        """Whether the derivative of a score with respect to scale * q . k may differ from 1."""
        return any(BY_NAME[name].derivative for name, _ in self.uses)

    def grid(self, problem: AnyProblem) -> int:
        """A block, or a cluster of blocks, for each tile of the side that it owns."""
        p = problem.forward
        tiles = tiles_of_all if self.in_order else tiles_by_bound
        if self.of_keys:
            return self.cluster * p.heads_kv * tiles(p, self.tile_n, True)
        return self.cluster * (p.heads // self.group_size) * tiles(p, self.queries)


class TensorConfig(Config):
    """The fields and properties that the tensor-core kernels of a forward share.

    group_size: how many query heads of one KV head lie in a tile as rows of one query (1: a tile is of one head).
    scores_finished: scores are finished before the softmax, because an option that changes them or a scale that is not
    above 0 forbids folding the scale into the exponent. o_vectorized: rows of o can be written 16 bytes at a time.
    bias_pairs: bias can be read two keys at a time (problem/option_checks.py, OptionArray). rescale_threshold: how many
    powers of two a row's running maximum may lag (kernels/score/fragment_softmax.py); 0 = not at all.
    """

    group_size: int = 1  # type: ignore[misc]
    scores_finished: bool = False
    o_vectorized: bool = True
    rescale_threshold: float = 0.0
    bias_pairs: bool = False

    takes = abi.forward()
    reads_states = True
    widest: ClassVar[int] = 256  # columns of O that a block keeps in registers
    columns_step: ClassVar[int] = 16  # O's padded columns are a multiple of it
    column_groups: ClassVar[int] = 1  # this and the next two: as in MmaConfig, for products
    splits_columns: ClassVar[bool] = False
    exchange_at: ClassVar[int] = 0
    unrolled: ClassVar[bool] = False  # this and the next: kernels/mma/products_float64.py
    odd_rows_first: ClassVar[bool] = False

    def _check(self, rows_step: int, keys_step: int, widest: float = math.inf) -> None:
        self._check_taken(widest)
        multiple_of("tile_m", self.tile_m, rows_step)
        multiple_of("tile_n", self.tile_n, keys_step)
        check(self.tile_n <= 128, f"tile_n must be at most 128, a row's word of random bits, not {self.tile_n}")
        fits = self.group_size >= 1 and self.tile_m % self.group_size == 0
        check(fits, f"group_size must divide tile_m = {self.tile_m}, but is {self.group_size}")
        named, most = ", ".join(name for name, _ in self.uses), 12  # 2^12 is far from float16's largest number, 65504
        finished = self.scores_finished or not changes_scores(self.uses)
        check(finished, f"{named}: options that change scores need scores_finished=True")
        within = 0 <= self.rescale_threshold <= most
        check(within, f"rescale_threshold must be 0 to {most}, not {self.rescale_threshold}: P may be held in 16 bits")

    @property
    def v_parts(self) -> int:  # type: ignore[override]
        """Blocks that share one tile's columns of O; each computes all scores. Registers hold `widest` columns."""
        return -(-self.head_dim_v // self.widest)

    @property
    def head_dim_v_padded(self) -> int:
        """Columns of O that a block computes, in whole steps."""
        step = self.columns_step
        return (-(-self.head_dim_v // self.v_parts) + step - 1) // step * step

    @property
    def group_columns(self) -> int:
        """Columns of O that a warp computes."""
        return self.head_dim_v_padded // self.column_groups

    def grid(self, problem: AnyProblem) -> int:
        return super().grid(problem) * self.v_parts
