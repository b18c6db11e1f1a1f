"""A caller's function means the same as Python and compiled, or it is an error as both."""

import functools
import math
import re

import numpy as np
import pytest
from helpers import compiler, functions_beside as beside, random_functions
from helpers.machines import A100, problem

import numba_flash
from numba_flash.arrays import read
from numba_flash.cpu import functions as cpu_functions
from numba_flash.functions import numbers
from numba_flash.functions.function import Function
from numba_flash.gpu import compiled as gpu
from numba_flash.select import forward as select

PLACES = [(0.75, 0, 1, 7, 3), (-1.5, 1, 0, 2, 5), (2.0, 0, 2, 4, 4)]  # s, b, h, i, j
IDS = np.array([3, 0, -2, 7, 2**62, -(2**63), 1, 9])
AUX = (
    IDS,
    np.array([2**64 - 1, 5, 2**63, 0, 1, 2, 3, 4], np.uint64),
    np.array([0, 1, 1, 0, 1, 0, 0, 1], bool),
    np.arange(8, dtype=np.int8) - 4,
    np.linspace(-2, 2, 8, dtype=np.float32),
)
ARRAYS = "ids, large, flags, small, reals"


def made(text, captured=None, option="score_mod"):
    """A function of this text: an expression, or the lines of a body."""
    arguments = f"{'s, ' * (option == 'score_mod')}b, h, i, j, {ARRAYS}"
    lines = text.strip().splitlines() if "\n" in text or "return" in text else [f"return {text}"]
    source = "\n".join([f"def f({arguments}):", *(f"    {line}" for line in lines)])
    return run(source, captured)


def run(source, captured=None):
    names = dict(math=math, np=np, **(captured or {}))
    exec(compile(source, "alike.py", "exec"), names)
    return names["f"]


def by_name(s, b, h, i, j, *rest, factor=0.5):
    return s * factor


def named(s, *, by=3.0):
    return s * by


