"""Compares results with the oracle's, within a tolerance derived from the case."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..api.backward import AttentionGradients
from ..arrays.dtypes import COMPUTE_DTYPE
from ..problem.options import GRADIENT_OF
from .cases import STRIDES, Case, heads_first, strided
from .expected import lse_of_all, oracle, oracle_gradients
from .formula import (
    counts_of,
    delta_of,
    finite,
    of_aux,
    of_each_head,
    of_each_kv_head,
    of_options,
    plain,
    plain_gradients,
    scale_of,
    scores_of,
    sinks_of,
    summed,
)

EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


def check(case: Case, o: np.ndarray, lse: np.ndarray | None = None, what: str = "attention") -> None:
    """Raise AssertionError unless o (in the case's layout) and lse agree with the oracle within tolerance.

    what: the name of the checked function, for the message.
    """
    what = f"{what}: " if what else ""
    expected_o, expected_lse = oracle(case)
    plain_o, plain_lse = plain(case)
    o = heads_first(case, np.asarray(o))
    assert o.dtype == case.q.dtype and o.shape == expected_o.shape, f"{what}o is {o.dtype} {o.shape} in {case}"
    compute = COMPUTE_DTYPE[case.dtype]
    size_o, size_lse, size_v = (np.max(np.abs(finite(x)), initial=0) for x in (expected_o, expected_lse, case.v))
    size_s = 1 + size_lse + _largest_score(case)
    floor = EPS[case.dtype] * size_o + EPS[compute] * size_s * size_v
    _compare(f"{what}o", case, o, expected_o, plain_o, floor)
    if lse is not None:
        lse = np.asarray(lse)
        assert lse.dtype == compute and lse.shape == expected_lse.shape, f"{what}lse is {lse.dtype} {lse.shape}"
        _compare(f"{what}lse", case, lse, expected_lse, plain_lse, EPS[compute] * 2 * size_s)


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

    gradients: an AttentionGradients with dq, dk and dv, like do and o, in the case's layout. A gradient that is None is
    not checked, also in daux.
    """
    aux = [number for number, x in enumerate(gradients.daux or ()) if x is not None]
    given = case, do, o, lse, dlse, aux
    expected, by_hand = oracle_gradients(*given), plain_gradients(*given)
    with np.errstate(all="ignore"):
        floors = _gradient_floors(*given)
    arrays: dict[str, Any] = dict(q=case.q, k=case.k, v=case.v) | case.options
    for name, of in GRADIENT_OF.items():
        got, right = getattr(gradients, name), getattr(expected, name)
        if got is not None:
            got, array = np.asarray(got), arrays[of]
            about = f"{what}: {name} is {got.dtype} {got.shape} in {case}"
            assert got.dtype == array.dtype and got.shape == array.shape, about
            got = heads_first(case, got) if name in ("dq", "dk", "dv") else got
            floor = EPS[array.dtype.name] * np.max(np.abs(finite(right)), initial=0) + getattr(floors, name)
            _compare(f"{what}: {name}", case, got, right, getattr(by_hand, name), floor)
    for number in aux:
        got, array, right = np.asarray(gradients.daux[number]), case.options["aux"][number], expected.daux[number]
        about = f"{what}: daux[{number}]"
        assert got.dtype == array.dtype and got.shape == array.shape, f"{about} is {got.dtype} {got.shape} in {case}"
        floor = EPS[array.dtype.name] * np.max(np.abs(finite(right)), initial=0) + floors.daux[number]
        _compare(about, case, got, right, by_hand.daux[number], floor)


def outer_gradients(case: Case, seed: int, strange_strides: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Random do and dlse, in the shapes and dtypes of the case's o and lse."""
    generator = np.random.default_rng(seed)
    batch, heads, seqlen_q, _ = heads_first(case, case.q).shape
    shape = (*case.q.shape[:3], case.v.shape[3])
    how = STRIDES[seed % len(STRIDES)] if strange_strides else "plain"
    do = strided(generator.standard_normal(shape), case.dtype, how)
    dlse = generator.standard_normal((batch, heads, seqlen_q))
    return do, dlse.astype(np.float64 if case.dtype == "float64" else np.float32)


def _gradient_floors(
    case: Case, do: np.ndarray, o: np.ndarray, lse: np.ndarray, dlse: np.ndarray | None, aux: Sequence[int]
) -> AttentionGradients:
    """Largest error in each gradient if each number in its sum is rounded once: P (through its score and lse), dP and
    delta (through their products), and the derivative of the scores."""
    wide = Case(finite(case.q), finite(case.k), finite(case.v), dict(case.options))
    if "bias" in case.options:
        wide.options["bias"] = np.where(case.options["bias"] == -np.inf, -np.inf, finite(case.options["bias"]))
    do, o = (finite(heads_first(case, x)) for x in (do, o))
    q, k, v = of_each_head(wide)
    s, through = scores_of(wide)
    eps = EPS[COMPUTE_DTYPE[case.dtype]]
    of_score = eps * (1 + np.max(np.abs(finite(lse)), initial=0) + _largest_score(case))
    lse = finite(lse_of_all(case, lse))[..., None]
    p, of_p = _weights(s - lse, of_score)
    counts = counts_of(case, p)
    of_dp = eps * (counts * (np.abs(do) @ np.abs(v).swapaxes(2, 3)) + np.sum(np.abs(do * o), -1, keepdims=True))
    bracket = np.abs(counts * (do @ v.swapaxes(2, 3)) - delta_of(do, o, dlse))
    ds = of_p * bracket + p * of_dp
    scaled = abs(scale_of(case)) * (ds * through + eps * p * bracket)
    of_arrays = of_options(case, ds)
    if "sinks" in case.options:
        weight, of_weight = _weights(sinks_of(case) - lse, of_score)
        terms = np.sum(np.abs(do * o), -1, keepdims=True) + (0 if dlse is None else np.abs(dlse[..., None]))
        of_arrays["dsinks"] = summed(((of_weight + eps * weight) * terms).sum((2, 3)), case.options["sinks"].shape)
    heads_kv = heads_first(case, case.k).shape[1]
    whole = dict(
        dq=scaled @ np.abs(k),
        dk=of_each_kv_head(scaled.swapaxes(2, 3) @ np.abs(q), heads_kv),
        dv=of_each_kv_head((of_p * counts).swapaxes(2, 3) @ np.abs(do), heads_kv),
        **of_arrays,
    )
    # A term of daux has the error of its dS, and the rounding of its own derivative.
    daux = of_aux(case, ds + eps * p * np.abs(bracket), aux, np.abs) if aux else {}
    return AttentionGradients(
        **{name: np.max(np.abs(x), initial=0) for name, x in whole.items()},
        daux={number: np.max(x, initial=0) for number, x in daux.items()},
    )


def _weights(exponent: np.ndarray, error: float) -> tuple[np.ndarray, np.ndarray]:
    """-> e^exponent, at most 1, and its largest error if the exponent is off by `error`."""
    exponent = np.minimum(exponent, 0.0)
    p = np.exp(exponent)
    return p, np.maximum(np.exp(np.minimum(exponent + error, 0)) - p, p - np.exp(exponent - error))


def _largest_score(case: Case) -> float:
    """Bound on one rounding of a score, before bias and mask, in units of eps: the partial sums of q . k. They reach at
    most half of |q . k| plus half of the sum of the products' magnitudes.
    """
    q, k = (finite(heads_first(case, x)) for x in (case.q, case.k))
    k = np.repeat(k, q.shape[1] // max(k.shape[1], 1), 1).swapaxes(2, 3)
    reached = (np.abs(q @ k) + np.abs(q) @ np.abs(k)) / 2
    return float(abs(scale_of(case)) * np.max(reached, initial=0))


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
