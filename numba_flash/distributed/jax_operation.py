"""context_parallel_attention inside jax.shard_map: one program for all devices of a mesh axis.

So all devices have equal shapes, and the positions of a device's tokens are traced numbers. XLA makes the collectives
and may overlap them with other work.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..api.forward import attention as attend
from ..dispatch.forward import AttentionOutput
from ..problem.options import FUNCTIONS, OF_HEADS, SEEDED
from .layout import Layout, layout_of


def attention(
    q: Any, k: Any, v: Any, axis: str, of_tokens: Any, given: dict[str, Any], method: str, dims: str, return_lse: bool
) -> Any:
    """of_tokens: layout, seqlen and cu_seqlens, as the caller gave them."""
    layout, seqlen, cu_seqlens = of_tokens
    if cu_seqlens is not None:
        raise NotImplementedError(
            "cu_seqlens on a JAX mesh: use mask_mod with the number of each token's document in aux"
        )
    size, dim = jax.lax.psum(1, axis), dims.index("s")
    tokens = q.shape[dim] * size
    if seqlen not in (None, tokens):
        raise ValueError(f"seqlen must be {tokens}, because all devices of a JAX mesh have equal shapes, not {seqlen}")
    chosen = _equal_runs(layout_of(layout, size, tokens))
    if method == "heads":
        o, lse = _by_heads(q, k, v, axis, chosen, given, dims)
    elif method in ("auto", "gather"):
        o, lse = _gathered(q, k, v, axis, chosen, given, dims)
    else:
        raise NotImplementedError(f"method={method!r} on a JAX mesh: use method='gather' or method='heads'")
    return AttentionOutput(o, lse) if return_lse else o


def _equal_runs(layout: Layout) -> Layout:
    lengths = {tuple(stop - start for start, stop in layout.runs(rank)) for rank in range(layout.size)}
    if len(lengths) > 1:
        raise ValueError(
            f"layout must give all {layout.size} devices of a JAX mesh runs of equal lengths, not {sorted(lengths)}: "
            "take a number of tokens that 2 * devices divides"
        )
    return layout


def _gathered(q: Any, k: Any, v: Any, axis: str, layout: Layout, given: dict[str, Any], dims: str) -> tuple[Any, Any]:
    dim, batch = dims.index("s"), q.shape[0]
    runs = np.array([[start for start, _ in layout.runs(rank)] for rank in range(layout.size)], "int32")
    starts = jnp.asarray(runs)[jax.lax.axis_index(axis)]
    keys, values = (_whole(x, axis, layout, dim, runs.shape[1]) for x in (k, v))
    outputs, row = [], 0
    for n, (start, stop) in enumerate(layout.runs(0)):
        own = jax.lax.slice_in_dim(q, row, row + stop - start, axis=dim)
        offset = jnp.broadcast_to(starts[n], (batch,))
        outputs.append(attend(own, keys[n], values[n], q_offset=offset, layout=dims, return_lse=True, **given))
        row += stop - start
    o, lse = zip(*outputs, strict=True)
    return jnp.concatenate(o, dim), jnp.concatenate(lse, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _whole(x: Any, axis: str, layout: Layout, dim: int, copies: int) -> tuple[Any, ...]:
    """All tokens in their order, a copy for each call that reads them, so that each copy has its own gradient."""
    return (_in_order(jax.lax.all_gather(x, axis, axis=dim, tiled=True), layout, dim),) * copies


def _whole_forward(x: Any, axis: str, layout: Layout, dim: int, copies: int) -> tuple[Any, None]:
    return _whole(x, axis, layout, dim, copies), None


def _whole_backward(axis: str, layout: Layout, dim: int, copies: int, _: None, shares: tuple[Any, ...]) -> tuple[Any]:
    """The sum of all devices' shares, in float32 and in the order of devices: XLA's own sum has no order, and would be
    in the dtype of x."""
    dtype = shares[0].dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    own = functools.reduce(jnp.add, [share.astype(wide) for share in shares])
    parts = jnp.stack(jnp.split(_of_ranks(own, layout, dim), layout.size, dim))
    parts = jax.lax.all_to_all(parts, axis, 0, 0)
    return (functools.reduce(jnp.add, [parts[rank] for rank in range(layout.size)]).astype(dtype),)


_whole.defvjp(_whole_forward, _whole_backward)


def _by_heads(q: Any, k: Any, v: Any, axis: str, layout: Layout, given: dict[str, Any], dims: str) -> tuple[Any, Any]:
    size, dim, at = layout.size, dims.index("s"), dims.index("h")
    if k.shape[at] % size:
        raise ValueError(
            f"method='heads' needs heads_kv that {size} devices divide, not {k.shape[at]}: use method='gather'"
        )
    for name in (*FUNCTIONS, SEEDED):
        if given.get(name):
            raise NotImplementedError(f"{name} is told heads of the whole: use method='gather'")
    each = q.shape[at] // size
    first = jax.lax.axis_index(axis) * each
    own = {name: x for name in OF_HEADS if (x := given[name]) is not None}
    own = {name: jax.lax.dynamic_slice_in_dim(x, first, each, axis=x.ndim - 1) for name, x in own.items()}

    def to_heads(x: Any) -> Any:
        return _in_order(jax.lax.all_to_all(x, axis, at, dim, tiled=True), layout, dim)

    def to_tokens(x: Any, dim: int, at: int) -> Any:
        return jax.lax.all_to_all(_of_ranks(x, layout, dim), axis, dim, at, tiled=True)

    operands = [to_heads(x) for x in (q, k, v)]
    o, lse = attend(*operands, q_offset=0, layout=dims, return_lse=True, **given | own)
    return to_tokens(o, dim, at), to_tokens(lse, 2, 1)


def _in_order(x: Any, layout: Layout, dim: int) -> Any:
    """Tokens in the order of the whole, of x that has them in the order of ranks."""
    runs, at = [], 0
    for rank in range(layout.size):
        for start, stop in layout.runs(rank):
            runs.append((start, jax.lax.slice_in_dim(x, at, at + stop - start, axis=dim)))
            at += stop - start
    return jnp.concatenate([run for _, run in sorted(runs, key=lambda run: run[0])], dim)


def _of_ranks(x: Any, layout: Layout, dim: int) -> Any:
    """The reverse of `_in_order`."""
    runs = [run for rank in range(layout.size) for run in layout.runs(rank)]
    return jnp.concatenate([jax.lax.slice_in_dim(x, *run, axis=dim) for run in runs], dim)


def shard(x: Any, axis: str, dim: int, layout: str | Layout) -> Any:
    """This device's tokens of x, which all devices have."""
    chosen = _equal_runs(layout_of(layout, jax.lax.psum(1, axis), x.shape[dim]))
    positions = np.stack([chosen.positions(rank) for rank in range(chosen.size)]).astype("int32")
    return jnp.take(x, jnp.asarray(positions)[jax.lax.axis_index(axis)], axis=dim)


def unshard(x: Any, axis: str, dim: int, layout: str | Layout) -> Any:
    size = jax.lax.psum(1, axis)
    chosen = _equal_runs(layout_of(layout, size, x.shape[dim] * size))
    return _in_order(jax.lax.all_gather(x, axis, axis=dim % x.ndim, tiled=True), chosen, dim % x.ndim)
