"""In which order blocks that each own a tile of keys add their parts of dQ: integers only, as in problem/ranges.py.

Float addition is not associative, so the parts of a query tile are added in a fixed order. A block waits until the
parts before its own are in. Blocks take their work by tickets, and whoever a block waits for has a lower ticket: so
each wait ends, however many blocks a GPU runs at a time.

Of some heads abreast all first tiles come before all second ones, so that a tile's turn has come when it begins. How
many they are changes no order, so it may depend on anything (select/heads_abreast.py).

Where every query sees every key, all heads go one way: the last key tile first, up from the first query (step 1). Under
a causal mask that begins on the diagonal, and a block n key tiles away comes to a query tile n steps later: turns come
without waiting. But its longest blocks come last. So there a head with an odd number goes the other way: the first key
tile comes first and blocks walk down from the last query (step -1). Its long blocks begin where short ones of the even
heads end, one behind the other, and follow each other like runners in a line. With an odd number of KV heads all go one
way: up, or down where a head has as many key tiles as a GPU runs blocks, as its longest blocks would begin when others
end: by arithmetic, of one head of 256 key tiles 132 multiprocessors would work 380 units of time instead of 256.

A block walks each query tile of all heads of its group before the next one. Else a short block would come to its second
head before the long ones that it waits for.
"""

from ...config.blocks import AT_A_TIME
from ...problem.ranges import UNBOUNDED


def ways_of(heads_kv, n_tiles, left, right):
    """In how many ways heads go; -1: in one, down."""
    if min(left, right) >= UNBOUNDED:
        return 1
    if heads_kv % 2 == 0:
        return 2
    return -1 if n_tiles >= AT_A_TIME else 1


def key_tile_of(ticket, batch, heads_kv, n_tiles, ways, abreast):
    """-> (b, h_kv, key tile, step). ways: of ways_of; abreast: heads of each way beside each other."""
    both = 2 if ways == 2 else 1
    of_each = heads_kv // both  # heads of an entry that go one way
    group = ticket // (both * abreast * n_tiles)
    first_head = group * abreast
    together = min(abreast, batch * of_each - first_head)
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
    """How many of a head's key tiles add to a query tile before the one that begins at first_key, which it sees.

    first_q_pos, last_q_pos: positions of the query tile's first query and of its last one; keys: how many there are.
    """
    if step > 0:  # those behind it, up to the last key that is seen
        return (min(last_q_pos + right, keys - 1) - first_key) // tile_n
    return first_key // tile_n - max(first_q_pos - left, 0) // tile_n
