"""score_mod and mask_mod under jit, grad and vmap of JAX, against JAX's own gradients of the plain formula."""

import functools
import math

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX")
pytest.importorskip("jax.experimental.buffer_callback", reason="needs a JAX with jax.experimental.buffer_callback")

import jax.numpy as jnp  # noqa: E402

import numba_flash  # noqa: E402
from numba_flash import mods  # noqa: E402

Q, K, V, O = (2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 4), (2, 4, 5, 4)  # grouped heads, lengths and head_dims apart
OFFSET = 1  # of the first query: seqlen_k - seqlen_q


@pytest.fixture(autouse=True)
def float64_on_the_cpu():
    """JAX has float64 only when asked. These kernels take arrays in host memory, also where there is a GPU."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    with jax.default_device(jax.devices("cpu")[0]):
        yield
    jax.config.update("jax_enable_x64", before)


def arrays(*shapes, seed=0):
    generator = np.random.default_rng(seed)
    return [jnp.asarray(generator.standard_normal(shape)) for shape in shapes]


def capped(score, b, h, q_pos, k_pos):
    return 1.5 * math.tanh(score / 1.5) if k_pos % 2 else score * score


def sloped(score, b, h, q_pos, k_pos, slopes, ids):
    return score * slopes[h] - b * slopes[0] * abs(q_pos - k_pos)


def same(b, h, q_pos, k_pos, slopes, ids):
    return ids[b, k_pos] == ids[b, 0] or q_pos == k_pos


SETS = {  # (what attention is given, the same of JAX's operations)
    "score_mod": (dict(score_mod=capped), lambda s, b, h, i, j: jnp.where(j % 2, 1.5 * jnp.tanh(s / 1.5), s * s), None),
    "mask_mod": (dict(mask_mod=lambda b, h, i, j: i >= j), None, lambda b, h, i, j: i >= j),
    "aux": (
        dict(score_mod=sloped, mask_mod=same),
        lambda s, b, h, i, j, slopes, ids: s * slopes[h] - b * slopes[0] * abs(i - j),
        lambda b, h, i, j, slopes, ids: (ids[b, j] == ids[b, 0]) | (i == j),
    ),
}


def aux_of(name):
    ids = np.array([[3, 3, 1, 3, 1, 3], [2, 2, 2, 4, 4, 2]], np.int32)
    return (jnp.array([0.5, -0.25, 2.0, 1.0]), jnp.asarray(ids)) if name == "aux" else ()


def plainly(q, k, v, aux=(), score_mod=None, mask_mod=None):
    """-> o and lse of JAX's own operations."""
    s = q @ jnp.repeat(k, 2, 1).swapaxes(2, 3) * q.shape[-1] ** -0.5
    b, h, i, j = jnp.meshgrid(*map(jnp.arange, s.shape), indexing="ij")
    if score_mod is not None:
        s = score_mod(s, b, h, i + OFFSET, j, *aux)
    if mask_mod is not None:
        s = jnp.where(mask_mod(b, h, i + OFFSET, j, *aux), s, -jnp.inf)
    return jax.nn.softmax(s) @ jnp.repeat(v, 2, 1), jax.nn.logsumexp(s, -1)


def pair_of(name, kernel="reference"):
    """-> ours and JAX's, functions of q, k, v and aux."""
    given, score_mod, mask_mod = SETS[name]

    def ours(q, k, v, aux=()):
        return numba_flash.attention(q, k, v, aux=aux, return_lse=True, kernel=kernel, **given)

    return ours, functools.partial(plainly, score_mod=score_mod, mask_mod=mask_mod)


def close(found, expected):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        # float64 with a few dozen terms of about 1 each
        assert one.shape == other.shape and np.allclose(one, other, rtol=1e-12, atol=1e-12)


