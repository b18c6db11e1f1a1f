"""torch's own signature: the results and gradients of the original, and its refusals."""

import inspect
import warnings

import numpy as np
import pytest
from hypothesis import given, strategies as st

torch = pytest.importorskip("torch", reason="needs torch")

from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

import numba_flash  # noqa: E402
from numba_flash.api import forward as api  # noqa: E402
from numba_flash.compat.flash_attn import flash_attn_func  # noqa: E402
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


def agree(inputs, mask=None, exact=1e-11, **options):
    """Result and gradients like torch's in float64, where both have some twenty roundings of numbers near 1."""
    given = [*inputs, *([mask] if mask is not None and mask.requires_grad else [])]
    expected, found = (function(*inputs, mask, **options) for function in (theirs, scaled_dot_product_attention))
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert torch.allclose(found, expected, rtol=exact, atol=exact)
    do = torch.randn_like(expected)
    wanted = (torch.autograd.grad(o, given, do) for o in (found, expected))
    for one, other in zip(*wanted, strict=True):
        assert one.shape == other.shape and torch.allclose(one, other, rtol=exact, atol=exact)


@st.composite
def any_dimensions(draw):
    """Shapes that torch takes: 0 to 4 leading dimensions, of which any tensor may lack some or have 1 instead."""
    lead = draw(st.lists(st.integers(1, 3), max_size=4))
    group = draw(st.integers(1, 2)) if lead else 1
    grouped = draw(st.booleans()) and bool(lead)
    seqlen_q, seqlen_k, head_dim, head_dim_v = (draw(st.integers(1, 4)) for _ in range(4))

    def some(lead):
        kept = [draw(st.sampled_from([extent, 1])) for extent in lead]
        return kept[draw(st.integers(0, len(kept))) :]

    if grouped:
        heads_q = [lead[-1] * group]
        query, key, value = some(lead[:-1]) + heads_q, some(lead[:-1]) + lead[-1:], some(lead[:-1]) + lead[-1:]
    else:
        query, key, value = some(lead), some(lead), some(lead)
    scores = list(torch.broadcast_shapes(query, key[:-1] + heads_q if grouped else key)) + [seqlen_q, seqlen_k]
    mask = draw(st.sampled_from(["none", "causal", "bool", "added"]))
    return dict(
        shapes=((*query, seqlen_q, head_dim), (*key, seqlen_k, head_dim), (*value, seqlen_k, head_dim_v)),
        enable_gqa=grouped,
        mask=mask,
        mask_shape=some(scores),
        order=draw(st.booleans()),
    )


@given(any_dimensions())
def test_any_leading_dimensions(problem):
    inputs = tensors(*problem["shapes"])
    if problem["order"]:  # dimensions that lie in memory the other way round
        inputs = [x.detach().mT.contiguous().mT.requires_grad_() for x in inputs]
        inputs = [x.detach().transpose(0, -2).contiguous().transpose(0, -2).requires_grad_() for x in inputs]
    (mask,) = tensors(problem["mask_shape"])
    mask = {"bool": mask.detach() < 0.7, "added": mask}.get(problem["mask"])
    agree(inputs, mask, is_causal=problem["mask"] == "causal", enable_gqa=problem["enable_gqa"])


