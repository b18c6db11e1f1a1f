"""Relations between calls that hold whatever the right answer is: no oracle, so no shared mistake.

For whatever kernel the fixture `rung` holds, as in forward.py. Where the sums run in another order
the results are compared within a few roundings; where they do not, bit by bit.
"""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import numba_flash
from contracts.forward import lse_unchanged, same_bits, unchanged
from numba_flash.testing import Case


def close(got, expected):
    """Within a few roundings of numbers of size one; sums of 16-bit numbers are in float32 and rounded once."""
    eps, steps = np.finfo(expected.dtype).eps, 4 if expected.dtype == np.float16 else 64
    return np.allclose(got, expected, rtol=steps * eps, atol=steps * eps, equal_nan=True)


def both_close(got, expected):
    return all(close(x, y) for x, y in zip(got, expected, strict=True))


def both_same(got, expected):
    return all(same_bits(x, y) for x, y in zip(got, expected, strict=True))


def part(case, keys=slice(None), rows=slice(None), batch=slice(None)):
    """The same problem over some of its keys, queries and batch entries."""
    options = dict(case.options)
    for name in ("bias", "mask"):
        if name in options:
            options[name] = options[name][batch, :, rows, keys]
    return Case(case.q[batch, :, rows], case.k[batch, :, keys], case.v[batch, :, keys], options)


MASK = np.random.default_rng(100).random((1, 2, 20, 30)) < 0.5
MASK[:, :, 4] = False


def with_mask(rung):
    """A case whose mask hides some keys from some queries, and all of them from one; for rungs that take masks."""
    return rung.problem(batch=1, mask=MASK)


def examples(rung):
    """As many as elsewhere, or three where each call takes a second."""
    return settings(max_examples=3) if rung.slow else settings()


# What all examples are compared with is computed once: in the simulator that is half of the time.


def test_the_order_of_the_keys_does_not_matter(rung):
    case = with_mask(rung)
    expected = rung(case)

    @examples(rung)
    @given(st.permutations(range(30)))
    def in_any_order(order):
        assert both_close(rung(part(case, keys=np.array(order))), expected)

    in_any_order()


def test_the_order_of_the_queries_does_not_matter(rung):
    case = with_mask(rung)
    o, lse = rung(case)

    @examples(rung)
    @given(st.permutations(range(20)))
    def in_any_order(order):
        assert both_close(rung(part(case, rows=np.array(order))), (o[:, :, order], lse[:, :, order]))

    in_any_order()