# (option, text, what it captures): as Python and compiled they are the same.
SAME = [
    ("2 ** -h * s", {}),
    ("10 ** -h + s", {}),
    ("2 ** (i - j) * s", {}),
    ("(-2) ** (j - i) + s", {}),
    ("0 ** -h + s", {}),
    ("s * base ** -power", dict(base=2, power=3)),
    ("i ** 3 + (h + 2) ** 63 * s", {}),
    ("s ** h + s ** power", dict(power=-2)),
    ("t = s\nfor n in range(4): t += 2 ** -n / (n + 1)\nreturn t", {}),
    ("n = 3\nreturn s * 2 ** -n", {}),
    ("s if j in range(i) else -s", {}),
    ("s if i - j in range(8, 0, -2) else 0", {}),
    ("s if j not in range(1, 9, h + 1) else 0", {}),
    ("s if j in (i, 4) else 0", {}),
    ("s if j in (3, 5) else 0", {}),
    ("s if s in (0.75, i) else 0", {}),
    ("s if j in few else 0", dict(few=(3, 4))),
    ("s if (i, j) in ((7, 3), (1, 1)) else 0", {}),
    ("s if (i, j) < (4, 5) else 0", {}),
    ("d = ids[i % 8] - ids[j]\nif d < 0: d = -d\nreturn s - d", {}),
    ("n = int(s)\nif n > 0: n = -n\nreturn s * n", {}),
    ("(abs(ids[i % 8] - ids[j]) if i > j else 0) + s", {}),
    ("(abs(large[j]) if i > j else 0) + s", {}),
    ("-ids[5] + abs(ids[5]) + s", {}),
    ("s + large[0] + (1 if large[2] < 0 else 2)", {}),
    ("ids[4] * 4 + s", {}),
    ("(i << 61) + s", {}),
    ("(i << i * 10) + (-i >> j * 20) + (i << -1) + (i >> -h) + s", {}),
    ("int(1e30) + int(-1e30) * 0.5 + s", {}),
    ("int(s * 1e300 * 1e300) + round(reals[0] * 1e30) + s", {}),
    ("int(math.nan) + math.floor(-math.inf) % 7 + s", {}),
    ("(-i) // 3 + (-i) % 3 + i // -2 + i % -2 + s", {}),
    ("ids[5] // (h - 2) + ids[5] % (h - 2) + s", {}),
    ("i // (j - 3) + i % (j - 3) + s", {}),
    ("s // (j - 4) + s % -3 + i % 2.5", {}),
    ("s * (i > j) + (i < j) / 2 + -(i == j) + abs(i > j) + (i > j) // 2 + ((i > j) << 3)", {}),
    ("s * (flags[i % 8] & flags[j] | (i > j) ^ True) + flags[j] + min(flags[j], 2)", {}),
    ("reals[i > j] + reals[not flags[j]] * s", {}),
    ("ids[large[0]] + s", {}),
    ("s * (not flags[j])", {}),
    ("s + (flags[j] or small[j]) + (small[i % 8] and reals[j])", {}),
    ("s if small[j] or s > 0 else -s", {}),
    ("x = y = s * 2\nreturn x + y", {}),
    ("(x := s * 2) + x", {}),
    ("x + 1 if (x := s * 2) > 0 else 3.0", {}),
    ("def g(x, y=1.5): return x * y\nreturn g(s) + g(s, 2)", {}),
    ("g = lambda x: x * s\nreturn g(2.0) + g(i)", {}),
    ("t = s\nfor x in (1, 2, 3): t = t * x\nreturn t", {}),
    ("a, c = pair\nreturn s * a + c", dict(pair=(2, 0.5))),
    ("t = s\nfor a, c in pairs: t = t * a + c\nreturn t", dict(pairs=((2, 0.5), (3, 1.5)))),
    ("s * few[1] + few[-1]", dict(few=(2, 0.5))),
    ("s * len((1, 2)) + len(few) + len(ids)", dict(few=(1, 2, 3))),
    ("s + ids.shape[0]", {}),
    ("s / zero + 1 // zero", dict(zero=0)),
    ("s + root ** third", dict(root=-8.0, third=0.5)),
    ("s if flag else s.nothing", dict(flag=True)),
    ("s if n == 2 else s.nothing", dict(n=2)),
    ("s if none is None else s + none", dict(none=None)),
    ("s + (1 if none is None else none)", dict(none=2)),
    ("k(s) + k(s, by=2) + k(by=h, s=s)", dict(k=named)),
    ("g(s, *(h, i)) + g(*(s, h), j)", dict(g=lambda a, b, c: a * b + c)),
    ("g(s, *pair)", dict(g=lambda a, *rest: a * rest[1] + len(rest), pair=(1, 2))),
    ("while True:\n    x = s * i\n    if i > 3: break\n    i = i + 1\nreturn x", {}),
    ("round(2.5 * s) + bool(s) * float(i > j) + s", {}),
]
MASKS = [
    ("i - j < 3 or flags[j]", {}),
    ("i > j or small[j]", {}),
    ("small[j]", {}),
    ("i >= j and small[i % 8] & 1", {}),
    ("j in range(4)", {}),
    ("not (i >= j)", {}),
    ("near(i, j) or ids[j]", dict(near=lambda i, j: i - j < 2)),
    ("True", {}),
    ("(i, j) == (7, 3)", {}),
]
ALIKE = [("score_mod", *each) for each in SAME] + [("mask_mod", *each) for each in MASKS]


def functions_of(option):
    return [made(text, captured, option) for each, text, captured in ALIKE if each == option]


@functools.cache
def compiled(option, narrow):
    """All of them together, which takes a third of the time."""
    return beside.compiled(option, functions_of(option), "float64", AUX, narrow)


