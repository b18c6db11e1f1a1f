"""What a score_mod of 16-bit problems computes with on a GPU, by NumPy and in the PTX; and what functions are told of
whole numbers."""

import math

import numpy as np
import pytest
from helpers import compiler
from helpers.machines import HOPPER, problem

from numba_flash.functions import NARROW, quick
from numba_flash.functions.function import Function
from numba_flash.gpu import compiled as gpu
from numba_flash.select import forward as select

ULP = np.finfo(np.float32).eps


class InNumpy:
    """`f` of quick.py, in float32. approx: off by what PTX allows, upwards: two units of the last place."""

    @staticmethod
    def approx(name, x):
        with np.errstate(all="ignore"):
            exact = {"ex2": np.exp2, "rcp": lambda x: 1 / x}[name](np.asarray(x, np.float64))
        return (exact * (1 + 2 * ULP)).astype(np.float32)

    where, fabs = staticmethod(np.where), staticmethod(np.abs)


def test_tanh_is_right_to_some_units_of_the_last_place():
    x = np.concatenate([np.linspace(-12, 12, 200001), [np.inf, -np.inf, 0.0], 0.25 + np.arange(-9, 9) * 1e-8])
    x = x.astype(np.float32)
    # Below SMALL the series lacks x^8 * 62 / 2835, 3.4e-7 at most. Above it 1 - y is computed, y = 2 / (1 + e), with e
    # off by 2 units and two roundings of 2x / ln 2, and the sum, the reciprocal and the difference by 5 together.
    with np.errstate(over="ignore", invalid="ignore"):  # of the way that is not taken
        found, true = quick.tanh(x, InNumpy), np.tanh(x.astype(np.float64))
        e = np.exp(2 * x.astype(np.float64))
    y, size = 2 / (1 + e), np.minimum(np.abs(x), 99)
    of_large = y * ((2 + 4 * size) * (1 - y / 2) + 5) + 1
    allowed = np.where(size < quick.SMALL, (3.4e-7 + 4 * ULP) * np.abs(true), of_large * ULP)
    assert (np.abs(found - true) <= allowed).all()


def test_exp_is_right_to_some_units_and_the_rounding_of_its_exponent():
    x = np.linspace(-80, 80, 100001).astype(np.float32)
    found, true = quick.exp(x, InNumpy), np.exp(x.astype(np.float64))
    assert (np.abs(found - true) <= (4 + 2 * np.abs(x)) * ULP * true).all()


def ptx_of(dtype, **functions):
    functions = {name: Function.of(name, function) for name, function in functions.items()}
    config = select.config_of("v2", problem(dtype=dtype, head_dim=8, **functions), HOPPER)
    return gpu.to_ptx(config, HOPPER.cc), config


def capped(s, b, h, i, j):
    return 20.0 * math.tanh(s / 20.0)


@compiler.needed
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_score_mod_of_16_bits_takes_instructions(dtype):
    plain = ptx_of(dtype)[0]
    ptx = ptx_of(dtype, score_mod=capped)[0]
    quotients = ptx.count("div.rn.f32") - plain.count("div.rn.f32")
    assert (quotients == 0) == (dtype != "float32")


@compiler.needed
def test_a_quotient_of_whole_numbers_is_exact():
    """How many times a distance holds another is a whole number of times."""
    by_bucket = ptx_of("float16", score_mod=lambda s, b, h, i, j: s + int((i - j) / 3))[0]
    assert by_bucket.count("div.rn.f32") > ptx_of("float16")[0].count("div.rn.f32")


@compiler.needed
def test_a_mask_mod_is_the_same_to_every_kernel():
    """tile_states computes in float32, and asks about tiles of which the others then ask no more."""
    ptx = ptx_of("float16", mask_mod=lambda b, h, i, j: float(i) / (float(j) + 0.5) < 2.5)[0]
    assert ptx.count("div.rn.f32") > ptx_of("float16")[0].count("div.rn.f32")


def test_positions_are_narrow_where_none_is_negative_or_large():
    own = Function.of("score_mod", capped)

    def narrow(**options):
        return problem(**dict(score_mod=own) | options).narrow

    assert narrow() and narrow(causal=True) and narrow(q_offset=NARROW - 10_000)
    assert not narrow(q_offset=-1) and not narrow(q_offset=NARROW)
    assert not problem().narrow, "nobody is told"


@compiler.needed
def test_an_index_that_cannot_be_negative_does_not_count_from_the_end():
    def config(q_offset):
        own = Function.of("mask_mod", lambda b, h, i, j: i * j % 7 < 3)
        return select.config_of("v2", problem(dtype="float16", head_dim=8, mask_mod=own, q_offset=q_offset), HOPPER)

    assert config(0).narrow and not config(-5).narrow
    assert str(NARROW) in gpu.to_ptx(config(0), HOPPER.cc) and str(NARROW) not in gpu.to_ptx(config(-5), HOPPER.cc)
