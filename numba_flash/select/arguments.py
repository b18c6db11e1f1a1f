"""The parameters of each kernel: up to four NamedTuples, with their fields, types for compiling and values for
launching.

    arrays   pointers; None if an optional array is not given
    strides  of those arrays, in elements: (batch, head, row, column), or what STRIDES says
    sizes    batch, heads, lengths, and the window: integers
    score    the numbers of the score, in the type that the kernel computes in (options.SCORE_NUMBERS)

PARAMETERS gives the fields of each kernel's tuples. Numba passes a NamedTuple as its members in order, so the compiled
kernel takes plain pointers and numbers.
"""

import functools
from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np

from ..config.states_of_tiles import TILE_STATES, TILE_STATES_OF_KEYS, StatesTile
from ..problem.forward import Problem
from ..problem.options import (
    ARRAYS,
    BY_NAME,
    GRADIENT_OF,
    HEAD_GRADIENTS,
    RANKS,
    SCORE_NUMBERS,
    SEEDED,
    Operands,
    Option,
    daux_name,
    dropped_steps,
    kept_count,
)
from ..problem.ranges import UNBOUNDED
from .tensor_maps import TensorMap


class Parameters(NamedTuple):
    """The fields of a kernel's tuples, in the order of its `def` line. A tuple without fields is not passed."""

    arrays: tuple[str, ...]
    strides: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    score: tuple[str, ...] = ()


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_SIZES = _words("batch heads heads_kv seqlen_q seqlen_k left right q_offset")
_OPTIONS = tuple(option.name for option in ARRAYS)
_OF_SCORES = tuple(option.name for option in ARRAYS if option.acts_on != "sum")  # lse says all of a sum to a backward
# What tensor-core kernels take instead of a mask (kernels/score/mask_bits.py); those whose rows are keys take the
# second.
MASK_BITS, MASK_BITS_OF_KEYS = "mask_bits", "mask_bits_of_keys"


def _with_bits(names: tuple[str, ...], bits: str = MASK_BITS) -> tuple[str, ...]:
    return tuple(bits if name == "mask" else name for name in names)


_FORWARD = Parameters(Operands._fields, ("q", "k", "v", "o", *_OPTIONS), _SIZES, SCORE_NUMBERS)
_BACKWARD = (*_words("q k v do lse delta"), *_OF_SCORES)
_BACKWARD_STRIDES = ("q", "k", "v", "do", *_OF_SCORES)
_TENSOR_FORWARD = _FORWARD._replace(arrays=_with_bits(_FORWARD.arrays), strides=_with_bits(_FORWARD.strides))
_TENSOR_OPTIONS = tuple(name for name in _OF_SCORES if name not in ("bias", "mask"))  # of kernels without bias and mask
_BITS = (MASK_BITS, MASK_BITS_OF_KEYS)


def _tensor_backward(gradients: tuple[str, ...], options: tuple[str, ...], *sizes: str) -> Parameters:
    arrays, strides = (*_words("q k v do lse_delta"), *options), (*_words("q k v do"), *options)
    return Parameters((*arrays, *gradients), (*strides, *gradients), (*_SIZES, *sizes), SCORE_NUMBERS)


def _wide_backward(gradients: tuple[str, ...], bits: str = MASK_BITS) -> Parameters:
    """For float32 and float64, which read what v2 stored for each row."""
    options = _with_bits(_OF_SCORES, bits)
    arrays, strides = (*_words("q k v do lse delta"), *options), (*_words("q k v do"), *options)
    return Parameters((*arrays, *gradients), (*strides, *gradients), _SIZES, SCORE_NUMBERS)


def _with_arrays(parameters: Parameters, *names: str) -> Parameters:
    return parameters._replace(arrays=(*parameters.arrays, *names))