@pytest.mark.parametrize("narrow", [False, True], ids=["as on CPUs", "as on GPUs"])
@pytest.mark.parametrize("option", ["score_mod", "mask_mod"])
def test_they_mean_the_same(option, narrow):
    texts = [(text, captured) for each, text, captured in ALIKE if each == option]
    for number, (text, captured) in enumerate(texts):
        as_python = beside.oracle(option, made(text, captured, option), "float64", AUX)
        for place in PLACES:
            found, expected = compiled(option, narrow)(number, *place), as_python(*place)
            assert np.allclose(found, expected, rtol=1e-13, atol=0, equal_nan=True), (text, place, found, expected)


# Random functions: each as Python, and compiled for CPUs or for GPUs.
RANDOM = [(option, narrow) for option in ("score_mod", "mask_mod") for narrow in (False, True)]


@pytest.mark.parametrize(("option", "narrow"), RANDOM, ids=[f"{x}, {'as on GPUs' * y}" for x, y in RANDOM])
def test_random_functions_mean_the_same(option, narrow):
    texts = [getattr(random_functions, option)(seed) for seed in range(narrow, 48, 2)]
    functions = [run(text) for text in texts]
    call = beside.compiled(option, functions, "float64", AUX, narrow)
    for number, function in enumerate(functions):
        as_python = beside.oracle(option, function, "float64", AUX)
        for place in PLACES:
            found, expected = call(number, *place), as_python(*place)
            assert np.allclose(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True), (texts[number], place, found)


def counting():
    count = 0

    def counts(s, b, h, i, j, *aux):
        nonlocal count
        count = count + 1
        return s * count

    return counts


# What a kernel cannot do, and words of the error. Those that bytecode shows are refused before anything runs.
SHOWN = [
    ("s + 10**19 * i", {}, "no whole number of 64 bits"),
    ("(1 << 70) * s", {}, "64 bits"),
    ("c * s", dict(c=2**63), "64 bits"),
    ("s + t[0]", dict(t=(2**64, 1)), "64 bits"),
    ("s * 2j", {}, "complex"),
    ("s if h in {1, 2} else 0", {}, "set"),
    ("a, *r = i, j, h\nreturn s + a", {}, "starred"),
    ("x = s\ndel x\nreturn s", {}, "deletes"),
    ("s if i is j else 0", {}, "write =="),
    ("if i > j: x = 1.0\nreturn s + x", {}, "x is not set"),
    ("for n in range(j): x = n\nreturn s + x", {}, "x is not set"),
    ("x = s\nreturn [x, 1.0][h]", {}, "list"),
    ("def g(x, y=1.0): return x * y\nreturn g(y=s, x=1.0)", {}, "by name: pass it by position"),
    ("def g(x, *, y=1.0): return x * y\nreturn g(s)", {}, "take them by position"),
    ("g(s)", dict(g=lambda x, **k: x), "**k"),
    ("~(i > j) + s", {}, "write not"),
    ("~(not i) + s", {}, "write not"),
    ("c = lambda x: ~(x > 1)\nreturn s + c(s)", {}, "write not"),
    ("t = s\nfor x in (1, 2.5): t = t * x\nreturn t", {}, "write 1.0 for 1"),
    ("max([s, 1.0])", {}, "list"),
    ("if i > j: raise ValueError\nreturn s", {}, "raises"),
    ("g = lambda x: x[0]\nreturn s + g([i])", {}, "list"),
    ("max(x for x in (s, 1.0))", {}, "generator"),
    ("s + {1: 2}[i]", {}, "dict"),
    ("np.exp(s)", {}, "write math.exp(x)"),
    ("np.maximum(s, 0)", {}, "write max(x, y)"),
    ("np.float32(s)", {}, "write float(x)"),
    ("divmod(i, 2)[0] + s", {}, "write // and %"),
    ("sum((s, 1.0))", {}, "write + in a loop"),
    ("pow(s, 2)", {}, "write **"),
    ("s + float('inf')", {}, "write math.inf"),
    ("s + float('-Infinity')", {}, "write math.inf"),
    ("f'{s}'", {}, "string"),
    ("math.gamma(s)", {}, "of math a kernel knows"),
    ("g(s)", dict(g=lambda x, *r, y=1.0: x), "by name behind *r"),
    ("s + ...", {}, "..."),
]
# Those that the types of numbers show: the oracle refuses what it comes to, and the compiler all of it.
TYPED = [
    ("s + t[h]", dict(t=(1.0, 2.0)), "a tuple is read at constants alone"),
    ("s + few()[h]", dict(few=lambda: (1, 2)), "constants alone"),
    ("s + ids.shape[h]", {}, "constants alone"),
    ("s + ~g(i, j)", dict(g=lambda i, j: i > j), "write not"),
    ("s + ~flags[j]", {}, "write not"),
    ("s + ids", {}, "read, as x[i]"),
    ("t = s\nfor x in reals: t += x\nreturn t", {}, "read, as x[i]"),
    ("s if j in ids else 0", {}, "x[i]"),
    ("round(s, 1)", {}, "round() takes a number here, not (float, int)"),
    ("len(s)", {}, "len() takes"),
    ("max(s)", {}, "two numbers or more"),
    ("math.exp(s, 2)", {}, "exp() takes a number"),
    ("t = s\nfor n in range(s): t += 1\nreturn t", {}, "whole numbers"),
    ("s & 1", {}, ""),
    ("s if s in range(3) else 0", {}, "whole numbers"),
    ("s + ids[0.5]", {}, "whole numbers"),
    ("s @ s", {}, ""),
    ("s.real", {}, "real"),
    ("s << 1", {}, ""),
    ("(1, 2)", {}, "must return a number"),
    ("i > j", {}, "must return a number"),
    ("s + ids[2 ** h]", {}, "int() makes"),
    ("s + min(ids, 2)", {}, "numbers"),
    ("int(s, 2)", {}, "int() takes"),
    ("float(ids)", {}, "float() takes"),
    ("bool(s, s)", {}, "bool() takes"),
]
AUX_TYPES = tuple((array.dtype.name, array.ndim) for array in AUX)


