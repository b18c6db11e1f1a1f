"""The signature of jax.nn's attention."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..api import forward as api
from ..problem.forward import check_bool
from .arguments import described, number, renamed

NAMES = dict(
    q="query",
    k="key",
    v="value",
    causal="is_causal",
    seqlens_k="key_value_seq_lengths",
    window="local_window_size",
    return_lse="return_residual",
)


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """jax.nn.dot_product_attention, under jit, grad, vmap and shard_map, on CPUs and GPUs.

    >>> o = dot_product_attention(query, key, value, is_causal=True)

    query: (batch, seqlen_q, heads, head_dim); key: (batch, seqlen_k, heads_kv, head_dim); value: likewise with
    head_dim_v, which may differ. All three may come without batch. heads is a multiple of heads_kv.
    bias: added to the scores, in float32 or query's dtype. mask: bool, True = attend. Both broadcast to (batch, heads,
    seqlen_q, seqlen_k).
    is_causal, local_window_size: query 0 stands at key 0 ("top-left"). A window is (left, right), inclusive, or one
    number for both.
    query_seq_lengths: int32 (batch,); later rows of the result are 0, and their gradients too.
    key_value_seq_lengths: int32 (batch,); later keys are not read.
    return_residual: return (o, lse), lse (batch, seqlen_q, heads) in key's dtype, without a gradient, as in jax.nn.

    Differences from jax.nn: a query that sees no key gives 0 and lse -inf, not the mean of value. Weights are not
    rounded to key's dtype before they are summed.

    Raises ValueError for any `implementation` but None, and what `numba_flash.attention` raises, with the names of
    these arguments.
    """
    if implementation is not None:
        raise ValueError(f"implementation must be None, not {implementation!r}: this is numba_flash's")
    for name, value_of in (("is_causal", is_causal), ("return_residual", return_residual)):
        check_bool(name, value_of)
    arrays = [_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
    without_batch = arrays[0].ndim == 3
    if without_batch:
        arrays = [x[None] for x in arrays]
    try:
        found = api.attention(
            *arrays,
            bias=None if bias is None else jnp.asarray(bias),
            mask=None if mask is None else jnp.asarray(mask),
            scale=None if scale is None else number("scale", scale),
            causal=is_causal,
            window=_window(local_window_size, is_causal),
            seqlens_k=None if key_value_seq_lengths is None else jnp.asarray(key_value_seq_lengths),
            q_offset=0,
            layout="bshd",
            return_lse=return_residual,
        )
    except (TypeError, ValueError, NotImplementedError) as error:
        raise renamed(error, NAMES)  # noqa: B904 - the same error
    o, lse = found if return_residual else (found, None)
    if query_seq_lengths is not None:
        o = _up_to(query_seq_lengths, o)
    o = o[0] if without_batch else o
    if lse is None:
        return o
    lse = lax.stop_gradient(jnp.swapaxes(lse, 1, 2)).astype(arrays[1].dtype)
    return o, lse[0] if without_batch else lse


def _array(name: str, x: Any) -> Array:
    if len(np.shape(x)) not in (3, 4):
        raise ValueError(f"{name} must have 3 or 4 dimensions ([batch,] seqlen, heads, head_dim), not {described(x)}")
    return jnp.asarray(x)


def _up_to(lengths: Any, o: Array) -> Array:
    """o (batch, seqlen_q, heads, head_dim_v), with 0 in rows from a batch entry's length on."""
    lengths = jnp.asarray(lengths)
    if lengths.shape != o.shape[:1] or lengths.dtype != jnp.int32:
        given = f"{lengths.dtype} {lengths.shape}"
        raise ValueError(f"query_seq_lengths must be int32 of shape {o.shape[:1]}, not {given}")
    kept = jnp.arange(o.shape[1]) < lengths[:, None]
    return jnp.where(kept[:, :, None, None], o, 0)


def _window(size: Any, is_causal: bool) -> tuple[int, int] | None:
    if size is None:
        return None
    sides = (size, size) if isinstance(size, int) else size
    whole = isinstance(sides, (tuple, list)) and len(sides) == 2 and all(type(x) is int and x >= 0 for x in sides)
    if not whole or isinstance(size, bool):
        allowed = "local_window_size must be a whole number from 0, or a pair of them (left, right)"
        raise ValueError(f"{allowed}, not {described(size)}")
    left, right = sides
    return left, 0 if is_causal else right
