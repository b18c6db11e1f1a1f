"""lse alone and weights of torch tensors and JAX arrays."""

import numpy as np
import pytest

import numba_flash

rng = np.random.default_rng(0)
Q, K = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 9, 8), (2, 2, 11, 8)))
LSE = numba_flash.attention_lse(Q, K, causal=True)
FUNCTIONS = {
    "weights": lambda *x: numba_flash.weights(*x, rows=slice(2, 7), heads=slice(0, 2), causal=True),
    "column_sums": lambda *x: numba_flash.column_sums(*x, causal=True),
    "bias": lambda q, k, lse: numba_flash.column_sums(q, k, lse, causal=True, bias=0 * lse[..., None]),
    "max_logit": lambda *x: numba_flash.row_statistics(*x, causal=True).max_logit,
    "entropy": lambda *x: numba_flash.row_statistics(*x, causal=True).entropy,
}


@pytest.mark.parametrize("which", FUNCTIONS)
def test_torch(which, device):
    torch = pytest.importorskip("torch", reason="needs torch")
    tensors = [torch.tensor(x, device=device) for x in (Q, K, LSE)]
    found = FUNCTIONS[which](*tensors)
    assert isinstance(found, torch.Tensor) and found.device.type == device
    np.testing.assert_allclose(found.cpu(), FUNCTIONS[which](Q, K, LSE), atol=2e-5)
    with pytest.raises(NotImplementedError, match="requires grad"):
        FUNCTIONS[which](tensors[0].requires_grad_(), *tensors[1:])
    with torch.no_grad():
        FUNCTIONS[which](*tensors)


@pytest.mark.parametrize("which", FUNCTIONS)
def test_jax(which):
    jax = pytest.importorskip("jax", reason="needs JAX")
    arrays = [jax.numpy.asarray(x) for x in (Q, K, LSE)]
    found = FUNCTIONS[which](*arrays)
    assert isinstance(found, jax.Array)
    np.testing.assert_allclose(found, FUNCTIONS[which](Q, K, LSE), atol=2e-5)
    with pytest.raises(NotImplementedError, match="traced JAX array"):
        jax.jit(FUNCTIONS[which])(*arrays)


def test_the_gradient_of_lse_alone():
    torch = pytest.importorskip("torch", reason="needs torch")
    jax = pytest.importorskip("jax", reason="needs JAX")
    q, k = (torch.tensor(x, requires_grad=True) for x in (Q, K))
    numba_flash.attention_lse(q, k, causal=True).sum().backward()
    scores = torch.tensor(Q, requires_grad=True)
    seen = torch.ones(9, 11, dtype=torch.bool).tril(2)
    products = scores @ torch.tensor(K).repeat_interleave(2, 1).mT * 8**-0.5
    products.masked_fill(~seen, -torch.inf).logsumexp(-1).sum().backward()
    np.testing.assert_allclose(q.grad, scores.grad, atol=1e-5)
    found = jax.jit(jax.grad(lambda *x: numba_flash.attention_lse(*x, causal=True).sum(), (0, 1)))(Q, K)
    for one, other in zip(found, (q, k), strict=True):
        np.testing.assert_allclose(one, other.grad, atol=1e-5)


def test_values_of_no_columns_have_the_gradient_of_lse():
    torch = pytest.importorskip("torch", reason="needs torch")
    q, k = (torch.tensor(x, requires_grad=True) for x in (Q, K))
    o, lse = numba_flash.attention(q, k, torch.zeros(2, 2, 11, 0), causal=True, return_lse=True)
    assert o.shape == (2, 4, 9, 0)
    (o.sum() + lse.sum()).backward()
    again, also = (torch.tensor(x, requires_grad=True) for x in (Q, K))
    numba_flash.attention_lse(again, also, causal=True).sum().backward()
    assert torch.equal(q.grad, again.grad) and torch.equal(k.grad, also.grad)
