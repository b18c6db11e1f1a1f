"""The right results, in float64, and random problems."""

import math

import numpy as np

from numba_flash import arrays
from numba_flash.ptx.sim import launch as simulator


def problem(queries, keys, dim=4, seed=0, size=1.0):
    """q, k, v in which the maximum of most rows grows in a later tile."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((n, dim)).astype(np.float32) for n in (queries, keys, keys))
    k *= np.linspace(0.2, 1.5, keys, dtype=np.float32)[:, None]
    return q * np.float32(size), k, v


def scores(q, k, causal=False):
    s = q.astype(np.float64) @ k.astype(np.float64).T
    if causal:
        ahead = len(k) - len(q)
        s = np.where(np.arange(len(k)) <= np.arange(len(q))[:, None] + ahead, s, -np.inf)
    return s


def softmax(x):
    m = x.max(axis=-1, keepdims=True, initial=-np.inf)
    p = np.exp(x - np.where(m == -np.inf, 0, m))
    total = p.sum(axis=-1, keepdims=True)
    return np.divide(p, total, where=total > 0, out=np.zeros_like(p))


def attention(q, k, v, causal=False):
    return softmax(scores(q, k, causal)) @ v.astype(np.float64)


def tiles(q, k, v, tile, causal=False):
    """{(row, j): (m before, m, alpha, l, acc)} after each tile of keys that a row sees something of."""
    s, found = scores(q, k, causal), {}
    for row in range(len(q)):
        m = -math.inf
        for j in range(len(k) // tile):
            before, seen = m, s[row, : (j + 1) * tile]
            m = max(m, seen.max())
            if m > -math.inf:
                p = np.exp(seen - m)
                found[row, j] = before, m, math.exp(before - m), p.sum(), p @ v[: (j + 1) * tile].astype(np.float64)
    return found


def run(kernel, threads, *operands, scalars=(), shared_bytes=0):
    """Launch a kernel that takes addresses of global memory: an operand is indexed by one number."""
    given = tuple(arrays.read("array", x) for x in operands)
    simulator.run(lambda: kernel, 1, threads, shared_bytes, given, scalars)
