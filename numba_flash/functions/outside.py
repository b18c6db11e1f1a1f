"""Reads outside an array: a kernel's report, and the error that the caller gets."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from . import numbers
from .function import Function


class Read(NamedTuple):
    """Where a function reads outside an array. score: the score that score_mod was called with."""

    option: str
    b: int
    h: int
    q_pos: int
    k_pos: int
    q_index: int
    score: float


class OutsideRead(Exception):
    """A kernel's report; the launch, which has the arrays, makes an IndexError of it."""

    def __init__(self, read: Read):
        super().__init__(read)
        self.read = read


def error_of(read: Read, function: Function, dtype: str, aux: Sequence[np.ndarray]) -> Exception:
    """The error that the same read raises in Python, which knows the line. dtype: the computing type."""
    base, places = np.dtype(dtype).type, (read.b, read.h, read.q_pos, read.k_pos, read.q_index)
    tables = [numbers.Table(base, array) for array in aux]
    try:
        with np.errstate(all="ignore"):
            if read.option == "mask_mod":
                numbers.mask_of(function, base, places, tables)
            else:
                numbers.score_of(function, base, read.score, places, tables, False)
    except IndexError as error:
        return error.with_traceback(None)
    return IndexError(f"{function.where} reads outside an array at {numbers.where(places)}")
