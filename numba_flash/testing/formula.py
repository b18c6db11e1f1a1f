"""The plain formula in NumPy, in a case's own dtype. Its error against the oracle is that of rounding alone.

It is written from the contract, independently of the oracle's code.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..api.backward import AttentionGradients
from ..functions import numbers as function_numbers
from ..functions.function import Function
from ..reference import weight_factors
from .cases import SEEDED, Case, heads_first
from .expected import lse_of_all, oracle


def plain(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """o and lse by the plain formula: the result of every step is rounded to the case's own dtype."""
    _, _, v = of_each_head(case)
    p, lse = softmax(case, scores_of(case)[0])
    with np.errstate(all="ignore"):
        o = rounded(case, p * counts_of(case, p)) @ np.where(np.isfinite(v), v, 0)
    return rounded(case, o), lse


def plain_gradients(
    case: Case,
    do: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    dlse: np.ndarray | None = None,
    aux: Sequence[int] = (),
) -> AttentionGradients:
    """The gradients by the plain formula: the result of every step is rounded to the case's own dtype.

    aux: the indices of the arrays of aux whose gradients are wanted, too; daux is a dict of these.
    """
    q, k, v = (np.where(np.isfinite(x), x, 0) for x in of_each_head(case))
    s, through = scores_of(case)
    do, o = (heads_first(case, x).astype(q.dtype) for x in (do, o))
    heads_kv = heads_first(case, case.k).shape[1]
    with np.errstate(all="ignore"):
        lse = lse_of_all(case, lse)
        share = np.exp(oracle(case)[1] - lse)  # 1 but where o and lse come from more keys than these
        p = softmax(case, s)[0]
        p = rounded(case, np.where(p == 0, 0, p * share[..., None].astype(q.dtype)))
        delta = delta_of(do, o, dlse)
        counts = counts_of(case, p)
        ds = rounded(case, p * (counts * rounded(case, do @ v.swapaxes(2, 3)) - delta))
        ds = np.where(p == 0, 0, ds)
        scaled = rounded(case, q.dtype.type(scale_of(case)) * np.where(p == 0, 0, rounded(case, ds * through)))
        made = dict(
            dq=scaled @ k,
            dk=of_each_kv_head(scaled.swapaxes(2, 3) @ q, heads_kv),
            dv=of_each_kv_head(rounded(case, p * counts).swapaxes(2, 3) @ do, heads_kv),
        )
        made = {name: rounded(case, x) for name, x in made.items()}
        made |= of_options(case, ds)
        if "sinks" in case.options:
            weight = rounded(case, np.exp(sinks_of(case).astype(q.dtype) - lse[..., None].astype(q.dtype)))
            of_rows = np.where(weight == 0, 0, -weight * rounded(case, delta))
            made["dsinks"] = summed(of_rows.sum((2, 3)), case.options["sinks"].shape)
        daux = of_aux(case, ds, aux, lambda x: x) if aux else None
    return AttentionGradients(**made, daux=daux)


