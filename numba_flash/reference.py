"""The oracle: attention and its gradients in float64 NumPy, written to be obviously right. No tiles, no tricks.

Every other kernel is tested against this file. It takes NumPy arrays in (batch, heads, seqlen, dim)
order and holds the whole seqlen_q x seqlen_k matrix, so keep the sizes small.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .functions import numbers
from .functions.function import Function

Array = NDArray[np.float64]


class Gradients(NamedTuple):
    """The gradients of everything that a score or an output depends on; None for what was not given."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None  # of bias' own shape: summed over the dimensions that it is broadcast in
    dalibi_slopes: Array | None  # of the slopes' own shape
    dsinks: Array | None  # of the sinks' own shape
    daux: dict[int, Array]  # gradients of the arrays of aux, by their index in aux


def visible_keys(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    left: int | None = None,
    right: int | None = None,
    q_offset: NDArray[np.int64],
    seqlens_k: NDArray[np.int64],
    mask: NDArray[np.bool_] | None = None,
) -> NDArray[np.bool_]:
    """True where query i of a batch entry may look at key j: (batch, 1 or heads, seqlen_q, seqlen_k).

    q_offset and seqlens_k have shape (batch,). Key j is visible to the query at position
    p = i + q_offset when p - left <= j <= p + right (None = unbounded), j < seqlens_k and the mask is True.
    """
    q_pos = np.arange(seqlen_q)[None, None, :, None] + q_offset[:, None, None, None]
    k_pos = np.arange(seqlen_k)[None, None, None, :]
    visible = np.broadcast_to(k_pos < seqlens_k[:, None, None, None], (batch, 1, seqlen_q, seqlen_k)).copy()
    if left is not None:
        visible &= k_pos >= q_pos - left
    if right is not None:
        visible &= k_pos <= q_pos + right
    return visible if mask is None else visible & mask


def forward(
    q: NDArray,  # (batch, heads, seqlen_q, head_dim)
    k: NDArray,  # (batch, heads_kv, seqlen_k, head_dim)
    v: NDArray,  # (batch, heads_kv, seqlen_k, head_dim_v)
    *,
    scale: float,
    visible: NDArray[np.bool_],  # broadcastable to (batch, heads, seqlen_q, seqlen_k)
    softcap: float | None = None,
    alibi_slopes: NDArray | None = None,  # (batch or 1, heads)
    q_offset: NDArray | None = None,  # (batch,); only ALiBi asks for positions
    bias: NDArray | None = None,  # broadcastable to (batch, heads, seqlen_q, seqlen_k)
    score_mod: Function | None = None,
    mask_mod: Function | None = None,
    aux: tuple[NDArray, ...] = (),  # arrays that score_mod and mask_mod read
    sinks: NDArray | None = None,  # (batch or 1, heads)
    dropout_p: float | None = None,
    seed: int | None = None,
) -> tuple[Array, Array]:
    """-> o (batch, heads, seqlen_q, head_dim_v) and lse (batch, heads, seqlen_q), both float64.

    o = softmax(scores) @ v over the visible keys; lse = log(sum(exp(scores))), natural. A row that
    sees no key gives o = 0 and lse = -inf. The contents of invisible positions are never used.
    A sink is one more score in each row of its head, of a key without a value: it only adds to the sum of e^s.
    Dropout does not change that sum.
    """
    k, v = _of_each_head(q, k), _of_each_head(q, v)
    with np.errstate(all="ignore"):  # masked keys may hold anything
        visible = _unmasked(visible, (*q.shape[:3], k.shape[2]), mask_mod, q_offset, aux)
        s, _ = _scores(q, k, scale, score_mod, softcap, alibi_slopes, q_offset, bias, visible, aux)
        p, _, m, l = _weights(np.where(visible, s, -np.inf), sinks)
        p = p * weight_factors(p.shape, dropout_p, seed, q_offset)
        o = np.where(l == 0, 0.0, _weighted(p, v) / np.where(l == 0, 1.0, l))
        lse = np.where(l == 0, -np.inf, m + np.log(l))
    return o, lse[..., 0]


