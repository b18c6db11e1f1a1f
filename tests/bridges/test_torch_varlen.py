"""varlen_attn with torch's signature: the oracle's results and gradients, torch.compile, and refusals."""

import inspect
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import numba_flash  # noqa: E402
from numba_flash.compat.torch import varlen_attn, varlen_attn_out  # noqa: E402
from numba_flash.testing import packed  # noqa: E402

LSE = SimpleNamespace(lse=True)  # as torch.nn.attention.varlen.AuxRequest, which old versions do not have
ENDS_Q = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
ENDS_K = torch.tensor([1, 8, 10, 19], dtype=torch.int32)
SPANS = ENDS_Q, ENDS_K, 7, 9


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return [torch.randn(rows, 4, 8, requires_grad=True) for rows in (13, 20, 20)]


@pytest.mark.parametrize("function", [varlen_attn, varlen_attn_out])
def test_the_signature_is_that_of_torch(function):
    theirs = pytest.importorskip("torch.nn.attention.varlen", reason="needs torch 2.13")
    signatures = [inspect.signature(f).parameters.values() for f in (function, getattr(theirs, function.__name__))]
    ours, expected = ([(x.name, x.kind, x.default) for x in parameters] for parameters in signatures)
    assert ours == expected


def arguments_of(case):
    """Those of varlen_attn, by name, for a case of attention_varlen; the others are refused by name."""
    given = case.arguments(torch.from_numpy)
    causal, (left, right) = given.pop("causal", False), given.pop("window", (None, None))
    sides = [-1 if side is None else side for side in (left, 0 if causal else right)]
    named = dict(query=given["q"], key=given["k"], value=given["v"], window_size=tuple(sides), enable_gqa=True)
    lengths = [
        int(max(case_ends[1:] - case_ends[:-1], default=0))
        for case_ends in (given["cu_seqlens_q"], given["cu_seqlens_k"])
    ]
    named |= dict(cu_seq_q=given["cu_seqlens_q"], cu_seq_k=given["cu_seqlens_k"], max_q=lengths[0], max_k=lengths[1])
    return named | dict(seqused_k=given.get("seqlens_k"))


@pytest.mark.parametrize("seed", range(12))
def test_random_problems_agree_with_the_oracle(seed):
    case = packed.packed_case(
        seed, features=("causal", "window", "seqlens_k"), dtypes=("float32", "float64"), head_dims=(8, 16)
    )
    named = arguments_of(case)
    inputs = [named[name].requires_grad_() for name in ("query", "key", "value")]
    o, lse = varlen_attn(**named, return_aux=LSE, num_splits=seed % 2)
    do, dlse = packed.outer_packed(case, seed)
    gradients = torch.autograd.grad((o, lse), inputs, (torch.from_numpy(do), torch.from_numpy(dlse)))
    o, lse, *gradients = (x.detach().numpy() for x in (o, lse, *gradients))
    packed.check_packed(case, o, lse, "varlen_attn")
    gradients = numba_flash.AttentionGradients(*gradients)
    packed.check_packed_gradients(case, gradients, do, o, lse, dlse, "varlen_attn's gradients")


def test_options_reach_it(tensors):
    alone = varlen_attn(*tensors, *SPANS, scale=0.3, window_size=[2, 1], return_aux=SimpleNamespace(lse=False))
    assert torch.equal(alone, numba_flash.attention_varlen(*tensors, *SPANS[:2], scale=0.3, window=(2, 1)))
    q, k, v = (x.detach() for x in tensors)
    k.requires_grad_()  # of all three alone
    (dk,) = torch.autograd.grad(varlen_attn(q, k, v, *SPANS).sum(), k)
    (expected,) = torch.autograd.grad(varlen_attn(*tensors, *SPANS).sum(), tensors[1])
    assert torch.equal(dk, expected)


def test_tensors_of_any_strides(tensors):
    """Every second column, heads that repeat, and rows that run backwards in memory of another order."""
    q, k, v = (x.detach() for x in tensors)
    spread = torch.stack([q, q], -1)[..., 0]
    repeated = k[:, :1].expand(-1, 4, -1)
    turned = v.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    found = varlen_attn(spread, repeated, turned, *SPANS, window_size=(-1, 0))
    assert torch.equal(found, varlen_attn(q, repeated.contiguous(), v, *SPANS, window_size=(-1, 0)))


