"""How many query rows a block of wgmma takes at a time: the arithmetic, and what was fastest on an H200."""

import heapq
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import HOPPER, empty, problem

from numba_flash import makespan as makespan_module
from numba_flash.makespan import ENDS, makespan
from numba_flash.select import select


def of(batch, heads, seqlen, head_dim=64, **options):
    q, k, v = (empty(batch, heads, seqlen, head_dim) for _ in range(3))
    return problem(head_dim, q=q, k=k, v=v, seqlen=seqlen, **options)


def one_after_the_other(lengths, multiprocessors):
    """Each, the longest first, to whoever is done first."""
    ends = [0.0] * multiprocessors
    for length in sorted(lengths, reverse=True):
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


@given(
    st.integers(1, 3), st.integers(1, 6), st.integers(1, 700), st.sampled_from([64, 128, 192]), st.integers(1, 20),
    st.booleans(), st.sampled_from([None, (70, 0), (300, None)]),
)  # fmt: skip
def test_it_is_what_blocks_take_one_after_the_other(batch, heads, seqlen, queries, multiprocessors, causal, window):
    made = of(batch, heads, seqlen, causal=causal, window=window)
    found = makespan(made, 1, queries, 128, multiprocessors)
    left, right = (window or (None, None)) if not causal else ((window or (None,))[0], 0)
    tiles = []
    for first in range(0, seqlen, queries):
        seen = [
            j // 128
            for i in range(first, min(first + queries, seqlen))
            for j in range(seqlen)
            if (left is None or j >= i - left) and (right is None or j <= i + right)
        ]
        tiles.append(ENDS + max(seen) - min(seen) + 1)
    lengths = tiles * batch * heads
    expected = one_after_the_other(lengths, multiprocessors)
    assert abs(found - expected) <= (0 if min(tiles) == max(tiles) else max(tiles))
    assert found >= max(max(tiles), sum(lengths) / multiprocessors) - 1e-9


def test_of_long_sequences_some_tiles_are_looked_at(monkeypatch):
    found = [makespan(of(1, 8, 100_001, causal=True), 1, 128, 128, 132)]
    monkeypatch.setattr(makespan_module, "SAMPLES", 10**9)
    found.append(makespan(of(1, 8, 100_001, causal=True), 1, 128, 128, 132))
    assert found[0] == pytest.approx(found[1], rel=0.02)


def test_without_queries_there_is_nothing_to_do():
    assert makespan(of(2, 2, 0), 1, 128, 128, 132) == 0


# What was fastest of 64, 128 and 192 rows, by 5 % and more, on an H200, float16.
@pytest.mark.parametrize(
    ("batch", "heads", "seqlen", "head_dim", "causal", "rows"),
    [
        (1, 8, 512, 64, False, 64), (1, 8, 1024, 64, True, 64), (1, 8, 2048, 64, False, 128),
        (1, 8, 2048, 64, True, 64), (1, 16, 1024, 64, False, 128), (1, 32, 1024, 64, True, 128),
        (1, 32, 2048, 64, False, 192), (16, 32, 256, 64, False, 128), (64, 32, 256, 64, True, 128),
        (1, 12, 1500, 64, False, 192), (1, 12, 1500, 64, True, 64), (1, 32, 4096, 64, True, 192),
        (24, 32, 640, 64, True, 128), (16, 32, 1280, 64, False, 192), (40, 32, 384, 64, True, 128),
        (8, 32, 1100, 64, False, 192), (1, 8, 1024, 128, False, 64), (1, 8, 2048, 128, False, 128),
        (1, 8, 2048, 128, True, 64), (1, 16, 1024, 128, False, 128), (1, 16, 1024, 128, True, 64),
        (2, 32, 1024, 128, True, 128), (32, 16, 192, 128, False, 128), (1, 8, 2048, 256, False, 128),
        (1, 8, 2048, 256, True, 64), (1, 16, 512, 256, False, 64), (1, 16, 2048, 256, True, 128),
    ],
)  # fmt: skip
def test_the_rows_that_were_fastest_are_taken(batch, heads, seqlen, head_dim, causal, rows):
    assert select(of(batch, heads, seqlen, head_dim, causal=causal), HOPPER, "wgmma").config.tile_m == rows


# A row's bits must not depend on its batch neighbours, so nothing that its sums depend on may.
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 160, 192, 200, 256])
def test_how_many_heads_there_are_decides_on_rows_alone(head_dim):
    for seqlen, options in itertools.product((1, 100, 700, 3000), ({}, dict(causal=True), dict(softcap=3.0))):
        found = [select(of(batch, 4, seqlen, head_dim, **options), HOPPER, "wgmma").config for batch in (1, 7, 40, 500)]
        facts = [
            {name: value for name, value in vars(config).items() if name not in ("tile_m", "paired", "shared_bytes")}
            for config in found
        ]
        assert facts[1:] == facts[:-1]
        assert seqlen != 700 or len({config.tile_m for config in found}) > 1