def _with_rows(parameters: Parameters, names: tuple[str, ...]) -> Parameters:
    """With what delta is computed from."""
    strides = tuple(name for name in names if name != "lse")
    return parameters._replace(arrays=(*parameters.arrays, *names), strides=(*parameters.strides, *strides))


_OF_ROWS = dict(strides=_words("do o dlse"), sizes=_words("heads seqlen_q"))

_STATES, _OF_STATES = (TILE_STATES, TILE_STATES_OF_KEYS), _words("mask seqlens_k q_offset")
_ORDERS = ("tile_order", "tile_order_of_keys")
FORWARD_WORKSPACE = (
    *_words("acc_o row_sum row_max"),
    MASK_BITS,
    TILE_STATES,
)  # the first three of v1: O before rounding, l and m
# For the gradients of aux (kernels/score/owed.py): the largest exponents, and the sums; their indices, and their room.
AUX_BOUNDS, AUX_SUMS, _OF_AUX = "aux_bounds", "aux_sums", _words("aux_begins term_bits run_bits")
_OF_DBIAS = ("dbias_shape", "dbias_splits")
BACKWARD_WORKSPACE = (
    *_words("delta row_shares lse_delta turns dq_sums dk_sums dv_sums dbias_sums"),
    *_BITS,
    *_STATES,
    AUX_BOUNDS,
    AUX_SUMS,
)
COUNTERS = "counters"  # of wgmma: its tile counters (gpu/tile_counters.py)
# Where weights drop: a number in the place of a pointer; how many of the 2^16 random numbers, the largest, drop a
# weight; how often a kept weight counts.
SEED, DROPPED, KEPT_COUNT = "seed", "dropped", "kept_count"


def _head_sums(option: Option) -> dict[str, Parameters]:
    """Parameters of head_sums, for the gradient of an option that is one number for each head; with delta as an array,
    and in blocks."""
    own, sizes = (option.name, option.gradient), _words("batch heads seqlen_q")
    if option.acts_on == "score":
        return {option.gradient: Parameters(("row_shares", option.gradient), (option.gradient,), sizes)}
    kernels = {option.gradient: "delta", f"{option.gradient}_of_blocks": "lse_delta"}
    return {kernel: Parameters(("lse", delta, *own), own, sizes) for kernel, delta in kernels.items()}


HEAD_SUMS = {kernel: taken for option in HEAD_GRADIENTS.values() for kernel, taken in _head_sums(option).items()}

