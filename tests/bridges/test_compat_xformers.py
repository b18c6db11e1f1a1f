"""compat.xformers beside torch's own attention, with its masks and with classes as xFormers has them."""

import types

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from torch.nn import functional as F  # noqa: E402

from numba_flash.compat import xformers  # noqa: E402
from numba_flash.compat.xformers import (  # noqa: E402
    BlockDiagonalMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    memory_efficient_attention,
)


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[1]))


def formula(q, k, v, **options):
    o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options)
    return o.transpose(1, 2)


q, k, v = drawn(2, 5, 3, 8), drawn(2, 7, 3, 8), drawn(2, 7, 3, 4)


def test_three_four_and_five_dimensions():
    torch.testing.assert_close(memory_efficient_attention(q, k, v), formula(q, k, v))
    one = [x[:, :, 0] for x in (q, k, v)]
    torch.testing.assert_close(memory_efficient_attention(*one), formula(q, k, v)[:, :, 0])
    grouped = q.repeat(1, 1, 2, 1).unflatten(2, (3, 2))
    keys, values = (x[:, :, :, None].expand(-1, -1, -1, 2, -1) for x in (k, v))
    right = formula(grouped.flatten(2, 3), keys.flatten(2, 3), values.flatten(2, 3)).unflatten(2, (3, 2))
    torch.testing.assert_close(memory_efficient_attention(grouped, keys, values), right)
    torch.testing.assert_close(memory_efficient_attention(grouped, keys.contiguous(), values.contiguous()), right)


def test_keys_expanded_over_a_group_are_read_once(monkeypatch):
    seen = []
    attend = xformers.api.attention
    monkeypatch.setattr(
        xformers.api, "attention", lambda q, k, v, **more: seen.append(k.shape) or attend(q, k, v, **more)
    )
    memory_efficient_attention(drawn(1, 5, 2, 3, 4), *[drawn(1, 6, 2, 1, 4).expand(-1, -1, -1, 3, -1)] * 2)
    assert seen == [(1, 6, 2, 4)]


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 1, 5, 7)])
def test_a_tensor_and_its_gradient(shape):
    bias, other = (drawn(*shape).requires_grad_() for _ in range(2))
    o, right = memory_efficient_attention(q, k, v, bias, scale=0.3), formula(q, k, v, attn_mask=other, scale=0.3)
    torch.testing.assert_close(o, right)
    found, expected = torch.autograd.grad(o.sin().sum(), bias), torch.autograd.grad(right.sin().sum(), other)
    torch.testing.assert_close(found, expected)


def test_a_tensor_without_heads():
    one, bias = [x[:, :, 0] for x in (q, k, v)], drawn(2, 5, 7)
    right = formula(*(x[:, :, :1] for x in (q, k, v)), attn_mask=bias[:, None])[:, :, 0]
    torch.testing.assert_close(memory_efficient_attention(*one, bias), right)


def test_causal_from_either_corner():
    top_left = memory_efficient_attention(q, k, v, LowerTriangularMask())
    torch.testing.assert_close(top_left, formula(q, k, v, is_causal=True))
    seen = torch.ones(5, 7, dtype=torch.bool).tril(2)
    bottom_right = memory_efficient_attention(q, k, v, LowerTriangularFromBottomRightMask())
    torch.testing.assert_close(bottom_right, formula(q, k, v, attn_mask=seen))


Q_LENGTHS, K_LENGTHS = (3, 1, 4), (3, 5, 2)


def seqinfo(lengths):
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return types.SimpleNamespace(seqstart=ends, max_seqlen=max(lengths))


def of_xformers(name):
    """A mask as xFormers has it, of a class of that name."""
    return type(name, (), dict(q_seqinfo=seqinfo(Q_LENGTHS), k_seqinfo=seqinfo(K_LENGTHS)))()


