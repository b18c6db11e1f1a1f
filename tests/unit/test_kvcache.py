"""Caches on the oracle and on the CPU rung, what a caller may get wrong, and the signatures of other libraries."""

import math

import numpy as np
import pytest
from contracts import forward, kvcache, suite

import numba_flash
from numba_flash import testing
from numba_flash.compat import flash_attn, flashinfer
from numba_flash.machine import threads

TestKvcache = suite(kvcache)
CPU = forward.Rung("cpu")

Q = np.zeros((2, 4, 1, 8), np.float32)
CACHE = np.zeros((2, 2, 10, 8), np.float32)
PAGES = np.zeros((6, 2, 4, 8), np.float32)
NEW = np.zeros((2, 2, 1, 8), np.float32)
LENGTHS = np.array([3, 9], np.int32)
TABLE = np.array([[0, 1, 2], [3, 4, 5]], np.int32)
COS = np.zeros((10, 4), np.float32)
PAGED = dict(k_cache=PAGES, v_cache=PAGES, page_table=TABLE)
ROTARY = dict(rotary_cos=COS, rotary_sin=COS, rotary_interleaved=False)
APPENDED = dict(k_new=NEW, v_new=NEW)
FIRSTS = np.zeros(2, np.int32)
SHARED = PAGED | dict(page_table=np.array([[0, 1, 2], [0, 4, 5]], np.int32), prefix_of=FIRSTS, prefix_lens=FIRSTS + 3)


