"""Every mistake a caller can make: the kind of error, and what its message has to name.

Fragments are what a person needs: the argument, what came, what is allowed. Calls run on
kernel="reference", which would compute anything it is let through to.
"""

import builtins
import math
import string

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import numba_flash


def array(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


Q, K, V = array(2, 4, 5, 8), array(2, 2, 7, 8), array(2, 2, 7, 6)


def call(**changes):
    return numba_flash.attention(**dict(q=Q, k=K, v=V, kernel="reference") | changes)


def misaligned(shape, dtype=np.float32):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.zeros(size + 1, np.uint8)[1:].view(dtype).reshape(shape)


def odd_strides(*shape):
    """Elements of 4 bytes, 6 bytes apart."""
    return np.lib.stride_tricks.as_strided(np.zeros(10_000, np.float32), shape, (2016, 504, 72, 6)[: len(shape)])


def readonly(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def one_element_many_times(*shape):
    return np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), shape, (0,) * len(shape))


shared = array(2, 4, 5, 12)
I32 = np.int32
NOT_ARRAYS = [[[1.0]], None, 3.0, "q", object(), b"bytes", {}, range(3), np.float32(1), float]

# (changes to a call that is right, the error, fragments of its message)
WRONG = [
    # dtypes that are not taken, suggested to be converted
    *[
        (dict(q=Q.astype(dtype), k=K.astype(dtype), v=V.astype(dtype)), TypeError, ["q must be", "float16", name])
        for dtype, name in [
            ("int32", "int32"), ("bool", "bool"), ("complex64", "complex64"), ("object", "object"), ("uint8", "uint8"),
            (ml_dtypes.float8_e4m3fn, "float8_e4m3fn"), (">f4", ">f4"), (">f8", ">f8"), ("longdouble", "float128"),
            ("int64", "q.astype('float64')"), ("longdouble", "q.astype('float64')"), (">f8", "q.astype('f8')"),
            ("int8", "q.astype('float32')"), ("complex128", "is not defined here"),
        ]
    ],
    (dict(q=np.full((2, 4, 5, 8), "x")), TypeError, ["q must be"]),
    (dict(q=np.zeros((2, 4, 5, 8), "M8[s]")), TypeError, ["q must be", "datetime64"]),
    (dict(q=np.zeros((2, 4, 5, 8), [("a", "f4")])), TypeError, ["q must be"]),
    (dict(k=K.astype(np.float16)), TypeError, ["one dtype", "float32", "float16", "k"]),
    (dict(v=V.astype(np.float64)), TypeError, ["one dtype", "float32", "float64", "v"]),
    (dict(k=K.astype(">f4")), TypeError, ["one dtype", "k is >f4"]),
    # ranks and shapes
    *[(dict(q=array(*shape)), ValueError, ["q must have 2 dimensions", "batch", str(shape)]) for shape in [(), (8,)]],
    *[(dict(q=array(*shape)), ValueError, ["k must have", words, str(shape), "(2, 2, 7, 8)"])
      for shape, words in [((5, 8), "2 dim"), ((4, 5, 8), "3 dim"), ((1, 2, 4, 5, 8), "leading dimensions")]],
    (dict(k=array(2, 7, 8), layout="bshd"), ValueError, ["k must have 4 dimensions", "bshd", "(2, 7, 8)"]),
    (dict(k=array(3, 2, 7, 8)), ValueError, ["batch", "(2, 4, 5, 8)", "(3, 2, 7, 8)"]),
    (dict(v=array(1, 2, 7, 6)), ValueError, ["batch", "(1, 2, 7, 6)"]),
    (dict(k=array(2, 2, 7, 9)), ValueError, ["head_dim", "(2, 2, 7, 9)"]),
    (dict(v=array(2, 2, 8, 6)), ValueError, ["seqlen of k and v", "(2, 2, 7, 8)", "(2, 2, 8, 6)"]),
    (dict(v=array(2, 4, 7, 6)), ValueError, ["heads of k and v", "(2, 4, 7, 6)"]),
    (dict(q=array(2, 3, 5, 8)), ValueError, ["multiple", "3", "2", "heads"]),
    (dict(q=array(2, 1, 5, 8)), ValueError, ["multiple", "heads"]),
    (dict(k=array(2, 0, 7, 8), v=array(2, 0, 7, 6)), ValueError, ["multiple", "heads"]),
    (dict(q=array(2, 4, 5, 0), k=array(2, 2, 7, 0)), ValueError, ["head_dim must be at least 1"]),
    (dict(v=array(2, 2, 7, 0), out=array(2, 4, 5, 0)), NotImplementedError, ["out", "head_dim_v of 0"]),
    (dict(layout="bshd"), ValueError, ["multiple", "bshd"]),
    # a block's next row, tile or head would be a negative number of 32 bits
    (dict(q=np.broadcast_to(np.float32(0), (1, 2, 2**31 - 2**16 + 1, 8)), k=K[:1], v=V[:1]), ValueError,
     ["2**31 - 2**16", "seqlen"]),
    (dict(q=np.broadcast_to(np.float32(0), (2**15, 2**16 - 1, 1, 8)),
          k=np.broadcast_to(np.float32(0), (2**15, 1, 7, 8)), v=np.broadcast_to(np.float32(0), (2**15, 1, 7, 6))),
     ValueError, ["2**31 - 2**16", "batch * heads"]),
    # how the memory lies
    (dict(q=misaligned((2, 4, 5, 8))), ValueError, ["q starts at address", "4-byte", "copy it"]),
    (dict(k=odd_strides(2, 2, 7, 8)), ValueError, ["k has strides", "4-byte", "copy it"]),
    (dict(bias=misaligned((5, 7))), ValueError, ["bias starts at address"]),
    (dict(q=np.ma.masked_array(Q)), TypeError, ["q", "masked", "mask="]),
    (dict(bias=np.ma.masked_array(array(5, 7))), TypeError, ["bias", "masked"]),
    # switches and numbers
    *[(dict(causal=x), TypeError, ["causal must be True or False", repr(x)]) for x in (1, 0, None, "yes", 1.0, [True])],
    *[(dict(return_lse=x), TypeError, ["return_lse must be True or False", repr(x)]) for x in (1, None, "no")],
    *[(dict(scale=x), ValueError, ["scale must be finite", "not"])
      for x in (np.nan, np.inf, -np.inf, np.float32("nan"))],
    *[(dict(scale=x), TypeError, ["scale must be a number"]) for x in ("1", True, [1.0], 1j, array(1), object())],
    (dict(scale=10**400), ValueError, ["scale"]),
    (dict(scale=1e300), ValueError, ["scale must fit into float32", "1e+300"]),
    (dict(softcap=1e300), ValueError, ["softcap must fit into float32", "1e+300"]),
    (dict(softcap=1e-300), ValueError, ["softcap must be above", "1e-300"]),
    *[(dict(softcap=x), ValueError, ["softcap", "0"]) for x in (0, -1.0, 0.0, np.float64(-3))],
    *[(dict(softcap=x), ValueError, ["softcap must be finite"]) for x in (np.nan, np.inf)],
    *[(dict(softcap=x), TypeError, ["softcap must be a number"]) for x in (True, "5", (5.0,))],
    # a bare window means three things, and the message tells them apart
    *[(dict(window=x), ValueError, ["window", "(left, right)", repr(x), "flash-attn", "Mistral", "JAX"])
      for x in (4, 0, np.int64(3), 2.0)],
    *[(dict(window=x), ValueError, ["window must be a pair (left, right)"])
      for x in ((4,), (1, 2, 3), [], "ab", {1: 2}, {1, 2}, object(), True)],
    (dict(window=(-1, 0)), ValueError, ["window: left", "at least 0", "-1", "None"]),
    (dict(window=(3, -1)), ValueError, ["window: right", "at least 0", "-1"]),
    (dict(window=(np.nan, 0)), TypeError, ["window: left", "nan"]),
    (dict(window=(1.5, 0)), TypeError, ["window: left", "1.5"]),
    (dict(window=(0, "3")), TypeError, ["window: right", "'3'"]),
    (dict(window=([1], 0)), TypeError, ["window: left"]),
    (dict(window=(0, True)), TypeError, ["window: right", "True"]),
    # offsets and lengths
    *[(dict(q_offset=x), TypeError, ["q_offset", "whole number", "int32"])
      for x in (True, 1.0, np.nan, "1", [1, 2], (0, 0))],
    (dict(q_offset=2**31), ValueError, ["q_offset", "2**31"]),
    (dict(q_offset=-(2**40)), ValueError, ["q_offset", "2**31"]),
    (dict(q_offset=array(2)), TypeError, ["q_offset", "int32", "float32"]),
    (dict(q_offset=array(2, dtype=np.int64)), TypeError, ["q_offset", "int32", "int64", "q_offset.astype('int32')"]),
    (dict(q_offset=array(3, dtype=I32)), ValueError, ["q_offset", "(batch,)", "(3,)"]),
    (dict(q_offset=array(2, 1, dtype=I32)), ValueError, ["q_offset", "(batch,)", "(2, 1)"]),
    (dict(q_offset=array(dtype=I32)), ValueError, ["q_offset", "(batch,)", "()"]),
    (dict(seqlens_k=array(2, dtype=np.int64)), TypeError, ["seqlens_k", "int32", "int64", "seqlens_k.astype('int32')"]),
    (dict(seqlens_k=array(3, dtype=I32)), ValueError, ["seqlens_k", "(batch,)", "(3,)"]),
    (dict(seqlens_k=np.array([3, 8], I32)), ValueError, ["seqlens_k", "0", "7", "[3, 8]"]),
    (dict(seqlens_k=np.array([-1, 3], I32)), ValueError, ["seqlens_k", "0", "7", "[-1, 3]"]),
    *[(dict(seqlens_k=x), TypeError, ["seqlens_k must be an array"]) for x in (5, [5, 5], (3, 4), "ab")],
    # what is added to scores, and what hides them
    *[({name: np.ones(shape)}, TypeError, [name, "not float64", f"as with {name}.astype('float32')"])
      for name, shape in (("bias", (5, 7)), ("sinks", 4), ("alibi_slopes", 4))],
    (dict(q=Q.astype("f2"), k=K.astype("f2"), v=V.astype("f2"), bias=np.ones((5, 7))), TypeError,
     ["float32 or float16", "bias.astype('float32')"]),
    (dict(bias=array(5, 8)), ValueError, ["bias", "broadcastable", "(2, 4, 5, 7)", "(5, 8)"]),
    (dict(bias=array(3, 1, 5, 7)), ValueError, ["bias", "(3, 1, 5, 7)"]),
    (dict(bias=array(1, 2, 4, 5, 7)), ValueError, ["bias", "(1, 2, 4, 5, 7)"]),
    (dict(bias=array(0, 1, 1, 1)), ValueError, ["bias", "(0, 1, 1, 1)"]),
    (dict(bias=array(5, 7, dtype=np.float16)), TypeError, ["bias must be float32", "float16"]),
    (dict(bias=array(5, 7, dtype=np.float64)), TypeError, ["bias must be float32", "float64"]),
    (dict(bias=array(5, 7, dtype=bool)), TypeError, ["bias must be float32", "not bool", "a mask goes to mask="]),
    (dict(bias=1.0), TypeError, ["bias must be an array"]),
    (dict(mask=array(5, 7)), TypeError, ["mask must be bool", "True = attend", "float32", "bias="]),
    (dict(mask=array(5, 7, dtype=np.uint8)), TypeError, ["mask must be bool", "uint8"]),
    (dict(mask=array(7, 5, dtype=bool)), ValueError, ["mask", "broadcastable", "(7, 5)"]),
    (dict(mask=array(2, 7, dtype=bool)), ValueError, ["mask", "(2, 7)", "one for each key is mask[:, None, None]"]),
    (dict(mask=True), TypeError, ["mask must be an array"]),
    (dict(mask="causal"), TypeError, ["mask must be an array"]),
    (dict(alibi_slopes=array(2)), ValueError, ["alibi_slopes", "(heads,) = (4,)", "(2,)"]),
    (dict(alibi_slopes=array(4, 2)), ValueError, ["alibi_slopes", "(2, 4)", "(4, 2)"]),
    (dict(alibi_slopes=array(4, dtype=np.float64)), TypeError, ["alibi_slopes must be float32", "float64"]),
    (dict(alibi_slopes=0.5), TypeError, ["alibi_slopes must be an array"]),
    (dict(sinks=array(2)), ValueError, ["sinks", "(heads,) = (4,)", "(2,)"]),
    (dict(sinks=array(1)), ValueError, ["sinks", "(heads,) = (4,)", "(1,)"]),
    (dict(sinks=array(4, 1)), ValueError, ["sinks", "(2, 4)", "(4, 1)"]),
    (dict(sinks=array(4, dtype=np.float16)), TypeError, ["sinks must be float32", "float16"]),
    (dict(sinks=0.5), TypeError, ["sinks must be an array"]),
    (dict(sinks=misaligned((4,))), ValueError, ["sinks starts at address"]),
    # outputs
    (dict(out=array(2, 4, 5, 8)), ValueError, ["out must have shape (2, 4, 5, 6)", "(2, 4, 5, 8)"]),
    (dict(out=array(2, 5, 4, 6)), ValueError, ["out must have shape (2, 4, 5, 6)", "bhsd"]),
    (dict(out=array(2, 4, 5, 6, dtype=np.float64)), TypeError, ["out must be float32", "float64"]),
    (dict(out=readonly(array(2, 4, 5, 6))), ValueError, ["out is read-only"]),
    (dict(out=one_element_many_times(2, 4, 5, 6)), ValueError, ["out", "strides", "share"]),
    (dict(out=np.lib.stride_tricks.as_strided(array(999), (2, 4, 5, 6), (480, 120, 20, 4))), ValueError,
     ["out", "share"]),
    (dict(out=misaligned((2, 4, 5, 6))), ValueError, ["out starts at address"]),
    (dict(out=[1]), TypeError, ["out must be an array"]),
    (dict(out=()), ValueError, ["out must be one array", "(o, lse)"]),
    (dict(out=(array(2, 4, 5, 6), array(2, 4, 5))), ValueError, ["out must be one array", "return_lse"]),
    (dict(out=(array(2, 4, 5, 6),) * 3, return_lse=True), ValueError, ["out must be one array", "pair"]),
    (dict(out=(array(2, 4, 5, 6), array(2, 5, 4)), return_lse=True), ValueError, ["lse", "(2, 4, 5)", "(2, 5, 4)"]),
    (dict(out=(array(2, 4, 5, 6), array(2, 4, 5, dtype=np.float16)), return_lse=True), TypeError, ["lse", "float32"]),
    (dict(out=(array(2, 4, 5, 6), array(5, 4, 2).T), return_lse=True), ValueError, ["lse", "contiguous"]),
    (dict(out=(array(2, 4, 5, 6), None), return_lse=True), TypeError, ["the lse of out must be an array", "NoneType"]),
    # names
    *[(dict(kernel=x), ValueError, ["kernel must be one of auto", repr(x)]) for x in ("v9", "", "CPU", None, 3)],
    *[(dict(layout=x), ValueError, ["layout", "bhsd", "bshd", repr(x)])
      for x in ("sbhd", "", None, 1, b"bhsd", ["bhsd"])],
    (dict(stream=1), ValueError, ["stream", "host memory"]),
    # more of these in test_dropout.py
    (dict(dropout_p=1.0, seed=1), ValueError, ["dropout_p", "from 0 to below 1", "1.0"]),
    (dict(seed=0.5), TypeError, ["seed", "whole number", "0.5"]),
    (dict(seed=-1), ValueError, ["seed", "2**64", "-1"]),
    # functions of the caller's own; what is wrong inside of them is in tests/contracts/functions.py
    *[({name: x}, TypeError, [name, "plain Python function", repr(x)])
      for name in ("score_mod", "mask_mod") for x in (abs, 3, int, [].append)],
    (dict(score_mod=lambda s, b: s), TypeError,
     ["score_mod is called with (score, b, h, q_pos, k_pos)", "<lambda>", "line", "too many"]),
    (dict(mask_mod=lambda b, h, q, k: True, aux=(Q,)), TypeError,
     ["mask_mod is called with (b, h, q_pos, k_pos, aux[0])", "too many"]),
    (dict(score_mod=lambda s, b, h, q, k, x: s), TypeError, ["score_mod is called with", "missing", "'x'"]),
    (dict(score_mod=lambda s, b, h, q, k: s + Q[0, 0, 0, 0]), TypeError, ["array Q", "aux=", "line"]),
    (dict(score_mod=lambda s, b, h, q, k: np.exp(s)), TypeError, ["np.exp()", "math.*", "line"]),
    (dict(score_mod=lambda s, b, h, q, k: print(s)), TypeError, ["print()", "aux[...]"]),
    (dict(score_mod=lambda s, b, h, q, k: undefined), TypeError, ["undefined", "not defined"]),  # noqa: F821
    (dict(score_mod=lambda s, b, h, q, k: math.gamma(s)), TypeError, ["math.gamma", "tanh"]),
    (dict(aux=(Q,)), ValueError, ["aux", "score_mod and mask_mod"]),
    (dict(aux=[Q]), TypeError, ["aux must be a tuple", "list"]),
    (dict(aux=(3,), mask_mod=lambda b, h, q, k, x: True), TypeError, ["aux[0] must be an array"]),
    (dict(aux=(Q.astype(complex),), mask_mod=lambda b, h, q, k, x: True), TypeError, ["aux[0]", "complex128"]),
    (dict(kernel="v2"), NotImplementedError, ["kernel='v2'", "no GPU is usable", "NUMBA_ENABLE_CUDASIM", "cpu"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "fragments"), WRONG)
def test_the_message_names_what_is_wrong(changes, error, fragments):
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
        call(**changes)
    assert type(caught.value) is error, caught.value
    for fragment in fragments:
        assert fragment in str(caught.value), f"{fragment!r} is missing in: {caught.value}"
    assert len(str(caught.value)) < 600


def test_the_call_that_is_changed_is_right():
    assert call().shape == (2, 4, 5, 6)


# Everything a person might pass for an array; for each of the three, because each is read by itself.
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("junk", NOT_ARRAYS, ids=lambda x: type(x).__name__)
def test_what_is_no_array_is_refused(name, junk):
    with pytest.raises(TypeError, match=f"^{name} must be an array .*NumPy.*__dlpack__.* not {type(junk).__name__}$"):
        call(**{name: junk})


# What cannot be looked up in a memo must not surface as "unhashable".
@pytest.mark.parametrize("junk", [[], {}, set(), bytearray(b"x"), slice(0, 1)], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize(
    "name",
    "causal window q_offset seqlens_k scale softcap alibi_slopes bias mask layout return_lse out kernel dropout_p "
    "sinks seed score_mod mask_mod".split(),
)  # every option but aux, for which () is right
def test_unhashable_junk_is_named(name, junk):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=name) as caught:
        call(**{name: junk})
    assert "unhashable" not in str(caught.value)


def test_one_is_not_true_even_after_true_was_seen():
    call(causal=True)
    with pytest.raises(TypeError, match="causal must be True or False, not 1"):
        call(causal=1)
    call(scale=1.0)
    with pytest.raises(TypeError, match="scale must be a number"):
        call(scale=True)
    call(window=(1, 0))
    for side in (True, 1.0):
        with pytest.raises(TypeError, match="window: left"):
            call(window=(side, 0))
    call(q_offset=1)
    with pytest.raises(TypeError, match="q_offset"):
        call(q_offset=True)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])  # each input that has out's dtype
