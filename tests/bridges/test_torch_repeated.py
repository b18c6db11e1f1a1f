"""Repeated calls of torch tensors (dispatch/cached_call.py): the same results, and no other call is taken for a
repeated one."""

import functools

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import numpy as np  # noqa: E402

import numba_flash  # noqa: E402
from numba_flash.dispatch import backward as gradients, call as of_calls, forward as dispatch  # noqa: E402

SHAPE = (2, 4, 10, 16)


def tensors(*shapes, device="cpu", dtype=torch.float32, requires_grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) for shape in shapes or (SHAPE,) * 3]
    return [x.to(device, dtype).requires_grad_(requires_grad) for x in made]


@pytest.fixture
def prepared(monkeypatch):
    """The names of what was prepared the long way, with nothing known before."""
    seen = []
    for module, name in ((dispatch, "forward"), (gradients, "backward")):
        monkeypatch.setattr(module, "_plans", {})
        real = module.prepare
        monkeypatch.setattr(module, "prepare", lambda *x, name=name, real=real: seen.append(name) or real(*x))
    numba_flash.attention(*tensors((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)))  # torch's tensors are known from now on
    seen.clear()
    return seen


OPTIONS = [
    {}, dict(causal=True), dict(window=(3, 0), scale=0.3), dict(q_offset=0, causal=True), dict(softcap=2.0),
    dict(layout="bshd"), dict(kernel="reference"), dict(window=(None, 2), q_offset=1),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_second_call_is_not_prepared_and_gives_the_same_bits(options, dtype, prepared, device):
    if device == "cuda" and options.get("kernel") == "reference":
        pytest.skip("the oracle computes in host memory")
    shapes = [(2, 4, 10, 16), (2, 4, 12, 16), (2, 4, 12, 8)]
    if options.get("layout") == "bshd":
        shapes = [(2, 10, 4, 16), (2, 12, 4, 16), (2, 12, 4, 8)]
    for requires_grad in (False, True):
        call = functools.partial(numba_flash.attention, **options)
        inputs = tensors(*shapes, device=device, dtype=dtype, requires_grad=requires_grad)
        found = []
        for turn in range(3):
            # other memory each time; of the graphs all are alive at once
            q, k, v = (x.detach().clone().requires_grad_(requires_grad) for x in inputs)
            o = call(q, k, v)
            results = [o, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o))] if requires_grad else [o]
            found.append(results)
            if turn == 0:
                prepared.clear()
        assert bool(prepared) == ("kernel" in options)  # the oracle takes arrays
        for results in found[1:]:
            assert all(torch.equal(x, y) for x, y in zip(results, found[0], strict=True))
        assert all(x.dtype == dtype for x in found[-1])


def test_lse_and_gradients_by_name(prepared):
    q, k, v, do = tensors(*(SHAPE,) * 4)

    def call():
        o, lse = numba_flash.attention(q, k, v, return_lse=True)
        whole = numba_flash.attention_backward(do, q, k, v, o, lse)
        part = numba_flash.attention_backward(do, q, k, v, o, lse, wanted=("dk",))
        assert part.dq is None and part.dv is None and type(whole) is type(part)
        return lse, *whole[:3], part.dk

    first = call()
    prepared.clear()
    again = call()
    assert not prepared and all(map(torch.equal, first, again))


def test_only_gradients_that_are_wanted_are_computed(prepared):
    for _ in range(2):
        q, k, v = tensors()
        k.requires_grad_()
        assert numba_flash.attention(q, k, v).grad_fn is not None
        numba_flash.attention(q, k, v).square().sum().backward()
        assert k.grad.any() and q.grad is v.grad is None
    assert prepared == ["forward", "backward"]


# A function of q, k and v whose results are called with twice, and how often this is prepared.
OTHERS = {
    "shape": (lambda q, k, v: (q[:, :, :5].contiguous(), k, v), 1),
    "strides of q": (lambda q, k, v: (q.transpose(0, 1).contiguous().transpose(0, 1), k, v), 1),
    "strides of v": (lambda q, k, v: (q, k, v.transpose(2, 3).contiguous().transpose(2, 3)), 1),
    "dtype": (lambda q, k, v: (q.double(), k.double(), v.double()), 1),
    "a copy": (lambda q, k, v: (q, k, v.clone()), 0),
    "a parameter": (lambda q, k, v: (torch.nn.Parameter(q, requires_grad=False), k, v), 1),
    "a subclass": (lambda q, k, v: (q, k.as_subclass(Subclass), v), 2),
    "unaligned": (lambda q, k, v: (at_number(2, q), k, v), 1),  # to 16 bytes, as kernels are told
    "not even to 8": (lambda q, k, v: (at_number(1, q), k, v), 2),  # its alignment is checked in each call
}


