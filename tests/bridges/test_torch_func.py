"""attention() under torch.func: grad, vjp, jacrev and vmap in any order; what it cannot do is refused by name."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from hypothesis import (  # noqa: E402
    given,
    settings,
    strategies as st,  # noqa: E402
)
from torch import func  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

import numba_flash  # noqa: E402
from numba_flash.dispatch import forward as dispatch  # noqa: E402

Q, K, V, O = (2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 4), (2, 4, 5, 4)
SEVERAL = 3  # how long a mapped dimension is


def made(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def ours(q, k, v, **options):
    return numba_flash.attention(q, k, v, **options)


def plainly(q, k, v, bias=None, alibi_slopes=None, q_offset=1):
    """The same of torch's own operations."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    if alibi_slopes is not None:
        apart = torch.arange(q.shape[2])[:, None] + q_offset - torch.arange(k.shape[2])
        slopes = alibi_slopes if alibi_slopes.ndim == 2 else alibi_slopes[None]
        scores = scores - slopes[..., None, None] * apart.abs()
    if bias is not None:
        scores = scores + bias
    return scores.softmax(-1) @ v.repeat_interleave(group, 1)


def same(function):
    """function(attention) of ours and of torch's."""
    found, expected = function(ours), function(plainly)
    if isinstance(expected, torch.Tensor):
        found, expected = (found,), (expected,)
    for one, other in zip(found, expected, strict=True):
        # float64 with a few dozen terms of about 1 each
        assert one.shape == other.shape and one.dtype == other.dtype
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


(WEIGHTS,) = made(O, seed=9)


def loss(attention, *arrays, **options):
    return (attention(*arrays, **options) * WEIGHTS).sum()


ALL = (0, 1, 2)
# of torch itself, when the first tangent is made
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


def test_grad():
    q, k, v = made(Q, K, V)
    same(lambda attention: func.grad(lambda *x: loss(attention, *x), argnums=ALL)(q, k, v))


def test_vjp_and_jacrev():
    q, k, v, do = made(Q, K, V, O)
    same(lambda attention: func.vjp(attention, q, k, v)[1](do))
    same(lambda attention: func.jacrev(attention, argnums=ALL)(q, k, v))


def test_lse_has_a_gradient():
    q, k, v = made(Q, K, V)

    def both(q):
        o, lse = numba_flash.attention(q, k, v, return_lse=True)
        return o.sum() + lse.square().sum()

    leaf = q.clone().requires_grad_()
    assert torch.equal(func.grad(both)(q), torch.autograd.grad(both(leaf), leaf)[0])


def test_constants_in_a_transform():
    q, k, v = made(Q, K, V)
    same(lambda attention: func.grad(lambda weights: (attention(q, k, v) * weights).square().sum())(WEIGHTS))
    found, tangent = func.jvp(lambda weights: ours(q, k, v) * weights, (WEIGHTS,), (WEIGHTS,))
    assert torch.equal(found, tangent)


@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None), (None, 0, 0), (0, 0, None), (2, 1, -1)], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_vmap(mapped, batch):
    arrays = []
    for shape, dim in zip((Q, K, V), mapped, strict=True):
        several = made((*([] if dim is None else [SEVERAL]), batch, *shape[1:]))[0]
        arrays.append(several if dim is None else several.movedim(0, dim))
    same(lambda attention: func.vmap(attention, in_dims=mapped)(*arrays))
    if batch == Q[0]:
        of_each = lambda attention: func.grad(lambda *x: loss(attention, *x), argnums=ALL)  # noqa: E731
        same(lambda attention: func.vmap(of_each(attention), in_dims=mapped)(*arrays))
        in_all = lambda attention: lambda *x: func.vmap(lambda *y: loss(attention, *y), in_dims=mapped)(*x).sum()  # noqa: E731
        same(lambda attention: func.grad(in_all(attention), argnums=ALL)(*arrays))


def test_vmap_of_vmap():
    q, k, v = made((SEVERAL, *Q), K, (2, SEVERAL, *V))
    once = lambda attention: func.vmap(attention, in_dims=(0, None, 0))  # noqa: E731
    same(lambda attention: func.vmap(once(attention), in_dims=(None, None, 0))(q, k, v))


@settings(deadline=None, max_examples=25)
@given(
    batch=st.sampled_from([1, 2]),
    heads=st.sampled_from([1, 4]),
    rows=st.sampled_from([1, 5]),
    ndim=st.integers(1, 4),
    slopes=st.sampled_from([(4,), (1, 4), (2, 4)]),
    bias_mapped=st.booleans(),
    slopes_mapped=st.booleans(),
)
def test_gradients_of_each_for_bias_and_slopes(batch, heads, rows, ndim, slopes, bias_mapped, slopes_mapped):
    """Also where all share them, and where they are broadcast over the batch."""
    q, k, v = made((SEVERAL, *Q), K, V)
    shape = (batch, heads, rows, 6)[4 - ndim :]
    bias, alibi = made(
        (SEVERAL, *shape) if bias_mapped else shape, (SEVERAL, *slopes) if slopes_mapped else slopes, seed=1
    )
    if not slopes_mapped and slopes[0] == 1:
        alibi = alibi.expand(2, 4)  # a batch of slopes has one for each of the batch
    elif slopes[0] == 1:
        alibi = alibi.expand(SEVERAL, 2, 4)
    in_dims = (0, 0 if bias_mapped else None, 0 if slopes_mapped else None)

    def of_each(attention):
        def one(q, bias, alibi):
            return loss(attention, q, k, v, bias=bias, alibi_slopes=alibi)

        return func.vmap(func.grad(one, argnums=ALL), in_dims=in_dims)(q, bias, alibi)

    same(of_each)


