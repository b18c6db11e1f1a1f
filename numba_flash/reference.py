"""The oracle: attention in float64 NumPy, written to be obviously right. No tiles, no tricks.

Every other kernel is tested against this file. It takes NumPy arrays in (batch, heads, seqlen, dim)
order and holds the whole seqlen_q x seqlen_k matrix, so keep the sizes small.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def visible_keys(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    left: int | None = None,
    right: int | None = None,
    q_offset: NDArray[np.int64],
    seqlens_k: NDArray[np.int64],
    mask: NDArray[np.bool_] | None = None,
) -> NDArray[np.bool_]:
    """True where query i of a batch entry may look at key j: (batch, 1 or heads, seqlen_q, seqlen_k).

    q_offset and seqlens_k have shape (batch,). Key j is visible to the query at position
    p = i + q_offset when p - left <= j <= p + right (None = unbounded), j < seqlens_k and the mask is True.
    """
    q_pos = np.arange(seqlen_q)[None, None, :, None] + q_offset[:, None, None, None]
    k_pos = np.arange(seqlen_k)[None, None, None, :]
    visible = np.broadcast_to(k_pos < seqlens_k[:, None, None, None], (batch, 1, seqlen_q, seqlen_k)).copy()
    if left is not None:
        visible &= k_pos >= q_pos - left
    if right is not None:
        visible &= k_pos <= q_pos + right
    return visible if mask is None else visible & mask


def forward(
    q: NDArray,  # (batch, heads, seqlen_q, head_dim)
    k: NDArray,  # (batch, heads_kv, seqlen_k, head_dim)
    v: NDArray,  # (batch, heads_kv, seqlen_k, head_dim_v)
    *,
    scale: float,
    visible: NDArray[np.bool_],  # broadcastable to (batch, heads, seqlen_q, seqlen_k)
    softcap: float | None = None,
    alibi_slopes: NDArray | None = None,  # (batch or 1, heads)
    q_offset: NDArray | None = None,  # (batch,); only ALiBi asks for positions
    bias: NDArray | None = None,  # broadcastable to (batch, heads, seqlen_q, seqlen_k)
) -> tuple[Array, Array]:
    """-> o (batch, heads, seqlen_q, head_dim_v) and lse (batch, heads, seqlen_q), both float64.

    o = softmax(scores) @ v over the visible keys; lse = log(sum(exp(scores))), natural. A row that
    sees no key gives o = 0 and lse = -inf. What lies in invisible positions is never looked at.
    """
    batch, heads, seqlen_q, _ = q.shape
    group = heads // k.shape[1] if k.shape[1] else 1
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)  # query head h reads KV head h // group

    with np.errstate(all="ignore"):  # masked keys may hold anything
        s = scale * np.einsum("bhid,bhjd->bhij", q, k)
        if softcap is not None:
            s = softcap * np.tanh(s / softcap)
        if alibi_slopes is not None:
            assert q_offset is not None
            q_pos = np.arange(seqlen_q)[None, :, None] + q_offset[:, None, None]  # (batch, seqlen_q, 1)
            distance = np.abs(q_pos - np.arange(k.shape[2]))  # (batch, seqlen_q, seqlen_k)
            s = s - np.asarray(alibi_slopes, np.float64)[:, :, None, None] * distance[:, None]
        if bias is not None:
            s = s + np.asarray(bias, np.float64)
        s = np.where(visible, s, -np.inf)

        m = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
        p = np.where(s == -np.inf, 0.0, np.exp(s - np.where(m == -np.inf, 0.0, m)))
        l = np.sum(p, axis=-1, keepdims=True)
        # A key without weight contributes nothing, whatever its value: 0 * NaN must not count.
        finite = np.isfinite(v)
        weighted = np.einsum("bhij,bhjd->bhid", p, np.where(finite, v, 0.0))
        if not finite.all():
            strange = np.where(finite, 0.0, v)
            for b, h, j in zip(*np.nonzero(~finite.all(axis=-1)), strict=True):
                seen = p[b, h, :, j] != 0
                weighted[b, h, seen] += strange[b, h, j]
        o = np.where(l == 0, 0.0, weighted / np.where(l == 0, 1.0, l))
        lse = np.where(l == 0, -np.inf, m + np.log(l))
    return o, lse[..., 0]
