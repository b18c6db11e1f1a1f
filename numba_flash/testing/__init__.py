"""Checking an attention kernel, ours or anyone's: problems, the oracle, and a tolerance that is derived.

    for case in random_cases(100, seed=0):
        o, lse = my_attention(**case.arguments(), return_lse=True)
        check(case, o, lse)
        do, dlse = outer_gradients(case, seed=0)
        gradients = my_backward(do, o=o, lse=lse, dlse=dlse, **case.arguments())
        check_gradients(case, gradients, do, o, lse, dlse)

`check_kernel(my_attention)` does all of that for a forward, and prints what of the contract held.

A case holds NumPy arrays; `cases()` is the same as a hypothesis strategy, which shrinks what fails.

The tolerance: a kernel may be at most twice as far from the float64 result as a plain computation in
the same dtype is, plus what rounding the scores and the output once can do. Both are computed from
the case, so there is nothing to tune. (The rule is FlashAttention's own.)
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from ..api import forward as api
from ..api.backward import AttentionGradients, attention_backward
from ..functions import numbers as function_numbers
from ..functions.function import Function
from . import functions

DTYPES = ("float16", "bfloat16", "float32", "float64")
FEATURES = ("causal", "window", "q_offset", "seqlens_k", "softcap", "alibi_slopes", "bias", "mask", "sinks")
FUNCTIONS = ("score_mod", "mask_mod")  # of the caller's own: features that are asked for by name
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


@dataclass
class Case:
    """One problem: arrays in `layout` order and the keyword arguments of attention()."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self, move: Callable[[np.ndarray], Any] = lambda x: x) -> dict[str, Any]:
        """The arguments of attention(); `move` turns each NumPy array into the caller's kind."""
        moved = {name: move(x) if isinstance(x, np.ndarray) else x for name, x in self.options.items()}
        if "aux" in moved:
            moved["aux"] = tuple(map(move, moved["aux"]))
        return dict(q=move(self.q), k=move(self.k), v=move(self.v), **moved)

    @property
    def dtype(self) -> str:
        return self.q.dtype.name

    def __repr__(self) -> str:
        def about(x: Any) -> str:
            if isinstance(x, tuple):
                return f"({', '.join(map(about, x))})"
            if callable(x):
                return str(getattr(x, "__name__", x))
            return f"{x.dtype}{list(x.shape)} strides {x.strides}" if isinstance(x, np.ndarray) else repr(x)

        options = "".join(f", {name}={about(x)}" for name, x in self.options.items())
        return f"Case(q={about(self.q)}, k={about(self.k)}, v={about(self.v)}{options})"


class _Numbers:
    """The three questions a case is made from, answered by NumPy's generator (hypothesis answers them too)."""

    def __init__(self, seed: int):
        self._generator = np.random.default_rng(seed)

    def integer(self, low: int, high: int) -> int:
        return int(self._generator.integers(low, high + 1))

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.integer(0, len(options) - 1)]

    def subset(self, options: Sequence[Any]) -> list[Any]:
        return [x for x in options if self.integer(0, 3) == 0]


def random_cases(count: int, seed: int, **limits: Any) -> Iterator[Case]:
    """`count` cases from a seed; limits are those of `make_case`."""
    for number in range(count):
        yield make_case(_Numbers(seed * 1_000_003 + number), **limits)


def cases(**limits: Any) -> Any:
    """A hypothesis strategy of cases; limits are those of `make_case`."""
    from hypothesis import strategies as st

    class Drawn:
        def __init__(self, draw: Any):
            self._draw = draw

        def integer(self, low: int, high: int) -> int:
            return self._draw(st.integers(low, high))

        def choice(self, options: Sequence[Any]) -> Any:
            return self._draw(st.sampled_from(list(options)))

        def subset(self, options: Sequence[Any]) -> list[Any]:
            return self._draw(st.lists(st.sampled_from(list(options)), unique=True)) if options else []

    return st.composite(lambda draw: make_case(Drawn(draw), **limits))()