def test_out_may_not_share_memory_with_an_input(name):
    arrays = dict(q=array(2, 2, 7, 6), k=array(2, 2, 7, 6), v=array(2, 2, 7, 6), bias=array(2, 2, 7, 7))
    out = arrays[name] if name != "bias" else arrays[name][..., :6]
    with pytest.raises(ValueError, match=f"out shares memory with {name}"):
        call(**arrays, out=out)
    with pytest.raises(ValueError, match=f"out shares memory with {name}"):
        call(**arrays, out=out[:, :, ::-1])


def test_the_outputs_may_not_share_memory_with_each_other():
    memory = array(1, 1, 5, 6)
    q, k, v = array(1, 1, 5, 8), K[:1, :1], V[:1, :1]
    lse = memory.reshape(-1)[:5].reshape(1, 1, 5)
    with pytest.raises(ValueError, match="shares memory"):
        call(q=q, k=k, v=v, out=(memory, lse), return_lse=True)


def test_interleaved_memory_without_a_common_element_is_allowed():
    memory = np.random.default_rng(0).standard_normal((2, 2, 7, 12), dtype=np.float32)
    q, out = memory[..., ::2], memory[..., 1::2]
    expected = call(q=q.copy(), k=q.copy(), v=q.copy())
    assert call(q=q, k=q, v=q, out=out) is out
    assert np.array_equal(out, expected)


