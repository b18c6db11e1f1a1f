"""The contract of attention_kvcache(), for whatever kernel the fixture `rung` holds.

A random problem of attention() is laid into a cache: into pages in any order, of any size and strides, with NaN in all
that no key of a sequence has, or into a contiguous cache. Some of its last keys are not there yet and come as k_new.
The result is that of the problem, within the tolerance that is derived from it.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, strategies as st

import numba_flash
from contracts.forward import same_bits
from numba_flash import mods, testing
from numba_flash.testing.cases import heads_first

KINDS = ("contiguous", "entries", "table", "csr")
FORMS = ("nhd", "hnd", "one row", "alternate", "far apart")


@dataclasses.dataclass
class Cached:
    """A problem of attention() whose keys lie in a cache, and the arguments of attention_kvcache()."""

    case: testing.Case
    given: dict

    def arguments(self, move):
        found = {name: move(x) if isinstance(x, np.ndarray) else x for name, x in self.given.items()}
        if "aux" in found:
            found["aux"] = tuple(map(move, found["aux"]))
        return found

    def run(self, rung, **more):
        moved = self.arguments(rung.move)
        with rung.skipping_refusals():
            o, lse = numba_flash.attention_kvcache(**moved | more, return_lse=True, kernel=rung.kernel)
        return rung.back(o), rung.back(lse), moved


def pool(form, count, heads, page, dims, dtype):
    """Arrays of pages for K and V, heads first, with NaN in them: views of memory that lies as `form` has it."""
    k_dim, v_dim = dims

    def filled(*shape):
        return np.full(shape, np.nan, dtype)

    if form == "one row":  # vLLM: K and V in one row
        both = filled(count, heads, page, k_dim + v_dim)
        return both[..., :k_dim], both[..., k_dim:]
    if form == "alternate" and k_dim == v_dim:  # Transformers: every second page is one of V
        both = filled(2 * count, heads, page, k_dim)
        return both[::2], both[1::2]
    if form == "far apart":
        return filled(count, 2 * heads, 2 * page, 2 * k_dim)[:, ::2, ::2, ::2], filled(count, heads, page, v_dim)
    if form == "nhd":
        return tuple(filled(count, page, heads, dim).transpose(0, 2, 1, 3) for dim in dims)
    return tuple(filled(count, heads, page, dim) for dim in dims)


def lay(case, kind="table", form="nhd", page=3, new=0, by_slots=False, spare=2, seed=0):
    """-> Cached. spare: pages, or batch entries, that nobody has."""
    generator = np.random.default_rng(seed)
    options = dict(case.options)
    layout = options.get("layout", "bhsd")
    k, v = heads_first(case, case.k), heads_first(case, case.v)
    batch, heads, seqlen_k, _ = k.shape
    lengths = options.pop("seqlens_k", np.full(batch, seqlen_k, np.int32)).astype(np.int64)
    new = min(new, *lengths.tolist()) if batch else 0
    if kind in ("contiguous", "entries"):
        page = seqlen_k
    of_each = -(-seqlen_k // page) if page else 1
    if kind == "contiguous":
        count, numbers = batch, np.arange(batch, dtype=np.int32)[:, None]
    else:
        count = batch * max(of_each, 1) + spare
        numbers = generator.permutation(count)[: batch * of_each].astype(np.int32).reshape(batch, of_each)
    arrays = pool(form, count, heads, page, (k.shape[3], v.shape[3]), case.q.dtype)
    for b in range(batch):
        for j in range(int(lengths[b]) - new):
            for to, x in zip(arrays, (k, v), strict=True):
                to[numbers[b, j // page], :, j % page] = x[b, :, j]
    given = dict(q=case.q, seqlens_k=(lengths - new).astype(np.int32), layout=layout) | options
    to_layout = (lambda x: x) if layout == "bhsd" else (lambda x: x.swapaxes(1, 2))
    given["k_cache"], given["v_cache"] = map(to_layout, arrays)
    used = -(-lengths // max(page, 1))
    if kind == "entries":
        given["cache_batch_idx"] = numbers[:, 0].copy() if of_each else numbers.reshape(-1)[:batch]
    elif kind == "table":
        behind = np.arange(of_each)[None] >= used[:, None]
        given["page_table"] = np.where(behind, generator.choice([-1, 10**9], (batch, of_each)), numbers).astype(
            np.int32
        )
    elif kind == "csr":
        given["page_indptr"] = np.concatenate([[0], np.cumsum(used)]).astype(np.int32)
        given["page_indices"] = np.concatenate([[], *(numbers[b, : used[b]] for b in range(batch))]).astype(np.int32)
    if new:
        at = [np.arange(n - new, n) for n in lengths]
        for name, x in (("k_new", k), ("v_new", v)):
            given[name] = to_layout(np.stack([x[b][:, at[b]] for b in range(batch)]))
        if by_slots:
            given["slots"] = np.stack(
                [numbers[b, at[b] // page].astype(np.int64) * page + at[b] % page for b in range(batch)]
            )
    for name in ("bias", "mask"):  # their last dimension is that of the capacity
        if name in options and options[name].ndim and options[name].shape[-1] not in (1,) and kind != "contiguous":
            room = page * (len(given["page_indices"]) if kind == "csr" else of_each)
            more = [(0, 0)] * (options[name].ndim - 1) + [(0, max(room - seqlen_k, 0))]
            value = np.pad(options[name].astype(np.float64), more, constant_values=np.nan if name == "bias" else 1)
            given[name] = value[..., :room].astype(options[name].dtype)
    return Cached(case, given)


def check(rung, cached, **more):
    o, lse, moved = cached.run(rung, **more)
    testing.check(cached.case, o, lse, rung.kernel)
    return o, lse, moved


@st.composite
def cached_cases(draw, **limits):
    case = draw(testing.cases(**limits))
    kind, form = draw(st.sampled_from(KINDS)), draw(st.sampled_from(FORMS))
    page, new = draw(st.sampled_from([1, 2, 3, 5, 16])), draw(st.sampled_from([0, 0, 1, 4]))
    return lay(case, kind, form, page, new, draw(st.booleans()) and kind in ("table", "csr"), draw(st.integers(0, 3)))


@given(st.data())
def test_random_problems_agree_with_the_oracle(rung, data):
    limits = dict(max_batch=2, max_heads_kv=1, max_seqlen=20) if rung.slow else rung.limits
    check(rung, data.draw(cached_cases(**limits)))


def problem(rung, lengths, seqlen_q=1, heads=4, heads_kv=2, head_dim=16, seqlen_k=None, salt=0, **options):
    """A case of sequences with so many keys each, whose values follow from its length and b."""
    most = max(lengths, default=0) if seqlen_k is None else seqlen_k
    shapes = (heads, seqlen_q), (heads_kv, most), (heads_kv, most)
    arrays = [np.zeros((len(lengths), *shape, head_dim), rung.dtype) for shape in shapes]
    for b, length in enumerate(lengths):
        generator = np.random.default_rng((length + 1, seqlen_q, salt))
        arrays[0][b] = generator.standard_normal((heads, seqlen_q, head_dim))
        for x in arrays[1:]:
            x[b, :, :length] = generator.standard_normal((heads_kv, length, head_dim))
    return testing.Case(*arrays, dict(seqlens_k=np.array(lengths, np.int32)) | options)


PAGES = [("contiguous", 3), ("entries", 3), *((kind, page) for kind in ("table", "csr") for page in (1, 2, 3, 16, 256))]
EACH_ONCE = {*PAGES[:2], ("table", 1), ("table", 3), ("table", 256), ("csr", 2), ("csr", 16)}  # in the simulator


@pytest.mark.parametrize(("kind", "page"), PAGES)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_about_a_leaf(rung, kind, page, causal):
    """0, 1, and one leaf less one, one leaf, one more."""
    if rung.slow and ((kind, page) not in EACH_ONCE or causal != (page in (3, 16))):
        pytest.skip("each of these once in the simulator; all pairs on a CPU and on a GPU")
    lengths = (0, 1, 17, 16) if rung.slow else (0, 1, 255, 256, 257, 1024, 1025, 1500)
    check(rung, lay(problem(rung, lengths, causal=causal, seqlen_q=3), kind, page=page, new=0))


OPTIONS = [
    {},
    dict(causal=True),
    dict(window=(9, 0)),
    dict(softcap=3.0, sinks=np.array([0.5, 0.1, -1, 2], np.float32)),
    dict(alibi_slopes=np.array([0.5, 0.25, 0.1, 1], np.float32), causal=True),
    dict(dropout_p=0.3, seed=7),
    dict(mask_mod=lambda b, h, i, j: (i + j) % 5 != 0, score_mod=lambda s, b, h, i, j: s * 0.5 + 0.01 * (i - j)),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "-".join(x) or "plain")
@pytest.mark.parametrize("new", [0, 1, 3])
def test_every_option(rung, options, new):
    if rung.slow and new != 1 and set(options) - {"causal"}:
        pytest.skip("with one new key in the simulator; all pairs on a CPU and on a GPU")
    lengths = (13, 40, 3) if rung.slow else (13, 300, 3, 1300)
    cached = lay(problem(rung, lengths, seqlen_q=max(new, 1), **options), "table", page=5, new=new)
    o, lse, moved = cached.run(rung)
    right = numba_flash.attention(**cached.case.arguments(), return_lse=True, kernel="reference")
    room = 64 * testing.EPS[cached.case.dtype]
    assert np.allclose(o.astype(float), right.o.astype(float), rtol=room, atol=room)
    assert np.allclose(lse, right.lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "by_slots"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in KINDS[1:])]
)
def test_new_keys_are_written_to_their_places_alone(rung, kind, by_slots):
    cached = lay(problem(rung, (7, 12, 30), seqlen_q=2), kind, page=4, new=2, by_slots=by_slots)
    whole = lay(cached.case, kind, page=4, new=0)
    before = [cached.given[name].copy() for name in ("k_cache", "v_cache")]
    _, _, moved = check(rung, cached)
    for name, old in zip(("k_cache", "v_cache"), before, strict=True):
        after = rung.back(moved[name])
        assert same_bits(after, whole.given[name])  # NaN where no sequence has a key
        assert not same_bits(after, old)


def test_negative_slots_and_rows_of_padding_write_nothing(rung):
    cached = lay(problem(rung, (7, 12), seqlen_q=1), "table", page=4, new=1, by_slots=True)
    given = cached.given
    given["slots"][:] = -1
    given["seqlens_k"][1] = -1
    given["page_table"][1] = -1
    before = given["k_cache"].copy()
    given["k_cache"][...] = np.where(np.isnan(before), 0, before)  # key 6 is read, and was not written
    o, lse, moved = cached.run(rung)
    assert same_bits(rung.back(moved["k_cache"]), np.where(np.isnan(before), 0, before).astype(before.dtype))
    assert (o[1] == 0).all() and np.isneginf(lse[1]).all() and np.isfinite(lse[0]).all()


def test_rows_of_padding_have_their_sink(rung):
    cached = lay(problem(rung, (7, 0), sinks=np.arange(4, dtype=np.float32)), "table", page=4)
    cached.given["seqlens_k"][1] = -1
    o, lse, _ = cached.run(rung)
    assert (o[1] == 0).all() and np.allclose(lse[1, :, 0], np.arange(4))


def test_pages_that_a_window_has_left_behind_may_be_gone(rung):
    cached = lay(problem(rung, (40, 33), window=(5, 0)), "table", page=4)
    expected = check(rung, cached)
    cached.given["page_table"][0, : 34 // 4] = -1
    cached.given["page_table"][1, : 27 // 4] = 10**9
    o, lse, _ = cached.run(rung)
    assert same_bits(o, expected[0]) and same_bits(lse, expected[1])


def bits_of(rung, lengths, seqlen_q=1, order=None, page=None, kind="table", **options):
    """(o, lse) of the sequences of these lengths."""
    cached = lay(
        problem(rung, lengths, seqlen_q, seqlen_k=options.pop("seqlen_k", None), **options), kind, page=page or 3
    )
    return cached.run(rung)[:2]


@pytest.mark.parametrize("seqlen_q", [1, 5])
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(300, 0))], ids=str)
def test_a_sequence_has_the_same_bits_in_any_batch_and_order_and_pages(rung, seqlen_q, options):
    if rung.slow and (seqlen_q == 1) != bool(options.get("causal")):
        pytest.skip("each of these once in the simulator; all pairs on a CPU and on a GPU")
    if rung.slow and "window" in options:
        options = dict(window=(9, 0))
    own, others = (20, (3, 31)) if rung.slow else (1300, (7, 2600, 1, 300))
    alone = bits_of(rung, (own,), seqlen_q, **options)
    batches = [(own, *others), (*others, own), (own,) * 3]
    if not rung.slow:
        batches += [(own, *range(1, 64)), (*range(5, 36), own)]
    for lengths in batches:
        o, lse = bits_of(rung, lengths, seqlen_q, **options)
        b = lengths.index(own)
        assert same_bits(o[b], alone[0][0]) and same_bits(lse[b], alone[1][0])
    pages = ((1, "csr"), (16, "table"), (1, "contiguous"), (1, "entries"), (256, "table"), (64, "csr"))
    for page, kind in pages[: 4 if rung.slow else 6]:  # four in the simulator, where a sequence has 20 keys
        o, lse = bits_of(rung, (own,), seqlen_q, page=page, kind=kind, **options)
        assert same_bits(o, alone[0]) and same_bits(lse, alone[1]), (page, kind)


def ragged(rung, pairs, page=4, new=False, **options):
    """Sequences (queries, keys) as arguments with cu_seqlens_q; new: the last keys come with the queries."""
    parts = [
        lay(problem(rung, (keys,), queries), "csr", page=page, new=queries if new else 0) for queries, keys in pairs
    ]
    given = {}
    for name in ("q", "k_new", "v_new"):
        rows = [part.given[name][0].swapaxes(0, 1) for part in parts if name in part.given]
        if rows:
            given[name] = np.concatenate(rows)
    counts = np.cumsum([0, *(len(part.given["k_cache"]) for part in parts)])
    for name in ("k_cache", "v_cache"):
        given[name] = np.concatenate([part.given[name] for part in parts])
    given["page_indices"] = np.concatenate(
        [part.given["page_indices"] + first for part, first in zip(parts, counts, strict=False)]
    ).astype(np.int32)
    given["page_indptr"] = np.cumsum([0, *(len(part.given["page_indices"]) for part in parts)]).astype(np.int32)
    given["seqlens_k"] = np.concatenate([part.given["seqlens_k"] for part in parts])
    given["cu_seqlens_q"] = np.cumsum([0, *(queries for queries, _ in pairs)]).astype(np.int32)
    return Cached(None, given | options), parts


@pytest.mark.parametrize("new", [False, True])
def test_sequences_with_different_numbers_of_queries(rung, new):
    """Prompts beside steps of generation: each has the bits that it has alone."""
    pairs = [(1, 30), (3, 3), (0, 5), (1, 1), (9, 20)] if rung.slow else [(1, 900), (70, 70), (0, 5), (3, 300), (1, 1)]
    cached, _ = ragged(rung, pairs, new=new, causal=True)
    o, lse, _ = cached.run(rung)
    first = 0
    for queries, keys in pairs:
        case = problem(rung, (keys,), queries, causal=True)
        alone, alone_lse, _ = lay(case, "csr", page=4, new=queries if new else 0).run(rung)
        rows = slice(first, first + queries)
        testing.check(case, o[rows].swapaxes(0, 1)[None], lse[None, :, rows], rung.kernel)
        assert same_bits(o[rows].swapaxes(0, 1)[None], alone) and same_bits(lse[None, :, rows], alone_lse)
        first += queries


def test_rows_of_no_sequence_are_written(rung):
    cached, _ = ragged(rung, [(2, 9), (1, 4)], causal=True)
    expected = cached.run(rung)
    given = cached.given
    filler = np.full((3, *given["q"].shape[1:]), np.nan, given["q"].dtype)
    given["q"] = np.concatenate([filler[:1], given["q"], filler])
    given["cu_seqlens_q"] = given["cu_seqlens_q"] + np.int32(1)
    o, lse, _ = cached.run(rung)
    assert same_bits(o[1:4], expected[0]) and same_bits(lse[:, 1:4], expected[1])
    assert (o[[0, 4, 5, 6]] == 0).all() and np.isneginf(lse[:, [0, 4, 5, 6]]).all()


def rotated(x, positions, cos, sin, interleaved):
    """As the definition has it: each pair as a complex number, times cos + i sin."""
    half = cos.shape[1]
    turned = np.array(x, np.float64)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        pair = (x[..., a] + 1j * x[..., b]) * (cos[positions, i] + 1j * sin[positions, i])
        turned[..., a], turned[..., b] = pair.real, pair.imag
    return turned


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary_turns_queries_and_new_keys_by_their_positions(rung, interleaved, rotary_dim, causal, kind="table"):
    lengths, new = (9, 14), 2
    case = problem(rung, lengths, seqlen_q=2, causal=causal)
    angles = np.random.default_rng(1).standard_normal((20, rotary_dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    cached = lay(case, kind, page=4, new=new)
    cached.given |= dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)
    o, lse, moved = cached.run(rung)
    q, k = case.q.copy(), case.k.copy()
    for b, length in enumerate(lengths):
        at = np.arange(length - new, length)
        q[b] = rotated(case.q[b].astype(float), at, cos, sin, interleaved)
        k[b, :, at] = rotated(case.k[b][:, at].astype(float), at, cos, sin, interleaved).swapaxes(0, 1)
    # one rounding in the type of the sums, and one to q's dtype, of what is as large as q
    turned = testing.Case(q, k, case.v, case.options)
    right, right_lse = testing.oracle(turned)
    room = 64 * testing.EPS[case.dtype]
    assert np.allclose(o.astype(float), right, rtol=room, atol=room)
    assert np.allclose(lse, right_lse, rtol=room, atol=room)
    written = rung.back(moved["k_cache"])
    for b, length in enumerate(lengths):
        last = length - 1
        row = (
            written[b, :, last]
            if kind == "contiguous"
            else written[cached.given["page_table"][b, last // 4], :, last % 4]
        )
        expected = k[b, :, last].astype(float)
        assert np.allclose(row.astype(float), expected, rtol=4 * testing.EPS[case.dtype], atol=1e-2 * room)


@pytest.mark.parametrize("kind", ["contiguous", "table"])
@pytest.mark.parametrize("seqlen_q", [1, 2])
def test_latent_attention_whose_v_is_a_view_of_k(rung, kind, seqlen_q):
    """Head_dim 576 and 512, one KV head, as in DeepSeek's MLA."""
    lengths = (5, 9) if rung.slow else (70, 300)
    dims = (72, 64) if rung.slow else (576, 512)
    case = problem(rung, lengths, seqlen_q, heads=2, heads_kv=1, head_dim=dims[0], causal=True, scale=0.05)
    case.v = case.k[..., : dims[1]]
    cached = lay(case, kind, page=4, new=1)
    for name in ("v_cache", "v_new"):
        del cached.given[name]
    cached.given["v_cache"] = cached.given["k_cache"][..., : dims[1]]
    moved = cached.arguments(rung.move)
    moved["v_cache"] = moved["k_cache"][..., : dims[1]]
    with rung.skipping_refusals():
        o, lse = numba_flash.attention_kvcache(**moved, return_lse=True, kernel=rung.kernel)
    testing.check(case, rung.back(o), rung.back(lse), rung.kernel)


