"""The arguments of a kernel: the types of its tuples' members for compiling, and their values for launching."""

import functools
import itertools
import math
from collections import namedtuple
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..problem import options
from ..problem.forward import Problem
from . import parameters as abi

if TYPE_CHECKING:
    from ..problem.backward import BackwardProblem

    AnyProblem = Problem | BackwardProblem


@functools.cache
def tuple_class(kind: str, fields: tuple[str, ...]) -> Any:
    """The NamedTuple that a kernel takes as its parameter `kind`. daux[0] is called daux0 in it."""
    return namedtuple(kind, [name.replace("[", "").replace("]", "") for name in fields])  # type: ignore[misc]


def types(config: Any) -> list[tuple[Any, list[Any]]]:
    """For each of a kernel's tuples its class and its members' types: an element type for a pointer; "int64",
    "float32", "float64", or ("int64", n) for a tuple of n."""

    def numbers(names: tuple[str, ...], lengths: dict[str, int], usual: int) -> list[Any]:
        counts = [lengths.get(name, usual) for name in names]
        return [("int64", count) if count else "int64" for count in counts]

    p = config.parameters
    of_aux = {
        name: 2 * max(ndim, 1) for name, (_, ndim) in zip(abi.aux_names(len(config.aux)), config.aux, strict=True)
    }
    members = dict(
        arrays=[element_type(config, name) for name in p.arrays],
        strides=numbers(p.strides, abi.STRIDES | of_aux, 4),
        sizes=numbers(p.sizes, dict(dbias_shape=4, bias_shape=4, aux_begins=len(config.wanted_aux) + 1), 0),
        score=[config.compute_dtype] * len(p.score),
    )
    return [(tuple_class(kind, getattr(p, kind)), found) for kind, found in members.items() if found]


def element_type(config: Any, name: str) -> str:
    """The element type of a pointer; masks are bytes."""
    if name in (abi.MASK_BITS, abi.MASK_BITS_OF_KEYS, *abi.STATES, abi.COUNTERS, "turns"):
        return "uint32"
    if name == abi.AUX_SUMS:
        return "int64"
    if name == abi.BIAS_ROWS:
        return config.dtype
    if name in map(options.daux_name, config.wanted_aux):
        return config.given[list(map(options.daux_name, config.wanted_aux)).index(name)]
    if name == abi.SEED:
        return abi.SEED
    if name in abi.aux_names(len(config.aux)):
        dtype = config.aux[int(name.removeprefix("aux"))][0]
        return "uint8" if dtype == "bool" else dtype
    if name in ("lse", "dlse", *abi.FORWARD_WORKSPACE, *abi.BACKWARD_WORKSPACE):
        return config.compute_dtype
    option = options.GRADIENT_OF.get(name, name)
    if option in options.BY_NAME:
        given = config.dtype_of(option) or options.BY_NAME[option].dtypes[0]
        return "uint8" if given == "bool" else given
    return config.dtype


class Values(NamedTuple):
    """A kernel's arguments after its pointers: (kind, fields, values) for each of its NamedTuples that has fields."""

    kinds: tuple[tuple[str, tuple[str, ...], tuple[Any, ...]], ...]

    @staticmethod
    def of(config: Any, **values: dict[str, Any]) -> "Values":
        """values: for each of strides, sizes and score, a value for each field."""
        taken = config.parameters
        kinds = [(kind, names) for kind in ("strides", "sizes", "score") if (names := getattr(taken, kind))]
        return Values(tuple([(kind, names, tuple([values[kind][name] for name in names])) for kind, names in kinds]))

    @property
    def tuples(self) -> tuple[Any, ...]:
        """The kernel's NamedTuples. A launch needs only the numbers, so it creates no classes."""
        return tuple(tuple_class(kind, names)(*values) for kind, names, values in self.kinds)

    @property
    def flat(self) -> list[Any]:
        """All numbers, in the order in which the compiled kernel takes them."""
        found: list[Any] = []
        for value in (value for _, _, values in self.kinds for value in values):
            found.extend(value) if isinstance(value, tuple) else found.append(value)
        return found