# Small, and so large that e^s without the maximum overflows float32 in either direction.
@pytest.mark.parametrize("shift", [1.0, 300.0, -300.0])
def test_a_constant_added_to_a_row_of_scores_changes_only_its_lse(rung, shift):
    case = rung.problem(dtype="float64")
    o, lse = rung(case)
    row = (shift * np.arange(20) / 20)[None, None, :, None]
    shifted_o, shifted_lse = rung(case, bias=rung.move(row))
    assert np.allclose(shifted_o, o, rtol=1e-11, atol=1e-11)
    assert np.allclose(shifted_lse, lse + row[..., 0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("group", [2, 3])  # a power of two, and not
def test_shared_kv_heads_equal_repeated_ones(rung, group):
    case = rung.problem(batch=rung.batch, heads=2 * group, heads_kv=2, causal=True)
    repeated = Case(case.q, np.repeat(case.k, group, 1), np.repeat(case.v, group, 1), case.options)
    assert both_close(rung(repeated), rung(case))


def test_parts_of_the_keys_merge_to_the_whole(rung):
    """Every split, with empty parts and with rows that see no key in some part, or in none."""
    case = with_mask(rung)
    whole = rung(case)

    @examples(rung)
    @given(st.lists(st.integers(0, 30), max_size=4).map(sorted))
    def split_at(cuts):
        edges = [0, *cuts, 30]
        parts = [rung(part(case, keys=slice(a, b))) for a, b in zip(edges, edges[1:], strict=False)]
        merged = numba_flash.merge(*(x for pair in parts for x in pair))
        assert both_close(merged, whole)
        assert "mask" not in case.options or ((merged.o[:, :, 4] == 0) & (merged.lse[:, :, 4:5] == -np.inf)).all()

    split_at()


@pytest.mark.parametrize("seqlen_q", [1, 20])  # a decode step, whose keys may be split, and a prefill
def test_concatenated_batches_equal_separate_ones(rung, seqlen_q):
    one, other = (rung.problem(seqlen_q, causal=True, seed=seed) for seed in (1, 2))
    together = Case(*(np.concatenate(pair) for pair in zip(*((x.q, x.k, x.v) for x in (one, other)), strict=True)))
    apart = (np.concatenate(pair) for pair in zip(rung(one), rung(other), strict=True))
    assert both_same(rung(together, causal=True), apart)


def test_causal_rows_do_not_know_later_keys(rung):
    n = 20 if rung.tensor else 30  # the time that rows take to be computed again grows with the square
    clean = rung.problem(n, n, batch=1, causal=True)
    whole = rung(clean)

    @examples(rung)
    @given(st.integers(1, n - 1), st.sampled_from([np.nan, np.inf, 0.0]))
    def from_there_on(length, later):
        case = Case(clean.q, clean.k.copy(), clean.v.copy(), clean.options)
        case.k[:, :, length:] = later
        case.v[:, :, length:] = later
        (o, lse), (whole_o, whole_lse) = ([x[:, :, :length] for x in pair] for pair in (rung(case), whole))
        assert unchanged(rung, o, whole_o) and lse_unchanged(rung, lse, whole_lse)

    from_there_on()


def test_generation_step_by_step_equals_all_at_once(rung):
    case = rung.problem(12, 12, batch=1, causal=True)
    o, lse = rung(case)
    for n in range(1, 13):
        step = rung(part(case, keys=slice(0, n), rows=slice(n - 1, n)))
        assert both_close(step, (o[:, :, n - 1 : n], lse[:, :, n - 1 : n]))


def test_v_of_ones_gives_ones(rung):
    case = rung.problem(causal=True, scale=3.0)
    case.v[...] = 1
    assert close(rung(case)[0], np.ones_like(case.q))


def test_scale_zero_gives_the_mean_of_v(rung):
    case = rung.problem(dtype="float64", scale=0)
    o, lse = rung(case)
    assert np.allclose(o, case.v.mean(2, keepdims=True), rtol=1e-12, atol=1e-12)
    assert np.allclose(lse, np.log(30), rtol=1e-14)


def test_causal_is_a_window_without_a_right(rung):
    case = rung.problem(batch=rung.batch)
    assert both_same(rung(case, causal=True), rung(case, window=(None, 0)))
    assert both_same(rung(case, causal=True, window=(5, 9)), rung(case, window=(5, 0)))
    assert both_same(rung(case, window=(None, None)), rung(case))
    assert both_same(rung(case, window=(10**12, 10**12)), rung(case))


def test_the_window_is_the_mask_that_it_describes(rung):
    case = rung.problem()
    q_pos, k_pos = np.arange(20)[:, None] + 3, np.arange(30)
    mask = (q_pos - 4 <= k_pos) & (k_pos <= q_pos + 2)
    assert both_close(rung(case, window=(4, 2), q_offset=3), rung(case, mask=rung.move(mask)))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(20, 30), (30, 20), (7, 7)])  # either longer, and equal
def test_bottom_right_is_the_default_offset(rung, seqlen_q, seqlen_k):
    case = rung.problem(seqlen_q, seqlen_k, batch=rung.batch, causal=True)
    expected = rung(case)
    number = seqlen_k - seqlen_q
    assert both_same(rung(case, q_offset=number), expected)
    assert both_same(rung(case, q_offset=rung.move(np.full(rung.batch, number, np.int32))), expected)


