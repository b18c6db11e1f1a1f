"""s - slope * |q_pos - k_pos|, with a slope for each head (Press et al., Train Short, Test Long, 2022)."""

from numba import cuda

from ..steps import elements
from ..steps.basics import inlined
from ..steps.sequence import lse_row
from ..steps.units import exponent_unit
from .stage import FragmentStage, Stage


def make(config):
    if not config.has("alibi_slopes"):
        return None
    compute = elements.COMPUTE_TYPES[config.dtype]
    load = elements.loader(config.dtype_of("alibi_slopes"), compute)

    @cuda.jit(device=True)
    def value(s, at, arrays, strides, score):
        slope = load(arrays.alibi_slopes, at.b * strides.alibi_slopes[0] + at.h * strides.alibi_slopes[1])
        return s - slope * compute(abs(at.q_pos - at.k_index))

    @cuda.jit(device=True)
    def by_head(at):
        return -compute(abs(at.q_pos - at.k_index))

    return Stage(value, by_head=by_head)


def row_gradient(config):
    """The sum over a head's rows of dS times `by_head`; v2_dq stores each row's share (row_shares)."""

    @cuda.jit(device=True)
    def of_row(sequence, h, q_index, arrays, strides, sizes):
        return arrays.row_shares[lse_row(sequence, h, q_index, sizes)]

    return of_row


def on_fragments(config):
    if not config.has("alibi_slopes"):
        return None
    real = elements.COMPUTE_TYPES[config.dtype]
    load, one = elements.loader(config.dtype_of("alibi_slopes"), real), real(1)
    unit = real(exponent_unit(config))

    @inlined
    def value(s, factor, at, score):
        return cuda.fma(s, factor, -abs(at.away)), one

    @inlined
    def row_term(b, h, arrays, strides):
        return load(arrays.alibi_slopes, b * strides.alibi_slopes[0] + h * strides.alibi_slopes[1]) * unit

    return FragmentStage(value, row_term=row_term)