class Subclass(torch.Tensor):
    pass


def at_number(n, x):
    """x where n numbers are before it."""
    return torch.empty(x.numel() + n)[n:].view(x.shape).copy_(x)


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_is_another_call(name, prepared):
    q, k, v = tensors()
    numba_flash.attention(q, k, v)
    prepared.clear()
    make, times = OTHERS[name]
    inputs = make(q, k, v)
    found = [numba_flash.attention(*inputs) for _ in range(2)]
    assert len(prepared) == times
    expected = numba_flash.attention(*(x.numpy() for x in inputs))
    for o in found:
        np.testing.assert_array_equal(o.numpy(), expected)


@pytest.fixture
def known(prepared):
    """q, k and v of calls that are known, with and without grad."""
    q, k, v = tensors()
    numba_flash.attention(q, k, v)
    inputs = tensors(requires_grad=True)
    numba_flash.attention(*inputs).sum().backward()
    prepared.clear()
    numba_flash.attention(q, k, v)
    numba_flash.attention(*inputs)
    assert not prepared
    return q, k, v


# One tensor's place taken by something that has the same shape, dtype and strides.
@pytest.mark.parametrize("place", range(3))
def test_nothing_else_is_taken_for_a_known_tensor(place, known):
    def refused(replacement, error, match):
        inputs = [replacement if n == place else x for n, x in enumerate(known)]
        with pytest.raises(error, match=match):
            numba_flash.attention(*inputs)

    x = known[place]
    refused(torch._neg_view(x), TypeError, "its own numbers")
    refused(torch._to_functional_tensor(x), TypeError, "its own numbers")
    refused(x.to_sparse(), TypeError, "dense")
    refused(x.to("meta"), TypeError, "meta")
    refused(x.numpy(), TypeError, "one kind")
    refused(x.tolist(), TypeError, "must be an array")
    if place:
        refused(x.double(), TypeError, "dtype|float64")


def test_of_options_each_type_is_its_own(known):
    q, k, v = known
    for _ in range(2):
        numba_flash.attention(q, k, v, causal=True, return_lse=True, q_offset=1, window=(1, 0), scale=1)
    for wrong in (
        dict(causal=1), dict(return_lse=1), dict(q_offset=True), dict(q_offset=1.0), dict(window=(1.0, 0)),
        dict(window=(True, 0)), dict(scale=True), dict(causal=[]), dict(kernel=[]),
    ):  # fmt: skip
        right = dict(causal=True, return_lse=True, q_offset=1, window=(1, 0), scale=1)
        with pytest.raises((TypeError, ValueError)):
            numba_flash.attention(q, k, v, **(right | wrong))


