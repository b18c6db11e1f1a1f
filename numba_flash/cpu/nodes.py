"""Joins nodes of the same rows over neighbouring keys, and writes o and lse: upper tree and the end of kernel.py."""

# mypy: ignore-errors

import numpy as np
from numba import njit

from ..arrays import host_pointer
from ..problem.forward import Problem
from . import plan as slot
from .cache import cached
from .elements import INT
from .forward import ready
from .kernel import finish, join_tree, sign_and_units
from .panel import Rows
from .vectors.build import load, size_of


@cached
@njit(nogil=True, error_model="numpy")
def _join(nodes, count, node_rows, plan, pointers, zero):
    """Joins `count` nodes of all rows, each of `node_rows` rows, in the order of keys. Overwrites the first node with
    the result."""
    heads, queries, head_dim_v = (
        load(plan, slot.HEADS, INT),
        load(plan, slot.SEQLEN_Q, INT),
        load(plan, slot.HEAD_DIM_V, INT),
    )
    group = max(heads // max(load(plan, slot.HEADS_KV, INT), 1), 1)
    size = (head_dim_v + 2) * size_of(zero)
    _, scale_log2 = sign_and_units(plan, zero)
    for row in range(node_rows):
        b, head, i = row // (heads * queries), row // queries % heads, row % queries
        tile = Rows(i * group + head % group, 1, 1, b, head // group, group, 0, 0, 0, 0, 0, 0)
        join_tree(nodes + row * size, count, node_rows * size, scale_log2, tile, head_dim_v, zero)
        finish(nodes + row * size, scale_log2, tile, plan, pointers, zero)


def join(problem: Problem, nodes: np.ndarray, pointers: tuple[int, ...]) -> None:
    """Writes o and lse. nodes: (count, *nodes_shape of the Problem), overwritten. pointers: as options.Operands."""
    rows = int(np.prod(problem.lse_shape))
    given, numbers = np.array(pointers, np.int64), ready(problem).numbers
    if rows:
        _join(host_pointer(nodes), len(nodes), rows, host_pointer(numbers), host_pointer(given), nodes.dtype.type(0))
