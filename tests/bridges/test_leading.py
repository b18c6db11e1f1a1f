"""q, k and v of any number of dimensions in torch and JAX, and triangle attention, which is made of them."""

import numpy as np
import pytest

import numba_flash
from numba_flash.compat.cuequivariance import triangle_attention

rng = np.random.default_rng(0)


def drawn(*shape):
    return rng.standard_normal(shape).astype(np.float32)


SHAPES = {
    "two": ((5, 8), (7, 8), (7, 6), (5, 7)),
    "three": ((4, 5, 8), (2, 7, 8), (2, 7, 6), (4, 1, 7)),
    "five": ((2, 3, 4, 5, 8), (2, 3, 2, 7, 8), (2, 3, 2, 7, 6), (1, 1, 4, 5, 7)),
}


def gradients(arrays):
    """Those of the sum of o sin(o) + lse, by NumPy; the last is that of bias."""
    q, k, v, bias = arrays
    o, lse = numba_flash.attention(q, k, v, bias=bias, return_lse=True)
    wanted = ("dq", "dk", "dv", "dbias")
    do = np.sin(o) + o * np.cos(o)
    found = numba_flash.attention_backward(do, q, k, v, o, lse, bias=bias, dlse=np.ones_like(lse), wanted=wanted)
    return [getattr(found, name) for name in wanted]


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_gradients_of_torch(shapes, device):
    torch = pytest.importorskip("torch", reason="needs torch")
    arrays = [drawn(*shape) for shape in shapes]
    q, k, v, bias = (torch.tensor(x, device=device, requires_grad=True) for x in arrays)
    o, lse = numba_flash.attention(q, k, v, bias=bias, return_lse=True)
    ((o * o.sin()).sum() + lse.sum()).backward()
    for x, right in zip((q, k, v, bias), gradients(arrays), strict=True):
        np.testing.assert_allclose(x.grad.cpu(), right, atol=2e-5)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_gradients_of_jax(shapes):
    jax = pytest.importorskip("jax", reason="needs JAX")
    arrays = [drawn(*shape) for shape in shapes]

    def loss(q, k, v, bias):
        o, lse = numba_flash.attention(q, k, v, bias=bias, return_lse=True)
        return (o * jax.numpy.sin(o)).sum() + lse.sum()

    found = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*map(jax.numpy.asarray, arrays))
    for one, right in zip(found, gradients(arrays), strict=True):
        np.testing.assert_allclose(one, right, atol=2e-5)


@pytest.mark.slow
def test_one_graph_of_torch_compile():
    torch = pytest.importorskip("torch", reason="needs torch")
    arrays = [drawn(*shape) for shape in SHAPES["five"]]
    q, k, v, bias = (torch.tensor(x, requires_grad=True) for x in arrays)

    def loss(q, k, v, bias):
        o, lse = numba_flash.attention(q, k, v, bias=bias, return_lse=True)
        return (o * o.sin()).sum() + lse.sum()

    torch.compile(loss, fullgraph=True, backend="aot_eager")(q, k, v, bias).backward()
    for x, right in zip((q, k, v, bias), gradients(arrays), strict=True):
        np.testing.assert_allclose(x.grad, right, atol=2e-5)


def test_vmap_of_torch():
    torch = pytest.importorskip("torch", reason="needs torch")
    q, k, v, _ = (torch.tensor(drawn(*shape)) for shape in SHAPES["five"])
    right = numba_flash.attention(q, k, v)
    assert torch.equal(torch.func.vmap(numba_flash.attention)(q, k, v), numba_flash.attention(q, k, v))
    assert torch.equal(torch.func.vmap(torch.func.vmap(numba_flash.attention))(q, k, v), right)


TRIANGLE = {
    "a batch": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8), (2, 1, 4, 5, 7), (2, 3, 1, 1, 7)),
    "one entry": ((1, 3, 4, 5, 8), (1, 3, 4, 7, 8), (1, 3, 4, 7, 8), (1, 1, 4, 5, 7), (1, 3, 1, 1, 7)),
    "no batch": ((3, 4, 5, 8), (3, 4, 7, 8), (3, 4, 7, 8), (1, 4, 5, 7), (3, 1, 1, 7)),
}