def test_bottom_right_counts_from_the_valid_keys(rung):
    lengths = np.array([25, 11], np.int32)
    case = rung.problem(6, 30, causal=True, seqlens_k=lengths)
    o, lse = rung(case)
    for b, length in enumerate(lengths):
        short = Case(case.q[b : b + 1], case.k[b : b + 1, :, :length], case.v[b : b + 1, :, :length], dict(causal=True))
        assert both_close(rung(short), (o[b : b + 1], lse[b : b + 1]))


def test_alibi_is_the_bias_that_it_describes(rung):
    slopes = np.array([0.25, 2.0], np.float32)
    distance = np.abs(np.arange(20)[:, None] + 10 - np.arange(30))
    bias = (-slopes[:, None, None] * distance)[None].astype(np.float32)
    case = rung.problem()
    assert both_close(rung(case, alibi_slopes=rung.move(slopes)), rung(case, bias=rung.move(bias)))


def test_a_mask_is_a_bias_of_minus_infinity(rung):
    case = rung.problem(batch=1)
    bias = np.where(MASK, 0, -np.inf).astype(np.float32)
    assert both_close(rung(case, bias=rung.move(bias)), rung(case, mask=rung.move(MASK)))


def test_a_bias_removes_no_nan(rung):
    case, bias = rung.problem(batch=1), np.zeros((1, 1, 1, 30), np.float32)
    case.k[:, :, 13], bias[..., 13] = np.nan, -np.inf
    assert all(np.isnan(x).all() for x in rung(case, bias=rung.move(bias)))


@pytest.mark.parametrize("sink", [np.inf, np.nan])
def test_a_sink_of_infinity_is_nan(rung, sink):
    case = rung.problem(batch=1)
    o, lse = rung(case, sinks=rung.move(np.array([sink, -np.inf], np.float32)))
    assert np.isnan(o[:, 0]).all() and np.isnan(lse[:, 0]).all()
    assert both_same((o[:, 1], lse[:, 1]), [x[:, 1] for x in rung(case)])


def test_a_sink_of_minus_infinity_is_none(rung):
    case = with_mask(rung)
    assert both_same(rung(case, sinks=rung.move(np.full(2, -np.inf, np.float32))), rung(case))


def test_a_sink_is_a_key_without_a_value(rung):
    """With that score for all queries: a further column is 1 in q, 0 in k, and sink / scale in this key."""
    sinks, case = np.array([0.5, -2.0], np.float32), rung.problem(heads_kv=2, head_dim=7, head_dim_v=4)
    q, k, v = (np.concatenate([x, np.zeros((*x.shape[:3], 1), x.dtype)], 3) for x in (case.q, case.k, case.v))
    k, v = (np.concatenate([x, np.zeros_like(x[:, :, :1])], 2) for x in (k, v))
    q[..., 7], k[:, :, 30, 7] = 1, sinks / 0.5
    o, lse = rung(Case(q, k, v, dict(scale=0.5)))
    assert both_close(rung(case, scale=0.5, sinks=rung.move(sinks)), (o[..., :4], lse))


def test_of_parts_of_the_keys_one_has_the_sink(rung):
    sinks = rung.move(np.array([0.5, -2.0], np.float32))
    case = with_mask(rung)
    first, rest = rung(part(case, keys=slice(0, 13)), sinks=sinks), rung(part(case, keys=slice(13, 30)))
    assert both_close(numba_flash.merge(*first, *rest), rung(case, sinks=sinks))


def test_a_softcap_bounds_the_scores(rung):
    case = rung.problem(scale=1e4, softcap=2.0)
    assert np.abs(rung(case)[1] - np.log(30)).max() <= 2.0 + 1e-4


def test_huge_offsets_and_windows_do_not_overflow(rung):
    case = rung.problem(batch=rung.batch)
    far = 2**31 - 1
    assert both_same(rung(case, causal=True, q_offset=far), rung(case))
    assert (rung(case, causal=True, q_offset=-far)[0] == 0).all()
    assert both_same(rung(case, window=(far, far), q_offset=3), rung(case))
    assert both_same(rung(case, window=(10**12, None), q_offset=far), rung(case))
    assert (rung(case, window=(5, None), q_offset=far)[1] == -np.inf).all()