def backward(
    do: NDArray,  # (batch, heads, seqlen_q, head_dim_v), the gradient of o
    q: NDArray,
    k: NDArray,
    v: NDArray,
    o: NDArray,  # (batch, heads, seqlen_q, head_dim_v), of the forward over all keys
    lse: NDArray,  # (batch, heads, seqlen_q), likewise
    *,
    dlse: NDArray | None = None,  # (batch, heads, seqlen_q), the gradient of lse
    scale: float,
    visible: NDArray[np.bool_],
    softcap: float | None = None,
    alibi_slopes: NDArray | None = None,
    q_offset: NDArray | None = None,
    bias: NDArray | None = None,
    score_mod: Function | None = None,
    mask_mod: Function | None = None,
    aux: tuple[NDArray, ...] = (),
    sinks: NDArray | None = None,
    dropout_p: float | None = None,
    seed: int | None = None,
    wanted_aux: tuple[int, ...] = (),  # indices of the arrays of aux whose gradients are wanted
) -> Gradients:
    """The gradients of sum(do * o) + sum(dlse * lse), all float64; the other arguments are those of `forward`.

    P is not stored but recomputed, P = e^(S - lse). e^(S - m) / l would be the same without the rounding of lse, which
    dominates P's error where |S| is large. Then, by equations 13 to 18 of docs/backward.md,

        dV = P^T dO    dP = dO V^T    dS = P * (dP - delta)    dQ = dS K    dK = dS^T Q

    with delta = rowsum(dO * O), from which dlse is taken away: d lse / dS = P. A position without weight
    (removed, or of a row that sees no key) gets and gives nothing, whatever k, v, q and do hold there.
    A sink is a score without a value, so its dP is 0, and its dS = e^(sink - lse) * (0 - delta).
    """
    q, do = np.asarray(q, np.float64), np.asarray(do, np.float64)
    heads_kv = k.shape[1]
    k, v = _of_each_head(q, k), _of_each_head(q, v)
    lse = lse[..., None]  # in its own dtype, whose rounding counts
    with np.errstate(all="ignore"):
        o = np.asarray(o, np.float64)
        delta = np.sum(np.where(o == 0, 0.0, do * o), axis=-1, keepdims=True)  # 0 for rows without keys, whatever do is
        if dlse is not None:
            delta = delta - np.asarray(dlse, np.float64)[..., None]
        visible = _unmasked(visible, (*q.shape[:3], k.shape[2]), mask_mod, q_offset, aux)
        s, through = _scores(q, k, scale, score_mod, softcap, alibi_slopes, q_offset, bias, visible, aux)
        p, of_sink, m, l = _weights(np.where(visible, s, -np.inf), sinks)
        own = np.where(l == 0, -np.inf, m + np.log(l))
        of_these = unrounded(lse, own) == own  # otherwise lse belongs to more keys than these
        p = np.where(of_these, p / l, np.exp(s - lse))
        p = np.where(visible & (s != -np.inf) & (lse != -np.inf), p, 0.0)
        counts = weight_factors(p.shape, dropout_p, seed, q_offset)  # factors of P in dV, and of dP
        dp = np.where(counts == 0, 0.0, counts * np.einsum("bhid,bhjd->bhij", do, v))
        ds = np.where(p == 0, 0.0, p * (dp - delta))
        dproduct = np.where(p == 0, 0.0, scale * through * ds)  # gradient of q . k before scaling
        dq = _weighted(dproduct, k)
        dk = _of_each_kv_head(_weighted(dproduct.swapaxes(2, 3), q), heads_kv)
        dv = _of_each_kv_head(_weighted((p * counts).swapaxes(2, 3), do), heads_kv)
        dbias = dalibi_slopes = dsinks = None
        if bias is not None:
            dbias = _summed(ds, bias.shape)
        if alibi_slopes is not None:
            assert q_offset is not None
            of_positions = np.where(p == 0, 0.0, -ds * _distance(q_offset, q.shape[2], k.shape[2]))
            dalibi_slopes = _summed(of_positions, (*alibi_slopes.shape, 1, 1))[..., 0, 0]
        if sinks is not None:
            sink = _of_rows(sinks)
            weight = np.where(of_these, of_sink / l, np.exp(sink - lse))
            weight = np.where((sink == -np.inf) | (lse == -np.inf), 0.0, weight)
            of_rows = np.where(weight == 0, 0.0, -weight * delta)
            dsinks = _summed(of_rows, (*sinks.shape, 1, 1))[..., 0, 0]
        products = scale * np.einsum("bhid,bhjd->bhij", q, k) if wanted_aux else s
        daux = _of_aux(wanted_aux, products, ds, score_mod, softcap, q_offset, aux)
    return Gradients(dq, dk, dv, dbias, dalibi_slopes, dsinks, daux)


