"""A step of generation whose cache is divided among ranks that are threads: its results beside those of one call."""

import numpy as np
import pytest
from helpers.ranks import Threads

import numba_flash
from numba_flash.distributed import context_parallel_attention_kvcache

SINKS = np.linspace(-1, 2, 4).astype("float32")
CASES = {  # ranks, share, keys of each sequence, more
    "causal": (2, 1024, (2048, 1500, 1024, 3, -1), dict(causal=True)),
    "a leaf for each rank, sinks": (3, 256, (768, 700, 256, 257, 0, -1), dict(causal=True, sinks=SINKS)),
    "window, softcap": (4, 512, (2048, 1500, 1024, 3), dict(window=(600, 0), softcap=5.0)),
    "alibi": (4, 256, (1000, 300), dict(seqlen_q=5, causal=True, alibi_slopes=np.abs(SINKS))),
    "panels of rows": (2, 512, (1024, 30), dict(seqlen_q=20, causal=True)),
    "float16": (2, 2048, (4096, 3000), dict(seqlen_q=2, causal=True, dtype="float16")),
    "float64, an offset": (2, 2048, (4096, 3000), dict(seqlen_q=2, causal=True, dtype="float64", q_offset=7)),
    "one rank": (1, 512, (512, 100), dict(causal=True)),
    "bshd": (2, 512, (1024, 600), dict(seqlen_q=3, causal=True, layout="bshd")),
}


def both(size, share, lengths, kernel="cpu", seqlen_q=1, dtype="float32", layout="bhsd", page=None, **options):
    """o and lse of each rank, and of one call."""
    generator = np.random.default_rng(0)
    batch, whole = len(lengths), share * size
    shapes = (batch, 4, seqlen_q, 16), (batch, 2, whole, 16), (batch, 2, whole, 24)
    q, k, v = (generator.standard_normal(shape).astype(dtype) for shape in shapes)
    for b, keys in enumerate(lengths):  # what nobody sees
        k[b, :, max(keys, 0) :], v[b, :, max(keys, 0) :] = np.nan, np.inf
    options |= dict(seqlens_k=np.array(lengths, "int32"), return_lse=True, kernel=kernel, layout=layout)
    turned = (lambda x: x.swapaxes(1, 2).copy()) if layout == "bshd" else (lambda x: x)
    expected = numba_flash.attention_kvcache(*map(turned, (q, k, v)), **options)

    def work(group):
        own = slice(group.rank * share, (group.rank + 1) * share)
        given, more = [q, k[:, :, own].copy(), v[:, :, own].copy()], {}
        if page is not None:
            given[1:], more["page_table"] = in_pages(given[1:], page)
        return context_parallel_attention_kvcache(*map(turned, given), group, **options, **more)

    return Threads(size).run(work), expected


def in_pages(caches, page):
    """Caches (batch, heads, keys, dim) as pages in another order, and their table."""
    batch, _, keys, _ = caches[0].shape
    table = np.random.default_rng(1).permutation(batch * keys // page).astype("int32").reshape(batch, -1)
    made = []
    for x in caches:
        pages = np.empty((table.size, x.shape[1], page, x.shape[3]), x.dtype)
        cut = x.reshape(batch, x.shape[1], -1, page, x.shape[3]).transpose(0, 2, 1, 3, 4)
        pages[table] = cut
        made.append(pages)
    return made, table


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_have_the_bits_of_one_process(name):
    size, share, lengths, options = CASES[name]
    found, expected = both(size, share, lengths, **options)
    for o, lse in found:
        np.testing.assert_array_equal(o, expected.o)
        np.testing.assert_array_equal(lse, expected.lse)


def test_pages():
    found, expected = both(2, 512, (1024, 700, 512, 1), causal=True, page=64)
    for o, lse in found:
        np.testing.assert_array_equal(o, expected.o)
        np.testing.assert_array_equal(lse, expected.lse)


@pytest.mark.parametrize("name", ["a leaf for each rank, sinks", "bshd"])
def test_kernels_without_nodes_are_close(name):
    size, share, lengths, options = CASES[name]
    found, expected = both(size, share, lengths, kernel="reference", **options)
    for o, lse in found:
        np.testing.assert_allclose(o, expected.o, 1e-5, 1e-6)
        np.testing.assert_allclose(lse, expected.lse, 1e-5, 1e-6)


def test_one_exchange_of_a_node_for_each_row():
    """However many keys there are."""
    threads, cache = Threads(2), np.zeros((3, 2, 2048, 16), "float32")
    q, lengths = np.zeros((3, 4, 1, 16), "float32"), np.array([4096, 7, 2048], "int32")
    call = lambda group: context_parallel_attention_kvcache(  # noqa: E731
        q, cache, cache, group, seqlens_k=lengths, kernel="cpu"
    )
    threads.run(call)
    assert threads.moved == [4 + 3 * 4 * (16 + 2) * 4] * 2, "and a number that says that all ranks ask for the same"


@pytest.mark.parametrize("share", [128, 300, 768])
def test_shares_that_are_no_node_are_refused(share):
    with pytest.raises(ValueError, match=f"share must be 256 times a power of two, .* not {share}"):
        both(2, share, (5,))


def test_what_ranks_cannot_serve_is_refused():
    group, x = object(), np.zeros((1, 1, 256, 8), "float32")
    given = q, k, v, _ = x[:, :, :1], x, x, group
    lengths = np.array([5], "int32")
    with pytest.raises(
        NotImplementedError, match="k_new is not taken where a cache is divided among ranks: use a copy"
    ):
        context_parallel_attention_kvcache(*given, seqlens_k=lengths, k_new=q, v_new=q)
    with pytest.raises(TypeError, match="unexpected keyword argument 'flavour'"):
        context_parallel_attention_kvcache(*given, seqlens_k=lengths, flavour=1)