def called(q=Q, k_cache=CACHE, v_cache=CACHE, seqlens_k=LENGTHS, kernel="reference", **options):
    copies = {name: x.copy() for name, x in (("k_cache", k_cache), ("v_cache", v_cache))}
    return numba_flash.attention_kvcache(q, **copies, seqlens_k=seqlens_k, kernel=kernel, **options)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (dict(seqlens_k=None), TypeError, "seqlens_k must be an int32 array"),
        (dict(seqlens_k=LENGTHS.astype(np.int64)), TypeError, "seqlens_k must be int32, not int64; .*astype"),
        (dict(seqlens_k=LENGTHS[:1]), ValueError, r"seqlens_k must have shape \(batch,\) = \(2,\), not \(1,\)"),
        (dict(seqlens_k=np.array([3, 11], np.int32)), ValueError, r"seqlens_k must lie in 0 to the room .*\[10, 10\]"),
        (dict(seqlens_k=np.array([-2, 1], np.int32)), ValueError, r"or be -1, a row of padding, not \[-2, 1\]"),
        (APPENDED | dict(seqlens_k=np.array([10, 1], np.int32)), ValueError, r"\[9, 9\]"),
        (dict(k_cache=CACHE.astype(np.float64)), TypeError, "k_cache must be float32 like q, not float64"),
        (dict(k_cache=CACHE[..., :7]), ValueError, "head_dim of q and k_cache must be the same, not 8 and 7"),
        (dict(v_cache=CACHE[:, :1]), ValueError, "k_cache and v_cache must have one shape but for head_dim"),
        (dict(k_cache=PAGES, v_cache=PAGES), ValueError, "k_cache has 6 batch entries and q 2: .*cache_batch_idx"),
        (dict(q=Q[0]), ValueError, r"q must have 4 dimensions \(batch, heads, seqlen, head_dim\)"),
        (PAGED | dict(page_table=TABLE[:1]), ValueError, r"page_table must have shape \(batch, pages of a sequence\)"),
        (PAGED | dict(page_table=TABLE.astype(np.int64)), TypeError, "page_table must be int32, not int64"),
        (PAGED | dict(page_table=TABLE - 1), ValueError, r"the pages of sequence 0, keys 0 to 2, .*0 to 5, not \[-1\]"),
        (PAGED | dict(page_table=TABLE + 1), ValueError, r"the pages of sequence 1, keys 0 to 8, .*\[4, 5, 6\]"),
        (PAGED | dict(page_indptr=LENGTHS), TypeError, "page_indptr and page_indices belong together"),
        (PAGED | dict(cache_batch_idx=LENGTHS), ValueError, "page_table and cache_batch_idx both say"),
        (dict(cache_batch_idx=np.array([0, 2], np.int32)), ValueError, "the pages of sequence 1"),
        (dict(k_new=NEW), TypeError, "k_new was given without v_new"),
        (dict(v_new=NEW), TypeError, "v_new was given without k_new"),
        (dict(k_new=NEW[:1], v_new=NEW[:1]), ValueError, r"k_new must have shape \(2, 2, 1, 8\), not \(1, 2, 1, 8\)"),
        (APPENDED | dict(slots=np.zeros((2, 1), np.float32)), TypeError, "slots must be int32 or int64, not float32"),
        (APPENDED | dict(slots=np.full((2, 1), 20)), ValueError, "slots must lie below 20"),
        (ROTARY | dict(rotary_sin=None), TypeError, "rotary_cos and rotary_sin belong together"),
        (ROTARY | dict(rotary_interleaved=None), TypeError, "rotary_interleaved must be True .*libraries differ"),
        (dict(rotary_interleaved=True), TypeError, "rotary_interleaved was given without"),
        (ROTARY | dict(rotary_cos=COS[:8], rotary_sin=COS[:8]), ValueError, "has 8 positions, and position 8 is asked"),
        (ROTARY | dict(rotary_cos=np.zeros((9, 5), np.float32)), ValueError, "must be alike"),
        (SHARED | dict(prefix_lens=None), TypeError, "prefix_of and prefix_lens belong together"),
        (SHARED | dict(prefix_of=FIRSTS.astype(np.int64)), TypeError, "prefix_of must be int32, not int64"),
        (SHARED | dict(prefix_lens=FIRSTS[:1]), ValueError, r"prefix_lens must have shape \(batch,\) = \(2,\), not"),
        (dict(prefix_of=FIRSTS, prefix_lens=FIRSTS), ValueError, "prefix_of says .* batch entries of their own"),
        (SHARED | dict(prefix_of=FIRSTS + 2), ValueError, r"prefix_of\[0\] must be 0 or -1, or a sequence before it"),
        (SHARED | dict(prefix_lens=FIRSTS + 4), ValueError, r"prefix_lens\[1\] must lie in 0 to 3, .*, not 4"),
        (SHARED | dict(page_table=TABLE), ValueError, r"sequences 0 and 1 .* the 3 keys .* not \[0\] and \[3\]"),
        (dict(max_seqlen_q=4), ValueError, "max_seqlen_q is a bound of the lengths in cu_seqlens_q"),
        (dict(score_mod=Q), TypeError, "score_mod must be a plain Python function or None, not array"),
        (dict(layout="shbd"), ValueError, 'layout must be "bhsd" or "bshd"'),
        (dict(out=Q), ValueError, "out shares memory with q"),
        (dict(kernel="mma", page_table=TABLE, k_cache=PAGES, v_cache=PAGES), NotImplementedError, "cannot run"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_is_said(wrong, error, message):
    with pytest.raises(error, match=message):
        called(**wrong)


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_out_is_written(kernel):
    cached = kvcache.lay(kvcache.problem(CPU, (7, 12)), page=4)
    expected = cached.run(forward.Rung(kernel))
    given = np.full_like(expected[0], np.nan), np.full_like(expected[1], np.nan)
    o, lse = numba_flash.attention_kvcache(**cached.given, out=given, return_lse=True, kernel=kernel)
    assert o is given[0] and lse is given[1]
    assert np.array_equal(o, expected[0]) and np.array_equal(lse, expected[1])
    alone = np.full_like(o, np.nan)
    assert numba_flash.attention_kvcache(**cached.given, out=alone, kernel=kernel) is alone
    assert np.array_equal(alone, o)


def test_a_cache_that_cannot_be_written_is_refused():
    cache = CACHE.copy()
    cache.flags.writeable = False
    with pytest.raises(ValueError, match="k_cache is read-only"):
        numba_flash.attention_kvcache(Q, cache, cache, seqlens_k=LENGTHS, **APPENDED)


def test_pages_farther_apart_than_32_bits_can_say(tmp_path):
    """Of a pool of 2^32 elements two pages are used: in a file that has no other blocks."""
    generator, apart = np.random.default_rng(0), 2**31 + 64
    pool = np.memmap(tmp_path / "pool", np.float16, "w+", shape=(2 * apart,))
    strides = (2 * apart, 2 * 64, 2 * 8, 2)
    pages = np.lib.stride_tricks.as_strided(pool, (2, 1, 8, 8), strides)
    small = generator.standard_normal((2, 1, 8, 8)).astype(np.float16)
    pages[:, :, :7] = small[:, :, :7]
    q = generator.standard_normal((1, 2, 1, 8)).astype(np.float16)
    rest = dict(page_table=np.array([[0, 1]], np.int32), k_new=small[1:, :, 7:], v_new=small[1:, :, 7:])
    pages[0, :, 7] = small[0, :, 7]
    rest["seqlens_k"] = np.array([15], np.int32)
    for kernel in ("reference", "cpu"):
        pages[1, :, 7] = 0
        o = numba_flash.attention_kvcache(q, pages, pages, kernel=kernel, **rest)
        assert np.array_equal(pages, small)
        copy = small.copy()
        assert np.array_equal(o, numba_flash.attention_kvcache(q, copy, copy, kernel=kernel, **rest))


@pytest.mark.parametrize("seqlen_q", [1, 8, 70])
def test_the_number_of_threads_changes_no_bits(seqlen_q, monkeypatch):
    cached = kvcache.lay(kvcache.problem(CPU, (4000, 9, 1300), seqlen_q, causal=True), page=16)
    found = []
    for count in (1, 2):
        monkeypatch.setattr(threads, "count", lambda count=count: count)
        found.append(cached.run(CPU)[:2])
    assert all(map(np.array_equal, *found))


def test_the_tree_of_leaves():
    """A row's sums are joined in the order of a tree over leaves of 256 keys, whatever a task's share of them is."""
    values = np.ones((1, 1, 4096, 1), np.float32)
    values[0, 0, :, 0] = np.random.default_rng(0).standard_normal(4096)
    q, k = np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1, 4096, 1), np.float32)
    o = numba_flash.attention(q, k, values, kernel="cpu")
    sums = []
    for leaf in values[0, 0, :, 0].reshape(16, 256):
        total = np.float32(0)
        for x in leaf:
            total = np.float32(total + x)
        sums.append(total)
    while len(sums) > 1:
        sums = [np.float32(one + other) for one, other in zip(sums[::2], sums[1::2], strict=True)]
    assert o[0, 0, 0, 0] == np.float32(sums[0] * np.float32(1 / np.float32(4096)))


