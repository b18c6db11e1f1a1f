"""Caches on tensor cores, simulated: the kernel that shares a sequence's keys out (kernels/mma/decode.py)."""

import contextlib
import dataclasses

import numpy as np
import pytest
from contracts import forward, kvcache, suite
from contracts.forward import same_bits
from helpers.tile_rows import CHUNK
from hypothesis import given, reject, strategies as st

import numba_flash
from numba_flash import arrays, testing
from numba_flash.dispatch import kvcache as dispatch
from numba_flash.problem import kvcache as problem
from numba_flash.select import decode, forward_kernels

TestDecode = pytest.mark.slow(suite(kvcache))  # minutes; what is of this kernel alone is below
LENGTHS = (2 * CHUNK + 70, 0, CHUNK + 1, 1, CHUNK, CHUNK - 1)  # 3 chunks, none, and about one


class Rung(forward.Rung):
    """It refuses rows that are not contiguous: then another random problem is drawn."""

    @contextlib.contextmanager
    def skipping_refusals(self):
        try:
            with super().skipping_refusals():
                yield
        except NotImplementedError as refused:
            if "is not contiguous along dim" not in str(refused):
                raise
            reject()


@pytest.fixture(scope="session")
def rung():
    return Rung("mma", testing.rows_padded, tensor=True, tile=32, slow=True)


def of_blocks(monkeypatch, blocks, cached, rung):
    """(o, lse) where so many blocks run at a time."""
    with monkeypatch.context() as patch:
        patch.setattr(decode, "SIMULATED_BLOCKS", blocks)
        patch.setattr(dispatch, "_plans", {})
        return cached.run(rung)[:2]


# The window begins in the second of 5 chunks: there the tree is not that of the chunks that are left.
WINDOW = dict(causal=True, window=(3 * CHUNK - 68, 0), sinks=np.ones(2, np.float32))


MANY = dict(causal=True, window=(8 * CHUNK - 48, 0))  # chunks 1 to 9: of two groups of eight nodes


@pytest.mark.parametrize(
    ("lengths", "options", "blocks"),
    [(LENGTHS, {}, (2, 64)), ((4 * CHUNK + 6, CHUNK + 1, 1), WINDOW, (5, 64)), ((9 * CHUNK + 96,), MANY, (9,))],
    ids=["plain", "window", "many"],
)
def test_any_number_of_blocks_gives_the_same_bits(rung, monkeypatch, lengths, options, blocks):
    """A block takes more chunks if there are fewer blocks, and hands over fewer nodes: none of one block. Two large
    neighbours cancel, if they are joined first; otherwise what is joined with one of them loses its last bits."""
    case = kvcache.problem(rung, lengths, 2, heads=2, heads_kv=1, **options)
    first = 2 * CHUNK if options else 0
    case.q[...], case.v[0, :, first : first + CHUNK], case.v[0, :, first + CHUNK : first + 2 * CHUNK] = 0, 30000, -30000
    cached = kvcache.lay(case, "table", page=3)
    o, lse = of_blocks(monkeypatch, 1, cached, rung)
    testing.check(case, o, lse, "one block")
    for number in blocks:
        other, other_lse = of_blocks(monkeypatch, number, cached, rung)
        assert same_bits(other, o) and same_bits(other_lse, lse), number


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_so_it_is_in_more_than_16_bits(monkeypatch, dtype):
    """A lane has one row here, and numbers of O lie in panels."""
    own = dataclasses.replace(Rung("mma", testing.rows_padded, tensor=True, tile=32, slow=True), usual=dtype)
    case = kvcache.problem(
        own,
        (2 * CHUNK + 6, 0, CHUNK + 1),
        2,
        heads=2,
        heads_kv=1,
        head_dim=64,
        causal=True,
        sinks=np.ones(2, "float32"),
    )
    cached = kvcache.lay(case, "csr", page=5)
    o, lse = of_blocks(monkeypatch, 1, cached, own)
    testing.check(case, o, lse, dtype)
    other, other_lse = of_blocks(monkeypatch, 7, cached, own)
    assert same_bits(other, o) and same_bits(other_lse, lse)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_attention_with_few_queries_has_the_bits_of_a_cache(monkeypatch, dtype):
    monkeypatch.setattr(forward_kernels, "LEAST_KEYS", 4 * CHUNK)
    own = dataclasses.replace(Rung("mma", testing.rows_padded, tensor=True, tile=32, slow=True), usual=dtype)
    case = kvcache.problem(own, (4 * CHUNK + 76,), 1, heads=2, heads_kv=1, causal=True)
    options = case.options | dict(q_offset=4 * CHUNK + 75)
    o = own.back(numba_flash.attention(case.q, case.k, case.v, **options, kernel="mma"))
    assert same_bits(o, kvcache.lay(case, "table", page=16).run(own)[0])


