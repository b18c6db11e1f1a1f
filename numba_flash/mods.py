"""Ready functions for score_mod= and mask_mod=. Each is a few lines to copy and change.

>>> numba_flash.attention(q, k, v, mask_mod=mods.document, aux=(segments,))
>>> numba_flash.attention(q, k, v, score_mod=mods.softcap(50.0))

A function gets all of aux, whether it is a score_mod or a mask_mod. So two that read different arrays are written
together, as `lambda b, h, q_pos, k_pos, segments, prefix: ...`.
"""

import math
import operator
from numbers import Real
from typing import Any

import numpy as np


def causal(b: Any, h: Any, q_pos: Any, k_pos: Any) -> Any:
    """mask_mod: a query sees no key behind its own position; the same as causal=True, which is faster."""
    return k_pos <= q_pos


def sliding_window(left: int, right: int = 0) -> Any:
    """-> mask_mod: a query sees `left` keys before its position and `right` behind it; as window=, which is faster."""

    def mask(b: Any, h: Any, q_pos: Any, k_pos: Any) -> Any:
        return q_pos - left <= k_pos <= q_pos + right

    return mask


def dilated(step: int) -> Any:
    """-> mask_mod: a query sees every step-th key up to its position, counted back from there."""
    step = _from_1("step", step)

    def mask(b: Any, h: Any, q_pos: Any, k_pos: Any) -> Any:
        return k_pos <= q_pos and (q_pos - k_pos) % step == 0

    return mask


def document(b: Any, h: Any, q_pos: Any, k_pos: Any, segments: Any) -> Any:
    """mask_mod: a query sees its own document. segments: integers (batch, seqlen_k), one value for each document."""
    return segments[b, q_pos] == segments[b, k_pos]


