"""How many query rows a block of wgmma takes at a time: the arithmetic, and what was fastest on an H200."""

import dataclasses
import heapq

import pytest
from helpers.machines import HOPPER, empty, problem
from hypothesis import given, strategies as st

from numba_flash.dispatch.launch import workspace
from numba_flash.problem.ranges import UNBOUNDED, key_tiles, row_keys
from numba_flash.select import cost_model
from numba_flash.select.around import epilogue
from numba_flash.select.cost_model import ENDS, same_tile_walk, tile_visits, wave_cost
from numba_flash.select.forward import select


def of(batch, heads, seqlen, head_dim=64, *, heads_kv=None, seqlen_k=None, **options):
    seqlen_k = seqlen if seqlen_k is None else seqlen_k
    q, k, v = (
        empty(batch, h or heads, n, head_dim) for h, n in ((heads, seqlen), (heads_kv, seqlen_k), (heads_kv, seqlen_k))
    )
    return problem(q=q, k=k, v=v, **options)


def one_after_the_other(lengths, multiprocessors):
    """Each, the longest first, to whoever is done first."""
    ends = [0.0] * multiprocessors
    for length in sorted(lengths, reverse=True):
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def walked(made, first, queries, tile_n):
    """By ranges.py: (begin, free, cut, end) of a tile of queries."""
    left, right = (UNBOUNDED if side is None else side for side in (made.left, made.right))
    last = min(first + queries, made.seqlen_q) - 1
    edges = [row_keys(made.q_offset + i, left, right, made.seqlen_k) for i in (first, last)]
    return key_tiles(*edges[0], *edges[1], tile_n)


@given(
    st.integers(1, 3), st.integers(1, 6), st.integers(1, 700), st.sampled_from([64, 128, 192]), st.integers(1, 20),
    st.booleans(), st.sampled_from([None, (70, 0), (300, None)]), st.sampled_from([0, -130, 50]),
)  # fmt: skip
def test_it_is_what_blocks_take_one_after_the_other(batch, heads, seqlen, queries, multiprocessors, causal, window, at):
    made = of(batch, heads, seqlen, causal=causal, window=window, q_offset=at)
    found = wave_cost(made, 1, queries, 128, multiprocessors)
    tiles = []
    for first in range(0, seqlen, queries):
        seen = [
            j // 128
            for i in range(first, min(first + queries, seqlen))
            for j in range(seqlen)
            if (made.left is None or j >= i + at - made.left) and (made.right is None or j <= i + at + made.right)
        ]
        tiles.append(ENDS + (max(seen) - min(seen) + 1 if seen else 1))
    lengths = tiles * batch * heads
    expected = one_after_the_other(lengths, multiprocessors)
    assert abs(found - expected) <= (1e-9 if min(tiles) == max(tiles) else max(tiles))
    assert found >= max(max(tiles), sum(lengths) / multiprocessors) - 1e-9
    assert tile_visits(made, queries, 128) == pytest.approx(sum(tiles))


@given(
    st.integers(1, 900), st.integers(0, 900), st.sampled_from([16, 64, 128, 192]), st.sampled_from([64, 96, 128]),
    st.sampled_from([None, 0, 64, 100, 128]), st.sampled_from([None, 0, 1, 64, 128]), st.integers(-4, 4),
    st.sampled_from([0, 1, 64]),
)  # fmt: skip
def test_parts_of_a_query_tile_see_the_same_key_tiles(seqlen_q, seqlen_k, queries, tile_n, left, right, blocks, more):
    made = of(1, 1, seqlen_q, seqlen_k=seqlen_k, window=(left, right), q_offset=64 * blocks + more)
    if not same_tile_walk(made, queries, tile_n):
        return
    for first in range(0, seqlen_q, queries):
        whole = walked(made, first, queries, tile_n)
        part = queries // 2
        while part > 1:
            for start in range(first, min(first + queries, seqlen_q), part):
                begin, *_, end = found = walked(made, start, part, tile_n)
                assert found == whole or begin == end  # rows that see no key walk none, and get zeros either way
            part //= 2


def test_parts_see_the_same_key_tiles_where_edges_meet():
    assert same_tile_walk(of(1, 1, 700, causal=True), 128, 128)
    assert same_tile_walk(of(1, 1, 700, causal=True, q_offset=256), 128, 128)
    assert same_tile_walk(of(1, 1, 700, window=(128, 0)), 128, 128)
    assert same_tile_walk(of(1, 1, 700, q_offset=3), 192, 128)
    assert not same_tile_walk(of(1, 1, 700, causal=True), 192, 128)
    assert not same_tile_walk(of(1, 1, 700, causal=True), 128, 64)
    assert not same_tile_walk(of(1, 1, 700, causal=True, q_offset=64), 128, 128)
    assert not same_tile_walk(of(1, 1, 700, window=(127, 0)), 128, 128)
    lengths = empty(1, dtype="int32")
    assert not same_tile_walk(of(1, 1, 700, causal=True, seqlens_k=lengths), 128, 128)


