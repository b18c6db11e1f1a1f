"""What programs import from flash_attn: its modules with their weights' names, and its names under install()."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from numba_flash.compat import flash_attn  # noqa: E402
from numba_flash.compat.flash_attn.bert_padding import index_first_axis, pad_input, unpad_input  # noqa: E402
from numba_flash.compat.flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb  # noqa: E402
from numba_flash.compat.flash_attn.modules.mha import MHA, CrossAttention, SelfAttention, alibi_slopes  # noqa: E402

BATCH, SEQLEN, WIDTH, HEADS = 2, 11, 24, 6


@pytest.fixture(autouse=True)
def generator():
    torch.manual_seed(0)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def formula(q, k, v, causal=False, kept=None, bias=0):
    """softmax(q k' / sqrt(d)) v of (batch, seqlen, heads, head_dim); a row that sees no key gives 0."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5 + bias
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if causal:
        seen = seen.tril(k.shape[2] - q.shape[2])
    if kept is not None:
        seen = seen & kept[:, None, None, :]
    weights = scores.masked_fill(~seen, -float("inf")).softmax(-1).nan_to_num(0)
    return (weights @ v).transpose(1, 2)


def rotated(x, dim, base=10000.0, first=0):
    """By complex numbers: pairs are columns i and i + dim / 2."""
    half = dim // 2
    angles = torch.outer(torch.arange(first, first + x.shape[1]).double(), base ** (-torch.arange(half) * 2.0 / dim))
    turned = torch.complex(x[..., :half], x[..., half:dim]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag, x[..., dim:]], -1)


def of(layer, x, heads):
    return torch.nn.functional.linear(x, layer.weight, layer.bias).unflatten(-1, (heads, -1))


@pytest.mark.parametrize("use_flash_attn", [False, True], ids=["", "use_flash_attn"])
@pytest.mark.parametrize("heads_kv", [HEADS, 2, 1])
@pytest.mark.parametrize("rotary", [0, 4], ids=["", "rotary"])
def test_mha_is_the_formula_between_its_projections(rotary, heads_kv, use_flash_attn):
    options = dict(causal=True, rotary_emb_dim=rotary, use_flash_attn=use_flash_attn)
    module = MHA(WIDTH, HEADS, heads_kv, dtype=torch.float64, **options)
    x = torch.randn(BATCH, SEQLEN, WIDTH, dtype=torch.float64)
    q, k, v = of(module.Wqkv, x, HEADS + 2 * heads_kv).split([HEADS, heads_kv, heads_kv], 2)
    if rotary:
        q, k = rotated(q, rotary), rotated(k, rotary)
    expected = module.out_proj(formula(q, k, v, causal=True).flatten(2))
    torch.testing.assert_close(module(x), expected, rtol=1e-5 if rotary else 1e-10, atol=1e-5 if rotary else 1e-10)
    assert sorted(module.state_dict()) == ["Wqkv.bias", "Wqkv.weight", "out_proj.bias", "out_proj.weight"]


def test_mha_packed_is_mha_of_each_sequence():
    module = MHA(
        WIDTH, HEADS, 2, causal=True, rotary_emb_dim=4, use_flash_attn=True, use_alibi=True, dtype=torch.float64
    )
    x, lengths = torch.randn(14, WIDTH, dtype=torch.float64), (5, 0, 9)
    ends = torch.tensor([0, 5, 5, 14], dtype=torch.int32)
    close(module(x, cu_seqlens=ends, max_seqlen=9), torch.cat([module(one[None])[0] for one in x.split(lengths)]))


@pytest.mark.parametrize("heads_kv", [HEADS, 2])
def test_mha_with_a_mask_does_not_see_padding(heads_kv):
    module = MHA(WIDTH, HEADS, heads_kv, causal=True, dtype=torch.float64)
    x, kept = torch.randn(BATCH, SEQLEN, WIDTH, dtype=torch.float64), torch.arange(SEQLEN) < torch.tensor([[7], [11]])
    found = module(x, key_padding_mask=kept)
    close(found[0, :7], module(x[:1, :7])[0])
    close(found[1], module(x[1:])[0])


