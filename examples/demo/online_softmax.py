"""The idea behind the kernels, for one query: softmax in one pass over tiles of keys.

After each tile three things are kept: m, the largest score so far; l, the sum of exp(score - m); and
o, the sum of exp(score - m) * value. A larger score in a later tile makes m grow, and then everything
summed before it shrinks by alpha = exp(m_old - m_new). After the last tile o / l is attention.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Step:
    begin: int  # the tile holds keys begin to end
    end: int
    m: float
    l: float  # noqa: E741 - the papers' name
    alpha: float  # what this tile multiplied the older l and o with
    o: np.ndarray  # (head_dim_v,), not yet divided by l


def online_softmax(s: np.ndarray, v: np.ndarray, tile: int) -> list[Step]:
    """The state after each tile, from one query's scaled scores (seqlen_k,) and v (seqlen_k, head_dim_v)."""
    steps = []
    m, l, o = -np.inf, 0.0, np.zeros(v.shape[1])  # noqa: E741
    for begin in range(0, len(s), tile):
        end = min(begin + tile, len(s))
        m_new = max(m, float(s[begin:end].max()))
        p = np.exp(s[begin:end] - m_new)  # (tile,)
        alpha = float(np.exp(m - m_new))
        l = alpha * l + float(p.sum())  # noqa: E741
        o = alpha * o + p @ v[begin:end]
        m = m_new
        steps.append(Step(begin, end, m, l, alpha, o))
    return steps
