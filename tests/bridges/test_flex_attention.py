"""compat.flex_attention against torch's own, run without torch.compile, which computes the plain formula."""

import functools
import warnings

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="needs a torch with flex_attention")

if not hasattr(flex, "AuxRequest"):
    pytest.skip("needs torch 2.9", allow_module_level=True)

from numba_flash.compat import traced  # noqa: E402
from numba_flash.compat.flex_attention import flex_attention  # noqa: E402

BATCH, HEADS, HEADS_KV, SEQLEN_Q, SEQLEN_K = 2, 4, 2, 21, 35


IN_GRAPHS = pytest.mark.skipif(torch.__version__ < (2, 13), reason="older torches leave their graph at a call")


@pytest.fixture
def in_graph():
    yield lambda function, backend="eager": torch.compile(function, backend=backend, fullgraph=True)
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def generator():
    torch.manual_seed(0)


def random(*shape, **options):
    return torch.randn(*shape, dtype=torch.float64, **options)


def problem(batch_kv=BATCH, heads_kv=HEADS_KV, **options):
    return (
        random(BATCH, HEADS, SEQLEN_Q, 8, **options),
        random(batch_kv, heads_kv, SEQLEN_K, 8, **options),
        random(batch_kv, heads_kv, SEQLEN_K, 6, **options),
    )


def torchs(*arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks to be compiled
        return flex.flex_attention(*arguments, **options)


def same(query, key, value, **options):
    """Both give the same o and lse."""
    options = dict(enable_gqa=True, return_lse=True) | options
    for one, other in zip(
        flex_attention(query, key, value, **options), torchs(query, key, value, **options), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def masked(mask_mod, batch=None, heads=None):
    return flex.create_block_mask(mask_mod, batch, heads, SEQLEN_Q, SEQLEN_K, device="cpu", BLOCK_SIZE=8)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx <= 5) & causal(b, h, q_idx, kv_idx)


SLOPES = torch.linspace(0.1, 0.4, HEADS, dtype=torch.float64)
TABLE = torch.linspace(-2, 2, HEADS * 60, dtype=torch.float64).view(HEADS, 60)
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 26, [3] * 20 + [2] * 15], dtype=torch.int32)
HIDDEN = torch.arange(SEQLEN_K) % 3 == 1
SCORES = {
    "relative": lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx),
    "alibi": lambda score, b, h, q_idx, kv_idx: score + SLOPES[h] * (kv_idx - q_idx),
    "softcap": lambda score, b, h, q_idx, kv_idx: 2 * torch.tanh(score / 2),
    "causal": lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -float("inf")),
    "table": lambda score, b, h, q_idx, kv_idx: score + TABLE[h][torch.clamp(q_idx - kv_idx, -20, 20) + 20],
    "checks": lambda score, b, h, q_idx, kv_idx: torch.where((q_idx // 4 % 2) == (kv_idx // 4 % 2), score, score * 0.5),
    "of all": lambda score, b, h, q_idx, kv_idx: (
        1 / (1 + score.abs()) + torch.maximum(score, -score) ** 2 - (score > 0) * torch.sigmoid(-score) + b % 2
    ),
    "inverted": lambda score, b, h, q_idx, kv_idx: torch.where(~HIDDEN[kv_idx], score, score - 1) + ~h,
    "types": lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx).to(score.dtype) * (q_idx > 3).to(torch.int32),
    "masked": lambda score, b, h, q_idx, kv_idx: score.masked_fill(HIDDEN[kv_idx], -1.0),
    "partial": functools.partial(lambda scale, score, b, h, q_idx, kv_idx: score * scale, 0.25),
}
MASKS = {
    "causal": (causal,),
    "window": (window,),
    "documents": (lambda b, h, q_idx, kv_idx: DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx], BATCH),
    "of heads": (lambda b, h, q_idx, kv_idx: (h % 2 == 0) | (kv_idx < 3), None, HEADS),
    "composed": (flex.and_masks(causal, flex.or_masks(window, lambda b, h, q_idx, kv_idx: h == 1)), None, HEADS),
    "nothing": (flex.noop_mask,),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_score_mod(name):
    same(*problem(), score_mod=SCORES[name])


@pytest.mark.parametrize("name", MASKS)
def test_a_block_mask(name):
    same(*problem(), block_mask=masked(*MASKS[name]))


def test_both_with_a_scale_and_a_batch_of_one():
    same(*problem(batch_kv=1), score_mod=SCORES["alibi"], block_mask=masked(*MASKS["documents"]), scale=0.3)


