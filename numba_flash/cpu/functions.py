"""The caller's own functions on the CPU: each is compiled by itself, for one panel of scores (compiled).

The kernels call a function by its address, which is in the plan. So a new function compiles only itself, and the
kernels do not change. LLVM puts the rows of a panel along its vectors, or for a single row the keys.
"""

# mypy: ignore-errors

import ctypes
import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ..arrays import host_pointer
from ..arrays.layout import numpy_dtype
from ..functions import compiled
from ..functions.failures import explained
from ..functions.function import Function
from ..functions.outside import OutsideRead, Read
from ..functions.remembered import note_compiled
from ..problem.backward import BackwardProblem
from ..problem.forward import Problem
from ..problem.options import BY_NAME
from ..problem.strides import contiguous_strides
from . import plan as slot
from .backward_plan import PARTS
from .cache import c_function
from .function_access import (
    FLAG,
    as_they_are,
    either,
    in_halves,
    in_whole_vectors,
    inner,
    is_raised,
    lower,
    new_flag,
    new_flags,
    raise_too,
    read_place,
    read_score,
    write_flags,
    write_score,
)
from .vectors.build import lanes, load, store

# s, slopes (0: unwanted), keys, the first key, address of PLACES, b, rows of a panel or 1, address of AUX
SIGNATURE = "void(int64, int64, int64, int64, int64, int64, int64, int64)"
# PLACES (int64): the position of each row of a panel, then the head of each, then numbers of the panel: the position
# of row 0 of q, whether a read was outside an array, and work space for panel.find_outside.
# AUX (int64): for each array its address, its shape and its strides in elements; for its gradient the offset among a
# part's sums and the strides, in bytes. Then a report of reads outside an array: how many there were, and for the first
# one which function it was, b, h, q_pos, k_pos, the row of q, and the bits of the score. At the end the address of the
# part's sums.
AUX_ELEMENTS = dict(bool="uint8", float16="uint16", bfloat16="uint16")  # the types in memory
REPORT = 8
MOST_FUNCTIONS = 200


# s and dS after score_mod, keys, the first key, address of PLACES, b, rows, addresses of AUX, READS and a part's sums
SIGNATURE_OF_AUX = "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)"


@functools.lru_cache(maxsize=MOST_FUNCTIONS)
def make_gradient(function: Function, base_name: str, aux: tuple, wanted: tuple, capped: bool, narrow: bool):
    """A function that adds up, for a panel, the gradients of the elements of the arrays `wanted` that score_mod reads.

    A score_mod may read any number of numbers, in loops too. So it is called once for each: in that call this number
    has the derivative 1. capped: dS is that after the cap of scores, which follows READS as a float64.
    """
    key = repr(("gradient of aux", function.key, base_name, aux, wanted, capped, narrow))
    body = _gradient_panel(function, base_name, aux, wanted, capped, narrow)
    return _compiled("score_mod", function, body, SIGNATURE_OF_AUX, key)


def _compiled(option: str, function: Function, body: Any, signature: str, key: str) -> Any:
    try:
        made = c_function(body, signature, key=hashlib.sha256(key.encode()).hexdigest())
    except Exception as error:
        found = explained(error, {option: function})
        if found is None:
            raise
        raise found from error
    if not made.cache_hits:  # it was not in the disk cache
        note_compiled({option: function})
    return made


