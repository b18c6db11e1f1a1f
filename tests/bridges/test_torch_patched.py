"""compat.torch.patched: programs that call torch's attention run ours."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from torch.nn import functional as F  # noqa: E402

from numba_flash.compat import torch as compat  # noqa: E402


@pytest.fixture
def calls(monkeypatch):
    """How often ours was called, by the shape of query."""
    seen, ours = [], compat.scaled_dot_product_attention

    def counted(query, *args, **options):
        seen.append(tuple(query.shape))
        return ours(query, *args, **options)

    monkeypatch.setattr(compat, "scaled_dot_product_attention", counted)
    return seen


def encoder():
    torch.manual_seed(0)
    return torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


def test_a_model_of_torchs_runs_ours_and_learns_the_same(calls):
    model, x = encoder(), torch.randn(2, 5, 16)
    right = model(x)
    right_gradients = torch.autograd.grad(right.square().sum(), model.parameters())
    before = F.scaled_dot_product_attention
    assert not calls
    with compat.patched():
        o = model(x)
        gradients = torch.autograd.grad(o.square().sum(), model.parameters())
    assert calls == [(2, 2, 5, 8)] and F.scaled_dot_product_attention is before
    torch.testing.assert_close(o, right)
    torch.testing.assert_close(gradients, right_gradients)


def test_the_fast_path_of_inference_is_off_as_long(calls):
    model, x = encoder().eval(), torch.randn(2, 5, 16)
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.inference_mode(), compat.patched():
        model(x)
    assert calls == [(2, 2, 5, 8)] and torch.backends.mha.get_fastpath_enabled()


def test_an_error_brings_torchs_back():
    before = F.scaled_dot_product_attention
    with pytest.raises(ZeroDivisionError), compat.patched():
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is before


def test_for_good_and_back(calls):
    before, q = F.scaled_dot_product_attention, torch.randn(1, 2, 3, 4)
    for_good = compat.patched()
    try:
        with compat.patched():  # within it, nothing changes
            F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(q, q, q)
        assert len(calls) == 2
    finally:
        for_good.restore()
    for_good.restore()
    assert F.scaled_dot_product_attention is before and torch.backends.mha.get_fastpath_enabled()


def test_a_second_restore_does_not_undo_a_later_patch():
    before = F.scaled_dot_product_attention
    first = compat.patched()
    first.restore()
    with compat.patched():
        first.restore()
        assert F.scaled_dot_product_attention is compat.scaled_dot_product_attention
    assert F.scaled_dot_product_attention is before


def test_in_one_graph():
    q = torch.randn(1, 2, 5, 4)

    def attend(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    right = attend(q)
    with compat.patched():
        torch.testing.assert_close(torch.compile(attend, fullgraph=True, backend="aot_eager")(q), right)
