"""Write v2 from nothing

Teaches: everything before, put together: a block for each tile of queries, a thread for each query, K and V by way of
    shared memory, and one pass over the keys.
Minutes: 45
Read: docs/first_kernels.md, "FlashAttention-2"
Solution: numba_flash/kernels/simt/v2.py, which has all options
"""

import math

import numpy as np
from numba import cuda, float32

...  # your kernel, made by cuda.jit; a tile may have 16 queries and 16 keys, and head_dim is up to 16


def attention(q, k, v, causal=False):
    """(o, lse) of float32 arrays: what numba_flash.attention(q, k, v, causal=causal, return_lse=True) gives.

    q: (batch, heads, seqlen_q, head_dim); k, v: (batch, heads_kv, seqlen_k, head_dim or head_dim_v); o is like q with
    head_dim_v, lse (batch, heads, seqlen_q). Query head h reads head h // (heads // heads_kv) of k and v. Lengths may
    be any, 0 too. Causal: the last query sees the last key, and each query before it one key fewer. A query that sees
    no key has o = 0 and lse = -inf.
    """
    ...