PARAMETERS: dict[str, Parameters] = {
    "v1": _FORWARD._replace(arrays=Operands._fields + FORWARD_WORKSPACE[:3]),
    "v2": _FORWARD,
    "mma": _TENSOR_FORWARD,
    **dict.fromkeys(("wgmma", "wgmma_float32"), _TENSOR_FORWARD._replace(arrays=(*_TENSOR_FORWARD.arrays, COUNTERS))),
    **{bits: Parameters(("mask", bits), ("mask",), _words("heads seqlen_q seqlen_k")) for bits in _BITS},
    **dict.fromkeys(_STATES, Parameters(_OF_STATES, _OF_STATES, _SIZES)),
    **{
        order: Parameters((states,), (states,), _words("seqlen_q seqlen_k"))
        for order, states in zip(_ORDERS, _STATES, strict=True)
    },
    "delta": Parameters(_words("do o dlse delta turns"), **_OF_ROWS),
    "v2_dkdv": Parameters((*_BACKWARD, "dk", "dv"), (*_BACKWARD_STRIDES, "dk", "dv"), _SIZES, SCORE_NUMBERS),
    "v2_dq": Parameters((*_BACKWARD, "dq", "row_shares"), (*_BACKWARD_STRIDES, "dq"), _SIZES, SCORE_NUMBERS),
    "v2_dbias": Parameters(
        (*_BACKWARD, "dbias", "dbias_sums"), (*_BACKWARD_STRIDES, "dbias"), (*_SIZES, *_OF_DBIAS), SCORE_NUMBERS
    ),
    **dict.fromkeys(
        ("v2_daux_bounds", "v2_daux_sums"),
        Parameters((*_BACKWARD, AUX_BOUNDS, AUX_SUMS), _BACKWARD_STRIDES, (*_SIZES, *_OF_AUX), SCORE_NUMBERS),
    ),
    **dict.fromkeys(("daux_start", "daux_round"), Parameters((AUX_BOUNDS, AUX_SUMS), sizes=_OF_AUX)),
    **HEAD_SUMS,
    "backward_preprocess": Parameters(_words("do o lse dlse lse_delta turns"), **_OF_ROWS),
    "mma_dkdv": _tensor_backward(("dk", "dv"), _with_bits(_OF_SCORES, MASK_BITS_OF_KEYS)),
    "mma_one_key_tile": _with_rows(
        _tensor_backward(("dq", "dk", "dv"), _with_bits(_OF_SCORES, MASK_BITS_OF_KEYS)), _words("o lse dlse")
    ),
    "mma_dq": _tensor_backward(("dq",), _with_bits(_OF_SCORES)),
    "mma_dbias": _with_arrays(_tensor_backward(("dbias",), _with_bits(_OF_SCORES), *_OF_DBIAS), "dbias_sums"),
    "dbias_sum": Parameters(("dbias_sums", "dbias"), ("dbias",), _OF_DBIAS),
    **dict.fromkeys(
        ("mma_daux_bounds", "mma_daux_sums"),
        _with_arrays(_tensor_backward((), _with_bits(_OF_SCORES), *_OF_AUX), AUX_BOUNDS, AUX_SUMS),
    ),
    "mma_dkdv_wide": _wide_backward(("dk", "dv"), MASK_BITS_OF_KEYS),
    "mma_dq_wide": _wide_backward(("dq",)),
    **dict.fromkeys(("mma_wide_fused", "mma_wide_carried"), _with_arrays(_wide_backward(("dq", "dk", "dv")), "turns")),
    "mma_dq_finish": _wide_backward(("dq",)),
    "wgmma_dkdv": _with_arrays(
        _tensor_backward(("dk", "dv"), _with_bits(_OF_SCORES, MASK_BITS_OF_KEYS)), "dk_sums", "dv_sums"
    ),
    "wgmma_dq": _tensor_backward(("dq",), _with_bits(_OF_SCORES)),
    "wgmma_dkdv_float32": _wide_backward(("dk", "dv"), MASK_BITS_OF_KEYS),
    "wgmma_dq_float32": _wide_backward(("dq",)),
    "wgmma_dkdv_paired": _wide_backward(("dk", "dv"), MASK_BITS_OF_KEYS),
    "wgmma_dq_paired": _wide_backward(("dq",)),
    "wgmma_fused": _with_arrays(
        _tensor_backward(("dq", "dk", "dv"), _TENSOR_OPTIONS, "heads_abreast"), "turns", "dq_sums", "dk_sums", "dv_sums"
    ),
    "wgmma_add_parts": _with_arrays(
        _tensor_backward(("dk", "dv"), _with_bits(_OF_SCORES, MASK_BITS_OF_KEYS)), "dk_sums", "dv_sums"
    ),
    "wgmma_round": _with_arrays(_tensor_backward(("dq",), _TENSOR_OPTIONS), "dq_sums"),
    **dict.fromkeys(("safe", "online", "blocked"), Parameters(("x", "y"), ("x", "y"), ("rows", "n"))),
}
# How many numbers a stride has, if not the usual four; 0: a plain number.
STRIDES = dict(x=2, y=2) | dict.fromkeys(_STATES, 3) | {name: rank if rank > 1 else 0 for name, rank in RANKS.items()}
SIZES = dict(dbias_shape=4)  # likewise