def _of_aux(
    wanted: tuple[int, ...],
    s: Array,  # (batch, heads, seqlen_q, seqlen_k), before score_mod
    ds: Array,  # likewise, for the scores that enter the softmax; 0 where there is no weight
    score_mod: Function | None,
    softcap: float | None,
    q_offset: NDArray | None,
    aux: tuple[NDArray, ...],
) -> dict[int, Array]:
    """The gradients of the arrays that a score_mod reads: for each element the sum of dS times its score's slope."""
    found = {number: np.zeros(aux[number].size) for number in wanted}
    if score_mod is not None and wanted:
        tables = [
            numbers.RecordedTable(np.float64, array, number) if number in wanted else numbers.Table(np.float64, array)
            for number, array in enumerate(aux)
        ]
        for at, where in _positions(ds != 0, q_offset):
            y, aux_gradient = numbers.score_of(score_mod, np.float64, s[at], where, tables, False)
            through = 1.0 if softcap is None else 1 - np.tanh(y / softcap) ** 2
            for (number, place), slope in numbers.parts_of(aux_gradient):
                found[number][place] += ds[at] * through * slope
    return {number: x.reshape(aux[number].shape) for number, x in found.items()}


def dropout_mask(
    shape: tuple[int, int, int, int], dropout_p: float, seed: int, q_offset: int | NDArray | None = None
) -> NDArray[np.bool_]:
    """True where a weight counts, False where dropout_p leaves it out, for any attention with this seed.

    >>> numba_flash.testing.dropout_mask((1, 8, 100, 100), 0.1, seed=3)

    shape: (batch, heads, seqlen_q, seqlen_k). q_offset: where query 0 stands, a number or (batch,); None = seqlen_k -
    seqlen_q, as for `attention`.

    Of each 16 keys four words of Philox 4x32 with 7 rounds (Salmon et al., 2011) are those of the first four and, in
    the upper 16 bits, of the third four; four others those of the second and the last. The key is the seed; the counter
    is (16 keys and which half of the first 8, q_pos, h, b). A weight counts where its number is below 2^16 - dropout_p
    * 2^16, of which the second is rounded and less than 2^16.
    """
    batch, heads, seqlen_q, seqlen_k = shape
    first = np.broadcast_to(np.asarray(seqlen_k - seqlen_q if q_offset is None else q_offset), (batch,))
    k_pos = np.arange(seqlen_k)
    low = np.uint64(0xFFFFFFFF)
    counter = [
        ((k_pos >> 4) << 1 | k_pos >> 2 & 1)[None, None, None, :],
        (np.arange(seqlen_q) + first[:, None])[:, None, :, None],
        np.arange(heads)[None, :, None, None],
        np.arange(batch)[:, None, None, None],
    ]
    x, y, z, w = np.broadcast_arrays(*(part.astype(np.uint64) & low for part in counter))
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(7):
        of_x, of_z = x * np.uint64(0xD2511F53), z * np.uint64(0xCD9E8D57)
        x, y = (of_z >> np.uint64(32)) ^ y ^ np.uint64(keys[0]), of_z & low
        z, w = (of_x >> np.uint64(32)) ^ w ^ np.uint64(keys[1]), of_x & low
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    words = np.choose(np.broadcast_to(k_pos & 3, shape), [x, y, z, w])
    numbers = words >> (16 * (k_pos >> 3 & 1)).astype(np.uint64) & np.uint64(0xFFFF)
    return numbers < np.uint64(2**16 - _dropped(dropout_p))


