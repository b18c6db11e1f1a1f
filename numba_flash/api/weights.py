"""Results besides o: lse alone, the weights, their sums for each key, and facts of each row.

The weights are the derivative of lse by a bias that is added to the scores: with dlse = 1 and do = 0, the backward's
dS = P * (dP - delta) is P. So the kernels of dbias compute them on every rung and with every option, and sum them where
that bias is broadcast.
"""

import math
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

from .. import arrays
from ..dispatch.block_mask import OPTIONS as OF_BLOCK_MASK, in_options
from ..functions.function import Function
from ..problem.options import FUNCTIONS, OF_HEADS, OF_PAIRS, SCORE_NUMBERS
from .backward import attention_backward
from .forward import attention, first_column

TAKEN = (
    *("causal", "window", "q_offset", "seqlens_k", *SCORE_NUMBERS, *OF_PAIRS, *OF_HEADS, *FUNCTIONS),
    *("aux", "block_mask", "layout", "kernel"),
)
COLUMNS = 8  # columns of a placeholder for v: the fewest for which 16-bit rows begin at multiples of 16 bytes
AT_ONCE = 2**26  # weights that `row_statistics` and `column_sums` hold
FEWEST = 128  # the least number of rows of them; a kernel computes as many at once


class RowStatistics(NamedTuple):
    """For each query its largest score and the entropy of its weights, both shaped like lse."""

    max_logit: Any
    entropy: Any


def attention_lse(q: Any, k: Any, **options: Any) -> Any:
    """The lse of `attention`, alone: log sum_j e^(s_j) of each query, without values.

    >>> lse = numba_flash.attention_lse(q, k, scale=2 / eps, bias=bias)

    q, k, options: as for `attention`, without return_lse, out and dropout_p. Returns (batch, heads, seqlen_q) in
    float32 (float64 for float64), with gradients as the lse of `attention`. The kernels compute one column of o beside
    it.
    """
    for name in ("return_lse", "out", "dropout_p", "seed"):
        if name in options:
            raise TypeError(f"attention_lse() takes no {name}: lse is all that it gives")
    v = first_column(k) if arrays.is_array(k) and len(k.shape) else k
    return attention(q, k, v, return_lse=True, **options).lse


def weights(q: Any, k: Any, lse: Any, *, rows: Any = None, heads: Any = None, **options: Any) -> Any:
    """A part of P = e^(S - lse), the weights of each query for each key.

    >>> o, lse = numba_flash.attention(q, k, v, causal=True, return_lse=True)
    >>> p = numba_flash.weights(q, k, lse, rows=slice(100, 164), heads=slice(0, 4), causal=True)

    q, k, lse: those of `attention`, lse with return_lse=True. options: those of that call which concern scores, and
    layout and kernel (of `attention_backward`); the weights are those before dropout. Work goes to the current stream.
    rows, heads: slices of queries and of heads, without steps; None = all. With fewer query heads than one KV head
    serves, the slice must lie inside of those.

    Returns (batch, heads, rows, seqlen_k) in float32 (float64 for float64), 0 for keys that a query does not see. The
    memory is that of the result. A row sums up to 1; with a sink to less. A bias of 16 bits is widened, which is a
    copy.

    Arrays are of NumPy, CuPy, torch or JAX. There are no gradients: tensors that require grad and traced arrays raise
    NotImplementedError. So do heads beside functions, which are told h, and rows beside one that asks for q_index.
    """
    call = _Asked(q, k, lse, options)
    return call.part(_range("rows", rows, call.seqlen_q), _range("heads", heads, call.heads))


def column_sums(q: Any, k: Any, lse: Any, **options: Any) -> Any:
    """The sum of each key's weights over all queries, (batch, heads, seqlen_k), in float32 (float64 for
    float64).

    >>> received = numba_flash.column_sums(q, k, lse, causal=True)

    Arguments as for `weights`. Without a bias, or with one that all queries share, a kernel adds up in the order of its
    tiles and no weight is stored. With another bias, the weights of some rows at a time are.
    """
    call = _Asked(q, k, lse, options)
    return call.column_sums()


def row_statistics(q: Any, k: Any, lse: Any, **options: Any) -> RowStatistics:
    """The largest score of each query and the entropy of its weights, -sum_j P_j log P_j, both (batch, heads,
    seqlen_q), in float32 (float64 for float64).

    >>> largest = numba_flash.row_statistics(q, k, lse, causal=True).max_logit.max()  # as QK-clip asks for

    Arguments as for `weights`, whose result is made for some rows at a time. The largest score is lse + log max_j P_j,
    with all that the options add; -inf for a query that sees no key, whose entropy is 0, and for one whose weights all
    round to 0 beside a sink. A sink is no key: its weight counts in lse, and has no part in the entropy.
    """
    return _Asked(q, k, lse, options).row_statistics()