# The signatures of other libraries.


def paged(lengths=(7, 12), heads=4, heads_kv=2, seqlen_q=1, new=0):
    """Pages as "NHD" has them, and what attention() gives."""
    rung = CPU
    case = kvcache.problem(rung, lengths, seqlen_q, heads, heads_kv, causal=True)
    given = kvcache.lay(case, "csr", form="nhd", page=4, new=new).given
    given = {name: x.swapaxes(1, 2) if x.ndim == 4 else x for name, x in given.items() if isinstance(x, np.ndarray)}
    return case, given, *testing.oracle(case)


def near(found, expected):
    return np.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_flashinfer_decodes_over_pages():
    case, given, o, lse = paged()
    last = (given["seqlens_k"] - 1) % 4 + 1
    where = given["page_indptr"], given["page_indices"], last.astype(np.int32)
    q, (k, v) = given["q"][:, 0], (given["k_cache"], given["v_cache"])
    found, found_lse = flashinfer.batch_decode_with_paged_kv_cache(q, (k, v), *where, return_lse=True)
    assert near(found, o[:, :, 0]) and near(found_lse * math.log(2), lse[:, :, 0])
    both = np.stack([k, v], 1)
    assert np.array_equal(flashinfer.batch_decode_with_paged_kv_cache(q, both, *where), found)
    hnd = both.swapaxes(2, 3)
    assert np.array_equal(flashinfer.batch_decode_with_paged_kv_cache(q, hnd, *where, "HND"), found)
    one = flashinfer.single_decode_with_kv_cache(q[1], case.k[1].swapaxes(0, 1), case.v[1].swapaxes(0, 1))
    assert np.array_equal(one, found[1])
    with pytest.raises(ValueError, match='kv_layout must be "NHD" or "HND"'):
        flashinfer.single_decode_with_kv_cache(q[0], k[0], v[0], "DHN")
    with pytest.raises(TypeError, match="kv_indices must be int32"):
        flashinfer.batch_decode_with_paged_kv_cache(q, (k, v), where[0], where[1].astype(np.int64), where[2])