def test_lengths_positions_and_masks_are_mapped_too():
    q, k, v = made((SEVERAL, *Q), K, V)
    mask = torch.rand(SEVERAL, 2, 1, 1, 6, generator=torch.Generator().manual_seed(1)) < 0.7
    lengths = torch.tensor([[6, 2], [4, 6], [1, 3]], dtype=torch.int32)
    offsets = torch.tensor([1, 3], dtype=torch.int32)

    def one(q, mask, lengths):
        return ours(q, k, v, causal=True, mask=mask, seqlens_k=lengths, q_offset=offsets)

    expected = torch.stack([one(*x) for x in zip(q, mask, lengths, strict=True)])
    assert torch.equal(func.vmap(one)(q, mask, lengths), expected)
    assert torch.equal(
        func.vmap(one, in_dims=(0, None, None))(q, mask[0], lengths[0])[1], one(q[1], mask[0], lengths[0])
    )


def test_sums_over_the_batch_are_rounded_once():
    q, k, v, do = (x.half() for x in made((SEVERAL, 64, *Q[1:]), (64, *K[1:]), (64, *V[1:]), (64, *O[1:])))
    (bias,) = made((4, 1, 6))

    def one(bias, q, like):
        return (ours(q, k.to(like), v.to(like), bias=bias) * do.to(like)).sum()

    found = func.vmap(func.grad(lambda bias, q: one(bias, q, torch.float16)), in_dims=(None, 0))(bias.half(), q)
    for gradient, q_of_one in zip(found, q, strict=True):
        leaf = bias.half().requires_grad_()
        (expected,) = torch.autograd.grad(one(leaf, q_of_one, torch.float16), leaf)
        # both round a float32 sum of 64 * 5 terms, added up in another order
        assert torch.allclose(gradient.double(), expected.double(), rtol=2**-10, atol=2**-14)


def test_one_call_for_all(monkeypatch):
    calls = []
    real = dispatch.prepare
    monkeypatch.setattr(dispatch, "prepare", lambda *x: calls.append(x[0].operands[0].shape) or real(*x))
    q, k, v = made((SEVERAL, *Q), (SEVERAL, *K), (SEVERAL, *V))
    func.vmap(ours)(q, k, v)
    assert calls[-1] == (SEVERAL * Q[0], *Q[1:]) and len([shape for shape in calls if len(shape) == 4]) <= 2


def test_no_copy_where_views_will_do(monkeypatch):
    given_to = []
    real = dispatch.prepare
    monkeypatch.setattr(dispatch, "prepare", lambda *x: given_to.append(x[0].operands[:3]) or real(*x))
    q, k, v = made((SEVERAL, 1, *Q[1:]), (1, *K[1:]), (SEVERAL, 1, *V[1:]))
    func.vmap(ours, in_dims=(0, None, 0))(q, k, v)
    assert [x.data_ptr() for x in given_to[-1]] == [x.data_ptr() for x in (q, k, v)]


def test_autograd_around_a_transform():
    inputs = [x.requires_grad_() for x in made((SEVERAL, *Q), (SEVERAL, *K), (SEVERAL, *V))]
    same(lambda attention: torch.autograd.grad(func.vmap(attention)(*inputs).square().sum(), inputs))


SECOND, TANGENT = "no gradients themselves", "no forward-mode derivatives"


@pytest.mark.parametrize(
    ("derivative", "words"),
    [
        (lambda f, q: func.hessian(f)(q), TANGENT),
        (lambda f, q: func.jacfwd(f)(q), TANGENT),
        (lambda f, q: func.jvp(f, (q,), (q,)), TANGENT),
        (lambda f, q: func.vmap(lambda q: func.jvp(f, (q,), (q,)))(q[None]), TANGENT),
        (lambda f, q: func.jvp(func.vmap(f), (q[None],), (q[None],)), TANGENT),
        (lambda f, q: func.jacrev(func.jacrev(f))(q), SECOND),
        (lambda f, q: func.grad(lambda q: func.grad(f)(q).sum())(q), SECOND),
        (lambda f, q: torch.autograd.gradgradcheck(f, q.clone().requires_grad_()), SECOND),
        (lambda f, q: torch.autograd.functional.jacobian(f, q, vectorize=True), "jacrev"),
    ],
    ids=[
        "hessian",
        "jacfwd",
        "jvp",
        "vmap(jvp)",
        "jvp(vmap)",
        "jacrev(jacrev)",
        "grad(grad)",
        "gradgradcheck",
        "old vmap",
    ],
)
def test_other_derivatives_are_refused_by_name(derivative, words):
    q, k, v = made(Q, K, V)
    with pytest.raises(NotImplementedError, match=words):
        derivative(lambda q: ours(q, k, v).square().sum(), q)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "alibi_slopes", "sinks"])
