"""merge: partial results over parts of the keys, joined exactly."""

from typing import Any

import array_api_compat

from ..dispatch.forward import AttentionOutput


def merge(*partial: Any, layout: str = "bhsd") -> AttentionOutput:
    """merge(o1, lse1, o2, lse2, ...) -> the attention over all keys, from attention over parts of them.

    >>> parts = [attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in ((0, 100), (100, 300))]
    >>> o, lse = merge(*parts[0], *parts[1])

    Equation 12 of docs/algorithm.md: with lse = max_i lse_i + log(sum_i e^(lse_i - max)), o is the sum of
    e^(lse_i - lse) * o_i. It is exact for any number and order of parts. A part that saw no key (lse -inf)
    has no effect, whatever its o is. If no part saw a key, o is 0 and lse is -inf.

    o_i: (batch, heads, seqlen_q, head_dim_v), or with layout "bshd" (batch, seqlen_q, heads, head_dim_v);
    lse_i: (batch, heads, seqlen_q), natural logarithm, float32 (float64 with float64 o). All arrays are of
    one library of the array API (NumPy, CuPy, torch, JAX, ...). Its own operations compute the result on its own
    device and stream. Sums are in lse's dtype. Returns AttentionOutput(o, lse) in o1's and lse1's dtypes.
    Raises ValueError and TypeError for missing pairs, other shapes, mixed kinds or dtypes.
    """
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f'layout must be "bhsd" or "bshd", not {layout!r}')
    if any(isinstance(x, tuple | list) for x in partial):
        given = "o1, lse1, o2, lse2, ..., not tuples or lists of them: merge(*one, *other) for results of attention"
        raise TypeError(f"merge takes {given}")
    if len(partial) < 2 or len(partial) % 2:
        raise ValueError(f"merge takes pairs o1, lse1, o2, lse2, ..., not {len(partial)} arrays")
    try:
        xp = array_api_compat.array_namespace(*partial)
    except TypeError as error:
        raise TypeError(f"merge takes arrays of one library (NumPy, CuPy, torch, JAX): {error}") from None
    strange = [x for x in partial if not array_api_compat.is_array_api_obj(x)]  # numbers and None pass the line above
    if strange:
        raise TypeError(f"merge takes arrays of one library (NumPy, CuPy, torch, JAX), not {strange[0]!r}")
    outputs, lses = partial[0::2], partial[1::2]
    _check(xp, outputs, lses, layout)
    compute = lses[0].dtype
    lse_max = lses[0]
    for lse in lses[1:]:
        lse_max = xp.where(lse > lse_max, lse, lse_max)
    nothing = lse_max == -float("inf")
    reference = xp.where(nothing, xp.zeros_like(lse_max), lse_max)
    weights = [xp.exp(lse - reference) for lse in lses]  # e^-inf = 0: a part without keys
    total = sum(weights[1:], weights[0])
    divisor = xp.where(nothing, xp.ones_like(total), total)
    merged = None
    for o, weight in zip(outputs, weights, strict=True):
        share = xp.expand_dims(weight / divisor, axis=-1)
        share = xp.permute_dims(share, (0, 2, 1, 3)) if layout == "bshd" else share
        wide = xp.astype(o, compute)
        term = share * xp.where(share == 0, xp.zeros_like(wide), wide)  # 0 * NaN must not count
        merged = term if merged is None else merged + term
    lse = xp.where(nothing, lse_max, reference + xp.log(divisor))
    return AttentionOutput(xp.astype(merged, outputs[0].dtype), lse)


def _check(xp: Any, outputs: tuple[Any, ...], lses: tuple[Any, ...], layout: str) -> None:
    shape = tuple(outputs[0].shape)
    if len(shape) != 4:
        raise ValueError(f"o1 must have 4 dimensions, not shape {shape}")
    rows = shape[:3] if layout == "bhsd" else (shape[0], shape[2], shape[1])
    if lses[0].dtype not in (xp.float32, xp.float64):
        raise TypeError(f"lse1 must be float32 or float64, not {lses[0].dtype}")
    for number, (o, lse) in enumerate(zip(outputs, lses, strict=True), 1):
        if tuple(o.shape) != shape or o.dtype != outputs[0].dtype:
            raise ValueError(f"o{number} must be {outputs[0].dtype} {shape} like o1, not {o.dtype} {tuple(o.shape)}")
        if tuple(lse.shape) != rows or lse.dtype != lses[0].dtype:
            raise ValueError(f"lse{number} must be {lses[0].dtype} {rows}, not {lse.dtype} {tuple(lse.shape)}")
