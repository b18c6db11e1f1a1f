"""torch's registry of flash attention: switched on and off, and what its operations then compute. They are replaced for
CUDA tensors; here also for those in host memory, for which torch has none. tests/gpu has the same on a GPU."""

from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import numba_flash  # noqa: E402
from numba_flash.compat import torch_registry  # noqa: E402
from numba_flash.compat.torch import register  # noqa: E402
from numba_flash.dispatch import backward  # noqa: E402
from numba_flash.problem.options import GradientOperands  # noqa: E402
from numba_flash.testing import packed  # noqa: E402

registry = torch.nn.attention
pytestmark = pytest.mark.skipif(
    not hasattr(registry, "restore_flash_attention_impl"), reason="needs torch's registry, as of torch 2.13"
)
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def inactive():
    """What another test has left, such as README's lines."""
    if registry.current_flash_attention_impl() is not None:
        registry.restore_flash_attention_impl()


@pytest.fixture
def active():
    on_host = lambda: torch_registry.InPlaceOfTorch("CPU")  # noqa: E731
    registry.register_flash_attention_impl("numba_flash on CPU", register_fn=on_host)
    registry.activate_flash_attention_impl("numba_flash on CPU")
    yield
    registry.restore_flash_attention_impl()


def state(device="CUDA"):
    """What torch would run for each operation."""
    return [
        [line for line in torch._C._dispatch_dump(f"aten::{name}").splitlines() if line.startswith(f"{device}:")]
        for name in torch_registry.OPERATIONS
    ]


def test_it_is_switched_on_and_off():
    before = state()
    for _ in range(2):  # a second registration replaces the first
        assert register() == "NUMBA" and "NUMBA" in registry.list_flash_attention_impls()
    assert registry.current_flash_attention_impl() is None and state() == before
    for _ in range(2):  # a second activation ends the first
        registry.activate_flash_attention_impl(register())
        assert registry.current_flash_attention_impl() == "NUMBA"
        assert all(lines != old for lines, old in zip(state(), before, strict=True))
    registry.restore_flash_attention_impl()
    assert registry.current_flash_attention_impl() is None and state() == before
    registry.restore_flash_attention_impl()  # nothing to restore: torch logs that
    assert state() == before


def test_a_handle_that_is_kept_holds_nothing_after_remove():
    before, handle = state(), torch_registry.InPlaceOfTorch()
    assert state() != before
    handle.remove()
    assert state() == before


def test_another_name():
    registry.activate_flash_attention_impl(register("another"))
    try:
        assert registry.current_flash_attention_impl() == "another"
    finally:
        registry.restore_flash_attention_impl()


def test_a_torch_without_the_registry(monkeypatch):
    monkeypatch.delattr(registry, "restore_flash_attention_impl")
    with pytest.raises(NotImplementedError, match=r"which torch 2\S+ does not have; torch 2.13 has"):
        register()


def made(order, dtype=torch.float32, heads=(4, 2, 2), lengths=(5, 9, 9), head_dim=16):
    """query, key and value (batch, heads, seqlen, head_dim), in memory in some order."""
    torch.manual_seed(0)
    if order == "one projection":  # (batch, seqlen, heads, head_dim) of one tensor
        x = torch.randn(2, 9, sum(heads), head_dim, dtype=dtype).transpose(1, 2)
        return [y.requires_grad_() for y in x.split(heads, 1)]
    tensors = [torch.randn(2, *pair, head_dim, dtype=dtype) for pair in zip(heads, lengths, strict=True)]
    if order == "seqlen first":
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    elif order == "batch last":
        tensors = [x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for x in tensors]
    elif order == "repeated heads":
        tensors = [x[:, :1].expand(-1, x.shape[1], -1, -1) for x in tensors]
    return [x.requires_grad_() for x in tensors]


ORDERS = ("heads first", "seqlen first", "batch last", "repeated heads", "one projection")


