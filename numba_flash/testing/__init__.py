"""Checks an attention kernel, ours or anyone's: problems, the oracle, and a derived tolerance.

    for case in random_cases(100, seed=0):
        o, lse = my_attention(**case.arguments(), return_lse=True)
        check(case, o, lse)
        do, dlse = outer_gradients(case, seed=0)
        gradients = my_backward(do, o=o, lse=lse, dlse=dlse, **case.arguments())
        check_gradients(case, gradients, do, o, lse, dlse)

`check_kernel(my_attention)` does all of that for a forward, and prints which promises of the contract held.

A case holds NumPy arrays; `cases()` is the same as a hypothesis strategy, which shrinks failing cases.

The tolerance: a kernel's error against the float64 result may be at most twice that of a plain computation
in the same dtype, plus the largest error of rounding the scores and the output once. Both are computed
from the case, so there is nothing to tune. (The rule is FlashAttention's own.)
"""

from ..reference import dropout_mask
from . import formula, functions
from .cases import (
    DTYPES,
    FEATURES,
    FUNCTIONS,
    SEEDED,
    STRIDES,
    Case,
    bfloat16,
    cases,
    make_case,
    random_cases,
    rows_padded,
    strided,
)
from .checks import EPS, check, check_gradients, outer_gradients
from .expected import gradients_of, oracle, oracle_gradients
from .formula import plain, plain_gradients
from .kernels import check_kernel

__all__ = [
    "SEEDED",
    "DTYPES",
    "EPS",
    "FEATURES",
    "FUNCTIONS",
    "STRIDES",
    "Case",
    "bfloat16",
    "cases",
    "check",
    "check_gradients",
    "check_kernel",
    "dropout_mask",
    "formula",
    "functions",
    "gradients_of",
    "make_case",
    "oracle",
    "oracle_gradients",
    "outer_gradients",
    "plain",
    "plain_gradients",
    "random_cases",
    "rows_padded",
    "strided",
]
