"""The contract of attention_varlen() and its gradients, for whatever kernel the fixture `rung` holds."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import numba_flash
from contracts.forward import same_bits
from numba_flash import testing
from numba_flash.testing import packed as packs


def limits(rung):
    tensor = dict(dtypes=("float16", "bfloat16"), head_dims=(8, 16, 32)) if rung.tensor else {}
    small = dict(max_batch=3, max_heads_kv=1) if rung.slow else {}
    return dict(tile=rung.tile) | tensor | small


@st.composite
def packed_cases(draw, **options):
    class Drawn:
        def integer(self, low, high):
            return draw(st.integers(low, high))

        def choice(self, options):
            return draw(st.sampled_from(list(options)))

        def subset(self, options):
            return draw(st.lists(st.sampled_from(list(options)), unique=True))

    return packs.make_packed(Drawn(), **options)


def forward(rung, case, **more):
    """(o, lse) as NumPy arrays."""
    with rung.skipping_refusals():
        o, lse = numba_flash.attention_varlen(**case.arguments(rung.move) | more, return_lse=True, kernel=rung.kernel)
    return rung.back(o), rung.back(lse)


def backward(rung, case, do, o, lse, dlse, **more):
    if rung.kernel == "v1":
        pytest.skip("v1 has no backward")
    moved = [rung.move(x) for x in (do, o, lse, dlse)]
    with rung.skipping_refusals():
        made = numba_flash.attention_varlen_backward(
            moved[0], o=moved[1], lse=moved[2], dlse=moved[3], **case.arguments(rung.move) | more, kernel=rung.kernel
        )
    return type(made)(*(x if x is None else rung.back(x) for x in made))


def test_random_problems_agree_with_the_oracle(rung):
    @settings(settings(), max_examples=3 if rung.slow else settings.default.max_examples)
    @given(st.data())
    def agrees(data):
        case = data.draw(packed_cases(**limits(rung)))
        (o, lse), (do, dlse) = forward(rung, case), packs.outer_packed(case)
        packs.check_packed(case, o, lse, rung.kernel)
        if rung.kernel != "v1":
            packs.check_packed_gradients(case, backward(rung, case, do, o, lse, dlse), do, o, lse, dlse, rung.kernel)

    agrees()


def ragged(rung, lengths, heads=4, heads_kv=2, head_dim=16, dtype=None, **options):
    """Sequences of these lengths (queries, keys), each with values of its own length alone."""
    dtype, generator = dtype or rung.dtype, np.random.default_rng(0)
    made = {
        pair: [
            np.random.default_rng(pair).standard_normal((rows, count, head_dim)).astype(dtype)
            for rows, count in zip((pair[0], pair[1], pair[1]), (heads, heads_kv, heads_kv), strict=True)
        ]
        for pair in lengths
    }
    q, k, v = (
        np.concatenate(
            [made[pair][n] for pair in lengths] or [generator.standard_normal((0, 1, head_dim)).astype(dtype)]
        )
        for n in range(3)
    )
    of_q, of_k = (np.cumsum([0, *(pair[n] for pair in lengths)]).astype(np.int32) for n in range(2))
    return packs.PackedCase(q, k, v, of_q, of_k, options)


# In turn: alone, between others, in another order, beside an empty one, and with other bounds.
BATCHES = [
    lambda own, a, b: [own],
    lambda own, a, b: [a, own, b],
    lambda own, a, b: [b, (0, 0), own, a],
    lambda own, a, b: [own, own, (1, 0), (0, 1)],
]


@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(9, 3)), {}], ids=str)
def test_a_sequence_has_the_same_bits_in_any_batch(rung, options):
    if rung.slow and list(options) != ["causal" if rung.kernel in ("v2", "wgmma") else "window"]:
        pytest.skip("with one of these in the simulator, where it takes seconds")
    tile = rung.tile
    own, others = (tile + 3, 2 * tile - 1), ((2, tile + 9), (2 * tile + 1, 5))
    if rung.slow:
        own, others = (tile + 3, tile + 1), ((2, 9), (3, 5))
    found = []
    for number, batch in enumerate(BATCHES[:2] if rung.slow else BATCHES):
        for bounds in ({}, dict(max_seqlen_q=2 * tile + 1, max_seqlen_k=2 * tile))[: 2 if number == 1 else 1]:
            lengths = batch(own, *others)
            case = ragged(rung, lengths, heads=2, heads_kv=1, head_dim=8, **options)
            b, (do, dlse) = lengths.index(own), packs.outer_packed(case)
            rows, keys = case.queries(b), case.keys(b)
            mine = np.random.default_rng(9)
            do[rows] = mine.standard_normal(do[rows].shape)
            dlse[:, rows] = mine.standard_normal(dlse[:, rows].shape)
            o, lse = forward(rung, case, **bounds)
            results = [o[rows], lse[:, rows]]
            if rung.kernel != "v1":
                dq, dk, dv, *_ = backward(rung, case, do, o, lse, dlse, **bounds)
                results += [dq[rows], dk[keys], dv[keys]]
            found.append(results)
    for results in found[1:]:
        assert all(same_bits(one, other) for one, other in zip(found[0], results, strict=True))


def test_nothing_of_a_neighbour_is_seen(rung):
    """NaN in all that is not a sequence's own, keys that are not valid among it. It never takes part: bits stay."""
    tile = rung.tile
    # Few of the neighbours': their rows are computed again, one by one.
    lengths, seqlens_k = [(2, 3), (tile + 2, tile - 1), (1, 2)], np.array([2, tile - 2, 2], np.int32)
    heads = 1 if rung.slow else 2  # each by itself
    case = ragged(rung, lengths, heads=heads, heads_kv=1, head_dim=8, seqlens_k=seqlens_k)
    clean, do = forward(rung, case), packs.outer_packed(case)
    strange = dataclasses.replace(case, q=case.q.copy(), k=case.k.copy(), v=case.v.copy())
    rows, keys = case.queries(1), case.keys(1)
    for x, own in ((strange.q, rows), (strange.k, keys), (strange.v, keys)):
        kept = x[own].copy()
        x[...] = np.nan
        x[own] = kept
    o, lse = forward(rung, strange)
    assert same_bits(o[rows], clean[0][rows]) and same_bits(lse[:, rows], clean[1][:, rows])
    do, dlse = do
    other = np.full_like(do, np.nan)
    other[rows] = do[rows]
    if rung.kernel != "v1":
        right, found = backward(rung, case, do, *clean, dlse), backward(rung, strange, other, o, lse, dlse)
        for name, own in (("dq", rows), ("dk", keys), ("dv", keys)):
            assert same_bits(getattr(found, name)[own], getattr(right, name)[own])


