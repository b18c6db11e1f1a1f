"""flash-attn's packed signatures over the grid of its own tests, with lengths for a CPU, against the oracle."""

from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import numba_flash  # noqa: E402
from numba_flash.compat.flash_attn import (  # noqa: E402
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from numba_flash.dispatch import backward, forward  # noqa: E402
from numba_flash.testing.packed import PackedCase, check_packed, check_packed_gradients  # noqa: E402

HEADS = 6
LENGTHS = ((1, 147), (37, 67), (64, 21), (21, 21), (31, 32), (32, 31), (16, 64))
HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)


def ends_of(generator, longest):
    """Of sequences that are up to 20 rows shorter than the longest, as there; and an empty one between them."""
    lengths = generator.integers(max(1, longest - 20), longest + 1, 2)
    return np.array([0, lengths[0], lengths[0], lengths.sum()], np.int32), int(lengths.max())


@pytest.mark.parametrize("local", [False, True], ids=["", "local"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_grid(head_dim, causal, local):
    generator = np.random.default_rng((head_dim, causal, local))
    heads_kv, softcap = int(generator.choice((6, 2, 1))), float(generator.choice((0, 50)))
    slopes, is_packed = (None, (3, HEADS), (HEADS,))[generator.integers(3)], generator.integers(2)
    most_q, most_k = LENGTHS[generator.integers(len(LENGTHS))]
    (ends_q, most_q), (ends_k, most_k) = ends_of(generator, most_q), ends_of(generator, most_k)
    slopes = slopes and generator.random(slopes, np.float32) * np.float32(0.3)
    window = tuple(map(int, generator.integers(0, most_k, 2))) if local else (-1, -1)
    shapes = [(ends[-1], heads, head_dim) for ends, heads in ((ends_q, HEADS), (ends_k, heads_kv), (ends_k, heads_kv))]
    q, k, v = (generator.standard_normal(shape, np.float32) for shape in shapes)
    q *= softcap or 1
    options = dict(causal=causal, window=window if local else None, softcap=softcap or None, alibi_slopes=slopes)
    case = PackedCase(q, k, v, ends_q, ends_k, {name: x for name, x in options.items() if x is not None})

    q, kv = torch.from_numpy(q).requires_grad_(), torch.from_numpy(np.stack([k, v], 1)).requires_grad_()
    slopes, spans = slopes if slopes is None else torch.from_numpy(slopes), map(torch.from_numpy, (ends_q, ends_k))
    named = dict(softcap=softcap, alibi_slopes=slopes, causal=causal, window_size=window, return_attn_probs=True)
    if is_packed:
        o, lse, nothing = flash_attn_varlen_kvpacked_func(q, kv, *spans, most_q, most_k, **named)
    else:
        o, lse, nothing = flash_attn_varlen_func(q, *kv.unbind(1), *spans, most_q, most_k, **named)
    assert nothing is None and lse.shape == (HEADS, len(q)) and lse.dtype == torch.float32
    do, dlse = torch.randn(o.shape), torch.randn(lse.shape)
    dq, dkv = torch.autograd.grad((o, lse), (q, kv), (do, dlse))
    results = [x.detach().numpy() for x in (do, o, lse, dlse)]
    gradients = numba_flash.AttentionGradients(dq.numpy(), *dkv.numpy().swapaxes(0, 1))
    check_packed(case, results[1], results[2])
    check_packed_gradients(case, gradients, *results)


def test_columns_of_one_projection_are_read_where_they_are():
    torch.manual_seed(0)
    x = torch.randn(20, 3 * 2 * 8, requires_grad=True)
    q, k, v = x.unflatten(1, (3, 2, 8)).unbind(1)
    ends = torch.tensor([0, 7, 20], dtype=torch.int32)
    with (
        mock.patch.object(forward, "enqueue", wraps=forward.enqueue) as there,
        mock.patch.object(backward, "enqueue", wraps=backward.enqueue) as back,
    ):
        o = flash_attn_varlen_func(q, k, v, ends, ends, 13, 13, causal=True)
        packed = flash_attn_varlen_qkvpacked_func(x.unflatten(1, (3, 2, 8)), ends, 13, causal=True)
        (dx,) = torch.autograd.grad(o, x, torch.ones_like(o))
    places = [array.data_ptr() for array in (q, k, v)]
    assert [[array.pointer for array in call.args[2][:3]] for call in there.call_args_list] == [places, places]
    assert [array.pointer for array in back.call_args.args[2][:3]] == places
    other = flash_attn_varlen_func(*(y.contiguous() for y in (q, k, v)), ends, ends, 13, 13, causal=True)
    assert torch.equal(o, other) and torch.equal(o, packed)
    assert torch.equal(dx, torch.autograd.grad(other, x, torch.ones_like(other))[0])


def test_the_longest_length_may_be_a_tensor():
    lengths = ENDS.diff()
    o = flash_attn_varlen_func(X, X, X, ENDS, ENDS, lengths.max(), lengths.max())
    assert torch.equal(o, flash_attn_varlen_func(X, X, X, ENDS, ENDS, 13, 13))


X, ENDS = torch.ones(20, 2, 8), torch.tensor([0, 7, 20], dtype=torch.int32)
REFUSALS = [
    (dict(cu_seqlens_q=ENDS.long()), TypeError, r"cu_seqlens_q must be int32, not int64.*cu_seqlens_q\.int\(\)"),
    (dict(cu_seqlens_k=ENDS[:2]), ValueError, "cu_seqlens_q and cu_seqlens_k must have one shape"),
    (dict(cu_seqlens_q=None), TypeError, "cu_seqlens_q must be an int32 array"),
    (dict(max_seqlen_q=torch.tensor([13])), TypeError, "max_seqlen_q must be a whole number"),
    (dict(max_seqlen_q=torch.tensor(12)), ValueError, "max_seqlen_q = 12 is less than a length of cu_seqlens_q, 13"),
    (dict(max_seqlen_k=12), ValueError, "max_seqlen_k = 12 is less than a length of cu_seqlens_k, 13"),
    (dict(softmax_scale="1"), TypeError, "softmax_scale must be a number"),
    (dict(window_size=(-2, 0)), ValueError, "window_size"),
    (dict(dropout_p=1.0), ValueError, "dropout_p is a probability"),
    (dict(return_attn_probs=1), TypeError, "return_attn_probs"),
    (dict(q=X[0]), ValueError, r"q must have 3 dimensions"),
    (dict(v=X.double()), TypeError, "v is float64"),
    (dict(alibi_slopes=torch.ones(3)), ValueError, "alibi_slopes"),
    (dict(block_table=ENDS), NotImplementedError, "block_table: pages"),
    (
        dict(q=torch.nested.nested_tensor([X[:7], X[7:]], layout=torch.jagged)),
        NotImplementedError,
        r"q is a nested tensor.*values\(\)",
    ),
]


@pytest.mark.parametrize(("changed", "error", "words"), REFUSALS)
def test_refusals_name_the_argument(changed, error, words):
    named = dict(q=X, k=X, v=X, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS, max_seqlen_q=13, max_seqlen_k=13)
    with pytest.raises(error, match=words):
        flash_attn_varlen_func(**named | changed)