OURS = BlockDiagonalMask.from_seqlens(Q_LENGTHS, K_LENGTHS)
BLOCKS = {
    "": (OURS, of_xformers("BlockDiagonalMask")),
    "top-left": (OURS.make_causal(), of_xformers("BlockDiagonalCausalMask")),
    "bottom-right": (OURS.make_causal_from_bottomright(), of_xformers("BlockDiagonalCausalFromBottomRightMask")),
}


@pytest.mark.parametrize("whose", [0, 1], ids=["ours", "of xFormers"])
@pytest.mark.parametrize("causal", BLOCKS)
def test_blocks(causal, whose):
    q, k, v = (drawn(1, sum(lengths), 2, 4) for lengths in (Q_LENGTHS, K_LENGTHS, K_LENGTHS))
    o = memory_efficient_attention(q, k, v, BLOCKS[causal][whose])
    parts = zip(q.split(Q_LENGTHS, 1), k.split(K_LENGTHS, 1), v.split(K_LENGTHS, 1), strict=True)
    for found, (a, b, c) in zip(o.split(Q_LENGTHS, 1), parts, strict=True):
        shift = b.shape[1] - a.shape[1] if causal == "bottom-right" else 0
        seen = torch.ones(a.shape[1], b.shape[1], dtype=torch.bool)
        seen = seen.tril(shift) if causal else seen
        right = formula(a, b, c, attn_mask=seen).nan_to_num()
        torch.testing.assert_close(found, right)


def test_a_list_of_tensors_and_back():
    parts = [drawn(1, n, 2, 4) for n in Q_LENGTHS]
    mask, packed = BlockDiagonalMask.from_tensor_list(parts)
    for x, part in zip(mask.split(memory_efficient_attention(packed, packed, packed, mask)), parts, strict=True):
        torch.testing.assert_close(x, formula(part, part, part))


def test_dropout_follows_torchs_generator():
    torch.manual_seed(1)
    first = memory_efficient_attention(q, k, v, p=0.5)
    second = memory_efficient_attention(q, k, v, p=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, memory_efficient_attention(q, k, v, p=0.5)) and not torch.equal(first, second)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (
            dict(attn_bias=type("PagedBlockDiagonalMask", (), {})()),
            NotImplementedError,
            "attn_bias must be one of None",
        ),
        (dict(attn_bias=OURS), ValueError, "with BlockDiagonalMask query must have batch 1, not 2"),
        (dict(attn_bias=torch.zeros(2, 3, 5, 6)), ValueError, "attn_bias"),
        (dict(p=1.0), ValueError, "p is a probability"),
        (dict(query=None), TypeError, "query must be a torch tensor, not NoneType"),
        (dict(value=v.tolist()), TypeError, "value must be a torch tensor, not list"),
        (dict(key=k[:, :, 0]), ValueError, "key must have 3, 4 or 5 dimensions"),
        (dict(key=k[..., :4]), ValueError, "head_dim of query and key"),
    ],
)
def test_what_is_wrong_is_said_with_the_names_of_this_signature(given, error, says):
    with pytest.raises(error, match=says):
        memory_efficient_attention(**dict(query=q, key=k, value=v) | given)


def test_lengths_are_whole_numbers_from_0():
    assert BlockDiagonalMask.from_seqlens(torch.tensor([1, 2])) == BlockDiagonalMask.from_seqlens([1, 2])
    with pytest.raises(TypeError, match=r"q_seqlen must have whole numbers, not \[1.0\]"):
        BlockDiagonalMask.from_seqlens([1.0])
    with pytest.raises(ValueError, match="kv_seqlen must have numbers from 0"):
        BlockDiagonalMask.from_seqlens([1], [-1])
    with pytest.raises(ValueError, match="tensor must have 3 rows, not 4"):
        BlockDiagonalMask.from_seqlens([1, 2]).split(torch.zeros(1, 4, 1))


def test_lengths_that_are_not_as_many():
    with pytest.raises(ValueError, match="kv_seqlen must have 2 lengths"):
        BlockDiagonalMask.from_seqlens([1, 2], [3])
    with pytest.raises(NotImplementedError, match="batch 1 each"):
        BlockDiagonalMask.from_tensor_list([q])
