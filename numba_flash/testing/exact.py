"""Backward problems in which every product is an integer, so that a correct kernel is exact to the last bit.

Rounding hides small errors in a product: one step of 16 too many, or an operand overwritten while it is read.
ptxas before 13.3 can let the register operands of a running wgmma be overwritten (triton-lang/triton#9433).
"""

from typing import Any

import numpy as np

from ..api.backward import AttentionGradients
from .cases import Case, rows_padded


def whole_problem(
    seed: int,
    dtype: Any,
    seqlen_q: int,
    seqlen_k: int,
    *,
    heads: int = 2,
    heads_kv: int = 1,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    causal: bool = False,
) -> tuple[Case, tuple[np.ndarray, np.ndarray, np.ndarray], AttentionGradients]:
    """(case, (do, o, lse), the gradients, rounded once) of batch 1.

    Elements are -1, 0 and 1. q has them in even columns and k in odd ones, so scores are 0; lse is 0 too, as if all
    weights were 1. Then dP - delta is a whole number that 16 bits hold, and so is every sum of them in float32.
    """
    generator, dtype = np.random.default_rng(seed), np.dtype(dtype)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v

    def whole(heads: int, rows: int, columns: int) -> np.ndarray:
        return generator.integers(-1, 2, (1, heads, rows, columns)).astype(np.float64)

    q, k = whole(heads, seqlen_q, head_dim), whole(heads_kv, seqlen_k, head_dim)
    q[..., 1::2], k[..., ::2] = 0, 0
    v, do, o = (
        whole(heads_kv, seqlen_k, head_dim_v),
        whole(heads, seqlen_q, head_dim_v),
        whole(heads, seqlen_q, head_dim_v),
    )
    seen = np.ones((seqlen_q, seqlen_k), bool)
    if causal:
        seen = np.arange(seqlen_k) <= np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    group = heads // heads_kv
    k_of_head, v_of_head = k.repeat(group, 1), v.repeat(group, 1)
    ds = np.where(seen, do @ v_of_head.swapaxes(2, 3) - (do * o).sum(-1, keepdims=True), 0.0)
    assert np.abs(ds).max(initial=0) <= 256, "bfloat16 holds whole numbers up to 256"

    def of_kv_heads(x: np.ndarray) -> np.ndarray:
        return x.reshape(1, heads_kv, group, *x.shape[2:]).sum(2)

    right = (
        ds @ k_of_head,
        of_kv_heads(ds.swapaxes(2, 3) @ q),
        of_kv_heads(np.where(seen, 1.0, 0.0).T @ do),
    )
    q, k, v = (rows_padded(x.astype(dtype)) for x in (q, k, v))
    case = Case(q, k, v, dict(scale=1.0, causal=causal))
    lse = np.zeros((1, heads, seqlen_q), np.float64 if dtype == np.float64 else np.float32)
    given = rows_padded(do.astype(dtype)), o.astype(dtype), lse
    return case, given, AttentionGradients(*(x.astype(np.float32).astype(dtype) for x in right))