@pytest.mark.parametrize("lengths", [(), (0,), (-1,), (0, -1, 0)], ids=str)
def test_nothing_is_defined(rung, lengths):
    case = problem(rung, [max(n, 0) for n in lengths], seqlen_k=8)
    cached = lay(case, "table", page=4)
    cached.given["seqlens_k"] = np.array(lengths, np.int32)
    o, lse, _ = cached.run(rung)
    assert o.shape == case.q.shape and (o == 0).all() and np.isneginf(lse).all()
    assert np.asarray(lse).shape == case.q.shape[:3]


def test_a_page_may_be_a_part_of_a_larger_block(rung):
    """Blocks of 12 keys in memory, read as pages of 4: the table times 3, and the strides of a part."""
    cached = lay(problem(rung, (30, 7)), "table", page=12, form="hnd")
    expected = check(rung, cached)
    given = dict(cached.given)
    for name in ("k_cache", "v_cache"):
        x = given[name]
        given[name] = x.reshape(*x.shape[:2], 3, 4, -1).swapaxes(1, 2).reshape(-1, x.shape[1], 4, x.shape[3])
    table = given["page_table"]
    given["page_table"] = np.where((table < 0) | (table > 10**6), -1, table.astype(np.int64) * 3).astype(
        np.int32
    ).repeat(3, 1) + np.tile(np.arange(3, dtype=np.int32), table.shape[1])
    o, lse, _ = Cached(cached.case, given).run(rung)
    assert same_bits(o, expected[0]) and same_bits(lse, expected[1])