def _gradient_panel(function, base_name, aux, wanted, capped, narrow):
    call = inner(function.build(compiled.stand_ins(base_name), inner))
    number, whole = compiled.as_number("real", base_name), compiled.as_number("whole", base_name, narrow)
    position = compiled.as_position(base_name, narrow)
    result, slope = (make("score_mod", base_name, function) for make in (compiled.result, compiled.derivative))
    tables, zero, none = _tables(aux, base_name, narrow, wanted), np.dtype(base_name).type(0), np.int64(0)
    behind, row_of = 8 * compiled.READS, _row_of(function, whole)

    def gradient_of_aux(s, ds, keys, key0, places, b, rows, aux, state, sums):
        arrays = tables(aux, state, sums, new_flag())
        for at in range(keys * lanes(zero)):
            key, r = at // lanes(zero), at % lanes(zero)
            if r >= rows or load(ds, at, zero) == 0:
                continue
            q_pos, head = load(places, r, none), load(places, lanes(zero) + r, none)
            where = (whole(b), whole(head), position(q_pos), whole(key0 + key))
            row, read = row_of(q_pos, places, lanes(zero)), none
            while True:
                store(state, 0, none)
                store(state, 1, read)
                store(state, 2, none)
                y = call(*((*row, number(load(s, at, zero)), *where, *arrays)))
                place = load(state, 2, none)
                if place == 0:  # it reads fewer numbers
                    break
                terms = np.float64(slope(y))
                if terms != 0:
                    if capped:
                        t = math.tanh(np.float64(result(y)) / load(state + behind, 0, 0.0))
                        terms *= 1 - t * t
                    store(place, 0, load(place, 0, 0.0) + np.float64(load(ds, at, zero)) * terms)
                read += 1

    return gradient_of_aux


@functools.lru_cache(maxsize=MOST_FUNCTIONS)
def make(option: str, function: Function, base_name: str, aux: tuple, derivative: bool, narrow: bool):
    """The compiled function; the plan has its `address`.

    aux: (dtype, dimensions) of each array. derivative: it also writes slopes. narrow: all positions are in 0 to NARROW.
    """
    key = repr((option, function.key, base_name, aux, derivative, narrow))
    return _compiled(option, function, _panel(option, function, base_name, aux, derivative, narrow), SIGNATURE, key)


