"""q_index, the row of q, where a framework records the computation: beside a bias by rows."""

import numpy as np
import pytest

import numba_flash


def by_row(score, b, h, q_pos, k_pos, q_index, steps):
    return score + steps[q_index] * k_pos


STEPS = np.arange(3, dtype=np.float32) / 10
BIAS = STEPS[:, None] * np.arange(5, dtype=np.float32)


def test_torch():
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 4, generator=generator).requires_grad_() for n in (3, 5, 5))
    o = numba_flash.attention(q, k, v, score_mod=by_row, aux=(torch.tensor(STEPS),))
    expected = numba_flash.attention(q, k, v, bias=torch.tensor(BIAS))
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, expected)))


def test_jax():
    jax = pytest.importorskip("jax")
    q, k, v = (jax.random.normal(jax.random.key(n), (1, 2, n, 4)) for n in (3, 5, 5))

    def loss(q, **options):
        return (numba_flash.attention(q, k, v, **options) ** 2).sum()

    found = jax.jit(jax.grad(lambda q: loss(q, score_mod=by_row, aux=(jax.numpy.asarray(STEPS),))))(q)
    assert np.allclose(found, jax.grad(lambda q: loss(q, bias=jax.numpy.asarray(BIAS)))(q), atol=1e-5)