# Lanes that have two rows, and one; and rows too wide to wait in registers, of which 15 leave room for one level in
# shared memory.
@pytest.mark.parametrize(
    ("queries", "head_dim", "in_registers", "fewer"),
    [(1, 16, True, (0, 1)), (1, 64, True, (0, 1)), (5, 176, False, (0,))],
)
def test_nodes_wait_in_shared_or_in_global_memory_with_the_same_bits(
    rung, monkeypatch, queries, head_dim, in_registers, fewer
):
    """Those of 6 chunks, on three levels."""
    case = kvcache.problem(rung, (5 * CHUNK + 20,), queries, heads=3, heads_kv=1, head_dim=head_dim, causal=True)
    cached = kvcache.lay(case, "table", page=16)
    config = numba_flash.explain(**cached.given, kernel="mma").config
    assert config.pair_registers == in_registers and config.stack_levels > max(fewer)
    o, lse = of_blocks(monkeypatch, 1, cached, rung)
    testing.check(case, o, lse, "in shared memory")
    for levels in fewer:
        monkeypatch.setattr(decode, "MOST_LEVELS", levels)
        monkeypatch.setattr(decode, "LEAST_LEVELS", levels)
        other, other_lse = of_blocks(monkeypatch, 1, cached, rung)
        assert same_bits(other, o) and same_bits(other_lse, lse), levels


def noted_counters(monkeypatch):
    """-> the counters of the launches to come"""
    counters, scratch = [], arrays.scratch

    def noted(like, shape, dtype, *more):
        made = scratch(like, shape, dtype, *more)
        counters.extend([made] if dtype == "uint32" else [])
        return made

    monkeypatch.setattr(arrays, "scratch", noted)
    return counters


def test_a_launch_leaves_its_counters_at_zero(rung, monkeypatch):
    """The next one counts from there."""
    counters = noted_counters(monkeypatch)
    for lengths in (LENGTHS, (0,), (CHUNK - 1,)):  # of several blocks, and of one
        of_blocks(monkeypatch, 3, kvcache.lay(kvcache.problem(rung, lengths, 1, heads=2, heads_kv=1)), rung)
    assert len(counters) == 3
    assert [list(arrays.host_view(x)) for x in counters] == [[0] * len(arrays.host_view(x)) for x in counters]


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (3, 16), (3, 64)])
def test_a_query_has_the_same_bits_beside_others(rung, heads, head_dim):
    """In tiles of 16, 32 and 64 rows, and in the second of two. At head_dim 64 a lane has one of few rows."""
    case = kvcache.problem(rung, (CHUNK + 44, 24), 24, heads=heads, heads_kv=1, head_dim=head_dim, causal=True)
    o, lse = kvcache.lay(case, "table", page=16).run(rung)[:2]
    testing.check(case, o, lse, "24 queries")
    for queries in (1, 7):
        last = testing.Case(case.q[:, :, -queries:], case.k, case.v, case.options)
        few, few_lse = kvcache.lay(last, "table", page=16).run(rung)[:2]
        assert same_bits(few, o[:, :, -queries:]) and same_bits(few_lse, lse[:, :, -queries:]), queries


