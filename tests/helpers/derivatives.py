"""Value and derivative of a score_mod at single numbers: as Python, and compiled for the CPU."""

import math

import numpy as np

from numba_flash.cpu import functions
from numba_flash.functions import numbers
from numba_flash.functions.function import Function

INF, NAN = math.inf, math.nan


class Table:
    """Expressions of s. All are one score_mod, which compiles once; the head says which of them it computes."""

    def __init__(self, expressions):
        self.heads = {expression: head for head, expression in enumerate(expressions)}
        lines = (f"    if h == {head}:\n        return {text} + 0.0\n" for text, head in self.heads.items())
        made = dict(math=math)
        exec(f"def score_mod(s, b, h, i, j):\n{''.join(lines)}    return s\n", made)
        self.function = Function.of("score_mod", made["score_mod"])

    def python(self, expression, x, dtype="float64"):
        """The derivatives at the numbers x."""
        base, head = np.dtype(dtype).type, self.heads[expression]
        with np.errstate(all="ignore"):
            found = [numbers.score_of(self.function, base, base(s), (0, head, 0, 0, 0), [], True).d for s in x]
        return np.array([0 if d is None else d for d in found], dtype)

    def compiled(self, expression, x, dtype="float64"):
        """The same, compiled for the CPU."""
        made = functions.make("score_mod", self.function, dtype, (), True, True)
        s, places, aux = (
            np.array(list(x), dtype),
            np.array([0, self.heads[expression], *[0] * 6]),
            np.zeros(8, np.int64),
        )
        slopes = np.full_like(s, NAN)
        made.ctypes(s.ctypes.data, slopes.ctypes.data, len(s), 0, places.ctypes.data, 0, 1, aux.ctypes.data)
        return slopes
