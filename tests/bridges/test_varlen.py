"""attention_varlen of torch tensors, recorded and compiled, and of JAX arrays that nothing traces."""

import numpy as np
import pytest

import numba_flash

torch = pytest.importorskip("torch")
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

ENDS_Q = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
ENDS_K = torch.tensor([1, 8, 10, 19], dtype=torch.int32)


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    shapes = ((13, 4, 8), (20, 2, 8), (20, 2, 6))
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def one_by_one(q, k, v, **options):
    """o of each sequence by a call of its own; 0 elsewhere. And lse."""
    o, lse = torch.zeros(13, 4, 6, dtype=q.dtype), torch.full((4, 13), -torch.inf, dtype=q.dtype)
    for b in range(3):
        (a, e), (c, d) = ENDS_Q[b : b + 2], ENDS_K[b : b + 2]
        own = [x[first:end].transpose(0, 1)[None] for x, first, end in ((q, a, e), (k, c, d), (v, c, d))]
        found, found_lse = numba_flash.attention(*own, return_lse=True, **options)
        o = torch.cat([o[:a], found[0].transpose(0, 1), o[e:]])
        lse = torch.cat([lse[:, :a], found_lse[0], lse[:, e:]], 1)
    return o, lse


def loss(o, lse):
    torch.manual_seed(1)
    return (o * torch.randn_like(o)).sum() + (torch.where(lse.isfinite(), lse, 0.0) * torch.randn_like(lse)).sum()


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(2, 1), softcap=3.0)], ids=str)
def test_gradients_are_those_of_one_call_for_each_sequence(tensors, options):
    expected = torch.autograd.grad(loss(*one_by_one(*tensors, **options)), tensors)
    o, lse = numba_flash.attention_varlen(*tensors, ENDS_Q, ENDS_K, return_lse=True, **options)
    for got, right in zip(torch.autograd.grad(loss(o, lse), tensors), expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)
    alone = numba_flash.attention_varlen(*tensors, ENDS_Q, ENDS_K, **options)
    assert alone.requires_grad and torch.equal(alone, o)


@pytest.mark.parametrize("bounds", [{}, dict(max_seqlen_q=7, max_seqlen_k=9)], ids=str)
def test_torch_compile_has_it_in_one_graph(tensors, bounds):
    def step(q, k, v):
        return numba_flash.attention_varlen(2 * q, k, v, ENDS_Q, ENDS_K, causal=True, return_lse=True, **bounds)

    expected = step(*tensors)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    found = compiled(*tensors)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    gradients = [torch.autograd.grad(loss(*x), tensors) for x in (found, expected)]
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


def test_other_lengths_and_bounds_are_no_other_graph():
    x = torch.randn(3, 2, 32)  # the process's first call starts threads, of which a graph takes the number
    numba_flash.attention_varlen(x, x, x, torch.tensor([0, 3], dtype=torch.int32))
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=graphs, fullgraph=True, dynamic=True)
    def step(q, cu_seqlens, most):
        return numba_flash.attention_varlen(q, q, q, cu_seqlens, max_seqlen_q=most, max_seqlen_k=most, causal=True)

    for lengths in ([3, 5], [4, 7, 2], [9, 0, 2, 6], [20, 1]):
        q = torch.randn(sum(lengths), 2, 32, requires_grad=True)  # a size of its own
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        o = step(q, cu_seqlens, max(lengths))
        expected = numba_flash.attention_varlen(q, q, q, cu_seqlens, causal=True)
        assert torch.equal(o, expected)
        assert all(map(torch.equal, *(torch.autograd.grad(x.square().sum(), (q,)) for x in (o, expected))))
    assert graphs.frame_count == 1


def test_vmap_is_refused_by_name(tensors):
    q, k, v = (x.detach() for x in tensors)
    with pytest.raises(NotImplementedError, match="torch.vmap takes no attention_varlen"):
        torch.func.vmap(lambda q: numba_flash.attention_varlen(q, k, v, ENDS_Q, ENDS_K))(torch.stack([q, q]))


def test_jax_arrays():
    jax = pytest.importorskip("jax")
    rows = [np.random.default_rng(0).standard_normal((12, 2, 8)).astype(np.float32) for _ in range(3)]
    ends = np.array([0, 5, 12], np.int32)
    q, k, v, of = map(jax.numpy.asarray, (*rows, ends))
    o = numba_flash.attention_varlen(q, k, v, of, causal=True)
    assert isinstance(o, jax.Array)
    assert np.array_equal(o, numba_flash.attention_varlen(*rows, ends, causal=True))


def test_from_padded_to_packed_and_back():
    from numba_flash.compat.flash_attn import flash_attn_varlen_qkvpacked_func
    from numba_flash.compat.flash_attn.bert_padding import pad_input, unpad_input

    torch.manual_seed(0)
    x = torch.randn(3, 7, 3, 2, 8, requires_grad=True)
    mask = torch.arange(7) < torch.tensor([[4], [0], [7]])
    rows, indices, cu_seqlens, longest, used = unpad_input(x, mask)
    assert cu_seqlens.tolist() == [0, 4, 4, 11] and cu_seqlens.dtype == torch.int32
    assert longest == 7 and used.tolist() == [4, 0, 7] and torch.equal(rows, x[mask])
    o = pad_input(flash_attn_varlen_qkvpacked_func(rows, cu_seqlens, longest, causal=True), indices, 3, 7)
    own = [x[:, :, n].transpose(1, 2) for n in range(3)]
    expected = numba_flash.attention(*own, causal=True, q_offset=0, seqlens_k=used).transpose(1, 2)
    assert torch.equal(o[~mask], torch.zeros_like(o[~mask]))
    torch.testing.assert_close(o[mask], expected[mask])
    o.sum().backward()
    assert x.grad[mask].abs().sum() > 0 and not x.grad[~mask].any()
    kept = torch.tensor([[1, 1, 0]])
    rows, indices, cu_seqlens, _, used = unpad_input(torch.arange(3.0)[None, :, None], kept, torch.tensor([[0, 0, 1]]))
    assert cu_seqlens.tolist() == [0, 3] and used.tolist() == [2]
    with pytest.raises(ValueError, match="attention_mask must have shape"):
        unpad_input(x, mask[:2])
