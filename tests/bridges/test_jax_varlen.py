"""attention_varlen() under jit and grad of JAX, with the bits that it has outside of them."""

import functools

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX")
pytest.importorskip("jax.experimental.buffer_callback", reason="needs a JAX with jax.experimental.buffer_callback")

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import numba_flash  # noqa: E402
from numba_flash.testing import packed as packs  # noqa: E402

ENDS_Q, ENDS_K = (np.array(ends, np.int32) for ends in ([0, 5, 5, 12], [1, 8, 10, 19]))  # the second has no queries
Q, K, V = (13, 4, 8), (20, 2, 8), (20, 2, 6)  # grouped heads, head_dims apart, rows of no sequence


@pytest.fixture(autouse=True)
def float64_on_the_cpu():
    """JAX has float64 only when asked. These kernels take arrays in host memory, also where there is a GPU."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    with jax.default_device(jax.devices("cpu")[0]):
        yield
    jax.config.update("jax_enable_x64", before)


def arrays(*shapes, dtype="float64", seed=0):
    generator = np.random.default_rng(seed)
    return [jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes]


def varlen(q, k, v, of_q=ENDS_Q, of_k=ENDS_K, **options):
    return numba_flash.attention_varlen(q, k, v, jnp.asarray(of_q), jnp.asarray(of_k), **options)


def same(found, expected):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other, equal_nan=True)


def outer(o, lse):
    """A loss that weights all of o and lse, and its gradients."""
    do, dlse = arrays(o.shape, lse.shape, seed=1)
    return (o * do).sum() + (jnp.where(jnp.isfinite(lse), lse, 0) * dlse).sum()


def step(attention, *given):
    """The gradients of q, k and v, through o and lse."""
    return jax.grad(lambda *x: outer(*attention(*x, return_lse=True)), (0, 1, 2))(*given)


@pytest.mark.parametrize("seed", range(16))
def test_traced_is_the_same_as_not(seed):
    """Of random problems: lengths of 0, windows, arrays of lengths and offsets, bounds, NaN in rows of no sequence."""
    case, dtype = packs.packed_case(seed), ("float16", "bfloat16", "float32", "float64")[seed % 4]
    given = case.arguments(jnp.asarray)
    given |= {name: given[name].astype(dtype) for name in "qkv"}
    static = {name: given.pop(name) for name in list(given) if not isinstance(given[name], jax.Array)}
    expected = numba_flash.attention_varlen(**given, **static, return_lse=True)
    found = jax.jit(lambda given: numba_flash.attention_varlen(**given, **static, return_lse=True))(given)
    assert isinstance(found, numba_flash.AttentionOutput)
    same(found, expected)
    do, dlse = (jnp.asarray(x, like.dtype) for x, like in zip(packs.outer_packed(case), expected, strict=True))
    wanted = numba_flash.attention_varlen_backward(
        do, o=expected.o, lse=expected.lse, dlse=dlse, **given, **static
    )  # fmt: skip
    others = {name: x for name, x in given.items() if name not in ("q", "k", "v")}

    def pulled(q, k, v, do, dlse):
        def attention(q, k, v):
            return tuple(numba_flash.attention_varlen(q, k, v, **others, **static, return_lse=True))

        return jax.vjp(attention, q, k, v)[1]((do, dlse))

    same(jax.jit(pulled)(given["q"], given["k"], given["v"], do, dlse), tuple(wanted)[:3])


SETS = {
    "plain": ({}, None),
    "window and softcap": (dict(window=(2, 1), softcap=1.5, scale=0.7), None),
    "sinks": (dict(causal=True), (4,)),
    "sinks of each sequence": (dict(causal=True, q_offset=-1), (3, 4)),
    "lengths and bounds": (dict(seqlens_k=np.array([3, 2, 9], np.int32), max_seqlen_q=7, max_seqlen_k=9), None),
}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", SETS)
def test_check_grads(name, jitted):
    """Gradients of o and of lse, by finite differences in float64, with respect to all that has one."""
    options, sinks = SETS[name]

    def function(q, k, v, *sinks):
        q, k, v, *sinks = map(jnp.asarray, (q, k, v, *sinks))  # check_grads hands over NumPy's
        return outer(*varlen(q, k, v, return_lse=True, **options, **(dict(sinks=sinks[0]) if sinks else {})))

    given = arrays(Q, K, V, *(() if sinks is None else (sinks,)))
    check_grads(jax.jit(function) if jitted else function, given, order=1, modes=["rev"])


def test_functions_are_told_the_sequence():
    (q, k, v), (slopes,) = arrays(Q, K, V), arrays((4,))
    options = dict(
        score_mod=lambda s, b, h, i, j, slopes: s * slopes[h] - b * abs(i - j) * slopes[0],
        mask_mod=lambda b, h, i, j, slopes: (i + j + b) % 3 != 0,
        aux=(slopes,),
    )

    def both(slopes):
        return step(lambda *x, **named: varlen(*x, **options | dict(aux=(slopes,)), **named), q, k, v)

    same(jax.jit(both)(slopes), both(slopes))
    same(jax.jit(functools.partial(varlen, **options))(q, k, v), varlen(q, k, v, **options))


def test_a_traced_seed_drops_as_a_number_does():
    q, k, v = arrays(Q, K, V)
    traced = jax.jit(lambda seed: step(functools.partial(varlen, dropout_p=0.4, seed=seed), q, k, v))
    for seed in (3, 4):
        same(traced(jnp.uint32(seed)), step(functools.partial(varlen, dropout_p=0.4, seed=seed), q, k, v))


def test_other_lengths_are_no_other_program():
    given, traces = arrays(Q, K, V), []

    @jax.jit
    def traced(of_q, of_k):
        traces.append(None)
        return varlen(*given, of_q, of_k, causal=True)

    for of_q in (ENDS_Q, np.array([0, 0, 13, 13], np.int32)):
        same(traced(of_q, ENDS_K), varlen(*given, of_q, ENDS_K, causal=True))
    assert len(traces) == 1


@pytest.mark.parametrize("ends", [[0], [0, 0], [2, 2, 2]], ids=str)
def test_no_sequence_and_empty_ones(ends):
    (q, k, v), ends = arrays(Q, K, V), np.array(ends, np.int32)
    o, lse = jax.jit(lambda *x: varlen(*x, ends, ends, return_lse=True))(q, k, v)
    assert not o.any() and (lse == -jnp.inf).all()
    assert not any(x.any() for x in step(lambda *x, **named: varlen(*x, ends, ends, **named), q, k, v))


def test_in_a_program():
    """Scanned layers, computed again in the backward, between operations of JAX's."""
    x, w = arrays((12, 32), (3, 32, 96))

    def layer(attention, x, w):
        q, k, v = (x @ w / 20).reshape(12, 3, 4, 8).swapaxes(0, 1)
        return x + attention(q, k, v).reshape(x.shape), None

    def loss(attention, w):
        return jnp.square(jax.lax.scan(jax.checkpoint(functools.partial(layer, attention)), x, w)[0]).mean()

    def one_by_one(q, k, v):
        own = [[x[None, a:e].swapaxes(1, 2) for x in (q, k, v)] for a, e in ((0, 5), (5, 12))]
        return jnp.concatenate([numba_flash.attention(*x, causal=True)[0].swapaxes(0, 1) for x in own])

    packed = functools.partial(varlen, of_q=ENDS_Q, of_k=ENDS_Q, causal=True)
    found, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, attention)))(w) for attention in (packed, one_by_one)
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


