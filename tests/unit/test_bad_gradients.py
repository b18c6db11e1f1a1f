"""Every mistake a caller of attention_backward can make, beside those that the forward's checks find for both."""

import string

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import numba_flash


def array(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


Q, K, V = array(2, 4, 5, 8), array(2, 2, 7, 8), array(2, 2, 7, 6)
O, LSE = array(2, 4, 5, 6), array(2, 4, 5)
BIAS, SLOPES = array(5, 7), array(4)


def call(**changes):
    return numba_flash.attention_backward(**dict(do=O, q=Q, k=K, v=V, o=O, lse=LSE, kernel="reference") | changes)


def misaligned(shape, dtype=np.float32):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.zeros(size + 1, np.uint8)[1:].view(dtype).reshape(shape)


# (changes to a call that is right, the error, fragments of its message)
WRONG = [
    *[
        ({name: junk}, TypeError, [f"{name} must be an array", type(junk).__name__])
        for name in ("do", "o", "lse")
        for junk in (None, 1.0, [[1.0]], "o")
    ],
    (dict(dlse=1.0), TypeError, ["dlse must be an array"]),
    # shapes: those of o and lse, in the caller's layout
    (dict(do=array(2, 4, 5, 8)), ValueError, ["do must have shape (2, 4, 5, 6)", "(2, 4, 5, 8)"]),
    (dict(o=array(2, 5, 4, 6)), ValueError, ["o must have shape (2, 4, 5, 6)", "(2, 5, 4, 6)"]),
    (dict(lse=array(2, 5, 4)), ValueError, ["lse must have shape (2, 4, 5)", "(2, 5, 4)"]),
    (dict(lse=array(2, 4, 5, 1)), ValueError, ["lse must have shape (2, 4, 5)"]),
    (dict(dlse=array(2, 4)), ValueError, ["dlse must have shape (2, 4, 5)", "(2, 4)"]),
    (dict(layout="bshd", q=Q.swapaxes(1, 2), k=K.swapaxes(1, 2), v=V.swapaxes(1, 2)), ValueError,
     ["do must have shape (2, 5, 4, 6)", "(2, 4, 5, 6)"]),
    (dict(k=array(2, 2, 7, 9)), ValueError, ["head_dim", "(2, 2, 7, 9)"]),
    # dtypes
    (dict(do=O.astype(np.float16)), TypeError, ["do must be float32", "float16"]),
    (dict(o=O.astype(np.float64)), TypeError, ["o must be float32", "float64"]),
    (dict(lse=LSE.astype(np.float64)), TypeError, ["lse must be float32", "float64"]),
    (dict(dlse=LSE.astype(np.float16)), TypeError, ["dlse must be float32", "float16"]),
    (dict(q=Q.astype(np.float64), k=K.astype(np.float64), v=V.astype(np.float64), do=O.astype(np.float64),
          o=O.astype(np.float64)), TypeError, ["lse must be float64", "float32"]),
    # how the memory lies
    (dict(lse=array(5, 4, 2).T), ValueError, ["lse must be contiguous"]),
    (dict(lse=np.broadcast_to(np.float32(0), (2, 4, 5))), ValueError, ["lse must be contiguous"]),
    (dict(do=misaligned((2, 4, 5, 6))), ValueError, ["do starts at address", "4-byte"]),
    (dict(dlse=misaligned((2, 4, 5))), ValueError, ["dlse starts at address", "4-byte"]),
    (dict(o=np.lib.stride_tricks.as_strided(array(9999), (2, 4, 5, 6), (2016, 504, 72, 6))), ValueError,
     ["o has strides", "4-byte"]),
    # what is wanted
    *[(dict(wanted=x), TypeError, ["wanted must be a tuple of names", "dalibi_slopes"])
      for x in ("dq", ["dq"], None, 1, ("dq", 1), {"dq"}, {"dq": 1})],
    (dict(wanted=("daux[0]",)), ValueError, ["wanted names daux[0], but no aux is given"]),
    *[(dict(wanted=x), ValueError, ["wanted must name some of dq, dk, dv", repr(x)])
      for x in ((), ("q",), ("dq", "do"))],
    (dict(wanted=("dq", "dbias")), ValueError, ["wanted names dbias", "no bias was given"]),
    (dict(wanted=("dalibi_slopes",), bias=BIAS), ValueError, ["wanted names dalibi_slopes", "no alibi_slopes"]),
    (dict(wanted=("dsinks",), bias=BIAS), ValueError, ["wanted names dsinks", "no sinks was given"]),
    # what both directions check
    (dict(causal=1), TypeError, ["causal must be True or False"]),
    (dict(window=3), ValueError, ["window must be a pair"]),
    (dict(scale=np.nan), ValueError, ["scale must be finite"]),
    (dict(seqlens_k=np.array([3, 8], np.int32)), ValueError, ["seqlens_k", "[3, 8]"]),
    (dict(bias=array(5, 8), wanted=("dbias",)), ValueError, ["bias", "(5, 8)"]),
    (dict(kernel="v9"), ValueError, ["kernel must be one of auto", "'v9'"]),
    (dict(kernel="v1"), NotImplementedError, ["kernel='v1'", "not built yet", "What would run", "'reference'"]),
    (dict(kernel="wgmma"), NotImplementedError, ["kernel='wgmma'", "no GPU is usable", "'reference' or 'cpu'"]),
    (dict(kernel="v2"), NotImplementedError, ["no GPU is usable", "NUMBA_ENABLE_CUDASIM"]),
    (dict(stream=1), ValueError, ["stream", "host memory"]),
    (dict(dropout_p=1.0, seed=1), ValueError, ["dropout_p", "from 0 to below 1", "1.0"]),
    (dict(seed=0.5), TypeError, ["seed", "whole number", "0.5"]),
    (dict(sinks=array(3)), ValueError, ["sinks", "(heads,) = (4,)", "(3,)"]),
    (dict(score_mod=abs), TypeError, ["score_mod", "plain Python function"]),
    (dict(mask_mod=lambda b: True), TypeError, ["mask_mod is called with"]),
    (dict(aux=(Q,)), ValueError, ["aux", "score_mod and mask_mod"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "fragments"), WRONG)
def test_the_message_names_what_is_wrong(changes, error, fragments):
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
        call(**changes)
    assert type(caught.value) is error, caught.value
    for fragment in fragments:
        assert fragment in str(caught.value), f"{fragment!r} is missing in: {caught.value}"
    assert "unhashable" not in str(caught.value) and len(str(caught.value)) < 600


def test_the_call_that_is_changed_is_right():
    every = ("dq", "dk", "dv", "dbias", "dalibi_slopes", "dsinks")
    gradients = call(bias=BIAS, alibi_slopes=SLOPES, sinks=array(4), wanted=every)
    assert [x.shape for x in gradients[:-1]] == [*(x.shape for x in (Q, K, V, BIAS, SLOPES)), (4,)]
    assert gradients.daux is None


def test_options_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        numba_flash.attention_backward(O, Q, K, V, O, LSE, LSE)


def test_arrays_of_a_bare_protocol_are_refused():
    """There is nothing to make new ones with, and no out= that would take them."""

    class Bare:
        def __init__(self, x):
            self.__dlpack__, self.__dlpack_device__ = x.__dlpack__, x.__dlpack_device__

    arrays = {name: Bare(x) for name, x in dict(do=O, q=Q, k=K, v=V, o=O, lse=LSE).items()}
    with pytest.raises(TypeError, match="bare protocol.*NumPy, CuPy, torch, JAX or Numba"):
        call(**arrays)


def test_one_kind_of_array():
    torch = pytest.importorskip("torch", reason="needs torch")
    with pytest.raises(TypeError, match="q is numpy and do is torch"):
        call(do=torch.ones(O.shape))


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(string.printable, max_size=5), st.binary(max_size=5),
    st.lists(st.integers(-5, 5), max_size=3), st.tuples(st.integers(-5, 5), st.integers(-5, 5)),
    st.dictionaries(st.integers(), st.integers(), max_size=2),
    st.lists(st.sampled_from(["dq", "dk", "dv", "dbias", "dalibi_slopes", "dsinks", "do"]), max_size=3).map(tuple),
    st.sampled_from([
        object(), int, np, Ellipsis, Q, K, V, O, LSE, O[::-1], O.astype(np.float16), LSE.astype(np.float64), BIAS,
        SLOPES, np.float64(2), np.bool_(True), np.array(3), np.array(2, np.int32),
        np.zeros(2, np.int32), np.ones((5, 7), bool),
        np.array("text"), np.array([None]), np.array([[]]), np.ma.masked_array(O), "auto", "reference", "bshd",
    ]),
)  # fmt: skip
NAMES = (
    "do q k v o lse dlse wanted causal window q_offset seqlens_k scale softcap alibi_slopes bias mask score_mod "
    "mask_mod aux sinks dropout_p seed layout stream kernel"
).split()


@settings(max_examples=1000)
@given(st.dictionaries(st.sampled_from(NAMES), JUNK, min_size=1, max_size=3))
def test_junk_raises_one_of_three_errors_or_gives_a_result(options):
    try:
        result = call(**options)
    except (ValueError, TypeError, NotImplementedError) as error:
        assert type(error) in (ValueError, TypeError, NotImplementedError), type(error)
        assert str(error)
    else:
        assert isinstance(result, numba_flash.AttentionGradients) and any(x is not None for x in result)