def test_pages_of_any_size_have_the_bits_of_a_contiguous_cache(rung):
    case = kvcache.problem(rung, (CHUNK + 1, 0, 30), 1, heads=2, heads_kv=2)
    o, lse = kvcache.lay(case, "contiguous").run(rung)[:2]
    for page, kind, form in (
        (1, "table", "nhd"),
        (3, "csr", "hnd"),
        (16, "table", "one row"),
        (64, "csr", "alternate"),
    ):
        other, other_lse = kvcache.lay(case, kind, form, page).run(rung)[:2]
        assert same_bits(other, o) and same_bits(other_lse, lse), (page, kind, form)


def test_values_that_some_queries_do_not_see_may_be_nan(rung):
    case = kvcache.problem(rung, (40, CHUNK + 44), 3, causal=True)
    expected = kvcache.lay(case, "table", page=16).run(rung)[:2]
    case.v[0, :, 39], case.v[1, 1, CHUNK + 42 :] = np.nan, np.inf
    o, lse = kvcache.lay(case, "table", page=16).run(rung)[:2]
    assert np.isnan(o[0, :, 2]).all() and not np.isfinite(o[1, 2:, 1:]).any()
    room = 4 * testing.EPS[case.dtype]
    for rows in (np.s_[0, :, :2], np.s_[1, :2], np.s_[1, 2:, 0]):
        assert np.allclose(o[rows].astype(float), expected[0][rows].astype(float), rtol=room, atol=room)
    assert same_bits(lse, expected[1])


