"""A user's function as a value, and the rules by which it has a derivative, as Python and compiled."""

import functools
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
from helpers import compiler
from helpers.machines import A100, HOPPER, problem

from numba_flash.arrays import read
from numba_flash.functions import numbers, rules
from numba_flash.functions.function import Function
from numba_flash.gpu import assembler, compiled as gpu
from numba_flash.select import forward as select

# Where each function of math is asked: inside its domain, off its steps.
AT = dict(acosh=1.7, log=1.3, log2=1.3, log10=1.3, sqrt=1.3)
EXPRESSIONS = [f"math.{name}(s * {AT.get(name, 0.6)})" for name in rules.SLOPES]
EXPRESSIONS += [f"math.{name}(1.5 * s, 2 - s)" for name in rules.MATH_BINARY]
EXPRESSIONS += [f"math.{name}(s, {other})" for name in rules.MATH_BINARY for other in ("2", "0.75", "i")]
EXPRESSIONS += [f"s * math.{name}(2.6 * s)" for name in rules.TO_WHOLE[:3]]
EXPRESSIONS += [f"s if math.{name}(s) else -s" for name in rules.ASKING]
EXPRESSIONS += [f"{one} {sign} {two}" for sign in "+ - * / // % **".split()
                for one, two in (("s", "(s + 1)"), ("s", "i"), ("i", "s"), ("s", "2.5"), ("2", "s"))]  # fmt: skip
EXPRESSIONS += [f"s {sign} 0.25 * i" for sign in ("+", "-")]
EXPRESSIONS += [
    "-s", "+s", "abs(s - 2)", "s ** 2", "s ** 3", "s ** -2", "s ** 0", "s ** 1", "s ** 0.5", "s ** 5 / s",
    "min(s, 2)", "max(s, 2.0)", "min(s, s * s, 3)", "max(i, 2) * s", "min(i, j, 1) + s", "math.fabs(s - 2)",
    "s if s > 1 else 2", "s if s < i else s * s", "2 if s == i else s", "s * (s != 0)", "s * (not s)", "s if s else 1",
    "float(i) * s", "int(3.7 * s) * s", "round(2.5 * s) * s", "float(s) * bool(i)", "i / j * s", "i // j + s",
    "-i % 3 + s",
    "(i << 2 | j & 6 ^ 1) * s", "~i + s", "(i ** 2 - j) * s", "abs(j - i) * s", "1 / (i - i) * 0 + s if i < 0 else s",
    "s * 1.5 + i * 0.1", "math.pi * s", "math.exp(0.5) * s", "math.sqrt(i) + s",
    "s if i <= j and s >= 0.5 or s <= -1 else 0",
]  # fmt: skip
SOURCE = "\n".join(
    ["import math", "def each(s, b, h, i, j):"]
    + [f"    if b == {number}: return {text}" for number, text in enumerate(EXPRESSIONS)]
    + ["    return 0"]
)
EACH = {}
exec(SOURCE, EACH)
EACH = Function.of("score_mod", EACH["each"])
PLACE = (0, 7, 3)  # h, i and j


def by_python(number, s, base=np.float64):
    return numbers.score_of(EACH, base, s, (number, *PLACE, 0), (), True)


# The value beside Python's own, and the derivative beside the difference of values.
@pytest.mark.parametrize("number", range(len(EXPRESSIONS)), ids=EXPRESSIONS)
@pytest.mark.parametrize("s", [0.9, 1.3])
def test_values_and_derivatives(number, s):
    names = dict(math=math, s=s, h=PLACE[0], i=PLACE[1], j=PLACE[2])
    expected = float(eval(EXPRESSIONS[number], names))
    y = by_python(number, s)
    assert math.isclose(y.x, expected, rel_tol=1e-12, abs_tol=1e-12)
    step = 1e-6
    low, high = (by_python(number, s + x).x for x in (-step, step))
    # the third derivatives of all of these are below 1e3: step**2 of them, and a rounding of the values over the step
    slope = (high - low) / (2 * step)
    assert math.isclose(0 if y.d is None else y.d, slope, rel_tol=1e-7, abs_tol=1e-8 * (1 + abs(expected)))


@pytest.fixture(scope="module")
def compiled_each():
    """each(number, s) -> (value, derivative) in float32, compiled by Numba for the CPU."""
    from numba import float32, int64, njit

    from numba_flash.functions import compiled

    fast = njit(error_model="numpy")
    each = fast(EACH.build(compiled.stand_ins("float32"), fast))
    dual, whole = compiled.as_number("dual", "float32"), compiled.as_number("whole", "float32")
    value = compiled.result("score_mod", "float32", EACH)
    slope = compiled.derivative("score_mod", "float32", EACH)
    h, i, j = PLACE

    @njit((int64, float32), error_model="numpy")
    def both(number, s):
        y = each(dual(s), whole(number), whole(h), whole(i), whole(j))
        return value(y), slope(y)

    return both


@pytest.mark.parametrize("number", range(len(EXPRESSIONS)), ids=EXPRESSIONS)
def test_compiled_it_is_what_it_is_as_python(compiled_each, number):
    s = np.float32(1.3)
    x, d = compiled_each(number, s)
    y = by_python(number, s, np.float32)
    eps = np.finfo(np.float32).eps
    # a handful of operations and functions that are right to a few roundings each
    assert math.isclose(x, y.x, rel_tol=16 * eps, abs_tol=16 * eps)
    assert math.isclose(d, 0 if y.d is None else y.d, rel_tol=64 * eps, abs_tol=64 * eps)