def test_options_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        numba_flash.attention(Q, K, V, True)


def test_explain_raises_the_same_errors():
    for changes, error, fragments in WRONG[:60:7]:
        with pytest.raises(error) as caught:
            numba_flash.explain(**dict(q=Q, k=K, v=V, kernel="reference") | changes)
        assert all(fragment in str(caught.value) for fragment in fragments)


def test_torch_tensors_are_checked_too():
    torch = pytest.importorskip("torch", reason="needs torch")
    q, k, v = (torch.ones(1, 1, 2, 4) for _ in range(3))
    with pytest.raises(NotImplementedError, match=r"requires grad.*detach"):
        numba_flash.attention_backward(q, q.requires_grad_(), k, v, q, q[..., 0])
    with torch.no_grad():
        assert call(q=q, k=k, v=v).shape == (1, 1, 2, 4)
    with pytest.raises(TypeError, match="q is torch and v is numpy"):
        call(q=q.detach(), k=k, v=v.numpy())
    with pytest.raises(TypeError, match="dense"):
        call(q=q.detach().to_sparse(), k=k, v=v)
    with pytest.raises(TypeError, match="int64"):
        call(q=torch.ones(1, 1, 2, 4, dtype=torch.int64), k=k, v=v)
    with pytest.raises(TypeError, match="complex64"):
        call(q=torch.ones(1, 1, 2, 4, dtype=torch.complex64), k=k, v=v)


