"""ranges.py against counting keys one by one."""

import pytest
from hypothesis import example, given, strategies as st

from numba_flash.problem.ranges import UNBOUNDED, key_queries, key_tiles, row_keys

SIDES = st.one_of(st.integers(0, 25), st.just(UNBOUNDED), st.just(2**31 - 1))
POSITIONS = st.integers(-60, 60)


def seen(q_pos, left, right, seqlen_k):
    return {j for j in range(seqlen_k) if q_pos - left <= j <= q_pos + right}


@given(POSITIONS, SIDES, SIDES, st.integers(0, 40))
def test_row_keys_are_the_visible_ones(q_pos, left, right, seqlen_k):
    first, end = row_keys(q_pos, left, right, seqlen_k)
    assert set(range(first, end)) == seen(q_pos, left, right, seqlen_k)
    assert 0 <= first <= seqlen_k and 0 <= end <= seqlen_k


@given(POSITIONS, st.integers(1, 20), SIDES, SIDES, st.integers(0, 40), st.integers(1, 16))
@example(0, 4, 0, 0, 0, 4)  # no key at all
@example(-50, 4, 3, 0, 20, 4)  # every row stands before the first key
@example(55, 4, 3, 0, 20, 4)  # every row stands past the last key
@example(-3, 8, UNBOUNDED, 0, 20, 4)  # only the later rows see keys
def test_key_tiles_cover_and_classify(first_pos, rows, left, right, seqlen_k, tile_n):
    positions = range(first_pos, first_pos + rows)
    top, bottom = (row_keys(p, left, right, seqlen_k) for p in (positions[0], positions[-1]))
    begin, free, cut, end = key_tiles(*top, *bottom, tile_n)
    assert 0 <= begin <= free <= cut <= end

    each = [seen(p, left, right, seqlen_k) for p in positions]
    visited = set(range(begin * tile_n, end * tile_n))
    assert set.union(*each) <= visited, "a visible key lies in no visited tile"
    for tile in range(free, cut):
        keys = set(range(tile * tile_n, (tile + 1) * tile_n))
        assert all(keys <= row for row in each), "a free tile would need a mask"
    if begin < end:  # no tile is visited for nothing at either end
        assert any(row & set(range(begin * tile_n, (begin + 1) * tile_n)) for row in each) or not set.union(*each)
        assert (end - 1) * tile_n < seqlen_k


@given(POSITIONS, st.integers(1, 20), SIDES, SIDES, st.integers(0, 40), st.integers(1, 16))
def test_every_tile_that_all_rows_see_whole_is_free(first_pos, rows, left, right, seqlen_k, tile_n):
    """The hot loop gets all it can: what is not free really needs its mask."""
    positions = range(first_pos, first_pos + rows)
    top, bottom = (row_keys(p, left, right, seqlen_k) for p in (positions[0], positions[-1]))
    begin, free, cut, end = key_tiles(*top, *bottom, tile_n)
    common = set.intersection(*(seen(p, left, right, seqlen_k) for p in positions))
    for tile in range(begin, end):
        if set(range(tile * tile_n, (tile + 1) * tile_n)) <= common:
            assert free <= tile < cut


@given(POSITIONS, st.integers(0, 40), SIDES, SIDES, st.integers(0, 40))
def test_key_queries_are_those_whose_row_has_the_key(q_offset, k_pos, left, right, seqlen_q):
    first, end = key_queries(k_pos, q_offset, left, right, seqlen_q)
    assert set(range(first, end)) == {i for i in range(seqlen_q) if k_pos in seen(i + q_offset, left, right, 41)}
    assert 0 <= first <= seqlen_q and 0 <= end <= seqlen_q


@given(POSITIONS, st.integers(0, 40), st.integers(1, 20), SIDES, SIDES, st.integers(0, 40), st.integers(1, 16))
def test_query_tiles_of_a_key_tile(q_offset, first_key, keys, left, right, seqlen_q, tile_m):
    """key_tiles with the two sides exchanged: every query that sees some key of the tile is visited."""
    ends = (key_queries(k_pos, q_offset, left, right, seqlen_q) for k_pos in (first_key, first_key + keys - 1))
    begin, free, cut, end = key_tiles(*next(ends), *next(ends), tile_m)
    assert 0 <= begin <= free <= cut <= end
    for i in range(seqlen_q):
        visible = seen(i + q_offset, left, right, 100) & set(range(first_key, first_key + keys))
        assert not visible or begin <= i // tile_m < end
        assert len(visible) == keys or not free <= i // tile_m < cut


@given(POSITIONS, st.integers(0, 60), st.integers(1, 60), st.integers(1, 16), st.integers(1, 16), SIDES, SIDES)
def test_the_order_in_which_key_tiles_add_to_dq(q_offset, keys, seqlen_q, tile_m, tile_n, left, right):
    """The key tiles that visit a query tile, as each finds it on its own, are just those that the query tile finds; so
    what is before a key tile in line can be counted from the first one (wgmma_backward_fused)."""
    visitors = {}
    for first_key in range(0, keys, tile_n):
        last_key = min(first_key + tile_n, keys) - 1
        ends = (key_queries(k_pos, q_offset, left, right, seqlen_q) for k_pos in (first_key, last_key))
        begin, _, _, end = key_tiles(*next(ends), *next(ends), tile_m)
        for i in range(begin, end):
            visitors.setdefault(i, []).append(first_key // tile_n)
    for i in range(-(-seqlen_q // tile_m)):
        last = min((i + 1) * tile_m, seqlen_q) - 1
        ends = (row_keys(row + q_offset, left, right, keys) for row in (i * tile_m, last))
        begin, _, _, end = key_tiles(*next(ends), *next(ends), tile_n)
        assert visitors.get(i, []) == list(range(begin, end))


# Positions as far out as an offset may be, with every combination of bounds: an int64 must hold all sums.
@pytest.mark.parametrize("q_pos", [2**31 - 1, -(2**31) + 1, 2**32])
@pytest.mark.parametrize("left", [0, 2**31 - 1, UNBOUNDED])
@pytest.mark.parametrize("right", [0, 2**31 - 1, UNBOUNDED])
def test_huge_positions(q_pos, left, right):
    for seqlen_k in (0, 1, 100, 2**31 - 1):
        first, end = row_keys(q_pos, left, right, seqlen_k)
        assert first == min(max(q_pos - left, 0), seqlen_k) and 0 <= end <= seqlen_k
        assert abs(q_pos) + max(left, right) + 1 < 2**63
        first, end = key_queries(seqlen_k, q_pos, left, right, seqlen_k)
        assert 0 <= first <= seqlen_k and end == min(max(seqlen_k + left - q_pos + 1, 0), seqlen_k)