def make_case(
    numbers: Any,
    *,
    dtypes: Sequence[str] = DTYPES,
    features: Sequence[str] = FEATURES,
    head_dims: Sequence[int] = (1, 7, 8, 16, 32, 59, 64),
    max_batch: int = 3,
    max_heads_kv: int = 2,
    max_seqlen: int = 70,
    layouts: Sequence[str] = ("bhsd", "bshd"),
    strange_strides: bool = True,
) -> Case:
    """One case from whatever answers `integer`, `choice` and `subset`."""
    dtype, layout = numbers.choice(dtypes), numbers.choice(layouts)
    batch, heads_kv, group = numbers.integer(0, max_batch), numbers.integer(1, max_heads_kv), numbers.integer(1, 3)
    seqlen_q, seqlen_k = numbers.integer(0, max_seqlen), numbers.integer(0, max_seqlen)
    head_dim, head_dim_v = numbers.choice(head_dims), numbers.choice(head_dims)
    heads = heads_kv * group
    generator = np.random.default_rng(numbers.integer(0, 2**32 - 1))
    size = 1.0 if numbers.integer(0, 3) else 8.0  # now and then scores so large that one key takes all

    def array(heads: int, seqlen: int, dim: int) -> np.ndarray:
        shape = (batch, heads, seqlen, dim) if layout == "bhsd" else (batch, seqlen, heads, dim)
        how = numbers.choice(STRIDES) if strange_strides else "plain"
        return strided(generator.standard_normal(shape) * size, dtype, how)

    q, k, v = (
        array(heads, seqlen_q, head_dim),
        array(heads_kv, seqlen_k, head_dim),
        array(heads_kv, seqlen_k, head_dim_v),
    )
    chosen = numbers.subset(features)
    options: dict[str, Any] = dict(layout=layout)
    scores = (batch, heads, seqlen_q, seqlen_k)
    if "causal" in chosen:
        options["causal"] = True
    if "window" in chosen:
        options["window"] = tuple(numbers.choice((None, 0, 1, 5, 40, 1000)) for _ in range(2))
    if "seqlens_k" in chosen:
        options["seqlens_k"] = generator.integers(0, seqlen_k + 1, batch).astype(np.int32)
    if "q_offset" in chosen:
        number = numbers.integer(-80, 80)
        per_batch = numbers.integer(0, 1) == 1
        options["q_offset"] = (number + np.arange(batch)).astype(np.int32) if per_batch else number
    if "softcap" in chosen:
        options["softcap"] = numbers.choice((0.5, 5.0, 50.0))
    if "alibi_slopes" in chosen:
        shape = (heads,) if numbers.integer(0, 1) else (batch, heads)
        options["alibi_slopes"] = generator.random(shape).astype(np.float32)
    if "bias" in chosen:
        shape = tuple(numbers.choice((1, n)) for n in scores)
        options["bias"] = generator.standard_normal(shape).astype(numbers.choice(("float32", dtype)))
    if "mask" in chosen:
        shape = tuple(numbers.choice((1, n)) for n in scores)
        options["mask"] = generator.random(shape) < numbers.choice((0.1, 0.5, 0.9))
    if "sinks" in chosen:
        shape = (heads,) if numbers.integer(0, 1) else (batch, heads)
        values = generator.standard_normal(shape) * 3
        values[generator.random(shape) < 0.1] = -np.inf
        options["sinks"] = values.astype(numbers.choice(("float32", dtype)))
    for name, known in (("score_mod", functions.SCORES), ("mask_mod", functions.MASKS)):
        if name in chosen:
            options[name] = numbers.choice(known)
    if "score_mod" in options or "mask_mod" in options:
        options["aux"] = functions.aux_for(batch, heads, seqlen_q, seqlen_k, generator, dtype)
    return Case(q, k, v, options)


STRIDES = ("plain", "transposed", "sliced", "negative", "broadcast", "fortran")


