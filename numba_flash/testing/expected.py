"""The expected results of a case: the reference's, in float64."""

from collections.abc import Sequence

import numpy as np

from ..api import forward as api
from ..api.backward import AttentionGradients, attention_backward
from ..problem.options import GRADIENT_OF, daux_name
from ..reference import unrounded
from .cases import Case, heads_first


def oracle(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """o and lse in float64, o in (batch, heads, seqlen_q, head_dim_v) order."""
    result = api.attention(**case.arguments(_widened), kernel="reference", return_lse=True)
    return heads_first(case, result.o), result.lse


def oracle_gradients(
    case: Case,
    do: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    dlse: np.ndarray | None = None,
    aux: Sequence[int] = (),
) -> AttentionGradients:
    """All gradients that the case has, in float64; dq, dk and dv in (batch, heads, seqlen, dim) order.

    o and lse: the rounded results of a forward, since a backward gets only these. aux: the indices of the arrays of aux
    whose gradients are wanted, too. The rounding of lse does not affect these gradients.
    """
    dq, dk, dv, *rest = attention_backward(
        _widened(do),
        **case.arguments(_widened),
        o=_widened(o),
        lse=lse_of_all(case, lse),
        dlse=None if dlse is None else _widened(dlse),
        wanted=(*gradients_of(case), *map(daux_name, aux)),
        kernel="reference",
    )
    return AttentionGradients(*(heads_first(case, x) for x in (dq, dk, dv)), *rest)


def lse_of_all(case: Case, lse: np.ndarray) -> np.ndarray:
    """lse in float64. It is exact, without rounding, where it belongs to the case's own keys, not to more keys."""
    with np.errstate(invalid="ignore"):
        return unrounded(lse, oracle(case)[1])


def gradients_of(case: Case) -> tuple[str, ...]:
    """The names of all gradients that the case has, as attention_backward takes them in wanted=."""
    return tuple(name for name, of in GRADIENT_OF.items() if of in ("q", "k", "v") or of in case.options)


def _widened(x: np.ndarray) -> np.ndarray:
    """Numbers in float64; lengths, masks and other whole numbers as they are."""
    return x if x.dtype == bool or x.dtype.kind in "iu" else x.astype(np.float64)