class Hostile:
    """Everything it is asked raises."""

    def __getattribute__(self, name):
        if name in ("__class__", "__dict__"):
            return object.__getattribute__(self, name)
        raise RuntimeError(name)


class Liar:
    """Says that it is an array and is none."""

    shape = (2, 4, 5, 8)
    dtype = "float32"


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(string.printable, max_size=5), st.binary(max_size=5),
    st.complex_numbers(), st.lists(st.integers(-5, 5), max_size=3), st.tuples(st.integers(-5, 5), st.integers(-5, 5)),
    st.tuples(st.floats(), st.none()), st.dictionaries(st.integers(), st.integers(), max_size=2),
    st.sampled_from([
        object(), int, len, np, Ellipsis, NotImplemented, Q, K, V, Q[0], Q[..., 0], Q[:, ::-1], Q.astype(np.int32),
        np.float64(2), np.int8(3), np.bool_(True), np.array(3), np.array(2, I32), np.zeros(2, I32), np.zeros(0, I32),
        np.ones((5, 7), bool), np.ones((5, 7), np.float32), np.ones((2, 4), np.float32), np.array("text"),
        np.array([None]), np.array([[]]), np.ma.masked_array([1]), Liar(), "auto", "reference", "cpu", "bshd",
        np.datetime64("2020"), iter([1]), memoryview(b"abcd"), np.ones((2, 4, 5, 6), np.float32),
    ]),
)  # fmt: skip
NAMES = (
    "q k v causal window q_offset seqlens_k scale softcap alibi_slopes bias mask score_mod mask_mod aux sinks "
    "dropout_p seed layout return_lse out stream kernel"
).split()


