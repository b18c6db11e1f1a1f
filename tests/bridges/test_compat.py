"""torch's own signature: the results and gradients of the original, and its refusals."""

import inspect

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from numba_flash.compat.torch import scaled_dot_product_attention  # noqa: E402

theirs = torch.nn.functional.scaled_dot_product_attention


def tensors(*shapes, device="cpu", dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(device, dtype).requires_grad_() for x in made]


SQUARE = ((2, 4, 7, 8), (2, 4, 7, 8), (2, 4, 7, 5))
LONG = ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8))
GROUPED = ((2, 6, 5, 8), (2, 2, 9, 8), (2, 2, 9, 8))
SEEN = torch.rand(2, 1, 5, 9, generator=torch.Generator().manual_seed(3)) < 0.7


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (SQUARE, {}),
        (SQUARE, dict(is_causal=True, scale=0.3)),
        (LONG, dict(is_causal=True)),  # query 0 stands at key 0
        (LONG, dict(attn_mask=SEEN)),
        (LONG, dict(attn_mask=SEEN[:, 0, 0][:, None, None])),
        (GROUPED, dict(enable_gqa=True)),
        (GROUPED, dict(enable_gqa=True, is_causal=True)),
    ],
)
def test_the_same_as_torch(shapes, options, device):
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    inputs = tensors(*shapes, device=device)
    expected, found = theirs(*inputs, **options), scaled_dot_product_attention(*inputs, **options)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    do = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, inputs, do), torch.autograd.grad(expected, inputs, do), strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-11)


def test_an_additive_mask_has_a_gradient(device):
    *inputs, mask = tensors(*LONG, (5, 9), device=device)
    expected, found = (function(*inputs, mask) for function in (theirs, scaled_dot_product_attention))
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    (one,), (other,) = (torch.autograd.grad(o.square().sum(), mask) for o in (found, expected))
    assert torch.allclose(one, other, rtol=1e-11, atol=1e-11)


def test_rows_without_keys_are_zero():
    inputs = tensors(*LONG)
    nothing = torch.zeros(5, 9, dtype=torch.bool)
    assert not scaled_dot_product_attention(*inputs, nothing).any()


def test_autocast_casts_as_for_the_original(device):
    q, k, v = (x.detach() for x in tensors(*SQUARE, device=device, dtype=torch.float32))
    with torch.autocast(device, dtype=torch.bfloat16):
        expected, found = theirs(q, k, v.bfloat16()), scaled_dot_product_attention(q, k, v.bfloat16())
    assert found.dtype == expected.dtype == torch.bfloat16
    exact = theirs(q.double(), k.double(), v.double())
    floor = torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert (found - exact).abs().max() <= 2 * (expected - exact).abs().max() + floor


def test_compiled():
    inputs = tensors(*SQUARE)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: scaled_dot_product_attention(*x, is_causal=True), fullgraph=True, backend="eager"
    )
    assert torch.allclose(compiled(*inputs), theirs(*inputs, is_causal=True), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(dropout_p=0.1), NotImplementedError, "dropout_p"),
        (dict(attn_mask=SEEN, is_causal=True), ValueError, "attn_mask"),
        (dict(query=torch.ones(4, 5, 8)), NotImplementedError, "query must have 4 dimensions"),
        (dict(query=torch.ones(2, 8, 5, 8)), ValueError, "enable_gqa"),
        (dict(attn_mask=torch.ones(5, 9, dtype=torch.int64)), TypeError, "mask"),
        (dict(attn_mask=torch.ones(5, 8, dtype=torch.bool)), ValueError, "mask"),
    ],
)
def test_refusals(options, error, words):
    inputs = dict(zip(("query", "key", "value"), tensors(*LONG), strict=True))
    with pytest.raises(error, match=words):
        scaled_dot_product_attention(**(inputs | options))


def test_the_signature_is_that_of_torch():
    names = list(inspect.signature(scaled_dot_product_attention).parameters)
    assert all(f"{name}" in theirs.__doc__ for name in names)
    with pytest.raises(TypeError, match="positional"):
        scaled_dot_product_attention(*tensors(*LONG), None, 0.0, False, 0.3)
