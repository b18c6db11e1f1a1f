"""attention() where torch records every operation: jit.trace, make_fx, export, modes. It is one of them, or refused."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import numba_flash  # noqa: E402
from numba_flash.bridges import torch_operations as operations  # noqa: E402

SHAPE = (1, 2, 5, 4)  # of q, which is also k and v
ITS_OWN = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")


def given(seed):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def attend(q):
    return numba_flash.attention(q, q, q, causal=True)


def gradient(q):
    q = q.detach().requires_grad_()
    return torch.autograd.grad(attend(q).square().sum(), q)[0]


class Names(TorchDispatchMode):
    """The names of the operations that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@ITS_OWN
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_jit_trace(grad, requires_grad):
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(attend, given(0).requires_grad_(requires_grad))
    assert torch.equal(traced(given(1)), attend(given(1)))


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("grad", [False, True])
def test_make_fx(tracing_mode, pre_dispatch, grad):
    with torch.set_grad_enabled(grad):
        traced = make_fx(attend, tracing_mode=tracing_mode, pre_dispatch=pre_dispatch)(given(0))
    assert torch.equal(traced(given(1)), attend(given(1)))


def test_make_fx_of_a_gradient_and_of_transforms():
    assert torch.equal(make_fx(gradient)(given(0))(given(1)), gradient(given(1)))
    by_func = torch.func.grad(lambda q: attend(q).square().sum())
    assert torch.equal(make_fx(by_func)(given(0))(given(1)), gradient(given(1)))
    several = torch.stack([given(1), given(2)])
    found = make_fx(torch.func.vmap(attend))(torch.stack([given(3), given(4)]))(several)
    assert torch.equal(found, torch.stack([attend(q) for q in several]))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    class Module(torch.nn.Module):
        def forward(self, q):
            return attend(q)

    exported = torch.export.export(Module(), (given(0),), strict=strict)
    assert torch.equal(exported.module()(given(1)), attend(given(1)))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", [Names, Calls])
def test_modes_see_the_operation(kind, grad):
    q = given(0).requires_grad_()
    with torch.set_grad_enabled(grad), kind() as mode:
        o = attend(q)
    assert "numba_flash.attention.default" in mode.seen and not any("empty" in name for name in mode.seen)
    assert torch.equal(o, attend(q)) and o.requires_grad == grad


def test_the_backward_is_seen_too():
    q = given(0).requires_grad_()
    o = attend(q)
    with Names() as mode:
        (found,) = torch.autograd.grad(o.square().sum(), q)
    assert "numba_flash.attention_backward.default" in mode.seen
    assert torch.equal(found, gradient(q))


def test_real_tensors_in_a_fake_mode():
    from torch._subclasses.fake_tensor import FakeTensorMode

    q = given(0)
    with FakeTensorMode(), pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
        attend(q)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.profiler")
@pytest.mark.parametrize(
    "calm",
    [
        lambda: torch.device("cpu"),
        lambda: torch.autograd.forward_ad.dual_level(),
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        lambda: torch.autograd.graph.save_on_cpu(),
    ],
    ids=["default device", "dual level", "profiler", "saved tensors"],
)
def test_what_records_nothing_is_not_taken_for_a_tracer(calm, monkeypatch):
    expected = attend(given(0)), gradient(given(0))
    monkeypatch.setattr(operations, "forward", lambda *_: pytest.fail("the dispatcher was asked"))
    monkeypatch.setattr(operations, "backward", lambda *_: pytest.fail("the dispatcher was asked"))
    with calm():
        found = attend(given(0)), gradient(given(0))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def gradients_of_given(q):
    o, lse = torch.zeros_like(q), torch.zeros(q.shape[:3], dtype=q.dtype)
    return numba_flash.attention_backward(q, q, q, q, o, lse).dq


@ITS_OWN
@pytest.mark.parametrize("trace", [torch.jit.trace, lambda function, q: make_fx(function)(q)], ids=["jit", "make_fx"])
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (gradients_of_given, "would miss what is computed here"),
        (lambda q: numba_flash.softmax(q, kernel="reference"), "would miss what is computed here"),
        (lambda q: numba_flash.attention(q, q, q, out=torch.empty_like(q)), "out cannot be given"),
    ],
    ids=["attention_backward", "softmax", "out"],
)
def test_what_is_no_operation_is_refused(trace, function, words):
    with pytest.raises(NotImplementedError, match=words):
        trace(function, given(0))


@ITS_OWN
@pytest.mark.parametrize("trace", [torch.jit.trace, lambda function, q: make_fx(function)(q)], ids=["jit", "make_fx"])
def test_merge_is_made_of_operations(trace):
    o, lse = numba_flash.attention(given(0), given(0), given(0), return_lse=True)

    def merged(q):
        return numba_flash.merge(q, lse, o, lse).o

    assert torch.equal(trace(merged, given(1))(given(2)), merged(given(2)))
