"""How many blocks run at a time, for decisions that must be the same in a kernel, in its Config and in select."""

from ..problem.forward import Problem

AT_A_TIME = 128  # about as many as a GPU has room for where one fills a multiprocessor
FEW = 24  # heads whose tiles may always come from memory: a quarter of its bandwidth
HALF_OF_L2 = 24 << 20  # bytes, about
MOST_TILES = 8 * AT_A_TIME  # of keys: with more, the waits at the beginning are a small part of the whole
FEW_QUERIES = 512  # up to here a head's line is long, but the waits in it are short


def heads_in_flight(p: Problem, tile_n: int, sums: int = 1) -> int:
    """How many heads wgmma/backward_fused processes side by side, of each way (kernels/steps/dq_order.py), as equal as
    possible for all groups. The order of sums, and so every bit, stays the same.

    If every query sees every key, blocks of a head follow each other in a line, each one turn after the one before.
    With more heads, fewer blocks of each run at a time, and the line is shorter. But what they read and add to should
    stay in L2. So it is where most queries see most keys. Under another mask blocks do not wait, and with many key
    tiles only the first ones do. Then the number is as many heads as keep a GPU busy. Of packed sequences it is the
    number of key tiles: the kernel counts those of a sequence, and takes as many of its heads as that needs.

    sums: of dQ, for each query tile. With more, a line is shorter, and takes more room: then fewer heads wait no longer
    than more heads with one sum.
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
