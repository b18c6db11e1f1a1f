"""The problem that docs/algorithm.md works out by hand: one query that sees four keys, two in each of two tiles."""

from typing import Any

import numpy as np


def worked_example() -> dict[str, Any]:
    """q, k, v and options, to be passed on: `trace(**worked_example(), row=0)`, `attention(**worked_example())`.

    The window leaves keys 14 to 17 to the query. In the simulator tiles have 16 keys. The scores are 1, 2, 4 and 3,
    and the values 1, 2, 3 and 4.
    """
    k, v = np.zeros((2, 18), np.float32)
    k[14:], v[14:] = (1, 2, 4, 3), (1, 2, 3, 4)
    q = np.ones((1, 1, 1, 1), np.float32)  # one query of one head, head_dim 1
    return dict(q=q, k=k.reshape(1, 1, 18, 1), v=v.reshape(1, 1, 18, 1), window=(3, 0), scale=1)