@pytest.mark.parametrize("lengths", [[], [(0, 0)], [(0, 5), (3, 0)], [(0, 0), (2, 3), (0, 0)]], ids=str)
def test_empty_sequences(rung, lengths):
    case = ragged(rung, lengths)
    (o, lse), (do, dlse) = forward(rung, case), packs.outer_packed(case)
    packs.check_packed(case, o, lse)
    packs.check_packed_gradients(case, backward(rung, case, do, o, lse, dlse), do, o, lse, dlse)


def test_rows_of_no_sequence_without_any_sequence(rung):
    case = ragged(rung, [(5, 6)])
    case = dataclasses.replace(case, cu_seqlens_q=np.array([2], np.int32), cu_seqlens_k=np.array([0], np.int32))
    (o, lse), (do, dlse) = forward(rung, case), packs.outer_packed(case)
    packs.check_packed(case, o, lse)
    packs.check_packed_gradients(case, backward(rung, case, do, o, lse, dlse), do, o, lse, dlse)


def test_functions_are_told_the_sequence_and_positions_inside_it(rung):
    case = ragged(
        rung,
        [(3, 7), (0, 2), (rung.tile + 1, rung.tile + 2)],
        heads=2,
        heads_kv=1,
        score_mod=lambda s, b, h, q_pos, k_pos: s + 0.5 * b + 0.01 * (q_pos - k_pos),
        mask_mod=lambda b, h, q_pos, k_pos: (q_pos + k_pos + b) % 3 != 0,
        sinks=np.array([0.5, -1], np.float32),
    )
    compare(rung, case)


def test_dropout_counts_from_the_sequence(rung):
    lengths = [(3, 7), (rung.tile + 1, rung.tile + 2)]
    compare(rung, ragged(rung, lengths, heads=2, heads_kv=1, causal=True, dropout_p=0.4, seed=5))


