"""Parameters: the fields of a kernel's tuples. Each Config states its own, made from the ones here.

    arrays   pointers; None if an optional array is not given
    strides  of those arrays, in elements: (batch, head, row, column), or what STRIDES says
    sizes    batch, heads, lengths, and the window: integers
    score    the numbers of the score, in the type that the kernel computes in (options.SCORE_NUMBERS)

Numba passes a NamedTuple as its members in order, so the compiled kernel takes plain pointers and numbers.
"""

import functools
from typing import NamedTuple

from ..problem.options import ARRAYS, BY_NAME, PACKED_ARRAYS, RANKS, SCORE_NUMBERS, Operands


class Parameters(NamedTuple):
    """The fields of a kernel's tuples, in the order of its `def` line. A tuple without fields is not passed."""

    arrays: tuple[str, ...]
    strides: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    score: tuple[str, ...] = ()

    def plus(self, arrays: str = "", sizes: str = "", strides: str = "") -> "Parameters":
        """Adds arrays, sizes, and strides of arrays."""
        more = dict(arrays=arrays, sizes=sizes, strides=strides)
        return self._replace(**{name: (*getattr(self, name), *words(text)) for name, text in more.items()})


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SIZES = words("batch heads heads_kv seqlen_q seqlen_k left right q_offset")
# Tensor-core kernels take one of these instead of a mask (kernels/score/mask_bits.py): the second if their rows are
# keys.
MASK_BITS, MASK_BITS_OF_KEYS = "mask_bits", "mask_bits_of_keys"
AS_BITS = "bits"  # stands for a mask_mod in the options of a kernel that reads its bits and does not call it
BIAS_ROWS = "bias_rows"  # a copy of the bias (kernels/score/bias_rows.py)
# The arrays of states and of the order in which tiles are taken (kernels/score/tile_order.py), for kernels that own
# queries and for those that own keys.
TILE_STATES, TILE_STATES_OF_KEYS = "tile_states", "tile_states_of_keys"
STATES_IN_WORD = 16  # bit i: something is seen in the i-th tile; bit 16 + i: mask_mod decides what
AUX_SUMS, OF_AUX = "aux_sums", "aux_begins"  # sums of kernels/score/aux_gradient.py, and where each array's begin
COUNTERS = "counters"  # for a kernel whose blocks take their work by a counter (gpu/tile_counters.py)
# Where weights drop: the seed, a number in place of a pointer; how many of the 2^16 random numbers, the largest, drop a
# weight; how often a kept weight counts.
SEED, DROPPED, KEPT_COUNT = "seed", "dropped", "kept_count"

# The arrays that kernels of one call hand each other. The first three are v1's: O before rounding, l and m. The blocks
# of decode hand each other partials.
STATES = (TILE_STATES, TILE_STATES_OF_KEYS)
FORWARD_WORKSPACE = (*words("acc_o row_sum row_max partials"), MASK_BITS, TILE_STATES)
BACKWARD_WORKSPACE = words("delta row_shares lse_delta turns dq_sums dk_sums dv_sums dbias_sums")
BACKWARD_WORKSPACE += (MASK_BITS, MASK_BITS_OF_KEYS, BIAS_ROWS)
BACKWARD_WORKSPACE += (*STATES, AUX_SUMS)
Workspace = dict[str, tuple[tuple[int, ...], str]]  # shape and dtype of some of these arrays

# How many numbers a stride has, if not the usual four; 0: a plain number.
STRIDES = dict(x=2, y=2) | dict.fromkeys(STATES, 3) | {name: rank if rank > 1 else 0 for name, rank in RANKS.items()}

CU_SEQLENS = PACKED_ARRAYS  # where packed sequences are
_OPTIONS = tuple(option.name for option in ARRAYS if not option.packed)
_OF_SCORES = tuple(name for name in _OPTIONS if BY_NAME[name].acts_on != "sum")  # of a sum a backward needs only lse


def forward(mask: str = MASK_BITS) -> Parameters:
    """mask: the array from which the kernel knows the mask."""
    options = tuple(mask if name == "mask" else name for name in _OPTIONS)
    return Parameters((*Operands._fields[:5], *options), ("q", "k", "v", "o", *options), SIZES, SCORE_NUMBERS)


@functools.cache
def backward(gradients: str, rows: str = "lse_delta", mask: str = MASK_BITS) -> Parameters:
    """rows: the arrays with numbers of each query."""
    options = tuple(mask if name == "mask" else name for name in _OF_SCORES)
    own = (*options, *words(gradients))
    return Parameters((*words(f"q k v do {rows}"), *own), (*words("q k v do"), *own), SIZES, SCORE_NUMBERS)


ROWS = "lse delta"  # for kernels that read each row's lse and delta by themselves
_OF_ROWS = Parameters((), words("do o dlse"), words("batch heads seqlen_q"))
OF_DELTA, OF_PREPROCESS = _OF_ROWS.plus("do o dlse delta turns"), _OF_ROWS.plus("do o lse dlse lse_delta turns")


@functools.cache
def complete(own: Parameters, aux: int, seeded: bool, states: str, counted: bool, packed: bool = False) -> Parameters:
    """A kernel's own parameters, and those that its options add: states of tiles, a seed, where packed sequences are,
    `aux` arrays that functions read, the counter of its work."""
    more, seeded = (states,) if states else (), seeded and bool(own.score)
    spans = tuple(name for name in CU_SEQLENS if packed and name not in own.arrays)
    totals = tuple(name for name in ("batch", "total_q", "total_k") if packed and name not in own.sizes)
    return Parameters(
        (*own.arrays, *more, *(SEED,) * seeded, *spans, *aux_names(aux), *(COUNTERS,) * counted),
        (*own.strides, *more, *spans, *aux_names(aux)),
        (*own.sizes, *(DROPPED,) * seeded, *totals),
        (*own.score, *(KEPT_COUNT,) * seeded),
    )


def aux_names(count: int) -> tuple[str, ...]:
    return tuple(f"aux{number}" for number in range(count))


class StatesTile(NamedTuple):
    """A tile that has a state: so many queries, of so many heads that share it, by so many keys. of_keys: words are
    those of a tile of keys, for a kernel that owns keys and walks over queries."""

    queries: int
    keys: int
    heads: int
    of_keys: bool = False

    @property
    def array(self) -> str:
        """The array that has the states."""
        return TILE_STATES_OF_KEYS if self.of_keys else TILE_STATES

    @property
    def own(self) -> int:
        """Rows of the side that words belong to."""
        return self.keys if self.of_keys else self.queries

    @property
    def other(self) -> int:
        return self.queries if self.of_keys else self.keys