@settings(max_examples=2000)
@given(st.dictionaries(st.sampled_from(NAMES), JUNK, min_size=1, max_size=3))
def test_junk_raises_one_of_three_errors_or_gives_a_result(options):
    try:
        result = call(**options)
    except (ValueError, TypeError, NotImplementedError) as error:
        assert type(error) in (ValueError, TypeError, NotImplementedError), type(error)
        assert str(error)
    else:
        o = result.o if isinstance(result, tuple) else result
        assert o.dtype in (np.float32, np.float16, np.float64)


@settings(max_examples=600)
@given(st.lists(JUNK, max_size=5), JUNK)
def test_junk_for_merge_and_softmax(arrays, option):
    for function in (
        lambda: numba_flash.merge(*arrays),
        lambda: numba_flash.merge(Q, Q[..., 0], layout=option),
        lambda: numba_flash.softmax(option, kernel="reference"),
        lambda: numba_flash.softmax(Q, kernel=option),
        lambda: numba_flash.softmax(Q, out=option, kernel="reference"),
    ):
        try:
            function()
        except (ValueError, TypeError, NotImplementedError) as error:
            assert type(error).__module__ == builtins.__name__


# Wrong arguments of the companions, each with its own message.
@pytest.mark.parametrize(
    ("function", "error", "fragments"),
    [
        (lambda: numba_flash.softmax([1.0]), TypeError, ["x must be an array", "list"]),
        (lambda: numba_flash.softmax(array(3, dtype=int), kernel="reference"), TypeError, ["float16", "not int64"]),
        (lambda: numba_flash.softmax(array(3, 0), kernel="reference"), ValueError, ["last axis", "(3, 0)"]),
        (lambda: numba_flash.softmax(array(), kernel="reference"), ValueError, ["last axis", "()"]),
        (lambda: numba_flash.softmax(array(3), kernel="v2"), ValueError, ["kernel must be one of", "'v2'"]),
        (lambda: numba_flash.softmax(array(3), kernel="online"), NotImplementedError, ["GPU", "simulator"]),
        (lambda: numba_flash.softmax(array(3), out=array(4), kernel="reference"), ValueError, ["out", "(3,)", "(4,)"]),
        (lambda: numba_flash.softmax(Q, out=Q, kernel="reference"), ValueError, ["out shares memory with x"]),
        (lambda: numba_flash.softmax(misaligned((3,)), kernel="reference"), ValueError, ["x starts at address"]),
        (lambda: numba_flash.merge(), ValueError, ["pairs"]),
        (lambda: numba_flash.merge(Q), ValueError, ["pairs", "1"]),
        (lambda: numba_flash.merge(Q, Q[..., 0], Q), ValueError, ["pairs", "3"]),
        (lambda: numba_flash.merge(1, 2), TypeError, ["arrays of one library"]),
        (lambda: numba_flash.merge([Q, Q], [Q[..., 0]] * 2), TypeError, ["o1, lse1, o2, lse2", "merge(*one, *other)"]),
        (lambda: numba_flash.merge(Q, Q[..., 0], Q, None), TypeError, ["arrays of one library", "None"]),
        (lambda: numba_flash.merge(Q[0], Q[0, ..., 0]), ValueError, ["o1", "4 dimensions"]),
        (lambda: numba_flash.merge(Q, Q), ValueError, ["lse1", "(2, 4, 5)"]),
        (lambda: numba_flash.merge(Q, Q[..., 0], K, K[..., 0]), ValueError, ["o2", "(2, 4, 5, 8)", "(2, 2, 7, 8)"]),
        (lambda: numba_flash.merge(Q, Q[..., 0].astype(np.float16)), TypeError, ["lse", "float32"]),
        (lambda: numba_flash.merge(Q, Q[..., 0], layout="x"), ValueError, ["layout", "'x'"]),
    ],
)  # fmt: skip
def test_companions(function, error, fragments):
    with pytest.raises(error) as caught:
        function()
    assert type(caught.value) is error
    assert all(fragment in str(caught.value) for fragment in fragments), caught.value
