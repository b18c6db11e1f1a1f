"""score_mod(s, b, h, q_pos, k_pos, *aux): a function of the caller's own; its derivative is derived from its code."""

from numba import cuda

from . import user
from .stage import Stage


def make(config):
    if not config.has("score_mod"):
        return None
    of_score, of_dual = user.make(config, "score_mod"), user.make(config, "score_mod", derivative=True)

    @cuda.jit(device=True)
    def value(s, at, arrays, strides, score):
        return of_score(s, at, arrays, strides)

    @cuda.jit(device=True)
    def with_derivative(s, at, arrays, strides, score):
        return of_dual(s, at, arrays, strides)

    return Stage(value, with_derivative)


def on_fragments(config):
    """In fragments it runs before the chain (fragment_functions.py), because it needs a position and stages do not."""