def compare(rung, case):
    """With the oracle's packed form, which the other tests compare with one call for each sequence."""
    wide = {name: x.astype(np.float64) for name, x in case.arguments().items() if name in ("q", "k", "v")}
    wide = case.arguments() | wide
    (o, lse), (do, dlse) = forward(rung, case), packs.outer_packed(case)
    right, right_lse = numba_flash.attention_varlen(**wide, return_lse=True, kernel="reference")
    room = 32 * testing.EPS[case.q.dtype.name]
    assert np.allclose(o.astype(np.float64), right, rtol=room, atol=room)
    assert np.allclose(lse, right_lse, rtol=1e-4, atol=1e-4)
    gradients = backward(rung, case, do, o, lse, dlse)
    expected = numba_flash.attention_varlen_backward(
        do.astype(np.float64), o=right, lse=right_lse, dlse=dlse.astype(np.float64), **wide, kernel="reference"
    )
    for name in ("dq", "dk", "dv"):
        found = getattr(gradients, name).astype(np.float64)
        assert np.allclose(found, getattr(expected, name), rtol=4 * room, atol=4 * room), name


def test_the_gradient_of_sinks_is_that_of_all_sequences(rung):
    for shape in ((4,), (2, 4)):
        sinks = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        case = ragged(rung, [(3, 7), (rung.tile + 1, 9)], sinks=sinks)
        (o, lse), (do, dlse) = forward(rung, case), packs.outer_packed(case)
        found = backward(rung, case, do, o, lse, dlse, wanted=("dsinks",)).dsinks
        right = np.zeros((2, 4))
        for b in range(2):
            own, rows = case.sequence(b), case.queries(b)
            given = [packs.one_entry(x[rows]) for x in (do, o)] + [x[None, :, rows].copy() for x in (lse, dlse)]
            right[b] = numba_flash.attention_backward(
                given[0],
                **own.arguments(),
                o=given[1],
                lse=given[2],
                dlse=given[3],
                wanted=("dsinks",),
                kernel="reference",
            ).dsinks
        room = 1e-4 if case.q.dtype.itemsize > 2 else 0.02
        assert np.allclose(found, right if shape[0] == 2 else right.sum(0), rtol=room, atol=room)


def gradients_of_each(rung, case, wanted):
    """-> (what the rung says of these gradients, the oracle's of each sequence alone)."""
    (o, lse), (do, dlse) = forward(rung, case), packs.outer_packed(case)
    found, right = backward(rung, case, do, o, lse, dlse, wanted=wanted), []
    for b in range(case.batch):
        rows, own = case.queries(b), case.sequence(b).arguments()
        if "aux" in own:  # its functions are told that it is sequence 0
            table, of_entry = own["aux"]
            own["aux"] = table, of_entry[b : b + 1]
        given = [packs.one_entry(x[rows]).astype(np.float64) for x in (do, o)]
        lse_of, dlse_of = (x[None, :, rows].astype(np.float64) for x in (lse, dlse))
        own |= {name: own[name].astype(np.float64) for name in "qkv"}
        right.append(
            numba_flash.attention_backward(
                given[0], **own, o=given[1], lse=lse_of, dlse=dlse_of, wanted=wanted, kernel="reference"
            )
        )
    return found, right


def test_the_gradient_of_slopes_is_that_of_all_sequences(rung):
    if rung.tensor:
        pytest.skip("tensor cores have none")
    lengths = [(3, 7), (0, 2), (rung.tile + 1, 9)]
    for shape in ((4,), (3, 4)):
        slopes = np.random.default_rng(1).random(shape).astype(np.float32)
        found, right = gradients_of_each(rung, ragged(rung, lengths, alibi_slopes=slopes), ("dalibi_slopes",))
        expected = np.stack([of.dalibi_slopes for of in right])
        assert np.allclose(found.dalibi_slopes, expected if len(shape) == 2 else expected.sum(0), rtol=1e-3, atol=1e-3)


def test_the_gradient_of_aux_is_that_of_all_sequences(rung):
    """What a score_mod reads by the distance of query and key, by the head, and by the number of the sequence."""
    generator = np.random.default_rng(1)
    by_distance, by_entry = (generator.standard_normal(n).astype(np.float32) for n in ((2, 100), (3,)))
    case = ragged(
        rung,
        [(3, 7), (0, 2), (rung.tile + 1, 9)],
        heads=2,
        heads_kv=1,
        score_mod=lambda s, b, h, q_pos, k_pos, table, of_entry: s * of_entry[b] + table[h, abs(q_pos - k_pos)],
        aux=(by_distance, by_entry),
        causal=True,
    )
    found, right = gradients_of_each(rung, case, ("daux[0]", "daux[1]"))
    room = 1e-3 if case.q.dtype.itemsize > 2 else 0.02
    tables, entries = zip(*(of.daux for of in right), strict=True)
    assert np.abs(sum(tables)).max() > 0.1
    assert np.allclose(found.daux[0], sum(tables), rtol=room, atol=room)
    assert np.allclose(found.daux[1], np.concatenate(entries), rtol=room, atol=room)
