"""How many heads wgmma_backward_fused computes at the same time. The order of sums, and so each bit, is the same."""

from ..config.blocks import AT_A_TIME
from ..config.wgmma_backward import WgmmaFusedConfig
from ..problem.forward import Problem

FEW = 24  # heads whose tiles may come from memory all the time: a quarter of what that can bring
L2_BYTES = 24 << 20  # about half of it
MOST_TILES = 8 * AT_A_TIME  # of keys: with more of them the first line's waits are a small part of the whole
FEW_QUERIES = 512  # with no more of them a head's line is long, but short are the waits in it


def heads_abreast(problem: Problem) -> int:
    """Of each way (kernels/steps/dq_order.py), and of all groups as equally many as can be.

    Where every query sees every key, blocks of a head follow each other in a line, each one turn behind the one before.
    The more heads there are, the fewer blocks of each work at a time, and the shorter is the line. But what they read
    and add to should stay in the L2 cache. Under a mask they do not wait, and where there are many key tiles only the
    first ones do; there as many heads as keep a GPU busy.
    """
    key_tiles = max(-(-problem.seqlen_k // WgmmaFusedConfig.KEYS), 1)
    heads, busy = max(problem.batch * problem.heads_kv, 1), max(AT_A_TIME // key_tiles, 1)
    masked = problem.left is not None or problem.right is not None
    if masked or (heads * key_tiles > MOST_TILES and problem.seqlen_q > FEW_QUERIES):
        return busy
    rows = problem.seqlen_q * max(problem.heads // max(problem.heads_kv, 1), 1)  # of the queries of a KV head
    of_head = max(rows * max(problem.head_dim, problem.head_dim_v) * 8, 1)  # Q and dO in 16 bits, sums of dQ in 32
    most = min(max(busy, FEW, L2_BYTES // of_head), AT_A_TIME)
    return -(-heads // -(-heads // most))