def on_meta(x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x


def promised(operation, *arguments, **named):
    """Shape, strides and dtype of each result as torch's compilers expect them; of no result None."""
    return [about(x) for x in operation(*map(on_meta, arguments), **{name: on_meta(x) for name, x in named.items()})]


def about(x):
    if not isinstance(x, torch.Tensor):
        return x
    return x.shape, [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1], x.dtype


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense(active, monkeypatch, order, dtype):
    q, k, v = made(order, dtype)
    inputs = (q, k, v)
    results = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=0.3)
    o, lse, *others = results
    expected, expected_lse = numba_flash.attention(q, k, v, causal=True, scale=0.3, return_lse=True)
    assert torch.equal(o, expected) and torch.equal(lse, expected_lse)
    assert list(map(about, results)) == promised(aten._scaled_dot_product_flash_attention, q, k, v, 0.0, True)
    do = torch.randn(o.shape, dtype=dtype)
    gradients, right = (torch.autograd.grad(x, inputs, do) for x in (o, expected))
    assert all(torch.equal(x, y) for x, y in zip(gradients, right, strict=True))
    given = (do, q, k, v, o, lse, None, None, 5, 9, 0.0, True, *others[-3:-1])
    differentiate = torch_registry.scaled_dot_product_flash_attention_backward
    found = [x.detach() if isinstance(x, torch.Tensor) else x for x in given]
    strides = promised(aten._scaled_dot_product_flash_attention_backward, *given)
    copied, copy = [], torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda x, y: copied.append(y) or copy(x, y))
    assert list(map(about, differentiate(*found, scale=0.3))) == strides == list(map(about, gradients))
    assert bool(copied) == (order in ("batch last", "repeated heads"))


@pytest.mark.parametrize("order", ORDERS)
def test_dense_with_heads_behind_the_length(active, order):
    tensors = made(order)
    q, k, v = (x.transpose(1, 2) for x in tensors)
    options = dict(scale=0.3, window_size_left=3, window_size_right=1)
    found = aten._flash_attention_forward(q, k, v, None, None, q.shape[1], 9, 0.0, False, False, **options)
    expected = numba_flash.attention(q, k, v, layout="bshd", scale=0.3, window=(3, 1), return_lse=True)
    assert torch.equal(found[0], expected.o) and torch.equal(found[1], expected.lse)
    forward = (q, k, v, None, None, q.shape[1], 9, 0.0, False, False)
    assert list(map(about, found)) == promised(aten._flash_attention_forward, *forward)
    do = torch.randn(found[0].shape)
    gradients, right = (torch.autograd.grad(x, tensors, do) for x in (found[0], expected.o))
    assert all(torch.equal(x, y) for x, y in zip(gradients, right, strict=True))


@pytest.mark.parametrize("window", [(-1, -1), (None, 0), (2, None)])
def test_windows_and_what_only_the_forward_has(active, window):
    q, k, v = (x.detach().transpose(1, 2) for x in made("seqlen first"))
    slopes, used = torch.rand(2, 4), torch.tensor([9, 4], dtype=torch.int32)
    named = dict(window_size_left=window[0], window_size_right=window[1], alibi_slopes=slopes, seqused_k=used)
    o, lse, *_ = aten._flash_attention_forward(q, k, v, None, None, 5, 9, 0.0, False, False, **named, num_splits=1)
    sides = tuple(None if side == -1 else side for side in window)
    options = dict(window=sides, alibi_slopes=slopes, seqlens_k=used, layout="bshd", return_lse=True)
    expected = numba_flash.attention(q, k, v, **options)
    assert torch.equal(o, expected.o) and torch.equal(lse, expected.lse)


def test_gradients_that_are_one_number_or_not_contiguous(active):
    """Of sum(), and of context parallelism, which merges lse of several parts."""
    q, k, v = made("seqlen first")
    found, expected = (
        f(q, k, v) for f in (lambda *x: aten._scaled_dot_product_flash_attention(*x)[0], numba_flash.attention)
    )
    with mock.patch.object(backward, "enqueue", wraps=backward.enqueue) as spy:
        pairs = zip(*(torch.autograd.grad(o.sum(), (q, k, v)) for o in (found, expected)), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)
    do = spy.call_args_list[0].args[2][GradientOperands._fields.index("do")]
    assert do.layout.strides[-1] == 1  # rows that tensor cores can load
    with torch.no_grad():
        o, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v)
        given = (torch.ones_like(o), q, k, v, o)
        rest = (None, None, 5, 9, 0.0, False, torch.empty(2), torch.empty(0))
        spread = torch.stack([lse, lse], -1)[..., 0]
        both = [aten._scaled_dot_product_flash_attention_backward(*given, x, *rest) for x in (lse, spread)]
    assert all(torch.equal(x, y) for x, y in zip(*both, strict=True))