def strided(values: np.ndarray, dtype: str, how: str) -> np.ndarray:
    """The same values as an array that lies in memory in some unusual way."""
    values = values.astype(dtype)
    if how == "transposed":
        return np.ascontiguousarray(values.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    if how == "sliced":  # every second element of a larger array, between elements that would show
        larger = np.full(tuple(2 * n + 1 for n in values.shape), np.nan, values.dtype)
        view = larger[tuple(slice(1, None, 2) for _ in values.shape)]
        view[...] = values
        return view
    if how == "negative":
        return np.ascontiguousarray(values[:, :, ::-1, ::-1])[:, :, ::-1, ::-1]
    if how == "broadcast" and values.shape[0]:
        return np.broadcast_to(values[:1], values.shape)
    if how == "fortran":
        return np.asfortranarray(values)
    return values


def rows_padded(x: np.ndarray) -> np.ndarray:
    """What tensor cores take: an array with rows that begin at multiples of 16 bytes, and NaN between them.

    The same elements in the same order of axes; arrays that lie well, or not contiguous along dim, stay as they are.
    """
    size = x.itemsize
    if x.ndim != 4 or not x.size or x.strides[3] != size or not any(s % 16 for s in x.strides[:3]):
        return x
    axes = [int(axis) for axis in np.argsort([-abs(s) for s in x.strides[:3]], kind="stable")]
    columns = -(-x.shape[3] * size // 16) * 16 // size
    larger = np.full([*(x.shape[axis] for axis in axes), columns], np.nan, x.dtype)
    view = larger.transpose(*np.argsort(axes), 3)[..., : x.shape[3]]
    view[...] = x
    return view


def oracle(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """o and lse in float64, o in (batch, heads, seqlen_q, head_dim_v) order."""
    result = api.attention(**case.arguments(_widened), kernel="reference", return_lse=True)
    return _heads_first(case, result.o), result.lse


def _widened(x: np.ndarray) -> np.ndarray:
    """Numbers in float64; lengths, masks and other whole numbers as they are."""
    return x if x.dtype == bool or x.dtype.kind in "iu" else x.astype(np.float64)


def plain(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The formula as one would write it in the case's own dtype: every step's result is rounded to it."""
    _, _, v = _of_each_head(case)
    p, lse = _plain_softmax(case, _plain_scores(case)[0])
    with np.errstate(all="ignore"):
        o = p @ np.where(np.isfinite(v), v, 0)
    return _rounded(case, o), lse


def _plain_softmax(case: Case, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """P, and lse (batch, heads, seqlen_q)."""
    sink = _sinks(case).astype(s.dtype)
    with np.errstate(all="ignore"):
        m = np.maximum(np.max(s, axis=-1, keepdims=True, initial=-np.inf), sink)
        m = np.where(m == -np.inf, s.dtype.type(0), m)
        p = _rounded(case, np.exp(s - m))
        l = np.sum(p, axis=-1, keepdims=True, dtype=s.dtype) + _rounded(case, np.exp(sink - m))
        lse = np.where(l == 0, -np.inf, m + np.log(l))
        return _rounded(case, p / np.where(l == 0, 1, l)), lse[..., 0]


def _sinks(case: Case) -> np.ndarray:
    """(batch or 1, heads, 1, 1), -inf for none."""
    sinks = case.options.get("sinks", np.full(1, -np.inf))
    return (sinks if sinks.ndim == 2 else sinks[None])[:, :, None, None]


def _plain_scores(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Scores (batch, heads, seqlen_q, seqlen_k), -inf for removed keys; the derivative of the softcap there, or 1."""
    q, k, _ = _of_each_head(case)
    options, compute = case.options, q.dtype.type
    through = np.ones((), compute)
    with np.errstate(all="ignore"):
        s = _rounded(case, compute(_scale(case)) * _rounded(case, np.matmul(q, k.swapaxes(2, 3))))
        visible = _visible(case)
        if "score_mod" in options:
            s, through = (_rounded(case, x) for x in _by_function(case, s, visible))
        if options.get("softcap"):
            t = np.tanh(s / compute(options["softcap"]))
            s, through = _rounded(case, compute(options["softcap"]) * t), _rounded(case, through * (1 - t * t))
        if "alibi_slopes" in options:
            slopes = options["alibi_slopes"]
            slopes = (slopes if slopes.ndim == 2 else slopes[None]).astype(compute)
            s = _rounded(case, s - slopes[:, :, None, None] * _distance(case).astype(compute))
        if "bias" in options:
            s = _rounded(case, s + options["bias"].astype(compute))
    return np.where(visible, s, -np.inf), through


def _by_function(case: Case, s: np.ndarray, visible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """score_mod of all scores that are visible, and its derivative."""
    function, base = Function.of("score_mod", case.options["score_mod"]), s.dtype.type
    found, through, q_pos = s.copy(), np.zeros_like(s), _positions(case)
    for b, h, i, j in zip(*np.nonzero(np.broadcast_to(visible, s.shape)), strict=True):
        position = (b, h, q_pos[b, i], j)
        y = function_numbers.score_of(function, base, s[b, h, i, j], position, _tables(case, base), True)
        found[b, h, i, j], through[b, h, i, j] = y.x, 0 if y.d is None else y.d
    return found, through


def _tables(case: Case, base: Any) -> list[Any]:
    return [function_numbers.Table(base, array) for array in case.options.get("aux", ())]


def _rounded(case: Case, x: np.ndarray) -> np.ndarray:
    """x as the case's dtype can hold it, in the type that is computed in."""
    return x.astype(case.q.dtype).astype(np.float64 if case.dtype == "float64" else np.float32)


def _of_each_head(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v in the type that is computed in, (batch, heads, seqlen, dim); k and v once for each query head."""
    compute = np.float64 if case.dtype == "float64" else np.float32
    q, k, v = (np.asarray(_heads_first(case, x), compute) for x in (case.q, case.k, case.v))
    group = q.shape[1] // max(k.shape[1], 1)
    return q, np.repeat(k, group, 1), np.repeat(v, group, 1)


def check(case: Case, o: np.ndarray, lse: np.ndarray | None = None, what: str = "attention") -> None:
    """Raise AssertionError unless o (in the case's layout) and lse agree with the oracle within tolerance."""
    expected_o, expected_lse = oracle(case)
    plain_o, plain_lse = plain(case)
    o = _heads_first(case, np.asarray(o))
    assert o.dtype == case.q.dtype and o.shape == expected_o.shape, f"{what}: o is {o.dtype} {o.shape} in {case}"
    compute = "float64" if case.dtype == "float64" else "float32"
    size_o, size_lse, size_v = (np.max(np.abs(_finite(x)), initial=0) for x in (expected_o, expected_lse, case.v))
    size_s = 1 + size_lse + _largest_score(case)
    floor = EPS[case.dtype] * size_o + EPS[compute] * size_s * size_v
    _compare(f"{what}: o", case, o, expected_o, plain_o, floor)
    if lse is not None:
        lse = np.asarray(lse)
        assert lse.dtype == compute and lse.shape == expected_lse.shape, f"{what}: lse is {lse.dtype} {lse.shape}"
        _compare(f"{what}: lse", case, lse, expected_lse, plain_lse, EPS[compute] * 2 * size_s)


def outer_gradients(case: Case, seed: int, strange_strides: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """do and dlse to begin with: random, in the shapes and dtypes that the case's o and lse have."""
    generator = np.random.default_rng(seed)
    batch, heads, seqlen_q, _ = _heads_first(case, case.q).shape
    shape = (*case.q.shape[:3], case.v.shape[3])
    how = STRIDES[seed % len(STRIDES)] if strange_strides else "plain"
    do = strided(generator.standard_normal(shape), case.dtype, how)
    dlse = generator.standard_normal((batch, heads, seqlen_q))
    return do, dlse.astype(np.float64 if case.dtype == "float64" else np.float32)


def oracle_gradients(
    case: Case, do: np.ndarray, o: np.ndarray, lse: np.ndarray, dlse: np.ndarray | None = None
) -> AttentionGradients:
    """All gradients that the case has, in float64; dq, dk and dv in (batch, heads, seqlen, dim) order.

    o and lse are what some forward made of the case, rounded as they may be: a backward works with just these.
    """
    dq, dk, dv, *rest = attention_backward(
        _widened(do),
        **case.arguments(_widened),
        o=_widened(o),
        lse=_widened(lse),
        dlse=None if dlse is None else _widened(dlse),
        wanted=gradients_of(case),
        kernel="reference",
    )
    return AttentionGradients(*(_heads_first(case, x) for x in (dq, dk, dv)), *rest)


def plain_gradients(
    case: Case, do: np.ndarray, o: np.ndarray, lse: np.ndarray, dlse: np.ndarray | None = None
) -> AttentionGradients:
    """The same as one would write them in the case's own dtype: every step's result is rounded to it."""
    q, k, v = (np.where(np.isfinite(x), x, 0) for x in _of_each_head(case))
    s, through = _plain_scores(case)
    do, o = (_heads_first(case, x).astype(q.dtype) for x in (do, o))
    heads_kv = _heads_first(case, case.k).shape[1]
    with np.errstate(all="ignore"):
        share = np.exp(oracle(case)[1] - lse)  # 1 but where o and lse come from more keys than these
        p = _plain_softmax(case, s)[0]
        p = _rounded(case, np.where(p == 0, 0, p * share[..., None].astype(q.dtype)))
        delta = _delta(do, o, dlse)
        ds = _rounded(case, p * (_rounded(case, do @ v.swapaxes(2, 3)) - delta))
        ds = np.where(p == 0, 0, ds)
        scaled = _rounded(case, q.dtype.type(_scale(case)) * np.where(p == 0, 0, _rounded(case, ds * through)))
        made = dict(
            dq=scaled @ k,
            dk=_of_each_kv_head(scaled.swapaxes(2, 3) @ q, heads_kv),
            dv=_of_each_kv_head(p.swapaxes(2, 3) @ do, heads_kv),
        )
        made = {name: _rounded(case, x) for name, x in made.items()}
        made |= _of_options(case, ds)
        if "sinks" in case.options:
            weight = _rounded(case, np.exp(_sinks(case).astype(q.dtype) - lse[..., None]))
            of_rows = np.where(weight == 0, 0, -weight * _rounded(case, delta))
            made["dsinks"] = _summed(of_rows.sum((2, 3)), case.options["sinks"].shape)
    return AttentionGradients(**made)


def check_gradients(
    case: Case,
    gradients: Any,
    do: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    dlse: np.ndarray | None = None,
    what: str = "attention_backward",
) -> None:
    """Raise AssertionError unless the gradients made from do, o, lse and dlse agree with the oracle within tolerance.

    gradients: an AttentionGradients with dq, dk and dv, like do and o, in the case's layout; what is None in it is
    not looked at.
    """
    given = case, do, o, lse, dlse
    expected, by_hand = oracle_gradients(*given), plain_gradients(*given)
    with np.errstate(all="ignore"):
        floors = _gradient_floors(*given)
    of_options = (case.options.get(name) for name in ("bias", "alibi_slopes", "sinks"))
    like = AttentionGradients(case.q, case.k, case.v, *of_options)
    for name in AttentionGradients._fields:
        got, array, right = getattr(gradients, name), getattr(like, name), getattr(expected, name)
        if got is not None:
            got = np.asarray(got)
            about = f"{what}: {name} is {got.dtype} {got.shape} in {case}"
            assert got.dtype == array.dtype and got.shape == array.shape, about
            got = _heads_first(case, got) if name in ("dq", "dk", "dv") else got
            floor = EPS[array.dtype.name] * np.max(np.abs(_finite(right)), initial=0) + getattr(floors, name)
            _compare(f"{what}: {name}", case, got, right, getattr(by_hand, name), floor)


def _delta(do: np.ndarray, o: np.ndarray, dlse: np.ndarray | None) -> np.ndarray:
    """(batch, heads, seqlen_q, 1)."""
    delta = np.sum(do * o, axis=-1, keepdims=True)
    return delta if dlse is None else delta - dlse[..., None]


def _gradient_floors(
    case: Case, do: np.ndarray, o: np.ndarray, lse: np.ndarray, dlse: np.ndarray | None
) -> AttentionGradients:
    """What rounding each number once does to what the gradients are sums of: P, by the rounding of its score, dP and
    delta, by that of the products in them, and what a softcap lets through."""
    wide = Case(_finite(case.q), _finite(case.k), _finite(case.v), dict(case.options))
    if "bias" in case.options:
        wide.options["bias"] = np.where(case.options["bias"] == -np.inf, -np.inf, _finite(case.options["bias"]))
    do, o = (_finite(_heads_first(case, x)) for x in (do, o))
    q, k, v = _of_each_head(wide)
    s, through = _plain_scores(wide)
    p = np.where(s == -np.inf, 0, np.exp(s - _finite(lse)[..., None]))
    eps = EPS["float64" if case.dtype == "float64" else "float32"]
    of_p = eps * (1 + np.max(np.abs(_finite(lse)), initial=0) + _largest_score(case))
    of_dp = eps * (np.abs(do) @ np.abs(v).swapaxes(2, 3) + np.sum(np.abs(do * o), -1, keepdims=True))
    bracket = np.abs(do @ v.swapaxes(2, 3) - _delta(do, o, dlse))
    ds = p * (of_p * bracket + of_dp)
    scaled = abs(_scale(case)) * (ds * through + eps * p * bracket)
    of_options = _of_options(case, ds)
    if "sinks" in case.options:
        weight = np.exp(_sinks(case).astype(np.float64) - _finite(lse)[..., None])
        terms = np.sum(np.abs(do * o), -1, keepdims=True) + (0 if dlse is None else np.abs(dlse[..., None]))
        of_options["dsinks"] = _summed((weight * (of_p + eps) * terms).sum((2, 3)), case.options["sinks"].shape)
    heads_kv = _heads_first(case, case.k).shape[1]
    whole = dict(
        dq=scaled @ np.abs(k),
        dk=_of_each_kv_head(scaled.swapaxes(2, 3) @ np.abs(q), heads_kv),
        dv=of_p * _of_each_kv_head(p.swapaxes(2, 3) @ np.abs(do), heads_kv),
        **of_options,
    )
    return AttentionGradients(**{name: np.max(np.abs(x), initial=0) for name, x in whole.items()})


def gradients_of(case: Case) -> tuple[str, ...]:
    """The names of all gradients that the case has, as attention_backward takes them in wanted=."""
    given = dict(dbias="bias", dalibi_slopes="alibi_slopes", dsinks="sinks")
    return ("dq", "dk", "dv", *(name for name, option in given.items() if option in case.options))


def _of_options(case: Case, ds: np.ndarray) -> dict[str, np.ndarray]:
    """dbias and dalibi_slopes, where the case has them, from dS of the scores."""
    made = {}
    if "bias" in case.options:
        made["dbias"] = _summed(ds, case.options["bias"].shape)
    if "alibi_slopes" in case.options:
        shape = case.options["alibi_slopes"].shape
        made["dalibi_slopes"] = _summed(-np.sum(ds * _distance(case), (2, 3)), shape)
    return made


def _summed(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The gradient of broadcasting from `shape`."""
    whole = (1,) * (x.ndim - len(shape)) + shape
    return x.sum(axis=tuple(a for a, n in enumerate(whole) if n != x.shape[a]), keepdims=True).reshape(shape)


def _of_each_kv_head(x: np.ndarray, heads_kv: int) -> np.ndarray:
    batch, heads, *rest = x.shape
    return x.reshape(batch, heads_kv, heads // max(heads_kv, 1), *rest).sum(axis=2)


def _compare(
    what: str, case: Case, got: np.ndarray, expected: np.ndarray, plain_result: np.ndarray, floor: float
) -> None:
    got = got.astype(np.float64)
    strange = ~np.isfinite(expected)
    assert np.array_equal(got[strange], expected[strange], equal_nan=True), (
        f"{what}: {got[strange][:5]} where {expected[strange][:5]} belongs, in {case}"
    )
    with np.errstate(invalid="ignore"):
        error = np.abs(np.where(strange, 0, got) - np.where(strange, 0, expected))
        yardstick = np.abs(np.where(strange, 0, plain_result) - np.where(strange, 0, expected))
    bound = 2 * np.max(np.where(np.isfinite(yardstick), yardstick, 0), initial=0) + floor
    worst = np.max(error, initial=0)
    assert worst <= bound, f"{what}: off by {worst:.3g}, allowed is {bound:.3g}, in {case}"


def _largest_score(case: Case) -> float:
    """max |score| before bias and mask: what one rounding of a score can be, in units of eps."""
    q, k = (_finite(_heads_first(case, x)) for x in (case.q, case.k))
    s = q @ np.repeat(k, q.shape[1] // max(k.shape[1], 1), 1).swapaxes(2, 3)
    return float(abs(_scale(case)) * np.max(np.abs(s), initial=0))


def _scale(case: Case) -> float:
    scale = case.options.get("scale")
    return case.q.shape[3] ** -0.5 if scale is None else scale  # 0 is a scale, too


def _finite(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return np.where(np.isfinite(wide), wide, 0)


def _heads_first(case: Case, x: np.ndarray) -> np.ndarray:
    return x if case.options.get("layout", "bhsd") == "bhsd" else x.transpose(0, 2, 1, 3)


def _positions(case: Case) -> np.ndarray:
    """(batch, seqlen_q): where each query stands among the keys."""
    q, k = _heads_first(case, case.q), _heads_first(case, case.k)
    offset: Any = case.options.get("q_offset")
    if offset is None:
        offset = case.options.get("seqlens_k", np.full(q.shape[0], k.shape[2])).astype(np.int64) - q.shape[2]
    return np.broadcast_to(np.asarray(offset, np.int64), (q.shape[0],))[:, None] + np.arange(q.shape[2])


def _distance(case: Case) -> np.ndarray:
    """|position of the query - position of the key|, (batch, 1, seqlen_q, seqlen_k)."""
    seqlen_k = _heads_first(case, case.k).shape[2]
    return np.abs(_positions(case)[:, None, :, None] - np.arange(seqlen_k))


def _visible(case: Case) -> np.ndarray:
    """(batch, heads or 1, seqlen_q, seqlen_k), by the words of the contract, apart from the oracle's own code."""
    options, q_pos = case.options, _positions(case)[:, None, :, None]
    k_pos = np.arange(_heads_first(case, case.k).shape[2])
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
    heads = _heads_first(case, case.q).shape[1]
    function, positions = Function.of("mask_mod", options["mask_mod"]), _positions(case)
    left = np.zeros((positions.shape[0], heads, positions.shape[1], k_pos.size), bool)
    for b, h, i, j in zip(*np.nonzero(np.broadcast_to(visible, left.shape)), strict=True):
        position = (b, h, positions[b, i], j)
        left[b, h, i, j] = function_numbers.mask_of(function, np.float64, position, _tables(case, np.float64))
    return left


def bfloat16(values: Any) -> np.ndarray:
    """values as a bfloat16 NumPy array."""
    return np.asarray(values).astype(ml_dtypes.bfloat16)


def __getattr__(name: str) -> Any:
    if name == "check_kernel":  # is made of what is here
        return importlib.import_module(f"{__name__}.kernels").check_kernel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