def test_flashinfer_prefills_over_pages():
    case, given, o, lse = paged((7, 12), seqlen_q=3)
    last = ((given["seqlens_k"] - 1) % 4 + 1).astype(np.int32)
    q = given["q"].reshape(6, 4, 16)
    found, found_lse = flashinfer.batch_prefill_with_paged_kv_cache(
        q, (given["k_cache"], given["v_cache"]), np.array([0, 3, 6], np.int32), given["page_indptr"],
        given["page_indices"], last, causal=True, return_lse=True,
    )  # fmt: skip
    assert near(found.reshape(2, 3, 4, 16).swapaxes(1, 2), o)
    assert near(found_lse.reshape(2, 3, 4).swapaxes(1, 2) * math.log(2), lse)


@pytest.mark.parametrize("new", [0, 1, 3])
def test_flash_attn_with_kvcache(new):
    case = kvcache.problem(CPU, (7, 12), max(new, 1), causal=True)
    given = {n: x for n, x in kvcache.lay(case, "table", page=4, new=new).given.items() if isinstance(x, np.ndarray)}
    o, lse = testing.oracle(case)
    named = {name: given.get(name).swapaxes(1, 2) if new else None for name in ("k_new", "v_new")}
    arrays = [given[name].swapaxes(1, 2) for name in ("q", "k_cache", "v_cache")]
    found, found_lse = flash_attn.flash_attn_with_kvcache(
        *arrays, named["k_new"], named["v_new"], cache_seqlens=given["seqlens_k"], block_table=given["page_table"],
        causal=True, return_softmax_lse=True,
    )  # fmt: skip
    assert near(found.swapaxes(1, 2), o) and near(found_lse, lse)


def test_flash_attn_with_kvcache_and_its_other_arguments():
    case = kvcache.problem(CPU, (9, 9))
    q, k, v = (x.swapaxes(1, 2) for x in (case.q, case.k, case.v))
    call = flash_attn.flash_attn_with_kvcache
    assert near(call(q, k, v).swapaxes(1, 2), testing.oracle(case)[0])
    assert np.array_equal(call(q, k, v, cache_seqlens=9), call(q, k, v))
    whole = call(q[:, :], k[:, 2:], v[:, 2:])
    assert near(call(q, k, v, cache_leftpad=np.array([2, 2], np.int32)), whole)
    index = np.array([1, 0], np.int32)
    assert np.array_equal(call(q, k[index], v[index], cache_batch_idx=index), call(q, k, v))
    with pytest.raises(TypeError, match="cache_seqlens must be given with k and v"):
        call(q, k.copy(), v.copy(), k[:, :1], v[:, :1])
    with pytest.raises(TypeError, match="cache_seqlens must be int32"):
        call(q, k, v, cache_seqlens=np.array([9, 9]))
    two = np.concatenate([q, q], 1)
    cos = np.ones((20, 8), np.float32)
    with pytest.raises(NotImplementedError, match="rotary_cos with 2 queries and 2 new keys, causal=False"):
        call(two, k.copy(), v.copy(), k[:, :2], v[:, :2], cos, cos, cache_seqlens=5)