@pytest.mark.parametrize("use_flash_attn", [False, True], ids=["", "use_flash_attn"])
def test_mha_of_two_sequences(use_flash_attn):
    module = MHA(WIDTH, HEADS, 2, cross_attn=True, use_flash_attn=use_flash_attn, dtype=torch.float64)
    x, x_kv = (torch.randn(BATCH, n, WIDTH, dtype=torch.float64) for n in (SEQLEN, 5))
    k, v = of(module.Wkv, x_kv, 4).split(2, 2)
    close(module(x, x_kv), module.out_proj(formula(of(module.Wq, x, HEADS), k, v).flatten(2)))
    assert {name.partition(".")[0] for name in module.state_dict()} == {"Wq", "Wkv", "out_proj"}


def test_causal_cross_attention_ends_at_the_last_key_that_is_kept():
    q, kv = torch.randn(BATCH, 3, 4, 8).double(), torch.randn(BATCH, SEQLEN, 2, 2, 8).double()
    kept = torch.arange(SEQLEN) < torch.tensor([[7], [11]])
    found = CrossAttention(causal=True)(q, kv, key_padding_mask=kept)
    for entry, keys in enumerate((7, 11)):
        one = slice(entry, entry + 1)
        close(found[one], formula(q[one], *kv[one, :keys].unbind(2), causal=True))


def test_causal_self_attention_begins_at_the_first_key():
    qkv, kept = torch.randn(BATCH, SEQLEN, 3, 4, 8).double(), torch.arange(SEQLEN) != 2
    found = SelfAttention(causal=True)(qkv, key_padding_mask=kept.expand(BATCH, -1))
    close(found, formula(*qkv.unbind(2), causal=True, kept=kept.expand(BATCH, -1)))


def test_dropout_counts_while_the_module_trains():
    module = MHA(WIDTH, HEADS, dropout=0.5, dtype=torch.float64)
    x = torch.randn(BATCH, SEQLEN, WIDTH, dtype=torch.float64)
    trained, trained_again = module(x), module(x)
    assert not torch.equal(trained, trained_again)
    module.eval()
    assert torch.equal(module(x), module(x))


@pytest.mark.parametrize("interleaved", [False, True], ids=["", "interleaved"])
def test_rotary_turns_pairs_and_leaves_the_rest(interleaved):
    x, tables = torch.randn(BATCH, SEQLEN, 3, 10).double(), RotaryEmbedding(8).tables(32, "cpu", torch.float64)
    order = [0, 4, 1, 5, 2, 6, 3, 7, 8, 9]  # columns of pairs beside each other
    given = x[..., order] if interleaved else x
    expected = rotated(x, 8, first=3)
    expected = expected[..., order] if interleaved else expected
    found = apply_rotary_emb(given, *tables[:2], interleaved, seqlen_offsets=3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found, apply_rotary_emb(given, *tables[:2], interleaved, seqlen_offsets=torch.tensor([3, 3])))
    inplace = given.clone()
    assert apply_rotary_emb(inplace, *tables[:2], interleaved, True, 3) is inplace and torch.equal(inplace, found)


def test_rotary_of_packed_sequences_begins_anew_in_each():
    x, (cos, sin, *_) = torch.randn(9, 2, 8).double(), RotaryEmbedding(8).tables(32, "cpu", torch.float64)
    ends, first = torch.tensor([0, 4, 4, 9], dtype=torch.int32), torch.tensor([2, 7, 0])
    found = apply_rotary_emb(x, cos, sin, seqlen_offsets=first, cu_seqlens=ends, max_seqlen=5)
    parts = zip(x.split((4, 0, 5)), first.tolist(), strict=True)
    assert torch.equal(found, torch.cat([apply_rotary_emb(p[None], cos, sin, seqlen_offsets=n)[0] for p, n in parts]))


def test_rotary_refuses_positions_without_a_row():
    tables = RotaryEmbedding(8).tables(8, "cpu", torch.float64)[:2]
    for offset, wrong in ((-1, -1), (5, 8)):
        with pytest.raises(ValueError, match=f"8 positions from 0, and x reaches position {wrong}"):
            apply_rotary_emb(torch.ones(1, 4, 1, 8).double(), *tables, seqlen_offsets=offset)


def test_xpos_of_many_packed_sequences_is_that_of_each():
    """The scale is 1 in the middle of max_seqlen, and not of all rows, where it would overflow."""
    rotary, qkv = RotaryEmbedding(8, scale_base=4), torch.randn(1200, 3, 1, 8)
    found = rotary(qkv, cu_seqlens=torch.arange(0, 1201, 12, dtype=torch.int32), max_seqlen=12)
    torch.testing.assert_close(found, rotary(qkv.unflatten(0, (100, 12))).flatten(0, 1))