def of_triangle(torch, q, k, v, bias, mask):
    """By the equation of cuEquivariance's page; each row has a valid key."""
    scores = torch.where(mask, q @ k.mT * q.shape[-1] ** -0.5 + bias, -1e9)
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("shapes", TRIANGLE.values(), ids=TRIANGLE)
def test_triangle_attention_and_its_gradients_are_the_equation_s(shapes, dtype, device):
    torch = pytest.importorskip("torch", reason="needs torch")
    *drawns, of_mask = shapes
    arrays = [torch.tensor(drawn(*shape), device=device).to(getattr(torch, dtype)) for shape in drawns]
    mask = torch.tensor(rng.random(of_mask) > 0.3, device=device)
    mask[..., 0] = True
    ours = [x.clone().requires_grad_() for x in arrays]
    exact = [x.double().requires_grad_() for x in arrays]
    o, right = triangle_attention(*ours, mask), of_triangle(torch, *exact, mask)
    near = dict(float32=1e-5, float64=1e-12, bfloat16=0.1)[dtype]
    np.testing.assert_allclose(o.detach().double().cpu(), right.detach().cpu(), atol=near)
    (o * o.detach()).sum().backward()
    (right * right.detach()).sum().backward()
    for one, other in zip(ours, exact, strict=True):
        np.testing.assert_allclose(one.grad.double().cpu(), other.grad.cpu(), atol=3 * near)


def test_triangle_attention_in_jax_and_numpy():
    jax = pytest.importorskip("jax", reason="needs JAX")
    *drawns, of_mask = TRIANGLE["a batch"]
    arrays, mask = [drawn(*shape) for shape in drawns], rng.random(of_mask) > 0.3
    right = triangle_attention(*arrays, mask)
    np.testing.assert_allclose(jax.jit(triangle_attention)(*map(jax.numpy.asarray, (*arrays, mask))), right, atol=1e-6)


@pytest.mark.parametrize("shapes", TRIANGLE.values(), ids=TRIANGLE)
def test_what_triangle_attention_gives_beside(shapes):
    torch = pytest.importorskip("torch", reason="needs torch")
    *drawns, of_mask = shapes
    q, k, v, bias = (torch.tensor(drawn(*shape), requires_grad=True) for shape in drawns)
    mask = torch.tensor(rng.random(of_mask) > 0.3)
    mask[..., 0] = True
    o, lse, largest = triangle_attention(q, k, v, bias, mask, return_aux=True)
    scores = (q @ k.mT * 8**-0.5 + bias).masked_fill(~mask, -torch.inf)
    assert torch.equal(o, triangle_attention(q, k, v, bias, mask))
    np.testing.assert_allclose(lse.detach()[..., 0], scores.detach().logsumexp(-1), atol=1e-5)
    np.testing.assert_allclose(largest[..., 0], scores.detach().amax(-1), atol=1e-5)


def test_lengths_of_keys_are_a_mask():
    for shapes in TRIANGLE.values():
        arrays = [drawn(*shape) for shape in shapes[:-1]]
        lengths = rng.integers(1, 8, (*shapes[-1][:-1], 1)).astype(np.int32)
        mask = np.broadcast_to(np.arange(7) < lengths, shapes[-1])
        found = triangle_attention(*arrays, kv_lengths=lengths)
        np.testing.assert_allclose(found, triangle_attention(*arrays, mask), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(bias=drawn(4, 5, 7)), ValueError, "bias must have 5 dimensions"),
        (dict(k=drawn(1, 3, 4, 7, 8)), ValueError, "k must have q's batch of 2"),
        (dict(mask=np.ones((2, 3, 1, 1, 7), np.float32)), TypeError, "mask must be bool"),
        (dict(kv_lengths=np.ones((2, 3, 1, 1, 1), np.int64)), TypeError, "kv_lengths must be int32"),
        (dict(q=drawn(5, 8)), ValueError, "q must have 5 dimensions"),
        (dict(k=None), ValueError, "k must have 5 dimensions"),
    ],
)
def test_what_triangle_attention_refuses(change, error, words):
    q, k, v, bias = (drawn(*shape) for shape in TRIANGLE["a batch"][:-1])
    with pytest.raises(error, match=words):
        triangle_attention(**(dict(q=q, k=k, v=v, bias=bias) | change))