def refused_by_the_oracle(function, option="score_mod"):
    with pytest.raises(TypeError) as caught:
        beside.oracle(option, function, "float64", AUX)(*PLACES[0])
    return str(caught.value)


def refused_by_the_compiler(function, option="score_mod"):
    with pytest.raises(TypeError) as caught:
        cpu_functions.make(option, Function.of(option, function), "float64", AUX_TYPES, False, True)
    return str(caught.value)


@pytest.mark.parametrize(("text", "captured", "words"), SHOWN, ids=[x[0].replace("\n", "; ") for x in SHOWN])
def test_what_bytecode_shows_is_refused_before_it_runs(text, captured, words):
    with pytest.raises(TypeError, match=re.escape(words)) as caught:
        Function.of("score_mod", made(text, captured))
    assert re.match(r"score_mod: \S+ \(.*, line \d+", str(caught.value))


def test_a_function_that_counts_its_calls_is_refused():
    with pytest.raises(TypeError, match="it sets count of the function around it"):
        Function.of("score_mod", counting())


@pytest.mark.parametrize(("text", "captured", "words"), TYPED, ids=[x[0].replace("\n", "; ") for x in TYPED])
def test_what_types_show_is_refused_in_the_same_words(text, captured, words):
    function = made(text, captured)
    for said in (refused_by_the_oracle(function), refused_by_the_compiler(function)):
        assert said.startswith("score_mod") and words in said and re.search(r"line \d", said), said
        assert "float64" not in said and "locals" not in said and "Whole" not in said, said


def test_a_mask_of_real_numbers_is_refused():
    function = made("0.5 * (i - j)", option="mask_mod")
    for said in (refused_by_the_oracle(function, "mask_mod"), refused_by_the_compiler(function, "mask_mod")):
        assert said.startswith("mask_mod must return True or False") and "float" in said


@pytest.mark.filterwarnings("ignore:Bitwise inversion")
def test_a_truth_that_is_inverted_is_refused():
    function = made("y = not (i > j)\nreturn ~y", option="mask_mod")
    assert "mask_mod must return True or False" in refused_by_the_oracle(function, "mask_mod")
    assert "write not" in refused_by_the_compiler(function, "mask_mod")