def test_xpos_scales_what_rotary_turns():
    """The products of q and k depend on the distance alone, and decay with it."""
    ones = torch.ones(1, 64, 3, 1, 8, dtype=torch.float64)
    q, k, v = RotaryEmbedding(8, scale_base=16)(ones).unbind(2)
    scores = (q[0, :, 0] @ k[0, :, 0].mT).tril()
    assert torch.equal(v, ones[:, :, 2])
    for distance in (0, 3, 40):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)
    assert scores[0, 0] > 0 and abs(scores[60, 0]) < scores[0, 0] / 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MHA(WIDTH, HEADS, dwconv=True), "dwconv is not implemented"),
        (lambda: MHA(WIDTH, HEADS, 4), "num_heads must be a multiple"),
        (lambda: MHA(WIDTH, HEADS, use_alibi=True), "need use_flash_attn=True"),
        (lambda: MHA(WIDTH, HEADS, cross_attn=True, rotary_emb_dim=4), "rotary_emb_dim must be 0"),
        (lambda: MHA(WIDTH, HEADS)(torch.ones(1, 2, WIDTH), inference_params=1), "flash_attn_with_kvcache"),
        (lambda: MHA(WIDTH, HEADS)(torch.ones(2, WIDTH), cu_seqlens=torch.tensor([0, 2])), "needs use_flash_attn=True"),
        (
            lambda: MHA(WIDTH, HEADS, use_flash_attn=True)(torch.ones(1, 2, WIDTH), key_padding_mask=torch.ones(1, 2)),
            "unpad_input",
        ),
        (lambda: RotaryEmbedding(7), "dim must be even"),
        (lambda: RotaryEmbedding(8, pos_idx_in_fp32=False), "always computed in float32"),
        (
            lambda: RotaryEmbedding(8)(torch.ones(1, 2, 3, 1, 8), seqlen_offset=torch.zeros(1)),
            "max_seqlen must be given",
        ),
        (
            lambda: apply_rotary_emb(torch.ones(1, 3, 1, 8), torch.ones(4, 2), torch.ones(4, 2), seqlen_offsets=2),
            "x reaches position 4",
        ),
        (lambda: apply_rotary_emb(torch.ones(1, 3, 1, 8), torch.ones(4, 5), torch.ones(4, 5)), "only 8 columns"),
        (lambda: flash_attn.flash_attn_qkvpacked_func(torch.ones(1, 2, 2, 1, 8)), "qkv must have shape"),
        (
            lambda: flash_attn.flash_attn_kvpacked_func(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 8)),
            "kv must have shape",
        ),
    ],
)
def test_refused(call, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        call()


def test_slopes_of_any_number_of_heads():
    assert alibi_slopes(4) == [2**-2, 2**-4, 2**-6, 2**-8]
    assert alibi_slopes(6) == [*alibi_slopes(4), 2**-1, 2**-3]


def test_rows_by_their_places():
    x, mask = torch.randn(BATCH, SEQLEN, 3), torch.rand(BATCH, SEQLEN) > 0.4
    rows, indices, *_ = unpad_input(x, mask)
    assert torch.equal(index_first_axis(x.flatten(0, 1), indices), rows)
    assert torch.equal(pad_input(rows, indices, BATCH, SEQLEN), x * mask[..., None])


PROGRAM = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from numba_flash.compat import flash_attn
flash_attn.install()
flash_attn.install()  # again is nothing
import flash_attn as found
from flash_attn import __version__, flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.flash_attn_interface import flash_attn_kvpacked_func
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.modules.mha import MHA
assert found is flash_attn and MHA.__module__ == "numba_flash.compat.flash_attn.modules.mha"
assert MHA(8, 2)(torch.ones(1, 3, 8)).shape == (1, 3, 8)
"""


def run(program, folder):
    command = [sys.executable, "-c", program, str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


def test_programs_find_it_under_its_name(tmp_path):
    done = run(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr


def test_flash_attn_itself_is_not_hidden(tmp_path):
    (tmp_path / "flash_attn.py").write_text("")
    assert "is installed here" in run(PROGRAM, tmp_path).stderr
    assert (
        "imported already"
        in run("import sys; sys.path.insert(0, sys.argv[1]); import flash_attn" + PROGRAM, tmp_path).stderr
    )