def _dropped(dropout_p: float) -> int:
    """How many of the 2^16 values of a random number drop a weight."""
    return min(round(dropout_p * 2**16), 2**16 - 1)


def weight_factors(shape: Any, dropout_p: float | None, seed: int | None, q_offset: NDArray | None) -> Any:
    """The factor of each weight in the output: 0 or 1 / (1 - dropout_p); 1 for all without dropout_p."""
    if dropout_p is None:
        return 1.0
    assert seed is not None and q_offset is not None
    return dropout_mask(shape, dropout_p, seed, q_offset) / (1 - _dropped(dropout_p) / 2**16)


def _scores(
    q: NDArray,
    k: NDArray,  # (batch, heads, seqlen_k, head_dim)
    scale: float,
    score_mod: Function | None,
    softcap: float | None,
    alibi_slopes: NDArray | None,
    q_offset: NDArray | None,
    bias: NDArray | None,
    visible: NDArray[np.bool_],
    aux: tuple[NDArray, ...],
) -> tuple[Array, Array]:
    """Scores before any is removed, (batch, heads, seqlen_q, seqlen_k), and their derivatives by scale * q . k.

    A score_mod is asked for what is visible only: elsewhere it might read past the end of an array.
    """
    s = scale * np.einsum("bhid,bhjd->bhij", np.asarray(q, np.float64), k)
    through = np.ones(())
    if score_mod is not None:
        through = np.zeros(s.shape)
        tables = _tables(aux)
        for at, where in _positions(visible, q_offset):
            s[at], derivative = numbers.score_of(score_mod, np.float64, s[at], where, tables, True)
            through[at] = 0.0 if derivative is None else derivative
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
        through = through * (1 - (s / softcap) ** 2)
    if alibi_slopes is not None:
        assert q_offset is not None
        slopes = np.asarray(alibi_slopes, np.float64)[:, :, None, None]
        s = s - slopes * _distance(q_offset, q.shape[2], k.shape[2])
    if bias is not None:
        s = s + np.asarray(bias, np.float64)
    return s, through


def rotated(
    x: NDArray,  # (..., rows, head_dim)
    positions: NDArray[np.int64],  # of the rows, broadcastable to (..., rows)
    cos: NDArray,  # (positions, rotary_dim // 2)
    sin: NDArray,
    interleaved: bool,
    compute: Any = np.float64,
) -> NDArray:
    """Rotary embedding (Su et al., RoFormer, 2021): of each pair (x, y) of the first rotary_dim columns
    (x cos - y sin, x sin + y cos). Pairs are columns (2 i, 2 i + 1) if interleaved, else (i, i + rotary_dim // 2)."""
    half = cos.shape[1]
    at = np.clip(positions, 0, max(len(cos) - 1, 0))
    cos, sin = (np.asarray(table, compute)[at] for table in (cos, sin))
    made = np.array(x, compute)
    first = np.s_[..., 0 : 2 * half : 2] if interleaved else np.s_[..., :half]
    second = np.s_[..., 1 : 2 * half : 2] if interleaved else np.s_[..., half : 2 * half]
    one, other = made[first].copy(), made[second].copy()
    made[first], made[second] = one * cos - other * sin, one * sin + other * cos
    return made


def unrounded(lse: NDArray, own: NDArray) -> NDArray:
    """own where lse may be own rounded, otherwise lse, which then belongs to more keys."""
    rounding = 2 * np.finfo(lse.dtype).eps * (1 + np.abs(own))
    return np.where(np.isfinite(own) & (np.abs(lse - own) <= rounding), own, np.asarray(lse, np.float64))