@pytest.mark.parametrize(
    ("shapes", "mask_shape", "enable_gqa", "calls", "seen_as"),
    [
        (((5, 8), (9, 8), (9, 8)), None, False, 1, [(1, 1, 5, 8), (1, 1, 9, 8)]),
        (((6, 5, 8), (6, 9, 8), (6, 9, 8)), None, False, 1, [(1, 6, 5, 8), (1, 6, 9, 8)]),
        (((2, 3, 4, 5, 8), (2, 3, 4, 9, 8), (2, 3, 4, 9, 8)), None, False, 1, [(1, 24, 5, 8), (1, 24, 9, 8)]),
        # the same keys for all of the batch: a stride of 0
        (((2, 3, 4, 5, 8), (4, 9, 8), (4, 9, 8)), None, False, 1, [(6, 4, 5, 8), (6, 4, 9, 8)]),
        # the same keys for all heads: one head of them
        (((2, 4, 5, 8), (2, 1, 9, 8), (2, 1, 9, 8)), None, False, 1, [(2, 4, 5, 8), (2, 1, 9, 8)]),
        (((2, 3, 6, 5, 8), (2, 3, 2, 9, 8), (2, 3, 2, 9, 8)), (2, 3, 1, 5, 9), True, 1, [(6, 6, 5, 8), (6, 2, 9, 8)]),
        (((3, 6, 5, 8), (1, 2, 9, 8), (1, 2, 9, 8)), None, True, 1, [(3, 6, 5, 8), (3, 2, 9, 8)]),
        # what repeats in some dimension between others: one attention for each of 2
        (((2, 3, 6, 5, 8), (2, 3, 2, 9, 8), (2, 3, 2, 9, 8)), (3, 1, 5, 9), True, 2, [(3, 6, 5, 8), (3, 2, 9, 8)]),
        (((2, 3, 4, 5, 8), (2, 1, 4, 9, 8), (2, 1, 4, 9, 8)), None, False, 2, [(3, 4, 5, 8), (3, 4, 9, 8)]),
    ],
)
def test_how_dimensions_are_seen(monkeypatch, shapes, mask_shape, enable_gqa, calls, seen_as):
    inputs = [x.detach() for x in tensors(*shapes)]
    mask = None if mask_shape is None else torch.ones(mask_shape, dtype=torch.bool)
    seen = []

    def spy(q, k, v, **options):
        seen.append((q, k, v, options["mask"]))
        return attention(q, k, v, **options)

    attention = api.attention
    monkeypatch.setattr(api, "attention", spy)
    found = scaled_dot_product_attention(*inputs, mask, enable_gqa=enable_gqa)
    assert torch.allclose(found, theirs(*inputs, mask, enable_gqa=enable_gqa), rtol=1e-12, atol=1e-12)
    assert len(seen) == calls and [tuple(x.shape) for x in seen[0][:2]] == seen_as
    for call in seen:  # nothing was copied
        for one, given_one in zip(call, (*inputs, mask), strict=True):
            if given_one is not None:
                assert one.untyped_storage().data_ptr() == given_one.untyped_storage().data_ptr()


def test_one_by_one_rounds_gradients_once():
    """Keys that repeat in the middle dimension: their gradients are added up in float32."""
    shapes = ((21, 20, 21, 1, 8), (21, 1, 21, 5, 8), (21, 1, 21, 5, 8))
    exact = tensors(*shapes)
    given = [x.detach().bfloat16().requires_grad_() for x in exact]
    do = torch.ones(21, 20, 21, 1, 8, dtype=torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in given]
    (right,) = torch.autograd.grad(theirs(*wide), wide[2], do.double())
    (found,) = torch.autograd.grad(scaled_dot_product_attention(*given), given[2], do)
    # each of 20 gradients is rounded, to 2**-8 of itself, and so is the sum; all are positive
    assert ((found.double() - right).abs() <= 2.01 * 2**-8 * right.abs()).all()


@pytest.mark.parametrize(
    "shapes",
    [
        ((0, 4, 5, 8), (0, 4, 9, 8), (0, 4, 9, 8)),
        ((3, 0, 5, 8), (1, 1, 9, 8), (3, 1, 9, 8)),
        ((2, 0, 4, 5, 8), (2, 1, 4, 9, 8), (2, 1, 4, 9, 8)),
        ((2, 3, 4, 0, 8), (2, 1, 4, 9, 8), (2, 1, 4, 9, 8)),
        ((2, 3, 4, 5, 8), (2, 3, 4, 0, 8), (2, 3, 4, 0, 8)),
    ],
)
def test_empty_dimensions(shapes):
    agree(tensors(*shapes))


@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
def test_causal_bias(variant):
    inputs = tensors(*LONG)
    found = scaled_dot_product_attention(*inputs, variant(5, 9))
    assert torch.allclose(found, theirs(*inputs, variant(5, 9)), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="attn_mask is a CausalBias of .*5, 8"):
        scaled_dot_product_attention(*inputs, variant(5, 8))