def test_a_block_mask_made_by_hand_says_which_blocks_are_seen():
    """Blocks that it does not list are hidden, and those it lists as full are seen, whatever mask_mod says."""
    counts = torch.tensor([[[1, 2, 0]]], dtype=torch.int32)
    indices = torch.tensor([[[[2, 0, 0, 0, 0], [0, 3, 1, 1, 1], [0, 1, 2, 3, 4]]]], dtype=torch.int32)
    full = (
        torch.tensor([[[1, 0, 1]]], dtype=torch.int32),
        torch.tensor([[[[4, 0, 0, 0, 0], [0] * 5, [1, 0, 0, 0, 0]]]], dtype=torch.int32),
    )
    block_mask = flex.BlockMask.from_kv_blocks(
        counts, indices, *full, BLOCK_SIZE=8, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0,
        seq_lengths=(SEQLEN_Q, SEQLEN_K),
    )  # fmt: skip
    query, key, value = problem()
    o, lse = flex_attention(query, key, value, block_mask=block_mask, enable_gqa=True, return_lse=True)
    seen = torch.zeros(24, 40, dtype=torch.bool)
    for row, column in ((0, 2), (1, 0), (1, 3)):
        seen[row * 8 : row * 8 + 8, column * 8 : column * 8 + 8 : 2] = True
    for row, column in ((0, 4), (2, 1)):
        seen[row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] = True
    key, value = (x.repeat_interleave(HEADS // HEADS_KV, 1) for x in (key, value))
    scores = (query @ key.mT * 8**-0.5).masked_fill(~seen[:SEQLEN_Q, :SEQLEN_K], -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(o, scores.softmax(-1) @ value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=IN_GRAPHS)])
def test_gradients_also_of_what_is_captured(compiled, in_graph):
    slopes = SLOPES.clone().requires_grad_()
    inputs = problem(requires_grad=True)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * torch.exp(-score * score) + slopes[h] * (kv_idx - q_idx)

    query, key, value = inputs
    key, value = (x.repeat_interleave(HEADS // HEADS_KV, 1) for x in (key, value))
    q_idx, kv_idx = torch.arange(SEQLEN_Q)[:, None], torch.arange(SEQLEN_K)
    scores = score_mod(query @ key.mT * 8**-0.5, None, torch.arange(HEADS)[:, None, None], q_idx, kv_idx)
    o = scores.masked_fill(q_idx < kv_idx, -torch.inf).softmax(-1) @ value  # torch has no such backward on a CPU
    do = torch.randn_like(o)
    given = dict(score_mod=score_mod, block_mask=masked(causal), enable_gqa=True)
    run = in_graph(flex_attention, "aot_eager") if compiled else flex_attention
    found = torch.autograd.grad(run(*inputs, **given), (*inputs, slopes), do)
    expected = torch.autograd.grad(o, (*inputs, slopes), do)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_what_is_captured_may_change():
    inputs, bias, factor = problem(), torch.zeros(HEADS, dtype=torch.float64), 1.0

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * factor + bias[h] * kv_idx

    same(*inputs, score_mod=score_mod)
    bias += 0.1
    factor = 0.5
    same(*inputs, score_mod=score_mod)


def test_equal_functions_are_compiled_once():
    def made():
        return lambda score, b, h, q_idx, kv_idx: score * 0.5 + SLOPES[h]

    traced.compiled.cache_clear()
    for _ in range(3):
        flex_attention(*problem(), score_mod=made(), enable_gqa=True)
    assert traced.compiled.cache_info().misses == 1


def test_plain_attention_and_results_by_name():
    query, key, value = problem(heads_kv=HEADS)
    expected, lse = torchs(query, key, value, return_lse=True)
    torch.testing.assert_close(flex_attention(query, key, value), expected)
    o, aux = flex_attention(query, key, value, return_aux=flex.AuxRequest(lse=True))
    assert isinstance(aux, flex.AuxOutput) and aux.max_scores is None
    torch.testing.assert_close((o, aux.lse), (expected, lse))
    assert flex_attention(query, key, value, return_aux=flex.AuxRequest())[1].lse is None


@IN_GRAPHS
@pytest.mark.parametrize("name", [*SCORES, *(f"block_mask {x}" for x in MASKS)])
def test_in_one_graph(name, in_graph):
    kind, _, rest = name.partition(" ")
    given = dict(block_mask=masked(*MASKS[rest])) if kind == "block_mask" else dict(score_mod=SCORES[name])
    given |= dict(enable_gqa=True, return_lse=True)
    inputs = problem()
    if name == "inverted" and torch.__version__ < (2, 14):  # torch.compile does not know ~ of an object
        with pytest.raises(torch._dynamo.exc.Unsupported, match="invert"):
            in_graph(lambda *inputs: flex_attention(*inputs, **given))(*inputs)
        return
    found = in_graph(lambda *inputs: flex_attention(*inputs, **given))(*inputs)
    for one, other in zip(found, torchs(*inputs, **given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@IN_GRAPHS
def test_what_is_captured_may_change_in_a_graph(in_graph, monkeypatch):
    inputs, bias, gate = problem(), torch.zeros(HEADS, dtype=torch.float64), torch.tensor(2.0)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * FACTOR * gate + bias[h] * kv_idx  # noqa: F821

    def run(block_mask):
        return flex_attention(*inputs, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)

    compiled, graphs = in_graph(run, "aot_eager"), torch._dynamo.utils.counters["stats"]
    made = 0
    for factor in (1.0, 0.5, 0.25, 4.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        bias += 0.1
        gate -= 0.3
        documents = torch.randint(0, 3, (BATCH, SEQLEN_K))
        block_mask = masked(lambda b, h, q_idx, kv_idx, ids=documents: ids[b, q_idx] == ids[b, kv_idx], BATCH)
        given = dict(score_mod=score_mod, block_mask=block_mask, enable_gqa=True)
        before = graphs["unique_graphs"]
        found = compiled(block_mask)
        made += graphs["unique_graphs"] - before
        torch.testing.assert_close(found, torchs(*inputs, **given), rtol=1e-12, atol=1e-12)
    assert made == 2  # a number that has changed once may change again


@IN_GRAPHS
def test_functions_and_block_masks_made_in_a_graph(in_graph):
    inputs = problem()

    def run(slopes):
        block_mask = flex.create_block_mask(causal, None, None, SEQLEN_Q, SEQLEN_K, device="cpu", BLOCK_SIZE=8)
        given = dict(score_mod=lambda s, b, h, i, j: s + slopes[h] * j, block_mask=block_mask)
        return flex_attention(*inputs, enable_gqa=True, **given)

    torch.testing.assert_close(in_graph(run)(SLOPES), run(SLOPES), rtol=0, atol=0)


def test_what_makes_block_masks_is_torchs_own():
    from numba_flash.compat import flex_attention as ours

    for name in ("BlockMask", "create_block_mask", "and_masks", "or_masks"):
        assert getattr(ours, name) is getattr(flex, name)


def with_if(score, b, h, q_idx, kv_idx):
    return score if q_idx >= kv_idx else score * 2


@pytest.mark.parametrize(
    ("score_mod", "error", "words"),
    [
        (with_if, TypeError, ["score_mod", "test_flex_attention.py", "torch.where"]),
        (lambda s, b, h, i, j: s + TABLE[h], TypeError, ["indexed by 1 numbers", "2 dimensions"]),
        (lambda s, b, h, i, j: s + TABLE, TypeError, ["shape (4, 60)", "bias[h, q_idx]"]),
        (lambda s, b, h, i, j: s + TABLE[h, :5], TypeError, ["slice"]),
        (lambda s, b, h, i, j: s + TABLE[h, s], TypeError, ["real number", "whole numbers"]),
        (lambda s, b, h, i, j: s + TABLE[h, i, j], TypeError, ["2 dimensions", "more indices"]),
        (lambda s, b, h, i, j: s + [1, 2][h], TypeError, ["index of a list"]),
        (lambda s, b, h, i, j: torch.digamma(s), NotImplementedError, ["digamma", "tanh"]),
        (lambda s, b, h, i, j: s.to(torch.bfloat16), NotImplementedError, ["torch.bfloat16", "in torch.float64"]),
        (lambda s, b, h, i, j: s.float(), NotImplementedError, ["torch.float32", "in torch.float64"]),
        (lambda s, b, h, i, j: None, TypeError, ["None"]),
        (lambda s, b, h, i, j: s + SLOPES.to("meta")[h], TypeError, ["tensor on meta", "query is on cpu"]),
    ],
)  # fmt: skip
def test_functions_that_a_kernel_cannot_have(score_mod, error, words, in_graph):
    with pytest.raises(error) as caught:
        flex_attention(*problem(), score_mod=score_mod, enable_gqa=True)
    assert all(word in str(caught.value) for word in words), caught.value
    if torch.__version__ >= (2, 13):
        with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
            in_graph(flex_attention)(*problem(), score_mod=score_mod, enable_gqa=True)
        assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (dict(query=None), TypeError, ["query", "NoneType"]),
        (dict(query=torch.zeros(4, 21, 8)), ValueError, ["query", "(4, 21, 8)"]),
        (dict(enable_gqa=False), ValueError, ["enable_gqa", "query has 4, key 2"]),
        (dict(enable_gqa=1), TypeError, ["enable_gqa"]),
        (dict(key=torch.zeros(3, 2, 35, 8)), ValueError, ["batches are: query 2, key 3, value 2"]),
        (dict(key=torch.zeros(2, 2, 35, 8)), TypeError, ["key", "float32"]),
        (dict(block_mask=torch.ones(21, 35)), TypeError, ["block_mask", "Tensor"]),
        (dict(block_mask=flex.create_block_mask(causal, 1, 1, 21, 36, device="cpu")), ValueError, ["(21, 36)"]),
        (dict(block_mask=masked(causal, 3)), ValueError, ["block_mask has 3 for batch"]),
        (dict(scale="1"), TypeError, ["scale"]),
        (dict(return_lse=True, return_aux=flex.AuxRequest(lse=True)), ValueError, ["return_aux"]),
        (dict(return_aux=flex.AuxRequest(max_scores=True)), NotImplementedError, ["max_scores"]),
    ],
)
def test_bad_arguments(given, error, words):
    query, key, value = problem()
    with pytest.raises(error) as caught:
        flex_attention(**dict(query=query, key=key, value=value, enable_gqa=True) | given)
    assert all(word in str(caught.value) for word in words), caught.value


FAR = [0.0, 5e-324, 1e-160, 0.3, 0.5, 1.0, 2.5, 30.0, 800.0, 1e19, 1e160, torch.inf]
FAR = torch.tensor([*FAR, *(-x for x in FAR[1:]), torch.nan], dtype=torch.float64)
HALF, NOT_A_NUMBER = torch.tensor([0.5], dtype=torch.float64), torch.tensor([torch.nan], dtype=torch.float64)
OF_A_NUMBER = {
    "sigmoid": torch.sigmoid, "exp2": torch.exp2, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal,
    "square": torch.square, "relu": torch.relu,
    "abs": torch.abs, "tanh": torch.tanh, "power": lambda x: x**0.0, "negative power": lambda x: x**-2,
    "root of relu": lambda x: torch.sqrt(torch.relu(x)), "root of clamp": lambda x: torch.sqrt(x.clamp(min=0.0)),
    "maximum": lambda x: torch.maximum(x, x.new_full((), 0.5)), "minimum": lambda x: torch.minimum(x * 2, x),
    "maximum with NaN": lambda x: torch.maximum(x, NOT_A_NUMBER[0]),
    "minimum with NaN": lambda x: torch.minimum(NOT_A_NUMBER[0], x),
    "maximum of a captured number": lambda x: torch.maximum(HALF[0], x),
    "clamp": lambda x: x.clamp(-1.0, 2.5), "clamp by NaN": lambda x: torch.clamp(x, NOT_A_NUMBER[0], HALF[0]),
    "clamp by a captured number": lambda x: torch.clamp(x, HALF[0], HALF[0] * 5),
    "clamp the other way around": lambda x: x.clamp(1.0, 0.5),
    "steps": lambda x: torch.floor(x) + 2 * torch.ceil(x) + 4 * torch.trunc(x) + x,
}  # fmt: skip


def of_heads(functions):
    """What each head computes with its own function, compiled as one."""

    def chosen(h, x, dtype):
        found = x.to(dtype)
        for head, function in enumerate(functions):
            found = torch.where(h == head, function(x).to(dtype), found)
        return found

    return chosen


def test_values_and_gradients_at_limits():
    """Of queries that see one key, lse is the score."""
    functions, one = OF_A_NUMBER.values(), torch.ones(1, 1, 1, 1, dtype=torch.float64)
    q = FAR.reshape(1, 1, -1, 1).repeat(1, len(functions), 1, 1).requires_grad_()
    chosen = of_heads(functions)
    given = dict(score_mod=lambda score, b, h, q_idx, kv_idx: chosen(h, score, score.dtype), scale=1.0)
    _, lse = flex_attention(q, one, one, enable_gqa=True, return_lse=True, **given)
    (gradients,) = torch.autograd.grad(lse.sum(), q)
    for name, values, found in zip(OF_A_NUMBER, lse[0], gradients[0, :, :, 0], strict=True):
        x = FAR.clone().requires_grad_()
        y = OF_A_NUMBER[name](x)
        (expected,) = torch.autograd.grad(y.sum(), x)
        seen = y < torch.inf  # no row with a score of inf has a sum
        torch.testing.assert_close(values[seen], y[seen], rtol=1e-12, atol=0, msg=name)
        assert values[y.isnan()].isnan().all(), name
        seen &= (y > -torch.inf) & ~expected.isnan()
        close = torch.isclose(found[seen], expected[seen], rtol=1e-12, atol=2e-16)  # torch computes y * (1 - y)
        assert close.all(), (name, FAR[seen][~close], found[seen][~close], expected[seen][~close])


BYTES, SHORTS = torch.tensor([0, 3, 255], dtype=torch.uint8), torch.tensor([-128, 3, 127], dtype=torch.int8)
OF_INTEGERS = [
    lambda i: BYTES[i] - 1, lambda i: -BYTES[i], lambda i: ~BYTES[i], lambda i: BYTES[i] + BYTES[2],
    lambda i: BYTES[i] - 300, lambda i: BYTES[i] * BYTES[i], lambda i: BYTES[i] - i,
    lambda i: BYTES[i] + torch.tensor(9),
    lambda i: BYTES[i] ** 2, lambda i: BYTES[i] // 2 - 1, lambda i: (i - 3).to(torch.uint8),
    lambda i: torch.where(i > 1, BYTES[i], 5) - 6, lambda i: torch.maximum(BYTES[i], i) - 5,
    lambda i: BYTES[i].clamp(max=9) - 10, lambda i: BYTES[i].double() - 1.0, lambda i: SHORTS[i] + 1,
    lambda i: -SHORTS[i], lambda i: abs(SHORTS[i]), lambda i: SHORTS[i] * BYTES[i], lambda i: SHORTS[i] % 5,
]  # fmt: skip


def test_captured_integers_wrap_around():
    zero, chosen = torch.zeros(1, len(OF_INTEGERS), 3, 1, dtype=torch.float64), of_heads(OF_INTEGERS)
    given = dict(score_mod=lambda s, b, h, i, j: s + chosen(h, i, s.dtype), return_lse=True)
    _, lse = flex_attention(zero, zero[:, :, :1], zero[:, :, :1], **given)
    expected = [torch.vmap(function)(torch.arange(3)).tolist() for function in OF_INTEGERS]
    assert lse[0].round().tolist() == expected


def test_captured_integers_beyond_int64_are_refused():
    words = torch.zeros(3, dtype=torch.uint64)
    with pytest.raises(TypeError, match="uint64"):
        flex_attention(*problem(), enable_gqa=True, score_mod=lambda s, b, h, i, j: s + words[0])


# As torch does without a compiler, also where block_mask hides it.
@pytest.mark.parametrize("block_mask", [None, "causal"])
def test_reads_outside_a_captured_tensor_raise_before_the_launch(block_mask):
    query, key, value = problem(heads_kv=HEADS)
    block_mask = block_mask and masked(causal)
    q_idx, kv_idx, h = torch.arange(SEQLEN_Q), torch.arange(SEQLEN_K), torch.arange(HEADS)
    short, whole, none = torch.zeros(SEQLEN_K - 1), torch.zeros(SEQLEN_K), torch.zeros(0, 3)
    for read in (
        lambda h, i, j: short[j], lambda h, i, j: whole[j + 1], lambda h, i, j: whole[-j - 2],
        lambda h, i, j: TABLE[h + 1][i], lambda h, i, j: none[j, 0],
    ):  # fmt: skip
        with pytest.raises(IndexError, match="out of bounds"):
            torch.vmap(torch.vmap(read, (0, None, None)), (None, 0, 0))(
                h, q_idx, kv_idx[:SEQLEN_Q] + SEQLEN_K - SEQLEN_Q
            )
        with pytest.raises(IndexError, match=r"score_mod \(.*line \d+\): index .* is out of bounds for dimension"):
            flex_attention(
                query, key, value, block_mask=block_mask, score_mod=lambda s, b, h, i, j, read=read: s + read(h, i, j)
            )
    for read in (
        lambda i, j: whole[-j - 1],
        lambda i, j: short[torch.where(j > 0, j - 1, 0)],
        lambda i, j: whole[i + 14],
    ):
        flex_attention(query, key, value, score_mod=lambda s, b, h, i, j, read=read: s + read(i, j))
