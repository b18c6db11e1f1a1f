"""How many blocks run at a time, for decisions that must be the same in a kernel, in its Config and in select."""

from ..problem.forward import Problem

AT_A_TIME = 128  # about as many blocks as a GPU runs at a time, if one fills a multiprocessor
FEW = 24  # so many heads may always read tiles from global memory: a quarter of its bandwidth
HALF_OF_L2 = 24 << 20  # bytes, about
MOST_TILES = 8 * AT_A_TIME  # of keys: with more, the waits at the beginning are a small part of the run time
FEW_QUERIES = 512  # up to here a head's line of blocks is long, but each wait is short


def heads_in_flight(p: Problem, tile_n: int, sums: int = 1) -> int:
    """How many heads wgmma/backward_fused processes side by side, in each direction (kernels/steps/dq_order.py); the
    groups are as equal as possible. It does not change the order of sums, and so changes no bit.

    If every query sees every key, the blocks of a head form a line: each is one turn behind the one before. With more
    heads, fewer blocks of each run at a time, and the line is shorter. But the data that they read and add to should
    stay in L2. The same holds if most queries see most keys. Under another mask blocks do not wait, and with many key
    tiles only the first blocks do: then the number is as many heads as keep a GPU busy. For packed sequences it is a
    number of key tiles: the kernel counts the key tiles of a sequence and takes as many heads as that needs.

    sums: how many sums of dQ a query tile has. With more, a line is shorter and takes more memory: then fewer heads
    wait no longer than more heads with one sum.
    """
    if p.packed is not None:
        return AT_A_TIME
    key_tiles = max(-(-p.seqlen_k // tile_n), 1)
    heads, busy = max(p.batch * p.heads_kv, 1), max(AT_A_TIME // key_tiles, 1)
    if not (p.every_key or p.most_keys) or (heads * key_tiles > MOST_TILES and p.seqlen_q > FEW_QUERIES):
        return busy
    rows = p.seqlen_q * max(p.group, 1)  # query rows of a KV head
    of_head = max(rows * p.widest * 4 * (1 + sums), 1)  # Q and dO in 16 bits, sums of dQ in 32
    most = min(max(busy, FEW // sums, HALF_OF_L2 // of_head), AT_A_TIME)
    return -(-heads // -(-heads // most))