@functools.cache
def parameters(
    kernel: str, aux: int = 0, seeded: bool = False, states: str = "", daux: tuple[int, ...] = ()
) -> Parameters:
    """PARAMETERS of a kernel that computes scores, with the states of tiles, what a seed needs, and `aux` arrays for
    functions after the others. daux: the indices of those whose gradients daux_round writes."""
    own = PARAMETERS[kernel]
    if kernel == "daux_round":
        return own._replace(arrays=(*own.arrays, *map(daux_name, daux)))
    if not own.score and kernel not in _STATES:
        return own
    counters = tuple(name for name in own.arrays if name == COUNTERS)
    arrays = tuple(name for name in own.arrays if name != COUNTERS)
    seeded = seeded and bool(own.score)
    of_tiles = (states,) if states else ()
    return Parameters(
        (*arrays, *of_tiles, *(SEED,) * seeded, *aux_names(aux), *counters),
        (*own.strides, *of_tiles, *aux_names(aux)),
        (*own.sizes, *(DROPPED,) * seeded),
        (*own.score, *(KEPT_COUNT,) * seeded),
    )


def parameters_of(config: Any) -> Parameters:
    """Parameters of the kernel that is compiled for `config`."""
    return parameters(config.kernel, len(config.aux), config.seeded, config.tile_states, config.wanted_aux)


def aux_names(count: int) -> tuple[str, ...]:
    return tuple(f"aux{number}" for number in range(count))


def aux_sizes(ndim: int) -> int:
    """How many numbers describe the elements of an aux array: its shape, then its strides; at least two."""
    return 2 * max(ndim, 1)


@functools.cache
def tuple_class(kind: str, fields: tuple[str, ...]) -> Any:
    """The NamedTuple that a kernel takes as its parameter `kind`. daux[0] is called daux0 in it."""
    return namedtuple(kind, [name.replace("[", "").replace("]", "") for name in fields])  # type: ignore[misc]


class Values(NamedTuple):
    """A kernel's arguments after its pointers: (kind, fields, values) for each of its NamedTuples that has fields."""

    kinds: tuple[tuple[str, tuple[str, ...], tuple[Any, ...]], ...]

    @staticmethod
    def of(kernel: str, aux: int = 0, seeded: bool = False, states: str = "", **values: dict[str, Any]) -> "Values":
        """values: for each of strides, sizes and score, a value for each field."""
        taken = parameters(kernel, aux, seeded, states)
        kinds = [(kind, names) for kind in ("strides", "sizes", "score") if (names := getattr(taken, kind))]
        return Values(tuple([(kind, names, tuple([values[kind][name] for name in names])) for kind, names in kinds]))

    @property
    def tuples(self) -> tuple[Any, ...]:
        """As the kernel's NamedTuples. A launch needs only the numbers, so it creates no classes."""
        return tuple(tuple_class(kind, names)(*values) for kind, names, values in self.kinds)

    @property
    def flat(self) -> list[Any]:
        """All numbers, in the order in which the compiled kernel takes them."""
        found: list[Any] = []
        for value in (value for _, _, values in self.kinds for value in values):
            found.extend(value) if isinstance(value, tuple) else found.append(value)
        return found


def types(config: Any) -> list[tuple[Any, list[Any]]]:
    """For each of a kernel's tuples its class and its members' types: an element type for a pointer; "int64",
    "float32", "float64", or ("int64", n) for a tuple of n."""

    def numbers(names: tuple[str, ...], lengths: dict[str, int], usual: int) -> list[Any]:
        counts = [lengths.get(name, usual) for name in names]
        return [("int64", count) if count else "int64" for count in counts]

    p = parameters_of(config)
    of_aux = {name: aux_sizes(ndim) for name, (_, ndim) in zip(aux_names(len(config.aux)), config.aux, strict=True)}
    members = dict(
        arrays=[element_type(config, name) for name in p.arrays],
        strides=numbers(p.strides, STRIDES | of_aux, 4),
        sizes=numbers(p.sizes, SIZES | dict(aux_begins=len(config.wanted_aux) + 1), 0),
        score=[config.compute_dtype] * len(p.score),
    )
    return [(tuple_class(kind, getattr(p, kind)), found) for kind, found in members.items() if found]


