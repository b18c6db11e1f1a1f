"""Attention as the formula says, in NumPy: the whole score matrix at once. The demo's yardstick."""

import numpy as np


def plain_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, seqlens_k: np.ndarray, layout: str = "bshd"
) -> np.ndarray:
    """softmax(q @ k.T / sqrt(head_dim)) @ v for q, k and v of (batch, seqlen, heads, head_dim)."""
    if layout != "bshd":
        raise ValueError(f"layout={layout!r}; the plain formula takes 'bshd'")
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))  # (batch, heads, seqlen, head_dim)
    s = q @ k.swapaxes(2, 3)  # (batch, heads, seqlen_q, seqlen_k)
    s *= q.shape[3] ** -0.5
    padding = np.arange(s.shape[3]) >= seqlens_k[:, None]  # (batch, seqlen_k)
    s[np.broadcast_to(padding[:, None, None, :], s.shape)] = -np.inf
    s -= s.max(3, keepdims=True)
    np.exp(s, out=s)
    s /= s.sum(3, keepdims=True)
    return np.ascontiguousarray((s @ v).transpose(0, 2, 1, 3))