def test_generating_token_by_token_equals_all_at_once(rung):
    steps, heads, heads_kv, dim, page = (12 if rung.slow else 300), 2, 1, 8, 4
    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((1, n, steps, dim)).astype(rung.dtype) for n in (heads, heads_kv, heads_kv))
    pages = -(-steps // page)
    caches = [np.full((pages, heads_kv, page, dim), np.nan, rung.dtype) for _ in range(2)]
    table = generator.permutation(pages).astype(np.int32)[None]
    found, begin = [], 0
    for n in (steps - 5, 1, 1, 1, 1, 1):  # a prompt, and five tokens
        now = np.s_[:, :, begin : begin + n]
        given = dict(q=q[now], k_cache=caches[0], v_cache=caches[1], k_new=k[now], v_new=v[now], page_table=table)
        cached = Cached(None, given | dict(seqlens_k=np.array([begin], np.int32), causal=True))
        o, _, moved = cached.run(rung)
        caches = [rung.back(moved[name]) for name in ("k_cache", "v_cache")]
        found.append(o)
        begin += n
    case = testing.Case(q, k, v, dict(causal=True))
    testing.check(case, np.concatenate(found, 2), what=rung.kernel)


def sharing(rung, groups, seqlen_q=1, page=4, kind="table", new=0, **options):
    """Groups of (prefix, lengths of all its sequences): the first keys of these are one, in the same pages.
    -> (Cached, what says so)"""
    lengths = [length for _, own in groups for length in own]
    case = problem(rung, lengths, seqlen_q, salt=3, causal=True, **options)
    firsts, lens = np.zeros((2, len(lengths)), np.int32)
    b = 0
    for prefix, own in groups:
        firsts[b : b + len(own)], lens[b : b + len(own)] = b, prefix
        for x in (case.k, case.v):
            x[b : b + len(own), :, :prefix] = x[b, :, :prefix]
        b += len(own)
    cached = lay(case, kind, page=page, new=new)
    for b, (first, length) in enumerate(zip(firsts, lens, strict=True)):
        count = length // page
        if kind == "table":
            cached.given["page_table"][b, :count] = cached.given["page_table"][first, :count]
        else:
            numbers, begin = cached.given["page_indices"], cached.given["page_indptr"]
            numbers[begin[b] : begin[b] + count] = numbers[begin[first] : begin[first] + count]
    return cached, dict(prefix_of=firsts, prefix_lens=lens)


GROUPS = ((512, (700, 520, 600, 513)), (0, (40,)), (288, (300, 290)))


@pytest.mark.parametrize(("kind", "seqlen_q", "new"), [("table", 1, 0), ("csr", 2, 2)])
def test_a_prefix_that_sequences_share_changes_no_bits(rung, kind, seqlen_q, new):
    groups = ((256, (300, 259, 270)), (0, (20,))) if rung.slow else GROUPS
    cached, told = sharing(rung, groups, seqlen_q, page=16, kind=kind, new=new)
    alone, alone_lse, _ = check(rung, cached)
    cached.given |= told
    o, lse, _ = cached.run(rung)
    assert same_bits(o, alone) and same_bits(lse, alone_lse)


@st.composite
def drafts(draw, most=8):
    """Which of some speculative tokens each of them sees: itself and its ancestors in a random tree."""
    ancestors = np.eye(draw(st.integers(1, most)), dtype=bool)
    for token in range(1, len(ancestors)):
        parent = draw(st.integers(-1, token - 1))
        if parent >= 0:
            ancestors[token] |= ancestors[parent]
    return ancestors


@given(st.data())
def test_a_tree_of_speculative_tokens(rung, data):
    """Appended to pages; each sees the whole past and its ancestors. A row of padding has none."""
    ancestors = data.draw(drafts(3 if rung.slow else 8))
    count, most = len(ancestors), 20 if rung.slow else 600
    lengths = np.array(data.draw(st.lists(st.integers(0, most), min_size=1, max_size=2 if rung.slow else 4)), np.int32)
    of_each = data.draw(st.booleans())
    heads = dict(heads=1, heads_kv=1) if rung.slow else {}
    case = problem(rung, (lengths + count).tolist(), count, **heads)
    cached = lay(case, "table", page=data.draw(st.sampled_from([1, 4, 16])), new=count)
    if of_each:  # another tree for each sequence
        trees = np.stack([ancestors, *[data.draw(drafts(1)).repeat(count, 0).repeat(count, 1)] * (len(lengths) - 1)])
        cached.given |= dict(mask_mod=mods.trees, aux=(trees, lengths))
    else:
        trees = np.stack([ancestors] * len(lengths))
        cached.given |= dict(mask_mod=mods.tree, aux=(ancestors, lengths))
    o, lse, _ = cached.run(rung)
    seen = np.ones((len(lengths), 1, count, max(lengths) + count), bool)
    for b, start in enumerate(lengths):
        seen[b, 0, :, start : start + count] = trees[b]
    testing.check(testing.Case(case.q, case.k, case.v, case.options | dict(mask=seen)), o, lse, rung.kernel)
