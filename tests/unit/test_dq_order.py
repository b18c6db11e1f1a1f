"""The order in which parts of dQ are added: every key tile once, waits that end, and counts that are right."""

import itertools

import pytest
from hypothesis import given, strategies as st

from numba_flash.kernels.steps.dq_order import AT_A_TIME, key_tile_of, parts_before, ways_of
from numba_flash.problem.ranges import UNBOUNDED, row_keys


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads_kv", "n_tiles", "in_flight"),
    list(itertools.product((1, 2, 3), (1, 2, 3, 4, 6), (1, 2, 5, AT_A_TIME - 1, AT_A_TIME), (1, 2, 128))),
)
def test_each_key_tile_has_one_ticket_and_waits_for_lower_ones(batch, heads_kv, n_tiles, in_flight, masked):
    ways = ways_of(heads_kv, n_tiles, UNBOUNDED, 0 if masked else UNBOUNDED)
    taken = [
        key_tile_of(ticket, batch, heads_kv, n_tiles, ways, in_flight) for ticket in range(batch * heads_kv * n_tiles)
    ]
    ticket_of = {place[:3]: ticket for ticket, place in enumerate(taken)}
    assert set(ticket_of) == set(itertools.product(range(batch), range(heads_kv), range(n_tiles)))
    for ticket, (b, h, j, step) in enumerate(taken):
        down = masked and (n_tiles >= AT_A_TIME if heads_kv % 2 else h % 2)
        assert step == (-1 if down else 1), "it must not depend on the batch, nor on who is in_flight"
        other = j + step  # those behind it come before this one, too
        assert not 0 <= other < n_tiles or ticket_of[b, h, other] < ticket


def test_the_first_tiles_of_all_heads_in_flight_come_first():
    taken = [key_tile_of(ticket, 2, 3, 2, 1, 4)[:3] for ticket in range(12)]
    of_four = [(0, 0), (0, 1), (0, 2), (1, 0)]
    of_two = [(1, 1), (1, 2)]
    assert taken == [(b, h, j) for heads in (of_four, of_two) for j in (1, 0) for b, h in heads]


side = st.integers(-5, 60) | st.just(UNBOUNDED)


@given(
    seqlen_q=st.integers(1, 70), keys=st.integers(1, 90), q_start=st.integers(-90, 90), left=side, right=side,
    tile_m=st.sampled_from((4, 8, 16)), tile_n=st.sampled_from((4, 8, 16)), step=st.sampled_from((1, -1)),
)  # fmt: skip
def test_parts_before_are_the_key_tiles_that_add_to_dq_first(
    seqlen_q, keys, q_start, left, right, tile_m, tile_n, step
):
    if left + right < 0:
        return  # no query sees a key
    for first in range(0, seqlen_q, tile_m):
        positions = range(q_start + first, q_start + min(first + tile_m, seqlen_q))
        seen = {k // tile_n for pos in positions for k in range(*row_keys(pos, left, right, keys))}
        for j in seen:
            before = [other for other in seen if (other - j) * step > 0]
            assert len(before) == parts_before(positions[0], positions[-1], j * tile_n, left, right, keys, tile_n, step)
