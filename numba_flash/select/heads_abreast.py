"""How many heads wgmma/backward_fused processes side by side. The order of sums, and so every bit, stays the same."""

from ..config.blocks import AT_A_TIME
from ..config.wgmma_backward import WgmmaFusedConfig
from ..problem.forward import Problem

FEW = 24  # heads whose tiles may always come from memory: a quarter of its bandwidth
L2_BYTES = 24 << 20  # about half of it
MOST_TILES = 8 * AT_A_TIME  # of keys: with more, the waits at the beginning are a small part of the whole
FEW_QUERIES = 512  # up to here a head's line is long, but the waits in it are short


def heads_abreast(problem: Problem) -> int:
    """The number of heads for each way (kernels/steps/dq_order.py), as equal as possible for all groups.

    If every query sees every key, blocks of a head follow each other in a line, each one turn after the one before.
    With more heads, fewer blocks of each run at a time, and the line is shorter. But what they read and add to should
    stay in L2. Under a mask they do not wait, and with many key tiles only the first ones do. Then the number is as
    many heads as keep a GPU busy.
    """
    key_tiles = max(-(-problem.seqlen_k // WgmmaFusedConfig.KEYS), 1)
    heads, busy = max(problem.batch * problem.heads_kv, 1), max(AT_A_TIME // key_tiles, 1)
    masked = problem.left is not None or problem.right is not None
    if masked or (heads * key_tiles > MOST_TILES and problem.seqlen_q > FEW_QUERIES):
        return busy
    rows = problem.seqlen_q * max(problem.heads // max(problem.heads_kv, 1), 1)  # query rows of a KV head
    of_head = max(rows * max(problem.head_dim, problem.head_dim_v) * 8, 1)  # Q and dO in 16 bits, sums of dQ in 32
    most = min(max(busy, FEW, L2_BYTES // of_head), AT_A_TIME)
    return -(-heads // -(-heads // most))
