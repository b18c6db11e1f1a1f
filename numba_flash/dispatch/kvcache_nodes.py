"""attention_kvcache in two steps, for keys that several ranks have: the nodes of a rank's keys, and their join.

A node of a row is m, l and O over some of its keys, with O not yet divided by l. The row's result is a tree of nodes
(docs/serving.md). Nodes of 256 times a power of two keys, which begin at a multiple of their length, are vertices of
the whole tree, so their join has the bits of one call. Here a node is head_dim_v + 2 numbers: O, m and l.
"""

from typing import Any

from .. import arrays
from ..problem.options import Operands
from .forward import AttentionOutput
from .kvcache import CacheCall, prepare
from .launch import addresses_of


def nodes(call: CacheCall) -> Any:
    """The nodes of all rows, (batch, heads, seqlen_q, head_dim_v + 2) in the dtype of lse; None if the chosen kernel
    has no nodes."""
    given, cache, others, aux, plan = prepare(call._replace(as_nodes=True, return_lse=True))
    if plan.kernel != "cpu":
        return None
    from .kvcache_on_host import run as on_host

    q, k, v, *_ = given
    p = plan.made.problem
    found = arrays.empty(q, p.nodes_shape, p.compute_dtype)
    on_host(plan.made, plan.kernel, Operands(q, k, v, None, found, *others), cache, list(aux))
    return arrays.give(q, found)


def joined(call: CacheCall, every: Any) -> AttentionOutput:
    """o and lse of nodes over neighbouring keys, (nodes, *shape of nodes), which are overwritten. call: that of the
    nodes, with terms that every row's sum has."""
    from ..cpu.nodes import join

    given, _, others, _, plan = prepare(call._replace(return_lse=True))
    q, (p, of_nodes) = given[0], (plan.made.problem, arrays.host_view(arrays.read("nodes", every)))
    o, lse = arrays.empty(q, p.o_shape, p.dtype), arrays.empty(q, p.lse_shape, p.compute_dtype)
    join(p, of_nodes, addresses_of(Operands(*given[:3], o, lse, *others)))
    return AttentionOutput(arrays.give(q, o), arrays.give(q, lse))
