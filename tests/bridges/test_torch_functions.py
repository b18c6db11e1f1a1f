"""score_mod and mask_mod under torch's autograd, against torch's own gradients of the plain formula."""

import functools
import math

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from torch import func  # noqa: E402

import numba_flash  # noqa: E402
from numba_flash import mods  # noqa: E402

Q, K, V = (2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 4)  # grouped heads, lengths and head_dims apart
OFFSET = 1  # of the first query: seqlen_k - seqlen_q


def tensors(*shapes, device="cpu", requires_grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(device).requires_grad_(requires_grad) for x in made]


# What a function of numbers does, and the same of torch's operations on all scores at once.


def capped(score, b, h, q_pos, k_pos):
    return 1.5 * math.tanh(score / 1.5) if k_pos % 2 else score * score / (2 + abs(score))


def capped_plainly(s, b, h, q_pos, k_pos):
    return torch.where(k_pos % 2 == 1, 1.5 * torch.tanh(s / 1.5), s * s / (2 + s.abs()))


def sloped(score, b, h, q_pos, k_pos, slopes, ids):
    return score * slopes[h] - b * slopes[0] * abs(q_pos - k_pos)


def sloped_plainly(s, b, h, q_pos, k_pos, slopes, ids):
    return s * slopes[h] - b * slopes[0] * (q_pos - k_pos).abs()


def same(b, h, q_pos, k_pos, slopes, ids):
    return ids[b, k_pos] == ids[b, 0] or q_pos == k_pos


def same_plainly(b, h, q_pos, k_pos, slopes, ids):
    return (ids[b, k_pos] == ids[b, 0]) | (q_pos == k_pos)


def causal(b, h, q_pos, k_pos):
    return q_pos >= k_pos


def aux_of(device="cpu"):
    slopes = torch.tensor([0.5, -0.25, 2.0, 1.0], dtype=torch.float64, device=device)
    return slopes, torch.tensor([[3, 3, 1, 3, 1, 3], [2, 2, 2, 4, 4, 2]], dtype=torch.int32, device=device)


SETS = {  # (what attention is given, score_mod and mask_mod of torch's operations)
    "score_mod": (dict(score_mod=capped), capped_plainly, None),
    "mask_mod": (dict(mask_mod=causal), None, lambda b, h, i, j: i >= j),
    "partial": (dict(score_mod=functools.partial(lambda by, s, b, h, i, j: by * s * s, 0.25)),
                lambda s, b, h, i, j: 0.25 * s * s, None),
    "aux": (dict(score_mod=sloped, mask_mod=same), sloped_plainly, same_plainly),
}  # fmt: skip


def plainly(q, k, v, score_mod=None, mask_mod=None, aux=()):
    """-> o and lse of torch's own operations."""
    group = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    b, h, i, j = torch.meshgrid(*[torch.arange(n, device=q.device) for n in s.shape], indexing="ij")
    if score_mod is not None:
        s = score_mod(s, b, h, i + OFFSET, j, *aux)
    if mask_mod is not None:
        s = s.masked_fill(~mask_mod(b, h, i + OFFSET, j, *aux), -math.inf)
    return s.softmax(-1) @ v.repeat_interleave(group, 1), s.logsumexp(-1)


def pair_of(name, device="cpu", kernel=None):
    """-> ours and torch's, functions of q, k and v."""
    given, score_mod, mask_mod = SETS[name]
    aux = aux_of(device) if name == "aux" else ()
    kernel = kernel or ("reference" if device == "cpu" else "auto")
    ours = functools.partial(numba_flash.attention, return_lse=True, kernel=kernel, aux=aux, **given)
    return ours, functools.partial(plainly, score_mod=score_mod, mask_mod=mask_mod, aux=aux)