def values_of(config: Any, problem: "AnyProblem") -> Values:
    """For a kernel of a forward or of a backward."""
    strides, sizes, score = _numbers(problem.forward, config.states_tile if config.tile_states else None)
    if problem.wanted is not None:
        strides = strides | dict(do=problem.do_strides, dlse=problem.dlse_strides)
        strides |= zip(options.GRADIENT_OF, problem.strides, strict=True)
        sizes = sizes | dict(
            dbias_shape=problem.dbias_shape, dbias_splits=problem.dbias_splits, **sizes_of_aux(problem)
        )
    return Values.of(config, strides=strides, sizes=sizes | config.own_sizes(problem), score=score)


@functools.lru_cache(maxsize=4096)
def _numbers(p: Problem, tile: abi.StatesTile | None) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """-> strides, sizes and numbers of the score. tile: what has a state, if the kernel reads states."""
    strides = {name: getattr(p, f"{name}_strides") for name in ("q", "k", "v", "o")}
    for option in options.ARRAYS:
        array, count = p.array(option.name), abi.STRIDES.get(option.name, 4)
        given = (0,) * (count or 1) if array is None else array.strides
        strides[option.name] = given if count else given[0]
    strides |= dict.fromkeys((abi.MASK_BITS, abi.MASK_BITS_OF_KEYS), (0, 0, 0, 0))
    if p.array("mask") is not None or p.function("mask_mod") is not None:
        from . import mask_bits

        strides |= {abi.MASK_BITS: mask_bits.layout(p)[1], abi.MASK_BITS_OF_KEYS: mask_bits.layout(p, of_keys=True)[1]}
    if tile is not None:
        from . import tile_states  # loads the reader of functions

        strides[tile.array] = tile_states.strides(p, tile)
    for name, aux in zip(abi.aux_names(len(p.aux)), p.aux, strict=True):
        strides[name] = (*aux.shape, *aux.strides) if aux.shape else (1, 0)
    sizes = {name: getattr(p, name) for name in abi.SIZES} | dict(zip(("left", "right"), p.sides, strict=True))
    sizes["total_q"], sizes["total_k"] = p.packed or (p.seqlen_q, p.seqlen_k)
    number = np.float64 if p.compute_dtype == "float64" else np.float32
    score = {name: number(p.number(name) or 0.0) for name in options.SCORE_NUMBERS}
    sizes[abi.DROPPED] = options.dropped_steps(p.number(options.SEEDED) or 0.0)
    score[abi.KEPT_COUNT] = number(options.kept_count(sizes[abi.DROPPED]))
    return strides, sizes, score


def sizes_of_aux(problem: "BackwardProblem") -> dict[str, Any]:
    """aux_begins: the index of each array's first element, and the number of elements."""
    p = problem.forward
    sizes = [math.prod(p.aux[number].shape) for number in problem.wanted_aux]
    return dict(aux_begins=tuple(itertools.accumulate(sizes, initial=0)))


def names_of(problem: "AnyProblem") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """-> (the names of a launch's operands in order, those of the workspace that follows them)."""
    p = problem.forward
    behind = (*(abi.SEED,) * p.seeded, *abi.aux_names(len(p.aux)))
    if problem.wanted is None:
        return options.Operands._fields + behind, abi.FORWARD_WORKSPACE
    daux = map(options.daux_name, range(len(p.aux) if problem.wanted_aux else 0))
    return (*options.GradientOperands._fields, *behind, *daux), abi.BACKWARD_WORKSPACE


def positions(config: Any, names: tuple[str, ...]) -> tuple[int, ...]:
    """The indices of a kernel's arrays in `names`; the launch itself has its counters."""
    return tuple(names.index(name) for name in config.parameters.arrays if name != abi.COUNTERS)
