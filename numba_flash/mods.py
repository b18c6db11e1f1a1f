"""Ready functions for score_mod= and mask_mod=. Each is a few lines to copy and change.

>>> numba_flash.attention(q, k, v, mask_mod=mods.document, aux=(segments,))
>>> numba_flash.attention(q, k, v, score_mod=mods.softcap(50.0))

A function gets all of aux, whether it is a score_mod or a mask_mod. So two that read different arrays are written
together, as `lambda b, h, q_pos, k_pos, segments, prefix: ...`.
"""

import math
from typing import Any

import numpy as np


def causal(b: Any, h: Any, q_pos: Any, k_pos: Any) -> Any:
    """mask_mod: no key behind the query's position; the same as causal=True, which is faster."""
    return k_pos <= q_pos


def sliding_window(left: int, right: int = 0) -> Any:
    """-> mask_mod: `left` keys before the query's position and `right` behind it; as window=, which is faster."""

    def mask(b: Any, h: Any, q_pos: Any, k_pos: Any) -> Any:
        return q_pos - left <= k_pos <= q_pos + right

    return mask


def dilated(step: int) -> Any:
    """-> mask_mod: of the keys up to the query's position every step-th, counted from there back."""

    def mask(b: Any, h: Any, q_pos: Any, k_pos: Any) -> Any:
        return k_pos <= q_pos and (q_pos - k_pos) % step == 0

    return mask


def document(b: Any, h: Any, q_pos: Any, k_pos: Any, segments: Any) -> Any:
    """mask_mod: keys of the query's own document. segments: whole numbers (batch, seqlen_k), the same in a document."""
    return segments[b, q_pos] == segments[b, k_pos]


def prefix_lm(b: Any, h: Any, q_pos: Any, k_pos: Any, prefix: Any) -> Any:
    """mask_mod: all see the first prefix[b] keys, and behind them it is causal. prefix: whole numbers (batch,)."""
    return k_pos < prefix[b] or k_pos <= q_pos


def tree(b: Any, h: Any, q_pos: Any, k_pos: Any, ancestors: Any, start: Any) -> Any:
    """mask_mod for speculative decoding: drafted tokens see what was there before, and of each other their ancestors.

    start: where the drafts begin, whole numbers (batch,); ancestors: bool (drafts, drafts), row i sees column j.
    """
    if k_pos < start[b]:
        return True
    return ancestors[q_pos - start[b], k_pos - start[b]]


def alibi(score: Any, b: Any, h: Any, q_pos: Any, k_pos: Any, slopes: Any) -> Any:
    """score_mod: less by slopes[h] for each step of distance; slopes (heads,). The same as alibi_slopes=."""
    return score - slopes[h] * abs(q_pos - k_pos)


def softcap(cap: float) -> Any:
    """-> score_mod: scores stay between -cap and cap; the same as softcap=."""

    def capped(score: Any, b: Any, h: Any, q_pos: Any, k_pos: Any) -> Any:
        return cap * math.tanh(score / cap)

    return capped


def relative_position(buckets: int = 32, farthest: int = 128, bidirectional: bool = True) -> Any:
    """-> score_mod: T5's bias by distance (Raffel et al., 2020). It reads the table (buckets, heads) of the model.

    Half of the buckets are for one distance each, the others for ranges that grow up to `farthest`.
    """
    own = buckets // 2 if bidirectional else buckets
    exact = own // 2
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
    """(first distance, bucket) of each behind `exact`, in float32 and with its roundings, as Transformers has it."""
    real = np.float32
    ratios = np.log(np.arange(exact, farthest + 1).astype(real) / real(exact)) / real(math.log(farthest / exact))
    found = exact + (ratios * real(own - exact)).astype(int)
    return tuple((exact + int(np.searchsorted(found, bucket)), bucket) for bucket in range(exact + 1, own))