@compiler.needed
@pytest.mark.parametrize("target", [A100, HOPPER], ids=["sm_80", "sm_90"])
def test_on_a_gpu_it_is_in_float32_and_inlined(target):
    """Everything at once, in a kernel of float32: no float64, no call, nothing spilled for it."""

    def rich(s, b, h, i, j, table, ids):
        if i > j and s > 0 and ids[j] == ids[0]:
            return s * s / (1 + i / 3) + table[h, i - j] * 0.5
        return max(30.0 * math.tanh(s / 30), -0.1 * abs(i - j)) + math.exp(-0.5 * j)

    aux = tuple(read("aux", x).layout for x in (np.ones((2, 9), np.float16), np.ones(9, np.int32)))
    made = problem(dtype="float32", head_dim=8, score_mod=Function.of("score_mod", rich), aux=aux,
                   mask_mod=Function.of("mask_mod", lambda b, h, i, j, table, ids: i >= j or ids[j] == 0))  # fmt: skip
    config = select.config_of("v2", made, target)
    ptx = gpu.to_ptx(config, target.cc)
    assert ".f64" not in ptx and "call" not in ptx
    code = assembler.assemble(ptx, gpu.architecture(target.cc))
    assert code.spill_bytes == 0


def made(factor):
    return lambda s, b, h, i, j: s * factor


def test_equal_functions_are_one():
    assert Function.of("score_mod", made(2.0)) is Function.of("score_mod", made(2.0))
    assert Function.of("score_mod", made(2.0)) != Function.of("score_mod", made(3.0))


# What is equal for Python and is not for a kernel.
@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (True, 1), (0.0, -0.0), (1, np.float32(1)), (None, 0), ((1,), 1)])
def test_numbers_of_other_types_are_other_functions(one, other):
    first, second = (Function.of("score_mod", made(x)) for x in (one, other))
    assert first != second and first.key != second.key


def test_nan_is_itself():
    assert Function.of("score_mod", made(math.nan)) is Function.of("score_mod", made(float("nan")))


def test_it_stays_what_was_read():
    """A global that changes later changes the next Function, not this one."""
    names = {"FACTOR": 2.0}
    exec("def f(s, b, h, i, j): return s * FACTOR", names)
    before = Function.of("score_mod", names["f"])
    names["FACTOR"] = 5.0
    assert numbers.score_of(before, np.float64, 1.0, (0, 0, 0, 0, 0), (), False).x == 2.0
    after = Function.of("score_mod", names["f"])
    assert before != after and numbers.score_of(after, np.float64, 1.0, (0, 0, 0, 0, 0), (), False).x == 5.0


def test_njit_and_partial():
    from numba import njit

    @njit
    def inner(x):
        return x * 3

    @njit
    def outer(factor, s, b, h, i, j):
        return inner(s) * factor

    function = Function.of("score_mod", functools.partial(outer, 0.5))
    assert function.takes(5) is None and function.takes(6)
    assert numbers.score_of(function, np.float64, 2.0, (0, 0, 0, 0, 0), (), True) == (3.0, 1.5)


def test_functions_and_numbers_of_modules(monkeypatch):
    import types

    lengths = types.ModuleType("lengths")
    lengths.FACTOR, lengths.twice = 3.0, lambda x: 2 * x

    def reads(s, b, h, i, j):
        return lengths.twice(s) * lengths.FACTOR

    function = Function.of("score_mod", reads)
    assert numbers.score_of(function, np.float64, 1.0, (0, 0, 0, 0, 0), (), True) == (6.0, 6.0)
    lengths.FACTOR = 4.0
    assert Function.of("score_mod", reads) != function


def key_of(source):
    code = f"from numba_flash.functions.function import Function as F\nns = {{}}\nexec({source!r}, ns)\n"
    code += "print(F.of('f', ns['f']).key)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_key_is_the_same_in_every_process_and_on_every_line():
    source = "X = 2.0\ndef g(s): return s * X if s in (1, 2) else s\ndef f(s, b, h, i, j): return g(s)"
    assert key_of(source) == key_of("\n\n" + source)
    assert key_of(source) != key_of(source.replace("2.0", "2.5"))
    assert key_of(source) != key_of(source.replace("(1, 2)", "(1, 3)"))
    assert key_of(source) != key_of(source.replace("s * X", "s / X"))


def test_it_is_of_one_process():
    with pytest.raises(TypeError, match="of one process"):
        pickle.dumps(Function.of("score_mod", made(2.0)))


def test_the_disk_cache_knows_the_function():
    def config(factor):
        return select.config_of("v2", problem(score_mod=Function.of("score_mod", made(factor))), HOPPER)

    assert gpu.key(config(2.0), "sm_90a") == gpu.key(config(2.0), "sm_90a")
    assert gpu.key(config(2.0), "sm_90a") != gpu.key(config(3.0), "sm_90a")


@pytest.mark.parametrize("kernel", ["mma", "wgmma"])
def test_kernels_without_functions_compile_no_code_for_them(kernel, monkeypatch):
    """A tile's functions are written out for each block of 8 keys, which takes seconds to compile."""
    from numba_flash.kernels.score import fragment_functions

    counts = []
    repeated = fragment_functions.repeated
    monkeypatch.setattr(
        fragment_functions, "repeated", lambda step, count: counts.append(count) or repeated(step, count)
    )
    mask_mod = Function.of("mask_mod", lambda b, h, q_pos, k_pos: q_pos > k_pos)
    for own, has_blocks in (({}, 0), (dict(mask_mod=mask_mod), 1)):
        counts.clear()
        config = select.config_of(kernel, problem(**own), HOPPER)
        fragment_functions.make.__wrapped__(config)
        assert counts == [has_blocks * config.tile_n // 8]
