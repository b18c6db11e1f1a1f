"""Repeated calls of NumPy arrays (dispatch/cached_call.py): the same results, and no other call is taken for a repeated
one. tests/bridges/test_torch_repeated.py has torch's."""

import numpy as np
import pytest

import numba_flash
from numba_flash import arrays as arrays_module, mods
from numba_flash.dispatch import backward as gradients, forward as dispatch

SHAPE = (2, 4, 10, 16)


def arrays(count=3, dtype=np.float32):
    generator = np.random.default_rng(0)
    return [generator.standard_normal(SHAPE).astype(dtype) for _ in range(count)]


@pytest.fixture
def prepared(monkeypatch):
    """The names of what was prepared the long way, with nothing known before."""
    seen = []
    for module, name in ((dispatch, "forward"), (gradients, "backward")):
        monkeypatch.setattr(module, "_plans", {})
        real = module.prepare
        monkeypatch.setattr(module, "prepare", lambda *x, name=name, real=real: seen.append(name) or real(*x))
    return seen


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(3, 0), scale=0.3), dict(return_lse=True)])
def test_the_second_call_is_not_prepared_and_gives_the_same_bits(options, dtype, prepared):
    q, k, v = arrays(dtype=dtype)
    first = numba_flash.attention(q, k, v, **options)
    prepared.clear()
    again = numba_flash.attention(q.copy(), k.copy(), v.copy(), **options)
    assert not prepared
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (first, again)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_gradients_are_prepared_once(prepared):
    q, k, v, do = arrays(4)
    o, lse = numba_flash.attention(q, k, v, return_lse=True)
    first = numba_flash.attention_backward(do, q, k, v, o, lse)
    prepared.clear()
    again = numba_flash.attention_backward(do, q, k, v, o, lse)
    assert not prepared
    for one, other in zip(first[:3], again[:3], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_known_call_writes_to_out(return_lse, prepared):
    q, k, v = arrays()
    expected = numba_flash.attention(q, k, v)
    for turn in range(3):
        out = np.full_like(q, np.nan)
        found = numba_flash.attention(q, k, v, out=out, return_lse=return_lse)
        assert (found.o if return_lse else found) is out
        np.testing.assert_array_equal(out, expected)
        assert ("forward" in prepared) == (turn == 0)
        prepared.clear()


def known_with_out():
    """q, k, v and out of a call that is known, in one piece of memory."""
    memory = np.random.default_rng(0).standard_normal((4, *SHAPE)).astype(np.float32)
    q, k, v, out = memory
    for _ in range(2):
        numba_flash.attention(q, k, v, out=out)
    return q, k, v, out


@pytest.mark.parametrize("place", range(3))
def test_out_that_is_an_input_is_refused_in_a_known_call(place):
    *inputs, _ = known_with_out()
    with pytest.raises(ValueError, match=f"out shares memory with {'qkv'[place]}"):
        numba_flash.attention(*inputs, out=inputs[place])


def test_out_that_begins_inside_an_input_is_refused_in_a_known_call():
    q, k, v, _ = known_with_out()
    memory = np.zeros(2 * v.size, np.float32)
    inside = memory[: v.size].reshape(SHAPE)
    inside[...] = v
    with pytest.raises(ValueError, match="out shares memory with v"):
        numba_flash.attention(q, k, inside, out=memory[v.size // 2 :][: v.size].reshape(SHAPE))


# What stands in place of a known call's out, and what is said then.
OTHERS = {
    "read only": (lambda out: np.frombuffer(out.tobytes(), np.float32).reshape(SHAPE), "read-only|readonly|written"),
    "another shape": (lambda out: out[:1], "shape"),
    "another dtype": (lambda out: out.astype(np.float64), "float64"),
    "a list": (lambda out: out.tolist(), "must be an array"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_is_taken_for_a_known_out(name):
    q, k, v, out = known_with_out()
    make, match = OTHERS[name]
    with pytest.raises((TypeError, ValueError), match=match):
        numba_flash.attention(q, k, v, out=make(out))


# What differs from the known call's q, k and v, and is right all the same.
DIFFERENT = {
    "strides": lambda q, k, v: (q.transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2), k, v),
    "fewer queries": lambda q, k, v: (q[:, :, :5].copy(), k, v),
    "dtype": lambda q, k, v: (q.astype(np.float64), k.astype(np.float64), v.astype(np.float64)),
    "a subclass": lambda q, k, v: (q, k.view(Subclass), v),
    "byte order of another machine": lambda q, k, v: (q, k.astype(">f4"), v),
}


class Subclass(np.ndarray):
    pass


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_another_call(name, prepared):
    q, k, v = arrays()
    numba_flash.attention(q, k, v)
    prepared.clear()
    inputs = DIFFERENT[name](q, k, v)
    if name.startswith("byte order"):
        with pytest.raises(TypeError, match=">f4"):
            numba_flash.attention(*inputs)
        return
    found = numba_flash.attention(*inputs)
    assert prepared == ["forward"]
    expected = numba_flash.attention(*(x.astype(np.float64) for x in inputs), kernel="reference")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)  # weighted means of normal numbers, in float32


# What makes each call another one, or is no part of a key.
NOT_CACHED = {
    "mask": dict(mask=np.ones((10, 10), bool)),
    "q_offset": dict(q_offset=np.zeros(2, np.int32)),
    "seed": dict(dropout_p=0.1, seed=3),
    "mask_mod": dict(mask_mod=mods.causal),
}


@pytest.mark.parametrize("name", [None, *NOT_CACHED])
def test_arrays_are_read_for_a_key_at_most_once(name, monkeypatch, prepared):
    """Only in a call that can be cached: the options say so, before the arrays are looked at."""
    facts = []
    seen = arrays_module.fast_paths[np.ndarray]
    counting = seen._replace(facts=lambda *x: facts.append(1) or seen.facts(*x))
    monkeypatch.setitem(arrays_module.fast_paths, np.ndarray, counting)
    q, k, v, do = arrays(4)
    for _ in range(2):
        o, lse = numba_flash.attention(q, k, v, return_lse=True, **NOT_CACHED.get(name, {}))
        assert len(facts) == (name is None)
        facts.clear()
    numba_flash.attention_backward(do, q, k, v, o, lse, **NOT_CACHED.get(name, {}))
    assert len(facts) == 2 * (name is None)  # of q, k and v, and of o, lse and do


# What is right, and what is equal to it and wrong.
EQUAL = [
    (dict(causal=True), dict(causal=1)),
    (dict(q_offset=1), dict(q_offset=True)),
    (dict(scale=1.0), dict(scale=True)),
    (dict(window=(1, 0)), dict(window=(1.0, 0))),
]


@pytest.mark.parametrize(("right", "wrong"), [*EQUAL, (dict(return_lse=True), dict(return_lse=1))])
def test_an_equal_value_of_another_type_is_refused_in_a_repeated_call(right, wrong):
    q, k, v = arrays()
    for _ in range(2):
        numba_flash.attention(q, k, v, **right)
    with pytest.raises(TypeError, match=next(iter(wrong))):
        numba_flash.attention(q, k, v, **wrong)


@pytest.mark.parametrize(("right", "wrong"), EQUAL)
def test_an_equal_value_of_another_type_is_refused_in_a_repeated_backward(right, wrong):
    q, k, v, do = arrays(4)
    o, lse = numba_flash.attention(q, k, v, return_lse=True)
    for _ in range(2):
        numba_flash.attention_backward(do, q, k, v, o, lse, **right)
    with pytest.raises(TypeError, match=next(iter(wrong))):
        numba_flash.attention_backward(do, q, k, v, o, lse, **wrong)


def test_a_list_in_place_of_k_is_refused(prepared):
    q, k, v = arrays()
    numba_flash.attention(q, k, v)
    with pytest.raises(TypeError, match="k must be an array"):
        numba_flash.attention(q, k.tolist(), v)
