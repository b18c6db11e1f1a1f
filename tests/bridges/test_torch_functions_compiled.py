"""score_mod and mask_mod in one graph of torch.compile: the same as without, also when what they capture changes."""

import functools

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

if torch.__version__ < (2, 13):
    pytest.skip("older torches leave their graph at a call with functions", allow_module_level=True)

import numba_flash  # noqa: E402
from numba_flash import mods  # noqa: E402

FACTOR, NUMBERS = 0.5, (0.25, 3)
Q, K, V = (2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 4)
attention = functools.partial(numba_flash.attention, kernel="reference")


@pytest.fixture(autouse=True)
def no_graphs():
    yield
    torch._dynamo.reset()


def tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(x, generator=generator, dtype=torch.float64, requires_grad=True) for x in shapes]


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compiled(function, backend="eager"):
    return torch.compile(function, backend=backend, fullgraph=True)


def helper(score, j):
    return score * FACTOR if j % 2 else score


def sloped(score, b, h, i, j, slopes, ids):
    return helper(score, j) * slopes[h] - b * slopes[0] * abs(i - j)


def same(b, h, i, j, slopes, ids):
    return ids[j] == ids[0] or i == j


def loss(q, k, v, slopes, ids):
    given = dict(score_mod=sloped, mask_mod=same, aux=(slopes, ids), return_lse=True)
    o, lse = attention(q * 2, k, v, **given)
    return (o * 3).sum() + lse.square().sum()


def test_results_and_gradients_also_of_aux(monkeypatch):
    q, k, v, slopes = tensors(Q, K, V, (4,))
    ids = torch.tensor([3, 3, 1, 3, 1, 3])
    in_graph = compiled(loss, "aot_eager")
    for factor in (0.5, 0.5, 2.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)  # of a function that score_mod calls
        found, expected = (f(q, k, v, slopes, ids) for f in (in_graph, loss))
        assert torch.equal(found, expected)
        of = (q, k, v, slopes)
        found, expected = (torch.autograd.grad(x, of) for x in (found, expected))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def scaled(by):
    return lambda score, b, h, i, j: score * by


def of_a_default(by):
    def score_mod(score, b, h, i, j, by=by):
        return score * by

    return score_mod


def of_a_keyword(by):
    def score_mod(score, b, h, i, j, *, by=by):
        return score * by

    return score_mod


def through_another(by):
    inner = scaled(by)
    return lambda score, b, h, i, j: inner(score, b, h, i, j) + 1


def of_a_tuple(by):
    numbers = by, 1
    return lambda score, b, h, i, j: score * numbers[0] + numbers[1]


def of_a_module(by):
    numba_flash.FACTOR = by
    return lambda score, b, h, i, j: score * numba_flash.FACTOR


KINDS = [scaled, of_a_default, of_a_keyword, through_another, of_a_tuple, of_a_module,
         lambda by: functools.partial(lambda a, s, b, h, i, j, c: s * a + c, by, c=2 * by)]  # fmt: skip


@pytest.mark.parametrize("made", KINDS)
def test_a_changed_number_gives_another_result(made, monkeypatch):
    monkeypatch.setattr(numba_flash, "FACTOR", 0.0, raising=False)
    q, k, v = tensors(Q, K, V)

    def run(q, score_mod):
        return attention(q, k, v, score_mod=score_mod)

    in_graph = compiled(run)
    before = graphs()
    for by in (0.5, 2.0, 3.0):
        assert torch.equal(in_graph(q, made(by)), run(q, made(by)))
        count = graphs()
        assert torch.equal(in_graph(q, made(by)), run(q, made(by))) and graphs() == count  # equal functions, one graph
    assert graphs() - before == 3


def test_functions_that_are_made_in_the_graph(monkeypatch):
    q, k, v = tensors(Q, K, V)

    def run(q, by):
        def mask_mod(b, h, i, j, at_most=by):
            return j - i < at_most

        return attention(q, k, v, score_mod=lambda s, b, h, i, j: s * by * FACTOR, mask_mod=mask_mod)

    in_graph = compiled(run)
    for factor in (0.5, 2.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        assert torch.equal(in_graph(q, 3), run(q, 3))


def test_functions_of_mods_and_block_masks():
    q, k, v = tensors((1, 2, 12, 8), (1, 2, 12, 8), (1, 2, 12, 8))
    documents = torch.repeat_interleave(torch.arange(3), 4).expand(1, 12).contiguous()

    def run(q, documents, blocks):
        of_documents = attention(q, k, v, mask_mod=mods.document, aux=(documents,))
        return of_documents + attention(q, k, v, block_mask=blocks)

    in_graph, before = compiled(run), graphs()
    for shift in range(3):  # other arrays and an equal function make no other graph
        moved = documents.roll(shift, 1)
        blocks = numba_flash.block_mask(mods.document, 1, 2, 12, 12, aux=(moved,), causal=True)
        assert torch.equal(in_graph(q, moved, blocks), run(q, moved, blocks))
    assert graphs() - before == 1


def test_packed_sequences_and_layouts():
    q, k, v = tensors((7, 4, 3), (7, 2, 3), (7, 2, 4))
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)

    def run(q, k, v):
        packed = numba_flash.attention_varlen(q, k, v, ends, score_mod=scaled(2.0), kernel="reference")
        return packed.sum() + attention(q[None], k[None], v[None], score_mod=scaled(0.5), layout="bshd").sum()

    found, expected = (torch.autograd.grad(f(q, k, v), (q, k, v)) for f in (compiled(run, "aot_eager"), run))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_func_in_a_graph():
    q, k, v, slopes = tensors((3, *Q), K, V, (4,))
    ids = torch.tensor([3, 3, 1, 3, 1, 3])

    def run(q, slopes):
        return torch.func.vmap(torch.func.grad(lambda q, s: loss(q, k, v, s, ids), (0, 1)), (0, None))(q, slopes)

    for found, expected in zip(compiled(run)(q, slopes), run(q, slopes), strict=True):
        torch.testing.assert_close(found, expected)


def of_numpy():
    import numpy as np

    by = np.float64(0.5)
    return lambda s, b, h, i, j: s * by


def of_no_module():
    made = {}
    exec("F = 2.0\ndef f(s, b, h, i, j): return s * F", made)
    return made["f"]


@pytest.mark.parametrize(
    ("score_mod", "words"),
    [
        (of_numpy(), "captures a number of NumPy"),
        (of_no_module(), "is of no module"),
    ],
)
def test_what_a_graph_cannot_ask_is_refused(score_mod, words):
    q, k, v = tensors(Q, K, V)
    with pytest.raises(Exception, match=words):
        compiled(lambda q: attention(q, k, v, score_mod=score_mod))(q)


def test_functions_made_in_the_graph():
    """Before torch 2.14 they capture numbers alone."""
    q, k, v = tensors(Q, K, V)

    def run(q, inner):
        return attention(q, k, v, score_mod=lambda s, b, h, i, j: inner(s, b, h, i, j))

    in_graph = compiled(run)
    if torch.__version__ < (2, 14):
        with pytest.raises(Exception, match="make it outside"):
            in_graph(q, scaled(2.0))
        return
    for factor in (2.0, 3.0, 2.0):
        torch.testing.assert_close(in_graph(q, scaled(factor)), run(q, scaled(factor)), rtol=0, atol=0)
