"""Whole numbers of a caller's functions, compiled: between which they lie, and that int32 changes none of them."""

import itertools
import operator

import pytest
from helpers import compiler
from llvmlite import ir
from numba import int64, njit
from numba.core import types
from numba.core.extending import intrinsic

from numba_flash.functions import NARROW, compiled
from numba_flash.functions.compiled import within
from numba_flash.functions.compiled.code import Code
from numba_flash.functions.compiled.number_types import ANY, BASES, Number
from numba_flash.functions.function import Function

pytestmark = compiler.needed
RANGES = [pair for pair in itertools.product(range(-5, 6), repeat=2) if pair[0] <= pair[1]]
fast = njit(error_model="numpy")
whole = compiled.as_number("whole", "float32", narrow=True)
query, key = compiled.as_positions("float32", narrow=True)


@intrinsic
def found_in(typingctx, x):
    """-> (a Number's value, whether it is an int32)."""

    def codegen(context, builder, sig, args):
        value = Code(context, builder, x.base).whole(x, args[0])
        return context.make_tuple(builder, sig.return_type, [value, ir.Constant(ir.IntType(1), x.narrow)])

    return types.Tuple((types.int64, types.boolean))(x), codegen


def built(function):
    return fast(Function.of("mask_mod", function).build(compiled.stand_ins("float32"), fast))


@pytest.mark.parametrize("name", within.BINARY)
def test_a_result_lies_where_it_is_said_to(name):
    """Of all numbers of small ranges, none left out."""
    operation = getattr(operator, name)
    for a, b in itertools.product(RANGES, repeat=2):
        low, high = within.of_binary(name, a, b)
        numbers = itertools.product(*(range(x[0], x[1] + 1) for x in (a, b)))
        fine = [(x, y) for x, y in numbers if not (name in ("floordiv", "mod") and y == 0)]
        fine = [(x, y) for x, y in fine if not (name in ("lshift", "rshift") and y < 0)]
        assert all(low <= operation(x, y) <= high for x, y in fine), f"{a} {name} {b}"


@pytest.mark.parametrize("key", within.UNARY)
def test_a_result_of_one_number_lies_where_it_is_said_to(key):
    for a in RANGES:
        low, high = within.of_unary(key, a)
        assert all(low <= key(x) <= high for x in range(a[0], a[1] + 1))


def test_nothing_is_known_of_what_may_not_fit_into_an_int64():
    assert within.of_binary("mul", (0, 2**40), (0, 2**40)) == ANY
    assert within.of_binary("sub", (-(2**63), 0), (0, 1)) == ANY
    assert within.of_unary(operator.neg, ANY) == within.of_unary(abs, ANY) == ANY


def test_a_variable_that_grows_in_a_loop_soon_has_a_type_that_holds_it():
    t, seen = Number("whole", BASES["float32"], (0, 8)), 0
    while t.within != ANY:
        grown = Number("whole", t.base, within.of_binary("add", t.within, (0, 1)))
        t, seen = t.unify(None, grown), seen + 1
        assert seen < 8
    assert not t.narrow and t.unify(None, types.float32).kind == "real"


@pytest.mark.parametrize(
    ("function", "narrow"),
    [
        (lambda b, h, i, j: i - j, True),
        (lambda b, h, i, j: i * j, False),  # 2^56
        (lambda b, h, i, j: (i - j) * 9, False),  # above 2^31
        (lambda b, h, i, j: i << 8, False),
        (lambda b, h, i, j: abs(i - j) % 7 + (i >= j), True),
        (lambda b, h, i, j: min(max(i * j, -3), 3), True),
        (lambda b, h, i, j: -i - ~j, True),
    ],
    ids=["difference", "product", "nine times", "shifted", "remainder", "between", "negative"],
)
@pytest.mark.parametrize("place", [(0, 0, 3, 11), (0, 0, NARROW, 0), (0, 0, 0, NARROW), (1, 2, NARROW, NARROW)])
def test_it_is_what_python_says_whatever_its_type(function, narrow, place):
    made = built(function)

    @njit((int64,) * 4, error_model="numpy")
    def call(b, h, i, j):
        return found_in(made(whole(b), whole(h), whole(i), whole(j)))

    assert call(*place) == (function(*place), narrow)


@pytest.mark.parametrize(
    "function",
    [lambda b, h, i, j: i - j, lambda b, h, i, j: j - i, lambda b, h, i, j: h + (i < j) + 2 * (j < i) + 4 * (i >= j),
     lambda b, h, i, j: abs(j - i) * (i != j)],
    ids=["behind", "ahead", "compared", "apart"],
)  # fmt: skip
@pytest.mark.parametrize("ahead", [-3, 0, 5])
def test_what_lies_between_positions_is_what_the_kernel_says(function, ahead):
    """Not what both positions say: these are 1000 apart."""
    made = built(function)

    @njit((int64,) * 2, error_model="numpy")
    def call(i, ahead):
        return found_in(made(whole(0), whole(0), query(i, ahead), key(i + 1000)))[0]

    assert call(7, ahead) == function(0, 0, ahead, 0)


def test_a_position_that_something_was_done_with_is_a_number_as_others():
    made = built(lambda b, h, i, j: (i + 1) - j + (max(i, 0) - j))

    @njit((int64,) * 2, error_model="numpy")
    def call(i, j):
        return found_in(made(whole(0), whole(0), query(i, 555), key(j)))[0]

    assert call(7, 4) == 4 + 3


@pytest.mark.parametrize("largest", [2**20, 2**40])
def test_numbers_of_a_tuple_lie_between_the_least_and_the_largest_of_it(largest):
    steps = ((1, 2), (10, -3), (100, largest))

    def function(b, h, i, j):
        found = 0 * i
        for start, number in steps:
            found = number if i >= start else found
        return found + 1

    made = built(function)

    @njit((int64,), error_model="numpy")
    def call(i):
        return found_in(made(whole(0), whole(0), whole(i), whole(0)))

    fits = largest < 2**31
    assert [call(i) for i in (0, 5, 10, 2000)] == [(1, fits), (3, fits), (-2, fits), (largest + 1, fits)]
