"""compat.jax: jax.nn's own function beside ours."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX")

import jax.numpy as jnp  # noqa: E402

from numba_flash.compat.jax import dot_product_attention  # noqa: E402

SHAPES = dict(query=(2, 7, 4, 8), key=(2, 9, 2, 8), value=(2, 9, 2, 8))
rng = np.random.default_rng(0)


def drawn(*shape):
    return jnp.asarray(rng.standard_normal(shape, dtype=np.float32))


q, k, v = (drawn(*shape) for shape in SHAPES.values())
OPTIONS = {
    "plain": dict(),
    "scale": dict(scale=0.3),
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(2, 3)),
    "one window": dict(local_window_size=2),
    "causal window": dict(local_window_size=(2, 3), is_causal=True),
    "bias": dict(bias=drawn(1, 4, 7, 9)),
    "bias of rank 3": dict(bias=drawn(4, 7, 1)),
    "mask": dict(mask=jnp.arange(9)[None, None, None] % 4 < 3),
    "lengths of keys": dict(key_value_seq_lengths=jnp.array([5, 9], jnp.int32)),
    "lengths of both": dict(
        query_seq_lengths=jnp.array([3, 6], jnp.int32), key_value_seq_lengths=jnp.array([5, 8], jnp.int32)
    ),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_results_and_gradients_are_those_of_jax_nn(options):
    def loss(attend):
        return lambda *x: jnp.sin(attend(*x, **options)).sum()

    right = jax.nn.dot_product_attention(q, k, v, **options)
    np.testing.assert_allclose(dot_product_attention(q, k, v, **options), right, atol=2e-6)
    found = jax.jit(jax.grad(loss(dot_product_attention), (0, 1, 2)))(q, k, v)
    for one, other in zip(found, jax.grad(loss(jax.nn.dot_product_attention), (0, 1, 2))(q, k, v), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_without_batch_and_with_the_residual():
    right = jax.nn.dot_product_attention(q[0], k[0], v[0], is_causal=True, return_residual=True)
    found = dot_product_attention(q[0], k[0], v[0], is_causal=True, return_residual=True)
    for one, other in zip(found, right, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_bfloat16_and_the_dtype_of_the_residual():
    few = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    o, lse = dot_product_attention(*few, return_residual=True)
    right, residual = jax.nn.dot_product_attention(*few, return_residual=True)
    assert o.dtype == right.dtype and lse.dtype == residual.dtype
    np.testing.assert_allclose(o.astype(np.float32), right.astype(np.float32), atol=0.03)


def test_vmap():
    many = [jnp.stack([x, 2 * x, x + 1]) for x in (q, k, v)]
    found = jax.vmap(dot_product_attention)(*many)
    np.testing.assert_allclose(found, jax.vmap(jax.nn.dot_product_attention)(*many), atol=2e-6)


def test_a_query_without_keys_gives_0():
    o, lse = dot_product_attention(q, k, v, mask=jnp.zeros((1, 1, 1, 9), bool), return_residual=True)
    assert not o.any() and (lse == -jnp.inf).all()


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (dict(implementation="cudnn"), ValueError, "implementation must be None, not 'cudnn'"),
        (dict(local_window_size=-1), ValueError, "local_window_size must be a whole number from 0, or a pair"),
        (dict(local_window_size=(1, 2, 3)), ValueError, "local_window_size must be"),
        (
            dict(query_seq_lengths=np.array([1], np.int32)),
            ValueError,
            r"query_seq_lengths must be int32 of shape \(2,\)",
        ),
        (dict(key_value_seq_lengths=np.array([1.0, 2.0])), TypeError, "key_value_seq_lengths must be int32"),
        (dict(mask=np.zeros((1, 1, 7, 9), np.int32)), TypeError, "mask must be bool"),
        (dict(is_causal=1), TypeError, "is_causal must be"),
        (dict(scale="a"), TypeError, "scale must be"),
        (dict(query=None), ValueError, "query must have 3 or 4 dimensions .*, not None"),
        (dict(key=k[0, 0]), ValueError, r"key must have 3 or 4 dimensions .*, not ArrayImpl of shape \(2, 8\)"),
    ],
)
def test_what_is_wrong_is_said_with_the_names_of_this_signature(given, error, says):
    with pytest.raises(error, match=says):
        dot_product_attention(**(dict(query=q, key=k, value=v) | given))


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="key"):
        dot_product_attention(q, k[..., :4], v)