def test_tangents_are_not_dropped(name, requires_grad, grad):
    arrays = dict(zip(("q", "k", "v", "bias", "alibi_slopes", "sinks"), made(Q, K, V, (6,), (4,), (4,)), strict=True))
    with forward_ad.dual_level(), torch.set_grad_enabled(grad):
        primal = arrays[name].requires_grad_(requires_grad)
        arrays[name] = forward_ad.make_dual(primal, torch.ones_like(primal))
        with pytest.raises(NotImplementedError, match=TANGENT):
            numba_flash.attention(**arrays)


def test_nor_by_the_other_functions():
    q, k, v, do = made(Q, K, V, O)
    o, lse = ours(q, k, v, return_lse=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match=TANGENT):
            numba_flash.attention_backward(do, dual, k, v, o, lse)
        with pytest.raises(NotImplementedError, match=TANGENT):
            numba_flash.softmax(dual, kernel="reference")
        merged = numba_flash.merge(forward_ad.make_dual(o, o), lse, o, lse).o  # of torch's operations, which know
        assert torch.allclose(forward_ad.unpack_dual(merged).tangent, o / 2)
        assert torch.equal(ours(q, k, v), o)  # without a tangent


@pytest.mark.parametrize("batch", [1, 2])
def test_jacrev_and_vmap_of_a_vjp(batch):
    """Whatever is not mapped with the incoming gradient is repeated without memory where the batch is 1."""
    q, k, v, do = made((batch, *Q[1:]), (batch, *K[1:]), (batch, *V[1:]), (SEVERAL, batch, *O[1:]))
    same(lambda attention: func.jacrev(attention, argnums=ALL)(q, k, v))
    same(lambda attention: func.vmap(func.vjp(attention, q, k, v)[1])(do))


BIAS, DO = made((5, 6), O, seed=5)
TRANSFORMS = {
    "grad": lambda f, q: func.grad(lambda q: (f(q) * DO[: len(q)]).sum())(q),
    "grad_and_value": lambda f, q: func.grad_and_value(lambda q: (f(q) * DO[: len(q)]).sum())(q)[0],
    "vjp": lambda f, q: func.vjp(f, q)[1](DO[: len(q)])[0],
    "vmap": lambda f, q: func.vmap(f)(torch.stack([q, q + 1])),
    "vmap of grad": lambda f, q: func.vmap(func.grad(lambda q: f(q).square().sum()))(torch.stack([q, q + 1])),
    "grad of vmap": lambda f, q: func.grad(lambda q: func.vmap(f)(torch.stack([q, 2 * q])).square().sum())(q),
    "vmap of vmap": lambda f, q: func.vmap(func.vmap(f))(torch.stack([q, q + 1])[None]),
    "jacrev": lambda f, q: func.jacrev(f)(q),
}


OPTIONS = {"": {}, "bias": dict(bias=BIAS), "seed": dict(dropout_p=0.5, seed=2**63 + 1)}
# Each transform alone; and those that have a loop and gradients with each batch and option.
PAIRS = [
    (name, batch, options)
    for name in TRANSFORMS
    for batch in (1, 2)
    for options in OPTIONS
    if name in ("vmap of grad", "jacrev") or (batch, options) == (2, "")
]


@pytest.mark.parametrize(("name", "batch", "options"), PAIRS)
def test_transforms_in_a_compiled_function(name, batch, options):
    options = OPTIONS[options]
    if not hasattr(torch.library, "register_vmap") and name not in ("grad", "grad_and_value", "vjp"):
        pytest.skip("needs torch 2.5")
    q, k, v = (x[:batch] for x in made(Q, K, V))

    def run(q):
        return TRANSFORMS[name](lambda q: ours(q, k, v, **options), q)

    torch._dynamo.reset()
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(q)
    assert torch.allclose(found, run(q), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (lambda f, q: func.jvp(f, (q,), (q,))[1], "no forward-mode derivatives"),
        (lambda f, q: func.jacfwd(f)(q), "no forward-mode derivatives"),
        (lambda f, q: func.grad(lambda q: func.grad(lambda q: f(q).square().sum())(q).sum())(q), "no gradients"),
    ],
    ids=["jvp", "jacfwd", "second derivative"],
)
@pytest.mark.parametrize("fullgraph", [True, False])
def test_what_a_graph_cannot_hold_of_transforms_is_refused_by_name(transform, words, fullgraph):
    if not hasattr(torch.library, "register_vmap") and not fullgraph:
        pytest.skip("torch 2.4 ends in an error of its own")
    q, k, v = made(Q, K, V)

    def run(q):
        return transform(lambda q: ours(q, k, v), q)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=fullgraph, backend="eager")
    with pytest.raises((NotImplementedError, torch._dynamo.exc.Unsupported), match=words):
        compiled(q)