def loss_of(attention):
    (do,) = arrays(O, seed=1)

    def loss(*given):
        o, lse = attention(*given)
        return (o * do).sum() + jnp.square(lse).sum()

    return loss


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("name", SETS)
def test_gradients_are_those_of_the_plain_formula(name, kernel):
    q, k, v = arrays(Q, K, V)
    aux = aux_of(name)
    found, expected = (
        (attention(q, k, v, aux), attention(q, k, v, aux)) for attention in map(jax.jit, pair_of(name, kernel))
    )
    close(found, expected)
    found, expected = (jax.grad(loss_of(attention), (0, 1, 2)) for attention in pair_of(name, kernel))
    close(found(q, k, v, aux), expected(q, k, v, aux))
    close(jax.jit(found)(q, k, v, aux), expected(q, k, v, aux))


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_vmap(name):
    """b is the entry of each call's own batch; aux is mapped over or shared."""
    q, k, v = arrays((3, *Q), K, (3, *V))
    aux = aux_of(name)
    several = tuple(jnp.stack([aux[0], -aux[0], 2 * aux[0]]) if n == 0 else x for n, x in enumerate(aux))
    for given, in_aux in ((aux, None), (several, (0, None))) if aux else (((), None),):
        axes = (0, None, 0, in_aux)
        found, expected = (jax.vmap(jax.grad(loss_of(x), (0, 1, 2)), axes)(q, k, v, given) for x in pair_of(name))
        close(found, expected)
        found, expected = (
            jax.jit(jax.grad(lambda *x, f=f, axes=axes: jax.vmap(loss_of(f), axes)(*x).sum(), (0, 1, 2)))(
                q, k, v, given
            )
            for f in pair_of(name)
        )
        close(found, expected)


def test_a_changed_function_is_another_program(monkeypatch):
    (q, k, v), seen = arrays(Q, K, V), []
    for factor in (0.5, 2.0):

        def scaled(score, b, h, i, j, factor=factor):
            return score * factor

        found = jax.jit(lambda *x, f=scaled: numba_flash.attention(*x, score_mod=f, kernel="reference"))(q, k, v)
        close(found, plainly(q, k, v, score_mod=lambda s, *_, factor=factor: s * factor)[0])
        seen.append(found)
    assert not np.allclose(*seen)


def test_gradients_of_aux():
    q, k, v = arrays((3, *Q), K, (3, *V))
    slopes, ids = aux_of("aux")
    several = jnp.stack([slopes, -slopes, 2 * slopes])

    def everything(attention):
        loss = loss_of(lambda q, k, v, slopes: attention(q, k, v, (slopes, ids)))
        of_one, of_slopes = jax.grad(loss, (0, 1, 2, 3)), jax.jit(jax.grad(loss, 3))
        shared, each = (jax.vmap(of_one, (0, None, 0, axis)) for axis in (None, 0))
        of_all = jax.grad(lambda slopes: jax.vmap(loss, (0, None, 0, None))(q, k, v, slopes).sum())
        return (
            of_one(q[0], k, v[0], slopes), of_slopes(q[0], k, v[0], slopes), shared(q, k, v, slopes),
            each(q, k, v, several), of_all(slopes),
        )  # fmt: skip

    close(*map(everything, pair_of("aux")))


def test_forward_mode_of_aux_is_refused():
    q, k, v = arrays(Q, K, V)
    slopes, ids = aux_of("aux")
    ours, _ = pair_of("aux")
    with pytest.raises(NotImplementedError, match="forward mode"):
        jax.jvp(lambda x: ours(q, k, v, (x, ids))[0], (slopes,), (slopes,))
    stopped = jax.grad(lambda x: ours(q * x[0], k, v, (jax.lax.stop_gradient(x), ids))[0].sum())(slopes)
    assert stopped[0] != 0 and (stopped[1:] == 0).all()


def test_a_block_mask_is_its_mask_mod():
    documents = jnp.repeat(jnp.arange(3), 4)[None]
    q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 12, 8), dtype=np.float32))
    blocks = numba_flash.block_mask(mods.document, 1, 2, 12, 12, aux=(documents,), causal=True)
    expected = numba_flash.attention(q, q, q, mask_mod=mods.document, aux=(documents,), causal=True)
    assert np.array_equal(jax.jit(lambda q: numba_flash.attention(q, q, q, block_mask=blocks))(q), expected)
    assert jax.grad(lambda q: numba_flash.attention(q, q, q, block_mask=blocks).sum())(q).shape == q.shape