def test_pages_that_a_window_has_left_behind_may_be_another_s(rung):
    """With NaN in them, and with keys of a page that it has left in part."""
    cached = kvcache.lay(kvcache.problem(rung, (40, 33), window=(5, 0)), "table", page=4)
    expected = cached.run(rung)[:2]
    given = cached.given
    (nobodys, *_) = set(range(len(given["k_cache"]))) - set(given["page_table"].ravel().tolist())
    assert np.isnan(given["v_cache"][nobodys].astype(float)).all()
    left = given["page_table"][0, 34 // 4]  # of keys 32 to 35, of which the last query sees 34 and more
    given["page_table"][0, : 34 // 4] = given["page_table"][1, : 27 // 4] = nobodys
    for name in ("k_cache", "v_cache"):
        heads_first = given[name] if given.get("layout", "bhsd") == "bhsd" else given[name].swapaxes(1, 2)
        heads_first[left, :, : 34 % 4] = np.nan
    o, lse = cached.run(rung)[:2]
    assert same_bits(o, expected[0]) and same_bits(lse, expected[1])


@pytest.mark.parametrize(("queries", "kernel"), [(1, "decode"), (80, "mma")])
def test_explain_names_the_kernel_of_caches_or_why_it_is_not_taken(rung, queries, kernel):
    cached = kvcache.lay(kvcache.problem(rung, (3 * CHUNK, 80), queries, heads=1, heads_kv=1), "contiguous")
    found = numba_flash.explain(**cached.given, kernel="mma")
    assert found.kernel == "mma" and found.config.kernel == kernel and found.blocks == found.config.grid(found.problem)
    assert (f"a tree over chunks of {CHUNK}" in str(found)) == (kernel == "decode")
    assert ("up to 64 queries of the heads of a KV head, not 80" in str(found)) == (kernel == "mma")


SHARED = (
    (2 * CHUNK, (2 * CHUNK + 18, 3 * CHUNK - 68, 2 * CHUNK + 1)),
    (0, (3,)),
    (CHUNK, (CHUNK + 44, CHUNK + 14)),
)  # groups: their prefix, and the lengths of sequences


def without_checks(monkeypatch):
    """The host can see these arrays, and would refuse some; it cannot see those on a GPU."""
    monkeypatch.setattr(problem, "_check_shared", lambda *_: None)


@pytest.mark.parametrize(("queries", "kind", "numbers"), [(1, "table", (1, 2, 64)), (2, "csr", (2,))])
def test_a_shared_prefix_has_the_same_bits_whatever_is_a_part(rung, monkeypatch, queries, kind, numbers):
    """Of one block, and of so many that each chunk is a part. Two large neighbours cancel, if they are joined first."""
    cached, told = kvcache.sharing(rung, SHARED, queries, page=16, kind=kind, heads=2, heads_kv=1)
    cached.case.q[...] = 0
    for name, value in (("v_cache", 30000),):
        x = cached.given[name]
        pages = cached.given["page_table"][0] if kind == "table" else cached.given["page_indices"]
        x[pages[: CHUNK // 16]], x[pages[CHUNK // 16 : CHUNK // 8]] = value, -value
    expected = of_blocks(monkeypatch, 1, cached, rung)
    cached.given |= told
    for blocks in numbers:
        found = of_blocks(monkeypatch, blocks, cached, rung)
        assert all(map(same_bits, found, expected)), blocks


def test_the_pages_of_a_shared_prefix_are_those_of_its_first_sequence(rung, monkeypatch):
    """Others are not read: so K and V are read once."""
    cached, told = kvcache.sharing(rung, SHARED, 1, page=16, heads=2, heads_kv=1)
    expected = cached.run(rung)[:2]
    table = cached.given["page_table"]
    nobodys = np.setdiff1d(np.arange(len(cached.given["k_cache"])), table)[0]
    for b, chunks in ((1, 2), (2, 2), (5, 1)):
        table[b, : chunks * CHUNK // 16] = nobodys
    cached.given |= told
    without_checks(monkeypatch)
    found = of_blocks(monkeypatch, 64, cached, rung)
    assert all(map(same_bits, found, expected))


@pytest.mark.parametrize(
    ("options", "fact"),
    [({}, "read once for up to 4 sequences"), (dict(window=(9, 0)), "each sequence reads its own: window: scores")],
    ids=["shared", "not shared"],
)
def test_explain_says_whether_a_prefix_is_shared(rung, options, fact):
    cached, told = kvcache.sharing(rung, ((32, (40, 36)), (16, (20,))), 1, heads=4, heads_kv=1)
    given = cached.given | told | options
    assert fact in str(numba_flash.explain(**given, kernel="mma"))
    if options:
        assert "prefixes" not in str(numba_flash.explain(**cached.given | options, kernel="mma"))


NUMBERS = st.integers(-3, 9)


@pytest.mark.slow
@given(st.data())
def test_any_numbers_of_a_prefix_are_taken_on_a_device(rung, data):
    """All sequences have the same keys, so that whatever is said of them is true: the bits stay, and so does 0 in each
    counter. Some have no keys, or no queries."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        batch = data.draw(st.integers(1, 7))
        lengths = data.draw(
            st.lists(
                st.sampled_from([-1, 0, 1, CHUNK - 56, CHUNK, CHUNK + 1, 2 * CHUNK + 8]), min_size=batch, max_size=batch
            )
        )
        queries = data.draw(st.lists(st.integers(0, 2), min_size=batch, max_size=batch))
        case = kvcache.problem(rung, [2 * CHUNK + 8], heads=2, heads_kv=1)
        cached = kvcache.lay(case, "table", page=16)
        given = cached.given
        given["q"] = np.random.default_rng(batch).standard_normal((sum(queries), 2, 16)).astype(case.q.dtype)
        given |= dict(seqlens_k=np.array(lengths, np.int32), causal=True, max_seqlen_q=2)
        given |= dict(
            page_table=np.repeat(given["page_table"], batch, 0), cu_seqlens_q=np.cumsum([0, *queries], dtype=np.int32)
        )
        blocks = data.draw(st.sampled_from([1, 3, 64]))
        expected = of_blocks(monkeypatch, blocks, cached, rung)
        firsts = data.draw(st.lists(NUMBERS, min_size=batch, max_size=batch))
        lens = data.draw(
            st.lists(
                st.sampled_from([-9, 0, CHUNK - 1, CHUNK, CHUNK + 44, 2 * CHUNK, 9999]), min_size=batch, max_size=batch
            )
        )
        given |= dict(prefix_of=np.array(firsts, np.int32), prefix_lens=np.array(lens, np.int32))
        without_checks(monkeypatch)
        counters = noted_counters(monkeypatch)
        found = of_blocks(monkeypatch, blocks, cached, rung)
        assert all(map(same_bits, found, expected))
        assert not any(arrays.host_view(x).any() for x in counters)
