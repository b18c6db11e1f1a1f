"""Join two parts of the keys

Teaches: attention over two sets of keys can be computed apart and joined: m, l and o are all that is needed.
Minutes: 10
Read: docs/algorithm.md, equations 5 and 6
Solution: numba_flash/api/merge.py, which does it with lse = m + log(l)
"""

import math


def join(m_a, l_a, o_a, m_b, l_b, o_b):
    """m, l and o of all keys, from those of the parts a and b.

    m: the largest score. l: the sum of e^(s - m). o: (head_dim,) the output, already divided by l.
    A part without keys has m = -inf, l = 0 and o = 0. So it can be that both have.
    """
    m = max(m_a, m_b)
    if m == -math.inf:  # no part has a key
        return m, 0.0, o_a
    a = math.exp(m_a - m) * l_a
    b = math.exp(m_b - m) * l_b
    l = a + b
    o = (a * o_a + b * o_b) / l
    return m, l, o