def _weights(s: Array, sinks: NDArray | None) -> tuple[Array, Array, Array, Array]:
    """-> (e^(s - m), e^(sink - m), m, l). s: scores, -inf where a key is not seen. l: the row sum of both terms."""
    sink = _of_rows(sinks)
    m = np.maximum(np.max(s, axis=-1, keepdims=True, initial=-np.inf), sink)
    shift = np.where(m == -np.inf, 0.0, m)
    p, of_sink = np.where(s == -np.inf, 0.0, np.exp(s - shift)), np.exp(sink - shift)
    return p, of_sink, m, np.sum(p, axis=-1, keepdims=True) + of_sink


def _of_rows(sinks: NDArray | None) -> Array:
    """The sinks as (batch or 1, heads, 1, 1); -inf, a score of weight 0, without sinks."""
    return np.full((1, 1, 1, 1), -np.inf) if sinks is None else np.asarray(sinks, np.float64)[:, :, None, None]


def _unmasked(
    visible: NDArray[np.bool_],
    shape: tuple[int, ...],
    mask_mod: Function | None,
    q_offset: NDArray | None,
    aux: tuple[NDArray, ...],
) -> NDArray[np.bool_]:
    """True where `visible` and mask_mod both let a query see a key: (batch, heads, seqlen_q, seqlen_k)."""
    visible = np.broadcast_to(visible, shape)
    if mask_mod is None:
        return visible
    left = np.zeros(shape, bool)
    tables = _tables(aux)
    for at, where in _positions(visible, q_offset):
        left[at] = numbers.mask_of(mask_mod, np.float64, where, tables)
    return left


def _positions(visible: NDArray[np.bool_], q_offset: NDArray | None) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """(index of a score, (b, h, q_pos, k_pos, row of q)) for all that are visible."""
    assert q_offset is not None
    for b, h, i, j in zip(*np.nonzero(visible), strict=True):
        yield (b, h, i, j), (b, h, i + q_offset[b], j, i)


def _tables(aux: tuple[NDArray, ...]) -> list[numbers.Table]:
    return [numbers.Table(np.float64, array) for array in aux]


def _distance(q_offset: NDArray, seqlen_q: int, seqlen_k: int) -> NDArray:
    """|position of the query - position of the key|, (batch, 1, seqlen_q, seqlen_k)."""
    q_pos = np.arange(seqlen_q)[None, :, None] + q_offset[:, None, None]
    return np.abs(q_pos - np.arange(seqlen_k))[:, None]


def _weighted(weights: Array, rows: Array) -> Array:
    """weights @ rows, where a row without weight contributes nothing, whatever it holds: 0 * NaN must not count."""
    finite = np.isfinite(rows)
    total = np.einsum("bhij,bhjd->bhid", weights, np.where(finite, rows, 0.0))
    if not finite.all():
        strange = np.where(finite, 0.0, rows)
        for b, h, j in zip(*np.nonzero(~finite.all(axis=-1)), strict=True):
            seen = weights[b, h, :, j] != 0
            total[b, h, seen] += weights[b, h, seen, j, None] * strange[b, h, j]
    return total


def _of_each_head(q: NDArray, x: NDArray) -> Array:
    """k or v repeated for all query heads: query head h reads KV head h // group."""
    group = q.shape[1] // x.shape[1] if x.shape[1] else 1
    return np.repeat(np.asarray(x, np.float64), group, axis=1)


def _of_each_kv_head(x: Array, heads_kv: int) -> Array:
    """The gradient of `_of_each_head`: summed over the query heads of each group."""
    batch, heads, *rest = x.shape
    return x.reshape(batch, heads_kv, heads // heads_kv if heads_kv else 1, *rest).sum(axis=2)


def _summed(x: Array, shape: tuple[int, ...]) -> Array:
    """The gradient of broadcasting from `shape` to x.shape."""
    whole = (1,) * (x.ndim - len(shape)) + shape
    repeated = tuple(axis for axis, (have, want) in enumerate(zip(whole, x.shape, strict=True)) if have != want)
    return x.sum(axis=repeated, keepdims=True).reshape(shape)