def close(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        # float64 with a few dozen terms of about 1 each
        assert one.dtype == other.dtype and torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("name", SETS)
def test_gradients_are_those_of_the_plain_formula(name, kernel, device):
    if device == "cuda" and kernel == "reference":
        pytest.skip("the oracle computes in host memory")
    q, k, v = tensors(Q, K, V, device=device)
    do, dlse = tensors((2, 4, 5, 4), (2, 4, 5), device=device, requires_grad=False, seed=1)
    ours, torchs = pair_of(name, device, kernel)
    found, expected = ours(q, k, v), torchs(q, k, v)
    close(found, expected)
    close(*(torch.autograd.grad(x, (q, k, v), (do, dlse), retain_graph=True) for x in (found, expected)))
    # without lse, for one array alone, and with a graph of the gradient
    alone = numba_flash.attention(q, k.detach(), v.detach(), **{**ours.keywords, "return_lse": False})
    close(torch.autograd.grad(alone, q, do, create_graph=True), torch.autograd.grad(expected[0], q, do))


def test_the_backward_has_the_function_that_the_forward_had(device, monkeypatch):
    q, k, v = tensors(Q, K, V, device=device)
    monkeypatch.setitem(globals(), "FACTOR", 0.5)

    def scaled(score, b, h, i, j):
        return score * FACTOR  # noqa: F821

    kernel = "reference" if device == "cpu" else "auto"
    found = numba_flash.attention(q, k, v, score_mod=scaled, kernel=kernel)
    monkeypatch.setitem(globals(), "FACTOR", 100.0)
    expected = plainly(q, k, v, score_mod=lambda s, *_: s * 0.5)[0]
    close(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (found, expected)))


@pytest.mark.parametrize("name", SETS)
def test_func(name):
    """grad, vmap of grad, and grad of vmap, in which b is the entry of each call's own batch."""
    q, k, v = tensors((3, *Q), K, (3, *V), requires_grad=False)
    (do,) = tensors((2, 4, 5, 4), requires_grad=False, seed=1)

    def everything(attention):
        def loss(q, k, v):
            o, lse = attention(q, k, v)
            return (o * do).sum() + lse.square().sum()

        of_one = func.grad(loss, argnums=(0, 1, 2))
        each = func.vmap(of_one, in_dims=(0, None, 0))(q, k, v)
        in_all = func.grad(lambda *x: func.vmap(loss, in_dims=(0, None, 0))(*x).sum(), argnums=(0, 1, 2))(q, k, v)
        return *of_one(q[0], k, v[0]), *each, *in_all

    close(*map(everything, pair_of(name)))


# which torch hides, unless warnings are errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")  # of torch 2.11
def test_compiled_with_a_break_of_the_graph(monkeypatch):
    """As older torches do; test_torch_functions_compiled.py has the others."""
    monkeypatch.setattr("numba_flash.bridges.torch.IN_GRAPHS", False)
    q, k, v = tensors(Q, K, V)
    ours, torchs = pair_of("aux")

    def loss(attention, q):
        return (attention(q * 2, k, v)[0] * 3).sum()

    compiled = torch.compile(functools.partial(loss, ours), backend="aot_eager")
    for _ in range(2):
        close(torch.autograd.grad(compiled(q), (q, k, v)), torch.autograd.grad(loss(torchs, q), (q, k, v)))
    torch.compiler.reset()
    whole = torch.compile(functools.partial(loss, ours), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="score_mod and mask_mod are no part of a graph"):
        whole(q)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_tracers_and_modes_see_an_operation():
    q, k, v = tensors(Q, K, V)
    ours, _ = pair_of("aux")
    others = tensors(Q, K, V, seed=1)
    for traced in (
        torch.fx.experimental.proxy_tensor.make_fx(ours)(*others),
        torch.jit.trace(lambda q, k, v: tuple(ours(q, k, v)), others),
        torch.export.export(Module(ours), tuple(others), strict=False).module(),
    ):
        found = traced(q, k, v)
        close(found, ours(q, k, v))
        close(torch.autograd.grad(found[0].sum(), q), torch.autograd.grad(ours(q, k, v)[0].sum(), q))
    mapped = torch.func.vmap(lambda q: ours(q, k, v)[0])
    close(torch.fx.experimental.proxy_tensor.make_fx(mapped)(q[None])(q[None]), mapped(q[None]))
    with torch._subclasses.FakeTensorMode() as mode:
        assert pair_of("score_mod")[0](*(mode.from_tensor(x) for x in (q, k, v))).o.shape == (2, 4, 5, 4)
    first = torch.autograd.grad(ours(q, k, v)[0].sum(), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="have no gradients themselves"):
        first.sum().backward()


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return tuple(self.function(*tensors))