def test_autocast_casts_masks_of_other_dtypes_too():
    q, k, v = (x.detach() for x in tensors(*LONG, dtype=torch.float32))
    mask = torch.randn(5, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept = scaled_dot_product_attention(q, k, v, mask)
        cast = scaled_dot_product_attention(q, k, v, mask.half())
    lower = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(kept, scaled_dot_product_attention(*lower, mask))
    assert torch.equal(cast, scaled_dot_product_attention(*lower, mask.half().bfloat16()))


def test_meta_tensors_have_shapes_and_are_checked():
    query, key, value = (torch.empty(shape, device="meta", requires_grad=True) for shape in LONG)
    found = scaled_dot_product_attention(query, key[:1], value[..., :3], is_causal=True)
    assert found.is_meta and found.shape == (2, 4, 5, 3)
    found.sum().backward()
    assert key.grad.is_meta and key.grad.shape == key.shape
    with pytest.raises(TypeError, match="query is float32 and key is float16"):
        scaled_dot_product_attention(query, key.half(), value)
    with pytest.raises(ValueError, match="value must be on the device of query, meta, not on cpu"):
        scaled_dot_product_attention(query, key, torch.empty(value.shape))


@pytest.mark.parametrize("scale", [np.float32(0.25), np.float64(0.25), np.int64(1), 1, 0, -0.5, torch.tensor(0.25)])
def test_numbers_of_all_kinds(scale):
    inputs = tensors(*LONG)
    expected = theirs(*inputs, scale=float(scale))
    found = scaled_dot_product_attention(*inputs, scale=scale, dropout_p=np.int64(0), is_causal=np.False_)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_dropout_has_a_seed_from_torchs_generator():
    """The same after manual_seed, another in each call, and the weights that numba_flash.attention drops with it."""
    inputs = tensors(*LONG)

    def attend():
        return scaled_dot_product_attention(*inputs, dropout_p=0.3, is_causal=True)

    torch.manual_seed(5)
    found, other = attend(), attend()
    torch.manual_seed(5)
    assert torch.equal(attend(), found) and not torch.equal(found, other)
    torch.manual_seed(5)
    seed = int(torch.randint(2**63 - 1, ()))
    assert torch.equal(numba_flash.attention(*inputs, causal=True, q_offset=0, dropout_p=0.3, seed=seed), found)
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    torch.manual_seed(5)
    assert torch.equal(compiled(), found) and torch.equal(compiled(), other)


@pytest.mark.parametrize("mask", [None, SEEN, SEEN * 1.0])
def test_dropout_of_all_weights(mask):
    inputs = tensors(*LONG)
    expected, found = (
        function(*inputs, mask if mask is None or mask.dtype == torch.bool else mask.double(), dropout_p=1.0)
        for function in (theirs, scaled_dot_product_attention)
    )
    assert torch.equal(found, expected) and not found.any()
    assert not any(x.any() for x in torch.autograd.grad(found, inputs, torch.ones_like(found)))
    with pytest.raises(ValueError, match="attn_mask"):
        scaled_dot_product_attention(*inputs, SEEN[..., :8], dropout_p=1.0)


def nested(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.nested_tensor([torch.ones(4, 5, 8), torch.ones(4, 5, 8)], layout=layout)


MANY = torch.ones(2, 8, 5, 8, dtype=torch.float64)
REFUSALS = [
    (dict(dropout_p=1.5), ValueError, "dropout_p is a probability, from 0 to 1, not 1.5"),
    (dict(dropout_p=None), TypeError, "dropout_p"),
    (dict(dropout_p=torch.tensor(0.0)), TypeError, "dropout_p must be a number.* not Tensor of shape"),
    (dict(scale=torch.tensor([0.5])), TypeError, "scale must be a number or None, not Tensor .*write scale=float"),
    (
        dict(scale=torch.tensor(0.5, requires_grad=True)),
        TypeError,
        "scale .*if it needs a gradient, multiply the queries",
    ),
    (dict(scale=np.array(0.5)), TypeError, "write scale=float"),
    (dict(scale=True), TypeError, "scale"),
    (dict(scale=float("nan")), ValueError, "scale must be finite"),
    (dict(is_causal=1), TypeError, "is_causal must be True or False"),
    (dict(is_causal=torch.tensor(True)), TypeError, "is_causal"),
    (dict(enable_gqa=1), TypeError, "enable_gqa must be True or False"),
    (dict(attn_mask=SEEN, is_causal=True), ValueError, "attn_mask must be None when is_causal"),
    (dict(query=torch.ones(8)), ValueError, "query must have at least 2 dimensions"),
    (dict(query=torch.ones(5, 8), enable_gqa=True), ValueError, "query must have at least 3 dimensions"),
    (dict(query=MANY), ValueError, r"query has shape \(2, 8, 5, 8\).*pass enable_gqa=True"),
    (dict(query=MANY[:, :6], enable_gqa=True), ValueError, "enable_gqa=True the heads of key and value must divide"),
    (dict(key=torch.ones(3, 4, 9, 8)), ValueError, r"broadcastable .*key \(3, 4, 9, 8\)"),
    (dict(key=torch.ones(9, 7)), ValueError, "query and key must have the same last dimension"),
    (dict(value=torch.ones(2, 8, 8)), ValueError, "key and value must have the same last dimension but one"),
    (dict(value=torch.ones(2, 4, 9, 0)), ValueError, "last dimension of at least 1"),
    (dict(query=torch.ones(2, 4, 5, 8)), TypeError, "query is float32 and key is float64"),
    (dict(query=torch.ones(4, 5, 8)), TypeError, "query is float32 and key is float64"),
    (dict(query=np.ones((2, 4, 5, 8))), TypeError, "query must be a torch tensor"),
    (dict(attn_mask=np.ones((5, 9), bool)), TypeError, "attn_mask must be a torch tensor"),
    (dict(attn_mask=torch.ones(5, 9, dtype=torch.int64)), TypeError, "attn_mask must be bool"),
    (dict(attn_mask=torch.ones(5, 9, dtype=torch.float16)), TypeError, "attn_mask must be float32 or float64"),
    (
        dict(attn_mask=torch.ones(5, 8, dtype=torch.bool)),
        ValueError,
        r"attn_mask .*\(2, 4, 5, 9\), not of shape \(5, 8\)",
    ),
    (dict(attn_mask=torch.ones(1, 1, 1, 5, 9)), ValueError, "attn_mask"),
    (dict(attn_mask=torch.ones(5, 9, device="meta")), ValueError, "attn_mask must be on the device of query"),
    (dict(query=nested(torch.strided)), NotImplementedError, "query is a nested tensor, torch.strided"),
    (dict(key=nested(torch.jagged)), NotImplementedError, "key is a nested tensor, torch.jagged"),
    (dict(attn_mask=nested(torch.jagged)), NotImplementedError, "attn_mask is a nested tensor"),
    (dict(value=torch.ones(2, 4, 9, 8).to_sparse()), TypeError, "value: a torch tensor must be dense"),
]


@pytest.mark.parametrize(("options", "error", "words"), REFUSALS)
def test_refusals(options, error, words):
    inputs = dict(zip(("query", "key", "value"), tensors(*LONG), strict=True))
    with pytest.raises(error, match=words), torch.no_grad():
        scaled_dot_product_attention(**(inputs | options))


def test_heads_of_key_and_value_that_do_not_divide_each_other():
    query, key, value = tensors((2, 6, 5, 8), (2, 2, 9, 8), (2, 3, 9, 8))
    with pytest.raises(NotImplementedError, match="key and value must have the same number of heads"):
        scaled_dot_product_attention(query, key, value, enable_gqa=True)
    agree([query, key[:, :1], value], enable_gqa=True)
    agree([query, key, value[:, :1]], enable_gqa=True)


def test_flash_attn_refuses_nested_tensors():
    q = torch.ones(2, 5, 4, 8)
    for layout in (torch.strided, torch.jagged):
        with pytest.raises(NotImplementedError, match="k is a nested tensor"):
            flash_attn_func(q, nested(layout), q)


def test_the_signature_is_that_of_torch():
    names = list(inspect.signature(scaled_dot_product_attention).parameters)
    assert all(f"{name}" in theirs.__doc__ for name in names)
    with pytest.raises(TypeError, match="positional"):
        scaled_dot_product_attention(*tensors(*LONG), None, 0.0, False, 0.3)