# --- packed sequences, as torch.nn.attention.varlen asks for them


def theirs():
    return pytest.importorskip("torch.nn.attention.varlen", reason="needs torch.nn.attention.varlen")


@pytest.mark.parametrize("seed", range(10))
def test_varlen_agrees_with_the_oracle(active, seed):
    case = packed.packed_case(seed, features=("causal", "window"), head_dims=(8, 16, 32))
    left, right = case.options.get("window", (None, None))
    window = tuple(-1 if x is None else x for x in (left, 0 if case.options.get("causal") else right))
    inputs = [torch.from_numpy(x) for x in (case.q, case.k, case.v)]
    if case.q.shape[2] != case.v.shape[2]:  # torch's operation returns query's shape
        case.v = np.resize(case.v, case.k.shape)
        case.v[case.outside("k")] = np.nan
        inputs[2] = torch.from_numpy(case.v)
    for x in inputs:
        x.requires_grad_()
    spans = [torch.from_numpy(x) for x in (case.cu_seqlens_q, case.cu_seqlens_k)]
    lengths = [int(np.diff(x).max(initial=0)) for x in spans]
    module = theirs()
    o, lse = module.varlen_attn(
        *inputs, *spans, *lengths, window_size=window, enable_gqa=True, return_aux=module.AuxRequest(lse=True)
    )
    do, dlse = packed.outer_packed(case, seed)
    gradients = [x.numpy() for x in torch.autograd.grad(o, inputs, torch.from_numpy(do))]
    o, lse = o.detach().numpy(), lse.detach().numpy()
    packed.check_packed(case, o, lse)
    packed.check_packed_gradients(case, numba_flash.AttentionGradients(*gradients), do, o, lse, 0 * dlse)


@pytest.fixture
def rows():
    torch.manual_seed(0)
    ends = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    return [torch.randn(13, 4, 16) for _ in range(3)], (ends, ends, 7, 7)


def test_varlen_with_valid_keys_and_into_out(active, rows):
    tensors, spans = rows
    used = torch.tensor([2, 0, 7], dtype=torch.int32)
    expected, expected_lse = numba_flash.attention_varlen(*tensors, *spans[:2], seqlens_k=used, return_lse=True)
    assert torch.equal(theirs().varlen_attn(*tensors, *spans, seqused_k=used), expected)
    room = torch.full((13, 4, 20), 7.0)
    aux = theirs().AuxRequest(lse=True)
    o, lse = theirs().varlen_attn_out(room[..., 2:18], *tensors, *spans, seqused_k=used, return_aux=aux)
    assert o.data_ptr() == room[..., 2:].data_ptr() and torch.equal(o, expected) and torch.equal(lse, expected_lse)
    assert bool((room[..., :2] == 7).all() and (room[..., 18:] == 7).all())


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_has_them_in_one_graph(active, rows, dynamic):
    tensors, spans = rows
    varlen_attn = theirs().varlen_attn

    def step(q, k, v, *spans):
        o = varlen_attn(2 * q, k, v, *spans, window_size=(3, 0))
        dense = [x[None].transpose(1, 2) for x in (q, k, v)]
        return o.sin() + aten._scaled_dot_product_flash_attention(*dense, 0.0, True)[0][0].transpose(0, 1)

    inputs = [x.requires_grad_() for x in tensors]
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for given in (spans, (spans[0] + 1, spans[1], 8, 9)):
        found, expected = compiled(*inputs, *given), step(*inputs, *given)
        assert torch.equal(found, expected)
        gradients = [torch.autograd.grad(x.sum(), inputs) for x in (found, expected)]
        assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