def element_type(config: Any, name: str) -> str:
    """The element type of a pointer; masks are bytes."""
    if name in (*_BITS, *_STATES, COUNTERS, "turns", AUX_BOUNDS):
        return "uint32"
    if name == AUX_SUMS:
        return "int64"
    if name in map(daux_name, config.wanted_aux):
        return config.given[list(map(daux_name, config.wanted_aux)).index(name)]
    if name == SEED:
        return SEED
    if name in aux_names(len(config.aux)):
        dtype = config.aux[int(name.removeprefix("aux"))][0]
        return "uint8" if dtype == "bool" else dtype
    if name in ("lse", "dlse", *FORWARD_WORKSPACE, *BACKWARD_WORKSPACE):
        return config.compute_dtype
    option = GRADIENT_OF.get(name, name)
    if option in BY_NAME:
        given = config.dtype_of(option) or BY_NAME[option].dtypes[0]
        return "uint8" if given == "bool" else given
    return config.dtype


@functools.lru_cache(maxsize=4096)
def forward_values(kernel: str, problem: Problem, states: str = "", tile: StatesTile | None = None) -> Values:
    """states, tile: a Config's tile_states and states_tile, if it has them."""
    return Values.of(kernel, len(problem.aux), problem.seeded, states, **numbers_of(problem, tile if states else None))


MASK_PIECE, MASK_ENDS = 16, 4  # rows of a piece, and the words before them (kernels/score/mask_bits.py)