def _panel(option, function, base_name, aux, derivative, narrow):
    call = inner(function.build(compiled.stand_ins(base_name), inner))
    number = compiled.as_number("dual" if derivative else "real", base_name)
    whole, position = compiled.as_number("whole", base_name, narrow), compiled.as_position(base_name, narrow)
    result, slope, truth = (
        compiled.result(option, base_name, function),
        compiled.derivative(option, base_name, function),
        compiled.truth_of(option, function),
    )
    tables, zero = _tables(aux, base_name, narrow), np.dtype(base_name).type(0)
    hidden, kept, read = type(zero)(-math.inf), *(in_halves() if narrow else (as_they_are, read_place))
    row_of = _row_of(function, whole)

    @inner
    def value_of(s, slopes, at, row, where, arrays, outside):
        x = read_score(s, at, zero)
        y = result(call(*((*row, number(x), *where, *arrays))))
        write_score(s, at, either(is_raised(outside), x, y))  # panel.find_outside calls it with x again

    @inner
    def both_of(s, slopes, at, row, where, arrays, outside):
        x = read_score(s, at, zero)
        y = call(*((*row, number(x), *where, *arrays)))
        write_score(s, at, either(is_raised(outside), x, result(y)))
        write_score(slopes, at, slope(y))

    @inner
    def mask_of(s, slopes, at, row, where, arrays, outside):
        write_score(s, at, either(truth(call(*(row + where + arrays))), read_score(s, at, zero), hidden))

    made = mask_of if option == "mask_mod" else both_of if derivative else value_of

    @inner
    def one(s, slopes, at, row, where, arrays, flags, lane):
        outside, ever = flags
        lower(outside)
        made(s, slopes, at, row, where, arrays, outside)
        raise_too(ever, lane, outside)

    @inner
    def of_row(own, r, b):
        return whole(b), whole(read(own, lanes(zero) + r)), position(read(own, r))

    def panel(s, slopes, keys, key0, places, b, width, aux):
        in_whole_vectors()
        flags = new_flag(), new_flags(zero)
        arrays = tables(aux, 0, 0, flags[0])
        if width == 1:
            q_pos, head = read_place(places, 0), read_place(places, 1)
            row = row_of(q_pos, places, 1)
            for key in range(keys):
                where = (whole(b), whole(head), position(q_pos), whole(key0 + key))
                one(s, slopes, key, row, where, arrays, flags, 0)
        else:
            own = kept(places, zero)
            # Two keys at a time. LLVM splits a loop over rows that has little code, and does not vectorise the rest.
            # With two keys the loop has enough code.
            for key in range(0, keys - 1, 2):
                for r in range(lanes(zero)):
                    where, at = of_row(own, r, b), key * lanes(zero) + r
                    row = row_of(read(own, r), places, lanes(zero))
                    one(s, slopes, at, row, where + (whole(key0 + key),), arrays, flags, r)
                    one(s, slopes, at + lanes(zero), row, where + (whole(key0 + key + 1),), arrays, flags, r)
            for key in range(keys // 2 * 2, keys):
                for r in range(lanes(zero)):
                    where, row = of_row(own, r, b), row_of(read(own, r), places, lanes(zero))
                    one(s, slopes, key * lanes(zero) + r, row, where + (whole(key0 + key),), arrays, flags, r)

        write_flags(places, 2 * width + 1, flags[1], zero)

    panel.__name__ = option
    return panel


def _row_of(function, whole):
    """-> row(q_pos, places, width): the first argument, the row of q, of functions that ask for it; otherwise ()."""

    @inner
    def no_row(q_pos, places, width):
        return ()

    @inner
    def row(q_pos, places, width):
        return (whole(q_pos - read_place(places, 2 * width)),)

    return row if function.asks_row else no_row


def _tables(aux: tuple, base_name: str, narrow: bool, wanted: tuple = ()):
    """-> tables(address of AUX, state, sums, outside): a tuple of all aux arrays. wanted: the indices of those that are
    recorded; outside: the flag that a read outside raises."""

    @inner
    def tables(address, state, sums, outside):
        return ()

    at = 0
    for number, (dtype, ndim) in enumerate(aux):
        tables = _one_more(tables, _table(dtype, ndim, base_name, number in wanted, narrow), at)
        at += 2 + 3 * ndim
    return tables


def _one_more(before, table, at):
    offset = 8 * at

    @inner
    def tables(address, state, sums, outside):
        return before(address, state, sums, outside) + (table(address + offset, state, sums, outside),)

    return tables


def _table(dtype: str, ndim: int, base_name: str, recorded: bool, narrow: bool):
    element = getattr(types, AUX_ELEMENTS.get(dtype, dtype))
    narrow = narrow and not recorded
    t = compiled.Table(dtype, element, ndim, compiled.BASES[base_name], recorded, narrow, checked=True)

    @intrinsic
    def table(typingctx, address, state, sums, outside):
        def codegen(context, b, sig, args):
            numbers = b.inttoptr(args[0], ir.IntType(64).as_pointer())
            loads = [b.load(b.gep(numbers, [ir.Constant(ir.IntType(64), n)])) for n in range(2 + 3 * ndim)]
            for found in loads:
                found.set_metadata("noalias", compiled.scope_of_scores(b.module))
            first, *sizes = loads
            made = cgutils.create_struct_proxy(t)(context, b)
            made.data = b.inttoptr(first, context.get_value_type(types.CPointer(element)))
            made.outside = args[3]
            made.shape, made.strides = (
                context.make_tuple(b, types.UniTuple(types.int64, ndim), part)
                for part in (sizes[:ndim], sizes[ndim : 2 * ndim])
            )
            if recorded:
                made.terms = b.add(args[2], sizes[2 * ndim])
                made.state = b.inttoptr(args[1], ir.IntType(64).as_pointer())
                made.term_strides = context.make_tuple(b, types.UniTuple(types.int64, ndim), sizes[2 * ndim + 1 :])
            return made._getvalue()

        return t(types.int64, types.int64, types.int64, FLAG), codegen

    return table


class OwnFunctions(NamedTuple):
    """A problem's compiled functions, and the numbers of the arrays that they read."""

    of: tuple[tuple[int, Any], ...]  # (the slot of the plan that holds the address, the function)
    aux_numbers: np.ndarray  # AUX without addresses
    places: tuple[int, ...]  # indices in AUX of the arrays' addresses
    empty: tuple[bool, ...]  # arrays without elements, which may have no address

    def go_into(self, plan: np.ndarray) -> None:
        for at, function in self.of:
            plan[at] = function.address
        plan[slot.OUTSIDE_AT] = len(self.aux_numbers) - 1 - REPORT

    def check(self, aux: np.ndarray) -> None:
        """Raises OutsideRead if a call that has AUX reported one."""
        if self.places:
            count, *found, score = aux[-1 - REPORT : -1]
            if count:
                option, *places = map(int, found)
                raise OutsideRead(Read(list(slot.OWN)[option], *places, float(score.view(np.float64))))

    def aux(self, pointers: Sequence[int]) -> np.ndarray:
        """AUX of a call."""
        if not self.places:
            return self.aux_numbers
        numbers = self.aux_numbers.copy()
        for at, pointer, empty in zip(self.places, pointers, self.empty, strict=True):
            numbers[at] = host_pointer(NOTHING) if empty else pointer
        return numbers


NOTHING = np.zeros(1, np.int64)
NO_FUNCTIONS = OwnFunctions((), np.zeros(1 + REPORT, np.int64), (), ())


def own_functions(problem: Problem, derivative: bool) -> OwnFunctions:
    """The compiled functions of a problem. derivative: score_mod also writes its slopes."""
    if not problem.functions:
        return NO_FUNCTIONS
    aux = tuple((array.dtype, len(array.shape)) for array in problem.aux)
    dtype, narrow = problem.compute_dtype, problem.narrow
    made = tuple(
        (slot.OWN[name], make(name, function, dtype, aux, derivative and name == "score_mod", narrow))
        for name, function in problem.functions
    )
    numbers: list[int] = []
    places, terms = [], 0
    for array in problem.aux:
        places.append(len(numbers))
        numbers += [0, *array.shape, *(array.strides if 0 not in array.shape else (0,) * len(array.shape))]
        by = (0,) * len(array.shape) if 0 in array.shape else contiguous_strides(array.shape)
        numbers += [terms, *(8 * stride for stride in by)]
        terms += 8 * math.prod(array.shape)
    empty = tuple(0 in array.shape for array in problem.aux)
    return OwnFunctions(made, np.array([*numbers, *[0] * REPORT, 0], np.int64), tuple(places), empty)


class OfAux(NamedTuple):
    """Gradients of the arrays that score_mod reads."""

    function: Any  # from make_gradient; None without a score_mod
    elements: int  # number of elements of all arrays
    wanted: tuple[tuple[int, int, int, str], ...]  # per gradient: array number, start and length of its sums, dtype

    @staticmethod
    def of(problem: BackwardProblem) -> "OfAux":
        p = problem.forward
        numbers = tuple(n for n in problem.wanted_aux if 0 not in p.aux[n].shape)  # others have no gradient to write
        sizes = [math.prod(array.shape) for array in p.aux]
        function, aux = p.function("score_mod"), tuple((array.dtype, len(array.shape)) for array in p.aux)
        capped = any(BY_NAME[name].derivative for name, _ in p.numbers)
        made = function and make_gradient(function, p.compute_dtype, aux, numbers, capped, p.narrow)
        return OfAux(made, sum(sizes), tuple((n, sum(sizes[:n]), sizes[n], p.aux[n].dtype) for n in numbers))

    def no_sums(self) -> np.ndarray:
        """Zeros (parts, elements), to which a call adds its sums."""
        return np.zeros((PARTS, self.elements))

    def write(self, sums: np.ndarray, addresses: Sequence[int]) -> None:
        """Adds up the parts and writes the gradients. sums: (parts, elements). addresses: by the indices of arrays."""
        total = sums.sum(axis=0)
        for number, begin, size, dtype in self.wanted:
            kind = numpy_dtype(dtype)
            if size:
                memory = (ctypes.c_char * (size * kind.itemsize)).from_address(addresses[number])
                with np.errstate(over="ignore"):  # beyond float16's range it becomes inf, as in every kernel
                    np.frombuffer(memory, kind)[...] = total[begin : begin + size].astype(kind)