# --- dropout


def test_dropout_draws_a_seed_and_the_backward_repeats_it(active):
    q, k, v = made("seqlen first")
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs += [aten._scaled_dot_product_flash_attention(q, k, v, 0.4, True) for _ in range(2)]
    o, rng_state = runs[0][0], runs[0][6]
    assert torch.equal(o, runs[2][0]) and not torch.equal(o, runs[1][0])
    assert about(rng_state) == (torch.Size([2]), [1], torch.uint64)
    expected = numba_flash.attention(q, k, v, causal=True, dropout_p=0.4, seed=int(rng_state[0]))
    assert torch.equal(o, expected)
    do = torch.randn(o.shape)
    pairs = zip(*(torch.autograd.grad(x, (q, k, v), do) for x in (o, expected)), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)


class Generator:
    """As torch's of a GPU: its state is a seed and an offset."""

    def __init__(self):
        self.offset = 8

    def initial_seed(self):
        return 2**63 + 5

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        assert offset % 4 == 0
        self.offset = offset


def test_on_a_gpu_the_seed_comes_from_its_generator(monkeypatch):
    generators = [Generator(), Generator()]
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    one, other = (torch_registry._drawn(torch.device("cuda", 1)) for _ in range(2))
    assert one != other and 0 <= one < 2**63 and 0 <= other < 2**63
    assert (generators[0].offset, generators[1].offset) == (8, 16)
    generators[1].offset = 8  # as torch.utils.checkpoint brings it back
    assert torch_registry._drawn(torch.device("cuda", 1)) == one
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotImplementedError, match="dropout_p in a CUDA graph"):
        torch_registry._drawn(torch.device("cuda", 1))


# --- what is refused

TABLE = torch.zeros(3, 1, dtype=torch.int32)
REFUSALS = [
    (dict(block_table=TABLE), NotImplementedError, "block_table: pages"),
    (dict(num_splits=2), NotImplementedError, "num_splits of 2"),
    (dict(return_debug_mask=True), NotImplementedError, "return_debug_mask"),
    (dict(query=torch.ones(13, 4, 16).double()), NotImplementedError, "query is float64"),
    (
        dict(alibi_slopes=torch.ones(4), query=torch.ones(13, 4, 16, requires_grad=True)),
        NotImplementedError,
        "alibi_slopes",
    ),
    (dict(seqused_k=TABLE[:, 0], value=torch.ones(13, 4, 16, requires_grad=True)), NotImplementedError, "seqused_k"),
    (dict(cum_seq_k=None), TypeError, "cum_seq_q and cum_seq_k must both be"),
    (dict(cum_seq_q=None), TypeError, "cum_seq_q and cum_seq_k must both be"),
    (dict(cum_seq_q=torch.tensor([0, 5, 5, 12])), TypeError, "cum_seq_q must be int32, not int64"),
    (dict(max_k=6), ValueError, "max_k = 6 is less than a length of cum_seq_k, 7"),
    (dict(seqused_k=torch.tensor([9, 0, 0], dtype=torch.int32)), ValueError, "seqused_k must lie in"),
    (dict(window_size_left=-2), ValueError, "window_size must be a pair"),
    (dict(dropout_p=1.0), ValueError, "dropout_p"),
    (dict(key=torch.ones(13, 3, 16)), ValueError, "key"),
    (dict(value=torch.ones(13, 4, 8)), ValueError, "value must have query's head_dim, 16, .* not 8"),
]


@pytest.mark.parametrize(("changed", "error", "words"), REFUSALS)
def test_refusals_name_the_argument(active, rows, changed, error, words):
    (q, k, v), spans = rows
    given = dict(query=q, key=k, value=v, cum_seq_q=spans[0], cum_seq_k=spans[1], max_q=7, max_k=7)
    given |= dict(dropout_p=0.0, is_causal=True, return_debug_mask=False)
    with pytest.raises(error, match=words):
        aten._flash_attention_forward(**given | changed)
