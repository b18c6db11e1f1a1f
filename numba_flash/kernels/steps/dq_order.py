"""The order in which blocks that each own a key tile add their parts of dQ: integers only, as in problem/ranges.py.

Floating-point addition is not associative, so the parts of a query tile are added in a fixed order. A block waits until
all parts before its own have been added. Blocks take their work by tickets, and a block waits only for blocks with
lower tickets. So every wait ends, however many blocks a GPU runs at a time.

Several heads are processed side by side: the first tiles of all of them come before their second tiles, so a tile's
turn has come when it begins. The number of heads changes no order of additions, so it may depend on anything
(config/blocks.py).

If every query sees every key, all heads go the same way: the last key tile first, and query tiles from the first one up
(step 1). Under a causal mask that begins on the diagonal, a block n key tiles away reaches a query tile n steps later,
so no block waits for its turn. But its longest blocks come last. So there a head with an odd number goes the other way:
the first key tile first, and query tiles from the last one down (step -1). Its long blocks begin when short ones of the
even heads end, one after the other, and follow each other without catching up. With an odd number of KV heads all go
one way: up, or down if a head has as many key tiles as a GPU runs blocks. Up, its longest blocks would begin when
others end: 132 multiprocessors would take 380 units of time for one head of 256 key tiles instead of 256 (computed).

A block processes a query tile of all heads of its group before the next query tile. Otherwise a short block would reach
its second head before the long blocks that it waits for.
"""

from ...config.blocks import AT_A_TIME
from ...problem.ranges import UNBOUNDED


def ways_of(heads_kv, n_tiles, left, right):
    """The number of ways in which heads go; -1: all go down."""
    if min(left, right) >= UNBOUNDED:
        return 1
    if heads_kv % 2 == 0:
        return 2
    return -1 if n_tiles >= AT_A_TIME else 1


def key_tile_of(ticket, batch, heads_kv, n_tiles, ways, in_flight):
    """-> (b, h_kv, key tile, step). ways: from ways_of; in_flight: heads of each way that are processed side by
    side."""
    both = 2 if ways == 2 else 1
    of_each = heads_kv // both  # heads of a batch entry that go one way
    group = ticket // (both * in_flight * n_tiles)
    first_head = group * in_flight
    together = min(in_flight, batch * of_each - first_head)
    within = ticket - both * first_head * n_tiles
    way = within // (together * n_tiles)
    within = within - way * together * n_tiles
    j = within // together
    head = first_head + within - j * together
    b = head // of_each
    h_kv = (head - b * of_each) * both + way
    down = way > 0 or ways < 0
    return b, h_kv, j if down else n_tiles - 1 - j, -1 if down else 1


def parts_before(first_q_pos, last_q_pos, first_key, left, right, keys, tile_n, step):
    """How many of a head's key tiles are added to a query tile before the key tile that begins at first_key, which it
    sees.

    first_q_pos, last_q_pos: positions of the first and last query of the query tile; keys: the number of keys.
    """
    if step > 0:  # the key tiles after it, up to the last key that is seen
        return (min(last_q_pos + right, keys - 1) - first_key) // tile_n
    return first_key // tile_n - max(first_q_pos - left, 0) // tile_n