def test_an_error_of_another_library_names_the_argument(monkeypatch):
    """Whatever Numba raises, as AssertionError without text; not what the system does."""

    def fails(*_, **__):
        raise error

    error = AssertionError()
    monkeypatch.setattr(cpu_functions, "c_function", fails)
    with pytest.raises(TypeError, match=r"score_mod: f \(.*line 1\): it cannot be compiled: AssertionError"):
        cpu_functions.make(
            "score_mod", Function.of("score_mod", made("s * 1.015625")), "float64", AUX_TYPES, False, True
        )
    error = OSError("no space")
    with pytest.raises(OSError, match="no space"):
        cpu_functions.make("score_mod", Function.of("score_mod", made("s * 1.5")), "float64", AUX_TYPES, False, True)


def test_what_a_debugger_raises_passes():
    from bdb import BdbQuit

    def quits():
        raise BdbQuit

    own = Function.of("score_mod", made("s * 1.25"))
    with pytest.raises(BdbQuit):
        numbers._called("score_mod", own, np.float64, (Quits(quits),), (0, 0, 0, 0, 0), AUX)


class Quits:
    """In the place of a score."""

    def __init__(self, what):
        self.what = what

    def __mul__(self, other):
        return self.what()


def test_errors_of_the_oracle_are_of_the_kinds_that_are_promised():
    for text, kind in (("s + ids[i + 99]", IndexError), ("s.real", TypeError), ("i.bit_length() + s", TypeError)):
        with pytest.raises(kind, match=r"^score_mod: f \(.*line 2\)") as caught:
            beside.oracle("score_mod", made(text), "float64", AUX)(*PLACES[0])
        assert type(caught.value) is kind


# Through the public function.
@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_parameters_by_name(kernel):
    q = np.linspace(-1, 1, 24, dtype=np.float32).reshape(1, 1, 6, 4)

    def scaled(score, b, h, q_pos, k_pos, table, *, by):
        return score * by + table[k_pos]

    given = dict(aux=(np.arange(6, dtype=np.float32),), kernel=kernel)
    expected = numba_flash.attention(q, q, q, score_mod=lambda s, b, h, i, j, t: s * 0.25 + t[j], **given)
    assert np.array_equal(
        numba_flash.attention(q, q, q, score_mod=functools.partial(scaled, by=0.25), **given), expected
    )
    with pytest.raises(TypeError, match="score_mod is called with .*aux.0.*missing a required"):
        numba_flash.attention(q, q, q, score_mod=scaled, **given)
    with pytest.raises(TypeError, match="score_mod is called with .*aux.0.*too many positional"):
        numba_flash.attention(q, q, q, score_mod=lambda s, b, h, i, j, *, c=2.0: s, **given)


@compiler.needed
def test_all_of_it_compiles_for_gpus():
    """What Numba's CUDA leaves out of what is registered shows here: nothing is run."""
    kinds = ("range(", " in ", "int(", "<<", "**", "len(", "flags", ":=", "for x in", "pair")
    parts = [next((text, captured) for _, text, captured in ALIKE if kind in text) for kind in kinds]
    names = {f"f{number}": made(*part) for number, part in enumerate(parts)}
    lines = [f"    if h == {number}: return f{number}(s, b, h, i, j, {ARRAYS})" for number in range(len(parts))]
    score = run("\n".join([f"def f(s, b, h, i, j, {ARRAYS}):", *lines, "    return s"]), names)
    shown = run(f"def f(b, h, i, j, {ARRAYS}):\n    return i - j in range(5) or small[j]")
    own = dict(score_mod=Function.of("score_mod", score), mask_mod=Function.of("mask_mod", shown))
    layouts = tuple(read("aux", array).layout for array in AUX)
    config = select.config_of("v2", problem(dtype="float32", head_dim=8, aux=layouts, **own), A100)
    assert ".entry" in gpu.to_ptx(config, A100.cc)
