"""torch's flash attention on a GPU, computed by numba_flash through torch's registry: results and gradients against the
oracle, and the same bits as numba_flash.attention, by which one sees who computed them."""

import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import numba_flash  # noqa: E402
from numba_flash import testing  # noqa: E402
from numba_flash.compat.torch import register  # noqa: E402
from numba_flash.testing import packed  # noqa: E402

registry = torch.nn.attention
pytestmark = [
    pytest.mark.skipif(
        not hasattr(registry, "restore_flash_attention_impl"), reason="needs torch's registry, as of torch 2.13"
    ),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use, and a torch with CUDA"),
]


@pytest.fixture
def active():
    registry.activate_flash_attention_impl(register())
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield
    if registry.current_flash_attention_impl() is not None:
        registry.restore_flash_attention_impl()


def to_torch(x):
    """On the GPU; bfloat16 has another name in NumPy."""
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(x).cuda()


def to_numpy(x):
    x = x.detach().cpu()
    return x.view(torch.int16).numpy().view(testing.bfloat16(0).dtype) if x.dtype == torch.bfloat16 else x.numpy()


def same_bits(ones, others):
    return all(torch.equal(x, y) for x, y in zip(ones, others, strict=True))


def made(dtype=torch.float16, heads=(6, 2, 2), lengths=(130, 130, 130), head_dim=64):
    """query, key and value as a projection leaves them: (batch, seqlen, heads, head_dim), transposed."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, seqlen, count, head_dim) for seqlen, count in zip(lengths, heads, strict=True)]
    rows = [torch.randn(shape, generator=generator, device="cuda", dtype=dtype) for shape in shapes]
    return [x.transpose(1, 2).requires_grad_() for x in rows]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("lengths", "head_dim", "causal"),
    [((130, 130), 64, True), ((77, 200), 128, False), ((33, 33), 40, True), ((20, 20), 36, False)],
)
def test_scaled_dot_product_attention(active, dtype, lengths, head_dim, causal):
    (seqlen_q, seqlen_k), generator = lengths, np.random.default_rng(0)
    shapes = (2, 6, seqlen_q, head_dim), (2, 2, seqlen_k, head_dim), (2, 2, seqlen_k, head_dim)
    arrays = [testing.strided(generator.standard_normal(shape), dtype, "plain") for shape in shapes]
    case = testing.Case(*arrays, dict(causal=causal))
    inputs = [to_torch(x).requires_grad_() for x in arrays]
    o = F.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=True)
    expected, lse = numba_flash.attention(*inputs, causal=causal, return_lse=True)
    if head_dim % 8 == 0:  # else torch fills the rows up with zeros before it calls
        assert torch.equal(o, expected)
    do, _ = testing.outer_gradients(case, 0)
    gradients = [to_numpy(x) for x in torch.autograd.grad(o, inputs, to_torch(do))]
    o, lse = to_numpy(o), to_numpy(lse)
    testing.check(case, o)
    testing.check_gradients(case, numba_flash.AttentionGradients(*gradients), do, o, lse)


def test_gradients_have_the_bits_of_ours(active):
    inputs = made()
    results = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True, scale=0.2)
    expected = numba_flash.attention(*inputs, causal=True, scale=0.2)
    for do in (torch.randn_like(expected), torch.ones((), device="cuda", dtype=torch.float16).expand(expected.shape)):
        assert same_bits(*(torch.autograd.grad(o, inputs, do, retain_graph=True) for o in (results, expected)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("seed", range(6))
def test_varlen_attn(active, dtype, seed):
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="needs torch.nn.attention.varlen")
    case = packed.packed_case(seed, features=("causal", "window"), dtypes=(dtype,), head_dims=(64,), tile=64)
    left, right = case.options.get("window", (None, None))
    window = tuple(-1 if side is None else side for side in (left, 0 if case.options.get("causal") else right))
    inputs = [to_torch(x).requires_grad_() for x in (case.q, case.k, case.v)]
    spans = [to_torch(x) for x in (case.cu_seqlens_q, case.cu_seqlens_k)]
    lengths = [int(np.diff(x).max(initial=0)) for x in (case.cu_seqlens_q, case.cu_seqlens_k)]
    # Up to 128 queries: more of them torch 2.14 gives to cuDNN where it can.
    aux = varlen.AuxRequest(lse=True)
    grouped = dict(enable_gqa=True) if case.q.shape[1] != case.k.shape[1] else {}
    if grouped and "enable_gqa" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("needs a torch whose varlen_attn takes enable_gqa")
    o, lse = varlen.varlen_attn(*inputs, *spans, *lengths, window_size=window, return_aux=aux, **grouped)
    do, dlse = packed.outer_packed(case, seed)
    gradients = [to_numpy(x) for x in torch.autograd.grad(o, inputs, to_torch(do))]
    o, lse = to_numpy(o), to_numpy(lse)
    packed.check_packed(case, o, lse)
    packed.check_packed_gradients(case, numba_flash.AttentionGradients(*gradients), do, o, lse, 0 * dlse)


def test_varlen_attn_with_valid_keys_and_into_out(active):
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="needs torch.nn.attention.varlen")
    q, k, v = (x[0].transpose(0, 1).detach() for x in made(heads=(4, 4, 4)))
    ends = torch.tensor([0, 30, 30, 130], dtype=torch.int32, device="cuda")
    used = torch.tensor([7, 0, 99], dtype=torch.int32, device="cuda")
    expected = numba_flash.attention_varlen(q, k, v, ends, seqlens_k=used, window=(None, 0))
    out = torch.full_like(q, 7)
    varlen.varlen_attn_out(out, q, k, v, ends, ends, 100, 100, seqused_k=used, window_size=(-1, 0))
    assert torch.equal(out, expected)
    pages = [x[None] for x in (k, v)]
    with pytest.raises(NotImplementedError, match="block_table"):
        varlen.varlen_attn(q, *pages, ends, ends, 100, 100, seqused_k=used, block_table=used[:, None])


def test_nested_tensors(active):
    rows = [torch.randn(n, 4, 64, device="cuda", dtype=torch.float16) for n in (5, 200, 17)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    found = F.scaled_dot_product_attention(nested, nested, nested, is_causal=True).transpose(1, 2).unbind()
    for own, o in zip(rows, found, strict=True):
        x = own.transpose(0, 1)[None]
        assert torch.equal(o.transpose(0, 1)[None], numba_flash.attention(x, x, x, causal=True))


def test_dropout_repeats_in_the_backward_and_with_the_seed(active):
    inputs = made(heads=(2, 2, 2))
    runs = []
    for _ in range(2):
        torch.cuda.manual_seed(3)
        runs += [torch.ops.aten._scaled_dot_product_flash_attention(*inputs, 0.4, True) for _ in range(2)]
    assert torch.equal(runs[0][0], runs[2][0]) and torch.equal(runs[1][0], runs[3][0])
    assert not torch.equal(runs[0][0], runs[1][0])
    seed = int(runs[0][6][0])
    expected = numba_flash.attention(*inputs, causal=True, dropout_p=0.4, seed=seed)
    do = torch.randn_like(expected)
    assert torch.equal(runs[0][0], expected)
    assert same_bits(*(torch.autograd.grad(o, inputs, do) for o in (runs[0][0], expected)))
    drawn = torch.utils.checkpoint.checkpoint(
        lambda *x: F.scaled_dot_product_attention(*x, dropout_p=0.4), *inputs, use_reentrant=False
    )
    assert all(x.isfinite().all() for x in torch.autograd.grad(drawn.sum(), inputs))


def test_torch_compile(active):
    inputs = made(heads=(4, 4, 4))

    def step(q, k, v):  # 2 and 4 round nothing, in whatever order they are multiplied
        return 4 * F.scaled_dot_product_attention(2 * q, k, v, is_causal=True)

    torch._dynamo.reset()
    found, expected = torch.compile(step, fullgraph=True)(*inputs), step(*inputs)
    do = torch.randn_like(expected)
    assert torch.equal(found, expected)
    assert same_bits(*(torch.autograd.grad(o, inputs, do) for o in (found, expected)))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # of torch, about the one that is refused
def test_a_cuda_graph(active):
    inputs = [x.detach() for x in made(heads=(4, 4, 4))]
    attend = F.scaled_dot_product_attention
    attend(*inputs, is_causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attend(*inputs, is_causal=True)
    for x in inputs:
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(o, attend(*inputs, is_causal=True))
    with (
        pytest.raises(NotImplementedError, match="dropout_p in a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        attend(*inputs, dropout_p=0.1)


def test_restore():
    inputs = made(heads=(4, 4, 4), lengths=(999, 999, 999))

    def run():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*inputs, is_causal=True)

    before, ours = run(), numba_flash.attention(*inputs, causal=True)
    assert not torch.equal(before, ours)
    for _ in range(2):
        registry.activate_flash_attention_impl(register())
        assert torch.equal(run(), ours)
        registry.restore_flash_attention_impl()
        assert torch.equal(run(), before)
