"""attention() under jit, grad and vmap."""

import functools
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX")
pytest.importorskip("jax.experimental.buffer_callback", reason="needs a JAX with jax.experimental.buffer_callback")

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import numba_flash  # noqa: E402
from numba_flash import gradients  # noqa: E402


@pytest.fixture(autouse=True)
def float64():
    """JAX has float64 only when asked."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def arrays(*shapes, dtype="float64", seed=0):
    generator = np.random.default_rng(seed)
    return [jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes]


Q, K, V = (2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 4)  # grouped heads, lengths and head_dims apart
LENGTHS, OFFSETS = np.array([6, 4], np.int32), np.array([1, 3], np.int32)
MASK = np.array([[1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 0]], bool)[:, None, None]
SETS = {
    "plain": ({}, None, None),
    "causal": (dict(causal=True, scale=0.7), None, None),
    "window and softcap": (dict(window=(2, 1), softcap=1.5, q_offset=OFFSETS), None, None),
    "bias and slopes": (dict(causal=True, q_offset=1), (1, 4, 1, 6), (4,)),
    "mask": (dict(mask=MASK), (6,), None),
    "lengths": (dict(seqlens_k=LENGTHS), None, (2, 4)),
    "bshd": (dict(layout="bshd", causal=True), None, None),
}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", SETS)
def test_check_grads(name, jitted):
    """Gradients of o and of lse, by finite differences in float64, with respect to all that has one."""
    options, bias, slopes = SETS[name]
    inputs = arrays(Q, K, V)
    if options.get("layout") == "bshd":
        inputs = [x.transpose(0, 2, 1, 3) for x in inputs]
    extra = {key: shape for key, shape in dict(bias=bias, alibi_slopes=slopes).items() if shape is not None}

    def function(q, k, v, *more):
        q, k, v, *more = map(jnp.asarray, (q, k, v, *more))  # check_grads hands over NumPy's
        known = {key: jnp.asarray(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
        o, lse = numba_flash.attention(q, k, v, return_lse=True, **dict(zip(extra, more, strict=True)), **known)
        return jnp.sin(o).sum() + jnp.cos(jnp.where(jnp.isfinite(lse), lse, 0)).sum()

    function = jax.jit(function) if jitted else function
    check_grads(function, (*inputs, *arrays(*extra.values(), seed=1)), order=1, modes=["rev"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_traced_is_the_same_as_not(dtype):
    q, k, v = arrays((2, 4, 40, 32), (2, 2, 50, 32), (2, 2, 50, 32), dtype=dtype)
    expected = numba_flash.attention(q, k, v, causal=True, return_lse=True)
    found = jax.jit(lambda *x: numba_flash.attention(*x, causal=True, return_lse=True))(q, k, v)
    assert isinstance(found, numba_flash.AttentionOutput)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and jnp.array_equal(ours, theirs)
    (do,) = arrays((2, 4, 40, 32), dtype=dtype, seed=2)
    _, pull = jax.vjp(lambda *x: numba_flash.attention(*x, causal=True), q, k, v)
    wanted = numba_flash.attention_backward(do, q, k, v, *expected, causal=True)
    for ours, theirs in zip(pull(do), wanted, strict=False):
        assert ours.dtype == theirs.dtype and jnp.array_equal(ours, theirs)


def test_subnormal_numbers_are_kept():
    q, k, v = arrays(Q, K, V, dtype="float16")
    v = v * jnp.float16(1e-6)
    o = jax.jit(numba_flash.attention)(q, k, v)
    assert jnp.array_equal(o, numba_flash.attention(q, k, v)) and (o != 0).mean() > 0.5


def test_vmap():
    q, k, v = arrays((3, *Q), K, (3, *V))
    mapped = jax.vmap(numba_flash.attention, in_axes=(0, None, 0))
    expected = jnp.stack([numba_flash.attention(q[i], k, v[i]) for i in range(3)])
    assert jnp.array_equal(mapped(q, k, v), expected)
    assert jnp.array_equal(jax.jit(mapped)(q, k, v), expected)
    of_mapped = jax.grad(lambda k: jnp.sin(mapped(q, k, v)).sum())(k)
    mapped_of = jax.vmap(jax.grad(lambda k, q, v: jnp.sin(numba_flash.attention(q, k, v)).sum()), (None, 0, 0))
    assert jnp.allclose(of_mapped, mapped_of(k, q, v).sum(0), rtol=1e-12, atol=1e-12)


def test_only_what_is_asked_for_is_computed(monkeypatch):
    asked = []
    real = gradients.understand

    def spy(**arguments):
        asked.append((arguments["wanted"], arguments["dlse"] is None))
        return real(**arguments)

    monkeypatch.setattr(gradients, "understand", spy)
    q, k, v = arrays(Q, K, V)
    dq = jax.grad(lambda q: numba_flash.attention(q, k, v).sum())(q)
    _, dv = jax.grad(lambda k, v: numba_flash.attention(q, k, v, return_lse=True).lse.sum(), (0, 1))(k, v)
    jax.block_until_ready((dq, dv))
    assert asked == [(("dq",), True), (("dk", "dv"), False)]
    assert not dv.any()  # lse does not depend on v


def test_lengths_and_offsets_may_be_traced_too():
    q, k, v = arrays(Q, K, V)
    function = jax.jit(lambda lengths, offsets: numba_flash.attention(q, k, v, seqlens_k=lengths, q_offset=offsets))
    lengths, offsets = jnp.asarray(LENGTHS), jnp.asarray(OFFSETS)
    expected = numba_flash.attention(q, k, v, seqlens_k=lengths, q_offset=offsets)
    assert jnp.array_equal(function(lengths, offsets), expected)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(out=np.empty(Q)), NotImplementedError, "out"),
        (dict(stream=0), NotImplementedError, "stream"),
        (dict(dropout_p=0.1), NotImplementedError, "dropout_p"),
        (dict(mask=MASK), TypeError, "mask is ndarray"),
        (dict(softcap=-1.0), ValueError, "softcap"),
        (dict(window=4), ValueError, "window"),
        (dict(kernel="v3"), ValueError, "kernel must be one of"),
        (dict(kernel="mma"), jax.errors.JaxRuntimeError, "cannot run this problem here"),
    ],
)
def test_mistakes_are_named(options, error, words):
    q, k, v = arrays(Q, K, V)
    with pytest.raises(error, match=words):
        jax.block_until_ready(jax.jit(lambda q: numba_flash.attention(q, k, v, **options))(q))


@pytest.mark.parametrize("name", ["scale", "softcap", "causal", "window"])
def test_options_are_not_traced(name):
    q, k, v = arrays(Q, K, V)

    def function(q, value):
        return numba_flash.attention(q, k, v, **{name: (value, None) if name == "window" else value})

    with pytest.raises(TypeError, match=f"{name} must be known when JAX traces"):
        jax.jit(function)(q, 1)
    with pytest.raises(TypeError, match=f"{name}.* must be .*Tracer"):  # an array that is there, an option that is not
        jax.jit(functools.partial(function, q))(1)


def test_forward_mode_and_second_derivatives_are_refused():
    q, k, v = arrays(Q, K, V)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: numba_flash.attention(q, k, v), (q,), (q,))
    with pytest.raises(ValueError, match="JVP"):
        jax.grad(lambda q: jax.grad(lambda q: numba_flash.attention(q, k, v).sum())(q).sum())(q)


def test_a_jax_without_buffer_callback_is_told_so(monkeypatch):
    q, k, v = arrays(Q, K, V)
    monkeypatch.setitem(sys.modules, "jax.experimental.buffer_callback", None)
    monkeypatch.delitem(sys.modules, "numba_flash.bridges.jax", raising=False)
    monkeypatch.delattr("numba_flash.bridges.jax", raising=False)
    with pytest.raises(NotImplementedError, match="buffer_callback"):
        jax.jit(numba_flash.attention)(q, k, v)
