"""Functions of scores and positions for random problems, and the arrays that all of them take.

Slopes are at most about 1, so that a score's rounding stays what it is, and each function does something else: reads an
array by position, branches on the score, loops, calls another function, captures a number, is a closure or a partial.
"""

import functools
import math
from typing import Any

import numpy as np


def relative(score: Any, b: Any, h: Any, q_pos: Any, k_pos: Any, table: Any, slopes: Any, documents: Any) -> Any:
    """A bias by distance, as T5 has it, the same beyond the ends of the table."""
    return score + table[h, min(max(q_pos - k_pos, 0), len(table[h]) - 1)]


def alibi(score: Any, b: Any, h: Any, q_pos: Any, k_pos: Any, table: Any, slopes: Any, documents: Any) -> Any:
    return score - slopes[h] * abs(q_pos - k_pos)


def bent(score: Any, b: Any, h: Any, q_pos: Any, k_pos: Any, table: Any, slopes: Any, documents: Any) -> Any:
    """Branches on the score, and divides whole numbers."""
    if score > 0:
        return score / (1 + score) + 1 / (2 + abs(q_pos - k_pos))
    return 0.5 * score


def _soft(x: Any, cap: Any) -> Any:
    return cap * math.tanh(x / cap)


def looped(score: Any, b: Any, h: Any, q_pos: Any, k_pos: Any, table: Any, slopes: Any, documents: Any) -> Any:
    """A loop, and a function that is called."""
    total = 0.0
    for n in range(3):
        total += _soft(score, 2.0 + n)
    return max(total / 3, -1.0) + 0.25 * math.sin(score)


def _scaled(
    factor: Any, score: Any, b: Any, h: Any, q_pos: Any, k_pos: Any, table: Any, slopes: Any, documents: Any
) -> Any:
    return score * factor if documents[b, 0] == 0 else score**2 / (abs(score) + 2)


def by_row(
    score: Any, b: Any, h: Any, q_pos: Any, k_pos: Any, table: Any, q_index: Any, slopes: Any, documents: Any
) -> Any:
    """It asks for the row of q, amid the arrays."""
    return score * (1 - q_index % 3 / 4) + slopes[h] * table[h, (q_pos + 2 * q_index) % 16]


def _with_closure(width: int) -> Any:
    def window(b: Any, h: Any, q_pos: Any, k_pos: Any, table: Any, slopes: Any, documents: Any) -> Any:
        return abs(q_pos - k_pos) <= width

    return window


def same_document(b: Any, h: Any, q_pos: Any, k_pos: Any, table: Any, slopes: Any, documents: Any) -> Any:
    return documents[b, k_pos] == documents[b, -1]


def near_row(b: Any, h: Any, q_pos: Any, k_pos: Any, q_index: Any, *aux: Any) -> Any:
    return abs(2 * q_index - k_pos) < 9


def every_third(b: Any, h: Any, q_pos: Any, k_pos: Any, table: Any, slopes: Any, documents: Any) -> Any:
    return (q_pos + k_pos) % 3 == h % 3 or k_pos == 0


SCORES = (relative, alibi, bent, looped, functools.partial(_scaled, 0.75), by_row)
MASKS = (_with_closure(9), same_document, every_third, near_row)


def aux_for(
    batch: int, heads: int, seqlen_q: int, seqlen_k: int, generator: np.random.Generator, dtype: str
) -> tuple[np.ndarray, ...]:
    """The arrays of these functions: (heads, 16) in q's dtype with strange strides, (heads,), and whole numbers."""
    table = np.ascontiguousarray(generator.standard_normal((16, heads)).astype(dtype)[::-1]).T
    slopes = np.repeat(generator.random(heads).astype(np.float32), 2)[::2]
    documents = np.sort(generator.integers(0, 3, (batch, max(seqlen_k, 1))), axis=1).astype(np.int16)
    return table, slopes, documents