def test_of_long_sequences_some_tiles_are_looked_at(monkeypatch):
    found = [wave_cost(of(1, 8, 100_001, causal=True), 1, 128, 128, 132)]
    monkeypatch.setattr(cost_model, "SAMPLES", 10**9)
    found.append(wave_cost(of(1, 8, 100_001, causal=True), 1, 128, 128, 132))
    assert found[0] == pytest.approx(found[1], rel=0.02)


def test_without_queries_a_tile_is_chosen_all_the_same():
    for made in (of(2, 2, 0), of(2, 2, 0, causal=True), of(0, 2, 70), of(2, 2, 70, seqlen_k=0)):
        assert select(made, HOPPER, "wgmma").config.tile_m in (64, 128, 192)


# What was fastest of 64, 128 and 192 rows, by 5 % and more, on an H200, float16.
@pytest.mark.parametrize(
    ("batch", "heads", "seqlen", "head_dim", "causal", "rows"),
    [
        (1, 8, 512, 64, False, 64), (1, 8, 1024, 64, True, 64), (1, 8, 2048, 64, False, 128),
        (1, 16, 1024, 64, False, 128), (1, 32, 1024, 64, True, 128), (1, 32, 2048, 64, False, 192),
        (16, 32, 256, 64, False, 128), (64, 32, 256, 64, True, 128), (1, 12, 1500, 64, False, 192),
        (1, 32, 4096, 64, True, 192), (24, 32, 640, 64, True, 128), (16, 32, 1280, 64, False, 192),
        (40, 32, 384, 64, True, 128), (8, 32, 1100, 64, False, 192), (1, 8, 1024, 128, False, 64),
        (1, 8, 2048, 128, False, 128), (1, 8, 2048, 128, True, 64), (1, 16, 1024, 128, False, 128),
        (1, 16, 1024, 128, True, 64), (2, 32, 1024, 128, True, 128), (32, 16, 192, 128, False, 128),
        (1, 8, 2048, 256, False, 128), (1, 16, 512, 256, False, 64), (1, 16, 2048, 256, True, 128),
    ],
)  # fmt: skip
def test_the_rows_that_were_fastest_are_taken(batch, heads, seqlen, head_dim, causal, rows):
    assert select(of(batch, heads, seqlen, head_dim, causal=causal), HOPPER, "wgmma").config.tile_m == rows


# A row's bits must not depend on its batch neighbours, so nothing that they depend on may. Full; causal, aligned and
# not; a window; lengths; heads that share a tile. Few heads with many keys have parts.
@pytest.mark.parametrize("options", [
    {}, dict(causal=True), dict(causal=True, q_offset=3), dict(window=(70, 9)), dict(softcap=3.0), dict(scale=0.0),
    dict(seqlens_k=empty(1, dtype="int32")), dict(causal=True, heads_kv=1),
], ids=range(8))  # fmt: skip
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 160, 192, 200, 256])
def test_batch_entries_decide_on_rows_alone(head_dim, options):
    for heads, seqlen in ((4, 1), (8, 100), (4, 700), (1, 2100), (16, 2100)):
        found = []
        for batch in (1, 7, 500):
            groups = {name: max(heads // 4, 1) for name in options if name == "heads_kv"}
            lengths = {name: empty(batch, dtype="int32") for name in options if name == "seqlens_k"}
            made = of(batch, heads, seqlen, head_dim, **options | groups | lengths)
            config = select(made, HOPPER, "wgmma").config
            if made.left is made.right is None or same_tile_walk(made, config.queries, config.tile_n):
                config = dataclasses.replace(config, tile_m=64)
            found.append(config)
        assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("heads", "seqlen_q", "seqlen_k", "causal", "parts"),
    [
        (8, 512, 8192, False, 4), (4, 256, 16384, False, 16), (2, 128, 32768, False, 16), (8, 1000, 4000, False, 1),
        (1, 2048, 2048, False, 2), (1, 2047, 2047, False, 1), (8, 2048, 2048, False, 1), (1, 16384, 16384, True, 4),
        (32, 2048, 2048, True, 1), (8, 8192, 8192, False, 1),
    ],
)  # fmt: skip
def test_keys_of_few_query_tiles_are_taken_in_parts(heads, seqlen_q, seqlen_k, causal, parts):
    """The batch size and the GPU decide on rows alone."""
    for batch in (1, 9):
        made = of(batch, heads, seqlen_q, 64, seqlen_k=seqlen_k, causal=causal)
        for multiprocessors in (78, 132):
            config = select(made, dataclasses.replace(HOPPER, multiprocessors=multiprocessors), "wgmma").config
            assert config.parts == parts
            (join,) = epilogue(config) if parts > 1 else (None,)
            if join is not None:
                assert join.grid(made) * parts == config.grid(made) and join.kernel == "wgmma_join"
                assert workspace([config, join], made)["acc_o"][0][0] == config.grid(made) * config.tile_m * 72