def softmax(case: Case, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """-> P, and lse (batch, heads, seqlen_q)."""
    sink = sinks_of(case).astype(s.dtype)
    with np.errstate(all="ignore"):
        m = np.maximum(np.max(s, axis=-1, keepdims=True, initial=-np.inf), sink)
        m = np.where(m == -np.inf, s.dtype.type(0), m)
        p = rounded(case, np.exp(s - m))
        l = np.sum(p, axis=-1, keepdims=True, dtype=s.dtype) + rounded(case, np.exp(sink - m))
        lse = np.where(l == 0, -np.inf, m + np.log(l))
        return rounded(case, p / np.where(l == 0, 1, l)), lse[..., 0]


def counts_of(case: Case, like: np.ndarray) -> np.ndarray:
    """The factor of each weight in o: 0 or 1 / (1 - dropout_p), 1 if none is dropped; in the dtype of `like`."""
    if SEEDED not in case.options:
        return np.ones((), like.dtype)
    q, k = heads_first(case, case.q), heads_first(case, case.k)
    offsets = _positions(case)[:, :1].sum(1)  # 0 without queries
    found = weight_factors((*q.shape[:3], k.shape[2]), case.options[SEEDED], case.options["seed"], offsets)
    return found.astype(like.dtype)


def sinks_of(case: Case) -> np.ndarray:
    """The sinks as (batch or 1, heads, 1, 1); -inf if there are none."""
    sinks = case.options.get("sinks", np.full(1, -np.inf))
    return (sinks if sinks.ndim == 2 else sinks[None])[:, :, None, None]


def scores_of(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Scores (batch, heads, seqlen_q, seqlen_k), -inf for removed keys; the derivative of the softcap there, or 1."""
    s = products_of(case)
    options, compute = case.options, s.dtype.type
    through = np.ones((), compute)
    with np.errstate(all="ignore"):
        visible = visible_keys(case)
        if "score_mod" in options:
            s, through = (rounded(case, x) for x in _by_function(case, s, visible))
        if options.get("softcap"):
            t = np.tanh(s / compute(options["softcap"]))
            s, through = rounded(case, compute(options["softcap"]) * t), rounded(case, through * (1 - t * t))
        if "alibi_slopes" in options:
            slopes = options["alibi_slopes"]
            slopes = (slopes if slopes.ndim == 2 else slopes[None]).astype(compute)
            s = rounded(case, s - slopes[:, :, None, None] * _distance(case).astype(compute))
        if "bias" in options:
            s = rounded(case, s + options["bias"].astype(compute))
    return np.where(visible, s, -np.inf), through


def products_of(case: Case) -> np.ndarray:
    """scale * q . k, (batch, heads, seqlen_q, seqlen_k)."""
    q, k, _ = of_each_head(case)
    with np.errstate(all="ignore"):
        return rounded(case, q.dtype.type(scale_of(case)) * rounded(case, np.matmul(q, k.swapaxes(2, 3))))


def _by_function(case: Case, s: np.ndarray, visible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """-> score_mod of all visible scores, and its derivative."""
    function, base = Function.of("score_mod", case.options["score_mod"]), s.dtype.type
    found, through, q_pos = s.copy(), np.zeros_like(s), _positions(case)
    for b, h, i, j in zip(*np.nonzero(np.broadcast_to(visible, s.shape)), strict=True):
        position = (b, h, q_pos[b, i], j, i)
        y = function_numbers.score_of(function, base, s[b, h, i, j], position, _tables(case, base), True)
        found[b, h, i, j], through[b, h, i, j] = y.x, 0 if y.d is None else y.d
    return found, through


def _tables(case: Case, base: Any) -> list[Any]:
    return [function_numbers.Table(base, array) for array in case.options.get("aux", ())]


def of_options(case: Case, ds: np.ndarray) -> dict[str, np.ndarray]:
    """dbias and dalibi_slopes, where the case has them, from dS of the scores."""
    made = {}
    if "bias" in case.options:
        made["dbias"] = summed(ds, case.options["bias"].shape)
    if "alibi_slopes" in case.options:
        shape = case.options["alibi_slopes"].shape
        made["dalibi_slopes"] = summed(-np.sum(ds * _distance(case), (2, 3)), shape)
    return made


def of_aux(case: Case, ds: np.ndarray, wanted: Sequence[int], term: Callable[[Any], Any]) -> dict[int, np.ndarray]:
    """The gradients of the wanted arrays of aux, {index: array}: sums over scores of a term for each element read.

    term: applied to each term before the sum, such as the identity or abs.
    """
    aux, base = case.options["aux"], ds.dtype.type
    found = {number: np.zeros(aux[number].size) for number in wanted}
    if "score_mod" in case.options:
        function, q_pos, products = (
            Function.of("score_mod", case.options["score_mod"]),
            _positions(case),
            products_of(case),
        )
        tables = [
            (
                function_numbers.RecordedTable(base, array, number)
                if number in wanted
                else function_numbers.Table(base, array)
            )
            for number, array in enumerate(aux)
        ]
        cap = case.options.get("softcap")
        for at in zip(*np.nonzero(ds), strict=True):
            b, h, i, j = at
            y, terms = function_numbers.score_of(function, base, products[at], (b, h, q_pos[b, i], j, i), tables, False)
            outer = ds[at] * (1 - np.tanh(y / base(cap)) ** 2) if cap else ds[at]
            for (number, place), slope in function_numbers.parts_of(terms):
                found[number][place] += term(outer * slope)
    return {number: x.reshape(aux[number].shape) for number, x in found.items()}


def summed(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The gradient of broadcasting from `shape`."""
    whole = (1,) * (x.ndim - len(shape)) + shape
    return x.sum(axis=tuple(a for a, n in enumerate(whole) if n != x.shape[a]), keepdims=True).reshape(shape)


def delta_of(do: np.ndarray, o: np.ndarray, dlse: np.ndarray | None) -> np.ndarray:
    """delta = rowsum(do * o) - dlse, (batch, heads, seqlen_q, 1)."""
    delta = np.sum(do * o, axis=-1, keepdims=True)
    return delta if dlse is None else delta - dlse[..., None]


def visible_keys(case: Case) -> np.ndarray:
    """True where a query sees a key, (batch, heads or 1, seqlen_q, seqlen_k), independently of the oracle's code."""
    options, q_pos = case.options, _positions(case)[:, None, :, None]
    k_pos = np.arange(heads_first(case, case.k).shape[2])
    left, right = options.get("window") or (None, None)
    lengths = options.get("seqlens_k")
    visible = np.ones(np.broadcast_shapes(q_pos.shape, k_pos.shape), bool)
    if lengths is not None:
        visible &= k_pos < lengths[:, None, None, None]
    if options.get("causal"):
        visible &= k_pos <= q_pos
    if right is not None:
        visible &= k_pos <= q_pos + right
    if left is not None:
        visible &= k_pos >= q_pos - left
    if "mask" in options:
        visible = visible & options["mask"]
    if "mask_mod" not in options:
        return visible
    heads = heads_first(case, case.q).shape[1]
    function, positions = Function.of("mask_mod", options["mask_mod"]), _positions(case)
    left = np.zeros((positions.shape[0], heads, positions.shape[1], k_pos.size), bool)
    for b, h, i, j in zip(*np.nonzero(np.broadcast_to(visible, left.shape)), strict=True):
        position = (b, h, positions[b, i], j, i)
        left[b, h, i, j] = function_numbers.mask_of(function, np.float64, position, _tables(case, np.float64))
    return left


def _positions(case: Case) -> np.ndarray:
    """(batch, seqlen_q): the position of each query among the keys."""
    q, k = heads_first(case, case.q), heads_first(case, case.k)
    offset: Any = case.options.get("q_offset")
    if offset is None:
        offset = case.options.get("seqlens_k", np.full(q.shape[0], k.shape[2])).astype(np.int64) - q.shape[2]
    return np.broadcast_to(np.asarray(offset, np.int64), (q.shape[0],))[:, None] + np.arange(q.shape[2])


def _distance(case: Case) -> np.ndarray:
    """|position of the query - position of the key|, (batch, 1, seqlen_q, seqlen_k)."""
    seqlen_k = heads_first(case, case.k).shape[2]
    return np.abs(_positions(case)[:, None, :, None] - np.arange(seqlen_k))


def of_each_head(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v in the computing type, (batch, heads, seqlen, dim); k and v are repeated for each query head."""
    compute = np.float64 if case.dtype == "float64" else np.float32
    q, k, v = (np.asarray(heads_first(case, x), compute) for x in (case.q, case.k, case.v))
    group = q.shape[1] // max(k.shape[1], 1)
    return q, np.repeat(k, group, 1), np.repeat(v, group, 1)


def of_each_kv_head(x: np.ndarray, heads_kv: int) -> np.ndarray:
    batch, heads, *rest = x.shape
    return x.reshape(batch, heads_kv, heads // max(heads_kv, 1), *rest).sum(axis=2)


def rounded(case: Case, x: np.ndarray) -> np.ndarray:
    """x as the case's dtype can hold it, in the type that is computed in."""
    return x.astype(case.q.dtype).astype(np.float64 if case.dtype == "float64" else np.float32)


def scale_of(case: Case) -> float:
    scale = case.options.get("scale")
    return case.q.shape[3] ** -0.5 if scale is None else scale  # 0 is a scale, too


def finite(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return np.where(np.isfinite(wide), wide, 0)
