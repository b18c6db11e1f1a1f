"""Bug hunt: right on my problem, wrong on others

Teaches: testing.check_kernel, which tries what a problem of your own does not: here lengths, masks, large scores.
Minutes: 15
Read: docs/testing_your_kernel.md
"""

import math

import numpy as np
from numba import cuda, float32

TILE, MOST = 16, 16  # keys of a tile; the largest head_dim


@cuda.jit
def kernel(q, k, v, scale, ahead, o):
    """Query i sees the keys up to i + ahead."""
    i = cuda.threadIdx.x
    b, h = cuda.blockIdx.x // q.shape[1], cuda.blockIdx.x % q.shape[1]
    s = cuda.local.array(TILE, float32)
    acc = cuda.local.array(MOST, float32)
    for x in range(v.shape[3]):
        acc[x] = 0
    m = -math.inf
    l = 0.0
    for j in range(0, k.shape[2], TILE):
        m_new = m
        for y in range(TILE):
            s[y] = -math.inf
            if j + y < k.shape[2] and j + y <= i + ahead:
                total = float32(0)
                for x in range(q.shape[3]):
                    total += q[b, h, i, x] * k[b, h, j + y, x]
                s[y] = total * scale
            m_new = max(m_new, s[y])
        alpha = math.exp(m - m_new)
        l = alpha * l
        for x in range(v.shape[3]):
            acc[x] = alpha * acc[x]
        for y in range(min(TILE, k.shape[2] - j)):
            p = math.exp(s[y] - m_new)
            if p != 0:
                l += p
                for x in range(v.shape[3]):
                    acc[x] += p * v[b, h, j + y, x]
        m = m_new
    for x in range(v.shape[3]):
        o[b, h, i, x] = acc[x] / l if l != 0 else 0


def attention(q, k, v, causal=False):
    o = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    ahead = k.shape[2] - q.shape[2] if causal else k.shape[2]
    if q.shape[0] and q.shape[2]:
        kernel[q.shape[0] * q.shape[1], q.shape[2]](q, k, v, q.shape[3] ** -0.5, ahead, o)
    return o