ARRAYS = {
    "q_offset": torch.tensor([0, 2], dtype=torch.int32), "seqlens_k": torch.tensor([4, 9], dtype=torch.int32),
    "mask": torch.ones(10, 10, dtype=torch.bool), "bias": torch.ones(4, 1, 1), "alibi_slopes": torch.ones(4),
    "sinks": torch.ones(4),
}  # fmt: skip


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_as_option_is_read_each_time(name, known, prepared):
    """The same object again and again, as the layers of a model hand it over, but with other numbers in it."""
    q, k, v = known
    array = ARRAYS[name].clone()
    for _ in range(3):
        array[0] = array[1]
        found = [numba_flash.attention(q, k, v, **{name: array}) for _ in range(2)]
        expected = numba_flash.attention(*(x.numpy() for x in known), **{name: array.numpy()})
        for o in found:
            np.testing.assert_array_equal(o.numpy(), expected)
    assert len(prepared) == 3 * 3


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_where_torch_records_a_known_call_is_recorded(known):
    q, k, v = known
    expected = numba_flash.attention(q, k, v)

    def function(q, k, v):
        return numba_flash.attention(q, k, v)

    traced = torch.fx.experimental.proxy_tensor.make_fx(function)(q, k, v)
    assert any("numba_flash" in str(node.target) for node in traced.graph.nodes)
    assert torch.equal(traced(q, k, v), expected)
    scripted = torch.jit.trace(function, (q, k, v), check_trace=False)
    assert "numba_flash::attention" in str(scripted.graph) and torch.equal(scripted(q, k, v), expected)
    mapped = torch.func.vmap(lambda q: numba_flash.attention(q, k, v))(q[None])
    assert torch.equal(mapped[0], expected)
    (inside,) = torch.func.vmap(lambda x: numba_flash.attention(q, k, v) + 0 * x)(torch.zeros(1))
    assert torch.equal(inside, expected)
    slope = torch.func.grad(lambda x: (numba_flash.attention(q, k, v) * x).sum())(torch.ones(()))
    torch.testing.assert_close(slope, expected.sum())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            numba_flash.attention(dual, k, v)
        assert torch.equal(numba_flash.attention(q, k, v), expected)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert type(numba_flash.attention(q, k, v)) is torch._subclasses.FakeTensor


def test_a_gradient_that_would_be_lost_is_an_error(known):
    q, k, v = known
    o, lse = numba_flash.attention(q, k, v, return_lse=True)
    for _ in range(2):
        numba_flash.attention_backward(o, q, k, v, o, lse)
    for place in range(6):
        inputs = [x.clone().requires_grad_(n == place) for n, x in enumerate((o, q, k, v, o, lse))]
        with pytest.raises(NotImplementedError, match="its gradient would be lost"):
            numba_flash.attention_backward(*inputs)
        with torch.no_grad():
            numba_flash.attention_backward(*inputs)


def test_second_gradients_of_a_known_call_are_refused(known):
    q, k, v = (x.clone().requires_grad_() for x in known)
    (dq,) = torch.autograd.grad(numba_flash.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no gradients themselves"):
        dq.sum().backward()


def test_autograd_notices_what_was_changed_in_between(known):
    for place in range(3):
        inputs = [x.clone().requires_grad_() for x in known]
        o = numba_flash.attention(*inputs)
        with torch.no_grad():
            inputs[place].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()


def test_saved_tensors_may_come_back_otherwise(known):
    """Hooks of autograd's own kind, as of checkpointing and offloading, hand the backward other tensors."""
    inputs = [x.clone().requires_grad_() for x in known]
    expected = torch.autograd.grad(numba_flash.attention(*inputs).square().sum(), inputs)

    def unpack(x):  # the same numbers with other strides
        return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), unpack):
        o = numba_flash.attention(*inputs)
    for ours, theirs in zip(torch.autograd.grad(o.square().sum(), inputs), expected, strict=True):
        assert torch.equal(ours, theirs)
    again = torch.utils.checkpoint.checkpoint(numba_flash.attention, *inputs, use_reentrant=False)
    for ours, theirs in zip(torch.autograd.grad(again.square().sum(), inputs), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_no_more_is_kept_than_so_many(monkeypatch, prepared):
    monkeypatch.setattr(of_calls, "MOST_PLANS", 6)
    for length in range(1, 12):
        numba_flash.attention(*tensors(*((1, 1, length, 8),) * 3))
        assert len(dispatch._plans) <= 6


def test_a_known_call_notes_that_out_was_written(known):
    q, k, v = known
    out = torch.empty_like(q)
    for turn in range(3):
        before = out._version
        assert numba_flash.attention(q, k, v, out=out) is out
        assert out._version == before + 1, turn
    w = torch.ones_like(q).requires_grad_()
    y = (w * out).sum()
    numba_flash.attention(q, k, v, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_out_that_requires_grad_is_refused_in_a_known_call(known):
    q, k, v = known
    for _ in range(2):
        numba_flash.attention(q, k, v, out=torch.empty_like(q))
    with pytest.raises((NotImplementedError, ValueError), match="out"):
        numba_flash.attention(q, k, v, out=torch.empty_like(q).requires_grad_())
    with pytest.raises(ValueError, match="shares memory with q"):
        numba_flash.attention(q, k, v, out=q)