def neighborhood(
    shape: int | tuple[int, ...],
    window: int | tuple[int, ...],
    dilation: int | tuple[int, ...] = 1,
    ordered: bool = False,
) -> Any:
    """-> mask_mod: neighborhood attention (Hassani et al., 2023) of tokens in one, two or three dimensions.

    shape: how many tokens there are in each dimension; the positions count them in row-major order. window: how many
    keys each query sees in each dimension, itself in the middle. At an edge the window is moved until it lies inside,
    as in NATTEN, so that all queries see the same number. dilation: the distance between keys in the window. window and
    dilation may be one number for all dimensions; window times dilation must be at most shape.
    ordered: the tokens are in the order of `tile_order`, and the function reads its `order` from aux. Then more tiles
    are empty and are skipped; `numba_flash.block_mask` finds them once for many calls.
    """
    extents = _whole("shape", shape)
    sides, steps = _each("window", window, extents), _each("dilation", dilation, extents)
    for extent, side, step in zip(extents, sides, steps, strict=True):
        if side > extent // step:
            raise ValueError(
                f"window times dilation must be at most shape in each dimension, but shape is {shape}, window {window} "
                f"and dilation {dilation}"
            )
    missing = (1,) * (3 - len(extents))
    (planes, rows, columns), (window_p, window_r, window_c), (step_p, step_r, step_c) = (
        (*missing, *of) for of in (extents, sides, steps)
    )

    def sees(query: Any, key: Any, extent: Any, side: Any, step: Any) -> Any:
        """Whether a query sees a key in one dimension. Only tokens with the query's remainder count; `last` is their
        number."""
        last = (extent - query % step + step - 1) // step
        start = min(max(query // step - side // 2, 0), last - side)
        return key % step == query % step and start <= key // step < start + side

    def of_tokens(query: Any, key: Any) -> Any:
        return (
            sees(query % columns, key % columns, columns, window_c, step_c)
            and sees(query // columns % rows, key // columns % rows, rows, window_r, step_r)
            and sees(query // (columns * rows), key // (columns * rows), planes, window_p, step_p)
        )

    def mask(b: Any, h: Any, q_pos: Any, k_pos: Any) -> Any:
        return of_tokens(q_pos, k_pos)

    def mask_of_ordered(b: Any, h: Any, q_pos: Any, k_pos: Any, order: Any) -> Any:
        return of_tokens(order[q_pos], order[k_pos])

    return mask_of_ordered if ordered else mask


def tile_order(shape: int | tuple[int, ...], tile: int | tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """-> (order, back), int32: an order of tokens, tile by tile, in which neighbours in several dimensions are near.

    >>> order, back = mods.tile_order((64, 64), (8, 8))
    >>> x = x[:, :, order]  # (batch, heads, tokens, head_dim), tokens in row-major order before
    >>> o = o[:, :, back]  # tokens in row-major order again

    shape: the number of tokens in each dimension; tile: the tokens of a tile, which need not divide them. A kernel
    computes 64 to 128 queries with as many keys at once. It pays where the last dimension is longer than that: in
    row-major order a window then reaches over parts of many rows.
    """
    extents, sides = _whole("shape", shape), _whole("tile", tile)
    if len(sides) != len(extents) or min(sides, default=0) < 1:
        raise ValueError(f"tile must have a number from 1 for each dimension of shape {shape}, not {tile}")
    places = np.indices(extents).reshape(len(extents), -1)
    numbers = [at // side for at, side in zip(places, sides, strict=True)]
    within = [at % side for at, side in zip(places, sides, strict=True)]
    order = np.lexsort((*within[::-1], *numbers[::-1])).astype(np.int32)
    return order, np.argsort(order).astype(np.int32)


def block_sparse(tile: int = 1) -> Any:
    """-> mask_mod: a query sees the keys of a sparse pattern, such as the neighbours of each atom. The pattern is in
    CSR form, aux=(indptr, indices), integers: row i has the columns indices[indptr[i] : indptr[i + 1]], in ascending
    order. All batch entries and heads share it.

    tile: the number of queries of a row of the pattern, and of keys of a column.

    >>> pattern = numba_flash.block_mask(mods.block_sparse(64), 1, heads, n, n, aux=(indptr, indices))
    >>> o = numba_flash.attention(q, k, v, block_mask=pattern)

    A `block_mask` finds the empty tiles once. It calls the function for each pair of query and key, by binary search in
    a row. Sort tokens so that neighbours have near indices: then more tiles are empty.
    """
    tile = _from_1("tile", tile)

    def mask(b: Any, h: Any, q_pos: Any, k_pos: Any, q_index: Any, indptr: Any, indices: Any) -> Any:
        row, column = q_index // tile, k_pos // tile
        first, end = indptr[row], indptr[row + 1]
        while first < end:
            middle = (first + end) // 2
            if indices[middle] < column:
                first = middle + 1
            else:
                end = middle
        return first < indptr[row + 1] and indices[first] == column

    return mask


def prefix_lm(b: Any, h: Any, q_pos: Any, k_pos: Any, prefix: Any) -> Any:
    """mask_mod: all queries see the first prefix[b] keys; other keys are causal. prefix: integers (batch,)."""
    return k_pos < prefix[b] or k_pos <= q_pos


def tree(b: Any, h: Any, q_pos: Any, k_pos: Any, ancestors: Any, start: Any) -> Any:
    """mask_mod for speculative decoding: drafted tokens see all earlier tokens, and among the drafts their ancestors.

    start: the first draft's position, integers (batch,); ancestors: bool (drafts, drafts), row i sees column j. With
    `attention_kvcache`, which appends the drafts as k_new, start is its seqlens_k.
    """
    if k_pos < start[b]:
        return True
    return ancestors[q_pos - start[b], k_pos - start[b]]


def trees(b: Any, h: Any, q_pos: Any, k_pos: Any, ancestors: Any, start: Any) -> Any:
    """mask_mod: `tree` with a tree for each sequence. ancestors: bool (batch, drafts, drafts)."""
    if k_pos < start[b]:
        return True
    return ancestors[b, q_pos - start[b], k_pos - start[b]]


def alibi(score: Any, b: Any, h: Any, q_pos: Any, k_pos: Any, slopes: Any) -> Any:
    """score_mod: the score minus slopes[h] times the distance; slopes: (heads,). The same as alibi_slopes=."""
    return score - slopes[h] * abs(q_pos - k_pos)


def softcap(cap: float) -> Any:
    """-> score_mod: scores stay between -cap and cap; the same as softcap=."""
    if not isinstance(cap, Real) or isinstance(cap, bool) or not 0 < cap < math.inf:
        raise ValueError(f"cap must be a finite number above 0, not {cap!r}")

    def capped(score: Any, b: Any, h: Any, q_pos: Any, k_pos: Any) -> Any:
        return cap * math.tanh(score / cap)

    return capped


def relative_position(buckets: int = 32, farthest: int = 128, bidirectional: bool = True) -> Any:
    """-> score_mod: T5's bias by distance (Raffel et al., 2020). It reads the table (buckets, heads) of the model.

    Half of the buckets are for one distance each, the others for ranges that grow up to `farthest`.
    """
    own = _from_1("buckets", buckets) // (2 if bidirectional else 1)
    exact = own // 2
    if exact < 1 or _from_1("farthest", farthest) <= exact:
        least = f"at least {4 if bidirectional else 2}, and farthest above {max(exact, 1)}"
        raise ValueError(f"buckets must be {least}, not {buckets} and {farthest}")
    ranges = _ranges(exact, own, farthest)

    def biased(score: Any, b: Any, h: Any, q_pos: Any, k_pos: Any, table: Any) -> Any:
        distance = abs(q_pos - k_pos) if bidirectional else max(q_pos - k_pos, 0)
        bucket = min(distance, exact)
        for start, number in ranges:
            bucket = number if distance >= start else bucket
        if bidirectional:
            bucket = bucket + own if k_pos > q_pos else bucket
        return score + table[bucket, h]

    return biased


def _ranges(exact: int, own: int, farthest: int) -> tuple[tuple[int, int], ...]:
    """(first distance, bucket) of each range behind `exact`, rounded in float32 as in Transformers."""
    real = np.float32
    ratios = np.log(np.arange(exact, farthest + 1).astype(real) / real(exact)) / real(math.log(farthest / exact))
    found = exact + (ratios * real(own - exact)).astype(int)
    return tuple((exact + int(np.searchsorted(found, bucket)), bucket) for bucket in range(exact + 1, own))


def _each(name: str, given: int | tuple[int, ...], extents: tuple[int, ...]) -> tuple[int, ...]:
    """A number for each dimension."""
    found = _whole(name, given)
    found = found * len(extents) if hasattr(given, "__index__") else found
    if not 1 <= len(extents) <= 3 or len(found) != len(extents) or min(found) < 1:
        raise ValueError(
            f"shape must have 1 to 3 dimensions, and {name} one number from 1, or one for each of them, but shape is "
            f"{extents} and {name} {given}"
        )
    return found


def _from_1(name: str, given: Any) -> int:
    (found,) = _whole(name, given)
    if found < 1:
        raise ValueError(f"{name} must be a whole number from 1, not {given}")
    return found


def _whole(name: str, given: Any) -> tuple[int, ...]:
    """One whole number, or several."""
    try:
        return tuple(map(operator.index, (given,) if hasattr(given, "__index__") else given))
    except TypeError:
        raise TypeError(f"{name} must be a whole number or a tuple of them, not {given!r}") from None