def of_one_memory(*shapes):
    """Arrays that begin at one address."""
    memory = np.zeros(max(math.prod(shape) for shape in shapes), np.float32)
    return [memory[: math.prod(shape)].reshape(shape) for shape in shapes]


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_what_is_wrong_with_memory_is_said_before_anything_is_written(kernel):
    k_cache, v_cache = (np.arange(CACHE.size, dtype=np.float32).reshape(CACHE.shape) for _ in range(2))
    frozen, one_row = v_cache.copy(), np.lib.stride_tricks.as_strided(v_cache, v_cache.shape, (320, 0, 32, 4))
    frozen.flags.writeable = False
    out, lse = of_one_memory(Q.shape, (2, 4, 1))
    of_bias, bias = of_one_memory(Q.shape, (2, 4, 1, 10))
    odd = np.zeros(Q.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(Q.shape)
    for wrong, message in (
        (dict(v_cache=frozen), "v_cache is read-only"),
        (dict(v_cache=one_row), "v_cache has strides .*share one element"),
        (dict(k_new=k_cache[:, :, :1]), "k_cache shares memory with k_new"),
        (dict(v_new=v_cache[:, :, :1]), "v_cache shares memory with v_new"),
        (dict(q=k_cache.reshape(2, 4, 5, 8)[:, :, :1]), "k_cache shares memory with q"),
        (dict(v_cache=k_cache), "v_cache is a view of k_cache, and v_new would be written over k_new"),
        (dict(out=(out, lse), return_lse=True), "out shares memory with the lse of out"),
        (dict(out=of_bias, bias=bias), "out shares memory with bias"),
        (dict(q=odd), "q starts at address .*, not a multiple of its 4-byte elements"),
    ):
        given = dict(q=Q, k_cache=k_cache, v_cache=v_cache, k_new=NEW, v_new=NEW + 1) | wrong
        before = k_cache.copy(), v_cache.copy()
        with pytest.raises(ValueError, match=message):
            numba_flash.attention_kvcache(**given, seqlens_k=LENGTHS, kernel=kernel)
        assert np.array_equal(k_cache, before[0]) and np.array_equal(v_cache, before[1]), message


def test_what_is_refused_does_not_depend_on_earlier_calls():
    q, ends = Q[:, :, 0], np.array([0, 1, 2], np.int32)
    called(window=(1, 0))
    called(q=q, cu_seqlens_q=ends, max_seqlen_q=1)
    with pytest.raises(TypeError, match="window: left must be a whole number"):
        called(window=(1.0, 0))
    with pytest.raises(TypeError, match="max_seqlen_q must be a whole number"):
        called(q=q, cu_seqlens_q=ends, max_seqlen_q=True)


def test_an_empty_batch_of_rows_of_k_and_v_has_rotary():
    """A cache without elements begins where its view does."""
    rows = np.zeros((0, 2, 10, 16), np.float32)
    given = ROTARY | dict(rotary_interleaved=np.True_, k_new=NEW[:0], v_new=NEW[:0])
    o = numba_flash.attention_kvcache(Q[:0], rows[..., :8], rows[..., 8:], seqlens_k=LENGTHS[:0], **given)
    assert o.shape == (0, 4, 1, 8)


def test_what_is_wrong_is_said_by_flash_attn_with_kvcache():
    q, cache, new = (x.swapaxes(1, 2) for x in (Q, CACHE, NEW))
    two, short = np.array([2, 2], np.int32), np.array([2], np.int32)
    for wrong, error, message in (
        (dict(rotary_cos=COS, rotary_sin=COS), TypeError, "rotary_cos and rotary_sin were given without k and v"),
        (dict(rotary_sin=COS, k=new, v=new), TypeError, "rotary_cos and rotary_sin belong together"),
        (dict(cache_seqlens=2.0), TypeError, "cache_seqlens must be an int32 array .*, not 2.0"),
        (dict(cache_seqlens=True), TypeError, "cache_seqlens must be an int32 array .*, not True"),
        (dict(cache_seqlens=2**31), ValueError, "cache_seqlens must lie in 0 to"),
        (dict(cache_leftpad=short), ValueError, r"cache_leftpad must be an array \(batch,\) = \(2,\), not ndarray"),
        (dict(cache_leftpad=[1, 2]), ValueError, r"cache_leftpad must be an array .*, not \[1, 2\]"),
    ):
        with pytest.raises(error, match=message):
            flash_attn.flash_attn_with_kvcache(q, cache.copy(), cache.copy(), **dict(cache_seqlens=two) | wrong)
    of_numpy = flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=np.int64(2))
    assert np.array_equal(of_numpy, flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=two))