def test_what_is_not_built_is_named():
    q, k, v = arrays(Q, K, V)
    words = "jax.vmap takes no attention_varlen: pack the sequences"
    with pytest.raises(NotImplementedError, match=words):
        jax.vmap(lambda q: varlen(q, k, v))(jnp.stack([q, q]))
    with pytest.raises(NotImplementedError, match=words):
        jax.jit(jax.vmap(lambda of_q: varlen(q, k, v, of_q)))(jnp.stack([ENDS_Q, ENDS_Q]))
    with pytest.raises(NotImplementedError, match=words):
        jax.jacrev(lambda q: varlen(q, k, v).sum((1, 2)))(q)
    with pytest.raises(NotImplementedError, match="forward mode"):
        jax.jvp(lambda q: varlen(q, k, v), (q,), (q,))
    with pytest.raises(NotImplementedError, match="second derivative"):
        jax.grad(lambda q: jnp.square(jax.grad(lambda q: jnp.square(varlen(q, k, v)).sum())(q)).sum())(q)


def test_what_is_wrong_is_said():
    q, k, v = arrays(Q, K, V)
    with pytest.raises(TypeError, match="max_seqlen_q must be a whole number or None.*leave it out"):
        jax.jit(lambda most: varlen(q, k, v, max_seqlen_q=most))(7)
    with pytest.raises(TypeError, match="cu_seqlens_q must be int32, not int64; .*astype"):
        jax.jit(lambda of_q: varlen(q, k, v, of_q))(ENDS_Q.astype(np.int64))
    with pytest.raises(
        (ValueError, jax.errors.JaxRuntimeError), match=r"cu_seqlens_q must rise .* at most 13.*\[12, 5, 5, 0\]"
    ):
        jax.block_until_ready(jax.jit(lambda of_q: varlen(q, k, v, of_q))(ENDS_Q[::-1].copy()))