@pytest.mark.parametrize(("rows", "batch"), [(0, 0), (0, 2), (3, 0)])
def test_nothing_to_attend_to(rows, batch):
    x = torch.randn(rows, 2, 8, requires_grad=True)
    ends = torch.zeros(batch + 1, dtype=torch.int32)
    o, lse = varlen_attn(x, x, x, ends, ends, 0, 0, return_aux=LSE)
    assert o.shape == (rows, 2, 8) and not o.any() and lse.shape == (2, rows) and bool((lse == -torch.inf).all())
    assert not torch.autograd.grad(o.sum(), x)[0].any()


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_has_it_in_one_graph(tensors, dynamic):
    def step(q, k, v, of_q, of_k, most_q, most_k):
        o, lse = varlen_attn(2 * q, k, v, of_q, of_k, most_q, most_k, window_size=(3, 0), return_aux=LSE)
        return o.sin(), torch.where(lse.isfinite(), lse, 0.0).cos()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for spans in (SPANS, (ENDS_Q + 1, ENDS_K, 8, 10)):
        found, expected = compiled(*tensors, *spans), step(*tensors, *spans)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        gradients = [torch.autograd.grad(x.sum() + y.sum(), tensors) for x, y in (found, expected)]
        assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


def test_autocast_casts_nothing(tensors):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = varlen_attn(*tensors, *SPANS)
    assert torch.equal(found, varlen_attn(*tensors, *SPANS))


def test_out_is_written(tensors):
    q, k, v = (x.detach() for x in tensors)
    room = torch.full((13, 4, 10), 7.0)
    o, lse = varlen_attn_out(room[..., 1:9], q, k, v, *SPANS, window_size=(-1, 0), return_aux=LSE)
    expected, expected_lse = varlen_attn(q, k, v, *SPANS, window_size=(-1, 0), return_aux=LSE)
    assert o.data_ptr() == room[..., 1:].data_ptr() and torch.equal(room[..., 1:9], expected)
    assert torch.equal(lse, expected_lse) and bool((room[..., ::9] == 7).all())
    assert varlen_attn_out(room[..., 1:9], q, k, v, *SPANS).shape == q.shape
    with pytest.raises(NotImplementedError, match="out cannot be given where torch records"):
        varlen_attn_out(room[..., 1:9], *tensors, *SPANS)
    with pytest.raises(NotImplementedError, match="block_table"):
        varlen_attn_out(room[..., 1:9], q, k, v, *SPANS, block_table=ENDS_Q)


def jagged():
    return torch.nested.nested_tensor([torch.ones(5, 4, 8), torch.ones(7, 4, 8)], layout=torch.jagged)


REFUSALS = [
    (dict(block_table=ENDS_Q), NotImplementedError, "block_table: pages of a cache are not implemented yet; pass"),
    (dict(num_splits=4), NotImplementedError, "num_splits of 4: keys are not split among blocks yet"),
    (dict(cu_seq_q=ENDS_Q.long()), TypeError, r"cu_seq_q must be int32, not int64.*cu_seq_q\.int\(\)"),
    (dict(cu_seq_k=ENDS_K.long()), TypeError, "cu_seq_k must be int32"),
    (dict(cu_seq_k=None), TypeError, "cu_seq_k must be an int32 tensor"),
    (dict(cu_seq_q=None), TypeError, "cu_seq_q must be an int32 array"),
    (dict(cu_seq_k=ENDS_K + 2), ValueError, "cu_seq_k must rise from 0 or more to at most 20"),
    (dict(max_q=6), ValueError, "max_q = 6 is less than a length of cu_seq_q, 7"),
    (dict(max_k=torch.tensor(9)), TypeError, "max_k must be a whole number"),
    (dict(seqused_k=torch.tensor([1, 2, 10], dtype=torch.int32)), ValueError, "seqused_k must lie in"),
    (dict(seqused_k=torch.tensor([1, 2, 3])), TypeError, "seqused_k must be int32"),
    (dict(window_size=3), ValueError, "window_size must be a pair"),
    (dict(window_size=(-2, 0)), ValueError, "window_size must be a pair"),
    (dict(scale=torch.tensor(0.5)), TypeError, "scale must be a number"),
    (dict(key=torch.ones(20, 2, 8), value=torch.ones(20, 2, 8)), ValueError, r"key \(20, 2, 8\).*enable_gqa=True"),
    (dict(enable_gqa=1), TypeError, "enable_gqa must be True or False"),
    (dict(return_aux=True), TypeError, "return_aux must be None or an AuxRequest"),
    (dict(query=torch.ones(13, 8)), ValueError, "query"),
    (dict(query=torch.ones(13, 4, 8).double()), TypeError, "query is float64 and key is float32"),
    (dict(query=jagged()), NotImplementedError, r"query is a nested tensor.*values\(\)"),
]


@pytest.mark.parametrize(("changed", "error", "words"), REFUSALS)
def test_refusals_name_the_argument(tensors, changed, error, words):
    named = dict(zip(("query", "key", "value"), (x.detach() for x in tensors), strict=True))
    named |= dict(zip(("cu_seq_q", "cu_seq_k", "max_q", "max_k"), SPANS, strict=True))
    with pytest.raises(error, match=words):
        varlen_attn(**named | changed)
