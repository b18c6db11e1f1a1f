"""An attention that, for each call, also asks the oracle how exact it was and the clock how fast."""

import statistics
import time
from dataclasses import dataclass

import numpy as np

from .minilm import Attention

REPEATS = 3


@dataclass
class LayerReport:
    difference: float = 0.0  # the largest |ours - oracle| of the layer
    plain_difference: float = 0.0  # the same for the plain formula in float32
    tolerance: float = 0.0
    seconds: float = 0.0
    plain_seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance  # NaN fails


class Measured:
    """Call it in place of `attention`. The model calls its layers in turn: the call's number is the layer."""

    def __init__(self, attention: Attention, plain: Attention, oracle: Attention, layers: int, repeats: int = REPEATS):
        self.attention, self.plain, self.oracle, self.repeats = attention, plain, oracle, repeats
        self.layers = [LayerReport() for _ in range(layers)]
        self.calls = 0
        self.score_bytes = 0  # of the largest score matrix that the plain formula had to hold

    def __call__(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, seqlens_k: np.ndarray, layout: str
    ) -> np.ndarray:
        report = self.layers[self.calls % len(self.layers)]
        self.calls += 1

        def run(attention: Attention) -> tuple[np.ndarray, float]:
            begin = time.perf_counter()
            o = attention(q, k, v, seqlens_k=seqlens_k, layout=layout)
            return o, time.perf_counter() - begin

        # In turns, so that whatever else this machine does slows both alike.
        turns = [(run(self.attention), run(self.plain)) for _ in range(self.repeats)]
        report.seconds += statistics.median(ours[1] for ours, _ in turns)
        report.plain_seconds += statistics.median(plain[1] for _, plain in turns)
        (o, _), (plain_o, _) = turns[-1]
        exact, _ = run(self.oracle)
        # np.maximum keeps a NaN, max() may lose it.
        difference, plain_difference = largest(o - exact), largest(plain_o - exact)
        report.difference = float(np.maximum(report.difference, difference))
        report.plain_difference = float(np.maximum(report.plain_difference, plain_difference))
        report.tolerance = max(report.tolerance, tolerance(plain_difference, q, k, v))
        batch, seqlen_q, heads, _ = q.shape
        self.score_bytes = max(self.score_bytes, batch * heads * seqlen_q * k.shape[1] * q.itemsize)
        return o


def tolerance(plain_difference: float, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> float:
    """Twice the plain formula's own error, and what rounding the scores once can do; as in `testing`."""
    longest_q, longest_k = (np.linalg.norm(x, axis=3).max() for x in (q, k))
    score = longest_q * longest_k * q.shape[3] ** -0.5  # no score is larger
    return 2 * plain_difference + float(np.finfo(v.dtype).eps * (1 + score)) * largest(v)


def largest(x: np.ndarray) -> float:
    return float(np.abs(x).max())