def mask_bits_layout(problem: Problem, of_keys: bool = False) -> tuple[int, tuple[int, int, int, int]]:
    """-> (number of pieces that mask_bits writes, the strides by which they are read: batch, head, piece, row), in
    words."""
    p, mask = problem, problem.array("mask")
    if mask is None or p.batch == 0:  # an empty batch has an empty mask
        return 0, (0, 0, 0, 0)
    rows, columns, by_row = p.seqlen_q, p.seqlen_k, mask.strides[2]
    if of_keys:
        rows, columns, by_row = columns, rows, mask.strides[3]
    row_words = -(-columns // 128) * 4
    pieces = -(-rows // MASK_PIECE) if by_row or not rows else 1  # without rows there is nothing to read
    piece = MASK_PIECE * row_words + MASK_ENDS
    heads = p.heads if mask.strides[1] else 1
    batch = p.batch if mask.strides[0] else 1
    apart = (heads * pieces * piece, pieces * piece, piece)
    varies = (*mask.strides[:2], by_row)
    by_batch, by_head, by_piece = (words if stride else 0 for words, stride in zip(apart, varies, strict=True))
    return batch * heads * pieces, (by_batch, by_head, by_piece, row_words)


def mask_bits_words(problem: Problem, of_keys: bool = False) -> int:
    """Number of words that mask_bits writes."""
    pieces, (*_, row_words) = mask_bits_layout(problem, of_keys)
    return pieces * (MASK_PIECE * row_words + MASK_ENDS)


def numbers_of(problem: Problem, tile: StatesTile | None) -> dict[str, dict[str, Any]]:
    p = problem
    strides = {name: getattr(p, f"{name}_strides") for name in ("q", "k", "v", "o")}
    for option in ARRAYS:
        array, count = p.array(option.name), STRIDES.get(option.name, 4)
        given = (0,) * (count or 1) if array is None else array.strides
        strides[option.name] = given if count else given[0]
    strides |= {MASK_BITS: mask_bits_layout(p)[1], MASK_BITS_OF_KEYS: mask_bits_layout(p, of_keys=True)[1]}
    if tile is not None:
        from . import tile_states  # loads what reads functions

        strides |= dict.fromkeys(_STATES, tile_states.strides(p, tile))
    for name, aux in zip(aux_names(len(p.aux)), p.aux, strict=True):
        strides[name] = (*aux.shape, *aux.strides) if aux.shape else (1, 0)
    sizes = {name: getattr(p, name) for name in _SIZES}
    sizes |= {side: UNBOUNDED if sizes[side] is None else sizes[side] for side in ("left", "right")}
    number = np.float64 if p.compute_dtype == "float64" else np.float32
    score = {name: number(p.number(name) or 0.0) for name in SCORE_NUMBERS}
    sizes[DROPPED] = dropped_steps(p.number(SEEDED) or 0.0)
    score[KEPT_COUNT] = number(kept_count(sizes[DROPPED]))
    return dict(strides=strides, sizes=sizes, score=score)


def forward_arrays(problem: Problem) -> tuple[str, ...]:
    """The names of all arrays of a forward: a launch's operands in order, then its workspace."""
    return Operands._fields + behind(problem) + FORWARD_WORKSPACE


def behind(problem: Problem) -> tuple[str, ...]:
    return (*(SEED,) * problem.seeded, *aux_names(len(problem.aux)))


def positions(config: Any, names: tuple[str, ...]) -> tuple[int, ...]:
    """The indices of a kernel's arrays in `names`; the launch itself has its counters."""
    return tuple(names.index(name) for name in parameters_of(config).arrays if name != COUNTERS)


def tensor_maps(config: Any, problem: Problem) -> tuple[tuple[int, TensorMap], ...]:
    """(operand, its tensor map) for each of the kernel's TMA descriptors, in the kernel's order."""
    if not config.tensor_maps:
        return ()
    p, group = problem, config.group_size
    q_batch, q_head, q_row = (2 * stride for stride in p.q_strides[:3])
    # The heads of a group are a dimension of their own, so that a box has some queries with all of them.
    q_shape = (p.head_dim, group, p.seqlen_q, p.heads // group, p.batch)
    q = TensorMap(p.dtype, q_shape, (q_head, q_row, group * q_head, q_batch), (64, group, config.queries, 1, 1))
    maps = [(0, q)]
    for operand, strides, columns in ((1, p.k_strides, p.head_dim), (2, p.v_strides, p.head_dim_v)):
        batch, head, row = (2 * stride for stride in strides[:3])
        # Without keys the kernel loads a tile past the end, which is zeros. But a map cannot have an extent of 0, and
        # an empty array has no address: one element of q replaces it.
        shape = (columns, p.seqlen_k, p.heads_kv, p.batch) if p.seqlen_k else (1, 1, 1, 1)
        box = (64, config.tile_n, 1, 1)
        maps.append((operand if p.seqlen_k else 0, TensorMap(p.dtype, shape, (row, head, batch), box)))
    if config.bias_boxes:
        maps.append(bias_map(config, p, 64, 0))
    return tuple(maps)


def bias_map(config: Any, problem: Problem, queries: int, present: int) -> tuple[int, TensorMap]:
    """The map of a bias in boxes of `queries` queries. A broadcast bias has one batch entry, or one head. present: an
    array that is not empty."""
    p, bias = problem, problem.array("bias")
    assert bias is not None
    by_batch, by_head, by_row, _ = bias.strides
    heads, batch = p.heads if by_head else 1, p.batch if by_batch else 1
    strides = (2 * by_row, 2 * by_head, 2 * by_batch)
    empty = 0 in (p.seqlen_k, p.seqlen_q)
    shape = (1, 1, 1, 1) if empty else (p.seqlen_k, p.seqlen_q, heads, batch)
    box = (config.bias_panel, queries, 1, 1)
    operand = present if empty else parameters_of(config).arrays.index("bias")
    return operand, TensorMap(bias.dtype, shape, strides, box, swizzle_bytes=2 * config.bias_panel)