def test_a_graph_of_another_process_says_what_it_lacks():
    from numba_flash.bridges import torch_functions

    with pytest.raises(NotImplementedError, match="only the process that traced it"):
        torch_functions.function_of("0")


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("alone", [False, True])
def test_gradients_of_aux(alone, kernel):
    """Of the one that is real, also where nothing else has a gradient, beside torch's own."""
    q, k, v = tensors(Q, K, V, requires_grad=not alone)
    do, dlse = tensors((2, 4, 5, 4), (2, 4, 5), requires_grad=False, seed=1)
    ours, torchs = pair_of("aux", kernel=kernel)
    slopes, ids = aux_of()
    slopes.requires_grad_()
    of = (slopes,) if alone else (q, k, v, slopes)
    found, expected = (f.func(q, k, v, **f.keywords | dict(aux=(slopes, ids))) for f in (ours, torchs))
    close(*(torch.autograd.grad(x, of, (do, dlse), retain_graph=True) for x in (found, expected)))
    first = torch.autograd.grad(found[0], slopes, do, create_graph=True)
    close(first, torch.autograd.grad(expected[0], slopes, do))
    with torch.no_grad():
        assert torch.equal(ours.func(q, k, v, **ours.keywords | dict(aux=(slopes, ids))).o, found[0])


def test_gradients_of_aux_under_func():
    q, k, v = tensors((3, *Q), K, (3, *V), requires_grad=False)
    (do,) = tensors((2, 4, 5, 4), requires_grad=False, seed=1)
    slopes, ids = aux_of()
    several = torch.stack([slopes, -slopes, 2 * slopes])

    def everything(attention):
        def loss(q, k, v, slopes):
            o, lse = attention.func(q, k, v, **attention.keywords | dict(aux=(slopes, ids)))
            return (o * do).sum() + lse.square().sum()

        of_one = func.grad(loss, argnums=(1, 3))
        shared = func.vmap(of_one, in_dims=(0, None, 0, None))(q, k, v, slopes)
        return *of_one(q[0], k, v[0], slopes), *shared, *func.vmap(of_one, in_dims=(0, None, 0, 0))(q, k, v, several)

    close(*map(everything, pair_of("aux")))


def test_a_block_mask_is_its_mask_mod():
    documents = torch.repeat_interleave(torch.arange(3), 4).expand(2, 12).contiguous()
    q, k, v = (torch.randn(2, 2, 12, 8, requires_grad=True) for _ in range(3))
    blocks = numba_flash.block_mask(mods.document, 2, 2, 12, 12, aux=(documents,), causal=True)
    of_blocks = numba_flash.attention(q, k, v, block_mask=blocks)
    expected = numba_flash.attention(q, k, v, mask_mod=mods.document, aux=(documents,), causal=True)
    assert torch.equal(of_blocks, expected)
    found, other = (torch.autograd.grad(o.sum(), (q, k, v)) for o in (of_blocks, expected))
    assert all(torch.equal(x, y) for x, y in zip(found, other, strict=True))
    compiled = torch.compile(lambda q: numba_flash.attention(q, k, v, block_mask=blocks), backend="eager")
    assert torch.equal(compiled(q), expected)