class _Asked:
    """A call of these functions: its arrays, and how to cut them."""

    def __init__(self, q: Any, k: Any, lse: Any, options: dict[str, Any]):
        unknown = set(options) - set(TAKEN)
        if unknown:
            raise TypeError(f"{min(unknown)!r} is no option here; these are: {', '.join(TAKEN)}")
        self.xp = _namespace("q", q)
        self.options = {name: x for name, x in options.items() if x is not None}
        blocks = self.options.pop("block_mask", None)
        if blocks is not None:
            in_options(blocks, self.options)  # raises if the call's own options differ from the block mask's
            self.options |= {name: x for name in OF_BLOCK_MASK if (x := getattr(blocks, name)) is not None}
        given = {name: self.options[name] for name in (*OF_PAIRS, *OF_HEADS, "seqlens_k") if name in self.options}
        for name, x in dict(k=k, lse=lse, **given).items():
            self._check_kind(name, x, q)
        if q.ndim < 2 or k.ndim != q.ndim:
            raise ValueError(
                f"q and k must have equally many dimensions, from 2, not shapes {tuple(q.shape)} and {tuple(k.shape)}"
            )
        self.q, self.k, self.lse = q, k, lse
        alone, packed_heads = q.ndim == 2, self.options.get("layout") == "bshd"
        self.rows_at = -2 if alone or not packed_heads else -3
        self.heads_at = None if alone else -2 if packed_heads else -3
        self.seqlen_q, self.seqlen_k = q.shape[self.rows_at], k.shape[self.rows_at]
        self.heads = 1 if self.heads_at is None else q.shape[self.heads_at]
        if tuple(lse.shape) != self._lse_shape():
            raise ValueError(f"lse must have shape {self._lse_shape()}, as of attention, not {tuple(lse.shape)}")
        if "bias" in self.options:
            self._check_bias(self.options["bias"])
        if blocks is not None:
            shape = dict(heads=self.heads, seqlen_q=self.seqlen_q, seqlen_k=self.seqlen_k)
            blocks.check(SimpleNamespace(batch=math.prod(q.shape[:-3]), **shape))

    def _check_kind(self, name: str, x: Any, q: Any) -> None:
        """Raises unless x is an array of q's library; with JAX arrays options may be NumPy's, as in `attention`."""
        found = _namespace(name, x)
        beside_jax = name not in ("k", "lse") and self.xp.__name__ == "jax.numpy" and found.__name__ == "numpy"
        if found is not self.xp and not beside_jax:
            raise TypeError(
                f"all arrays must be of one kind, but {name} is {type(x).__name__} beside q, {type(q).__name__}"
            )

    def _check_bias(self, bias: Any) -> None:
        """Raises for a bias that `attention` refuses: this class widens every bias, which would hide a wrong one."""
        dtype, of_q = (arrays.read(name, x).layout.dtype for name, x in (("bias", bias), ("q", self.q)))
        if dtype not in ("float32", of_q):
            raise TypeError(f"bias must be float32 or q's dtype, {of_q}, not {dtype}")
        scores = (*self._lse_shape(), self.seqlen_k)
        extents = zip(reversed(bias.shape), reversed(scores), strict=False)
        if bias.ndim > len(scores) or any(have not in (1, want) for have, want in extents):
            raise ValueError(f"bias must be broadcastable to the scores, {scores}, not shape {tuple(bias.shape)}")

    def _lse_shape(self) -> tuple[int, ...]:
        own = (self.seqlen_q,) if self.heads_at is None else (self.heads, self.seqlen_q)
        return (*tuple(self.q.shape)[:-3], *own)

    def functions(self) -> list[Function]:
        given = {name: self.options.get(name) for name in ("score_mod", "mask_mod")}
        return [Function.of(name, x) for name, x in given.items() if x is not None]

    def part(self, rows: range, heads: range) -> Any:
        """P of some rows and heads."""
        q, k, lse, options = self._cut(rows, heads)
        zeros = self.xp.zeros_like(lse)[..., None]
        return self._backward(q, k, lse, options, zeros, (*tuple(lse.shape), self.seqlen_k))

    def _backward(self, q: Any, k: Any, lse: Any, options: dict[str, Any], zeros: Any, shape: Any) -> Any:
        """P, summed where `shape` has 1. zeros: in lse's dtype, broadcastable to it; a bias is taken instead."""
        xp = self.xp
        bias = options.pop("bias", None)
        bias = zeros if bias is None else _as(lse.dtype, bias)
        nothing, none_of_k = xp.zeros_like(q[..., :COLUMNS]), xp.zeros_like(k[..., :COLUMNS])
        given = dict(options, bias=xp.broadcast_to(bias, shape), dlse=xp.ones_like(lse), wanted=("dbias",))
        return attention_backward(nothing, q, k, none_of_k, nothing, lse, **given).dbias

    def column_sums(self) -> Any:
        xp, bias = self.xp, self.options.get("bias")
        if bias is None or bias.ndim < 2 or bias.shape[-2] == 1:
            lse = _contiguous(self.lse)
            zeros = xp.zeros_like(lse.sum(-1))[..., None, None]
            shape = (*tuple(lse.shape)[:-1], 1, self.seqlen_k)
            return self._backward(self.q, self.k, lse, dict(self.options), zeros, shape)[..., 0, :]
        every = range(self.heads)
        return sum(self.part(rows, every).sum(-2) for rows in self._turns())

    def row_statistics(self) -> RowStatistics:
        xp, found = self.xp, []
        for rows in self._turns():
            p, lse = self.part(rows, range(self.heads)), self.lse[..., rows.start : rows.stop]
            if not self.seqlen_k:
                found.append((xp.zeros_like(lse) - float("inf"), xp.zeros_like(lse)))
                continue
            top, least = xp.amax(p, -1), float(xp.finfo(p.dtype).tiny)
            largest = xp.where(top > 0, lse + xp.log(top.clip(least, None)), xp.zeros_like(lse) - float("inf"))
            found.append((largest, -(p * xp.log(p.clip(least, None))).sum(-1)))
        return RowStatistics(*(xp.concatenate(parts, -1) for parts in zip(*found, strict=True)))

    def _turns(self) -> list[range]:
        """The ranges of rows whose weights are held at once."""
        entries = max(
            1, int(self.lse.size if self.xp.__name__ != "torch" else self.lse.numel()) // max(self.seqlen_q, 1)
        )
        most = max(FEWEST, AT_ONCE // (entries * max(self.seqlen_k, 1)) // FEWEST * FEWEST)
        if any(function.asks_row for function in self.functions()):
            most = max(self.seqlen_q, 1)
        return [range(at, min(at + most, self.seqlen_q)) for at in range(0, max(self.seqlen_q, 1), most)]

    def _cut(self, rows: range, heads: range) -> tuple[Any, Any, Any, dict[str, Any]]:
        """q, k, lse and the options of some rows and heads."""
        options, every = dict(self.options), len(heads) == self.heads
        if len(rows) < self.seqlen_q and any(function.asks_row for function in self.functions()):
            raise NotImplementedError(
                "rows: a function asks for q_index, the row of q; leave rows out, and cut the result"
            )
        if not every and self.functions():
            raise NotImplementedError("heads: functions are told h; leave heads out, and cut the result")
        q, k = _part(self.q, self.rows_at, rows), self.k
        lse = self.lse[..., rows.start : rows.stop]
        if len(rows) < self.seqlen_q:
            options["q_offset"] = self._offset() + rows.start
            options |= {name: _taken(x, -2, rows) for name in OF_PAIRS if (x := options.get(name)) is not None}
        if not every and self.heads_at is not None:
            q, k = _part(q, self.heads_at, heads), _part(k, self.heads_at, self._of_kv(heads))
            lse = lse[..., heads.start : heads.stop, :]
            options |= {name: _taken(x, -3, heads) for name in OF_PAIRS if (x := options.get(name)) is not None}
            options |= {name: _taken(x, -1, heads) for name in OF_HEADS if (x := options.get(name)) is not None}
        return q, k, _contiguous(lse), options

    def _offset(self) -> Any:
        """The position of query 0."""
        given, lengths = self.options.get("q_offset"), self.options.get("seqlens_k")
        if given is not None:
            return given
        return (self.seqlen_k if lengths is None else lengths) - self.seqlen_q

    def _of_kv(self, heads: range) -> range:
        heads_kv = self.k.shape[self.heads_at]
        group = max(self.heads // max(heads_kv, 1), 1)
        first, end = heads.start // group, -(-heads.stop // group)
        if end - first > 1 and (heads.start % group or heads.stop % group):
            raise ValueError(
                f"heads from {heads.start} to {heads.stop} must lie inside of the {group} that share a head of k, or "
                "be all of several such"
            )
        return range(first, max(end, first))


def _range(name: str, given: Any, extent: int) -> range:
    if given is None:
        return range(extent)
    if not isinstance(given, slice):
        raise TypeError(f"{name} must be a slice or None, not {given!r}")
    found = range(*given.indices(extent))
    if found.step != 1:
        raise ValueError(f"{name} must be a slice without steps, not {given}")
    return range(found.start, max(found.start, found.stop))


def _taken(x: Any, axis: int, part: range) -> Any:
    """A part of an option's axis; the whole option if the axis is missing or broadcast."""
    return x if x.ndim < -axis or x.shape[axis] == 1 else _part(x, axis, part)


def _part(x: Any, axis: int, part: range) -> Any:
    """A part of an axis that is counted from the end."""
    return x[(..., slice(part.start, part.stop), *(slice(None),) * (-axis - 1))]


def _namespace(name: str, x: Any) -> Any:
    """The module of the library whose array this argument is."""
    for library, kind, functions in (("torch", "Tensor", "torch"), ("jax", "Array", "jax.numpy")):
        if library in sys.modules and isinstance(x, getattr(sys.modules[library], kind)):
            return sys.modules[functions]
    package = type(x).__module__.partition(".")[0]
    if package not in ("numpy", "cupy"):
        raise NotImplementedError(f"{name} must be an array of NumPy, CuPy, torch or JAX, not {type(x).__name__}")
    return sys.modules[package]


def _contiguous(x: Any) -> Any:
    return x.contiguous() if hasattr(x, "contiguous") else x.copy()


def _as(dtype: Any, x: Any) -> Any:
    return x.to(dtype) if hasattr(x, "to") and not hasattr(x, "astype") else x.astype(dtype)