def test_what_is_wrong_is_said_by_flashinfer():
    q, pages, indptr, last = Q[:, :, 0], PAGES.swapaxes(1, 2), np.array([0, 1, 3], np.int32), np.array([2, 1], np.int32)
    indices = np.array([3, 1, 0], np.int32)
    for where, error, message in (
        ((indptr, indices, last[:1]), ValueError, r"kv_last_page_len must have shape \(batch,\) .*, not \(1,\) and"),
        (([0, 1, 3], indices, last), TypeError, r"kv_indptr must be an int32 array of 1 dimension, not \[0, 1, 3\]"),
    ):
        with pytest.raises(error, match=message):
            flashinfer.batch_decode_with_paged_kv_cache(q, (pages, pages), *where)
    right = dict(q=q, paged_kv_cache=(pages, pages), kv_indptr=indptr, kv_indices=indices, kv_last_page_len=last)
    for wrong, error, message in (
        (dict(q=None), ValueError, "q must be an array of 3 dimensions, not None"),
        (dict(paged_kv_cache=None), ValueError, r"paged_kv_cache must be \(pages, 2, ...\) .*, not None"),
        (dict(paged_kv_cache=(pages, None)), ValueError, "paged_kv_cache must be .* or a pair of 4, not .*, None"),
        (dict(kv_last_page_len=last - 2), ValueError, r"kv_last_page_len must lie in 1 to .*, 4, not \[0, -1\]"),
        (dict(kv_last_page_len=last + 3), ValueError, r"kv_last_page_len must lie in 1 to .*, 4, not \[5, 4\]"),
        (dict(window_left="a"), TypeError, "window_left must be a whole number, -1 for all keys, not 'a'"),
    ):
        with pytest.raises(error, match=message):
            flashinfer.batch_decode_with_paged_kv_cache(**right | wrong)
    with pytest.raises(ValueError, match="k must be an array of 3 dimensions, not None"):
        flashinfer.single_decode_with_kv_cache(q[0], None, pages[0])


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_a_query_before_the_first_key_has_no_rotary_unless_it_sees_nothing(kernel):
    q, lengths = np.repeat(Q, 3, 2), np.array([5, 1], np.int32)
    caches = CACHE.copy(), CACHE.copy()
    given = dict(seqlens_k=lengths, kernel=kernel, **ROTARY)
    for wrong in ({}, dict(window=(None, 1))):
        with pytest.raises(ValueError, match="sequence 1 has queries before its first key that see keys"):
            numba_flash.attention_kvcache(q, *caches, **given, **wrong)
    for right in (
        dict(causal=True),
        dict(seqlens_k=np.array([5, 0], np.int32)),
        dict(seqlens_k=np.array([5, -1], np.int32)),
    ):
        assert np.isfinite(numba_flash.attention_kvcache(q, *caches, **given | right)).all()
