"""Gradients of what a score_mod reads, on the simulated GPU kernels."""

import math

import numpy as np
import pytest
from contracts import backward, daux, suite
from numba import cuda

import numba_flash
from numba_flash import testing
from numba_flash.abi.arguments import tuple_class
from numba_flash.arrays import read
from numba_flash.config.aux_gradients import AuxRoundConfig, AuxStartConfig, DauxConfig, words
from numba_flash.functions.function import Function
from numba_flash.functions.reads import reads_by_head
from numba_flash.gpu.compiled import source
from numba_flash.kernels.score import aux_gradient
from numba_flash.problem.options import uses
from numba_flash.ptx.sim.launch import run
from numba_flash.select import rungs

TestDaux = suite(daux)


@pytest.fixture(scope="session", params=["v2", "mma"])
def aux_rung(request):
    if rungs.RUNGS[request.param].tensor_cores:
        return backward.Rung(request.param, testing.rows_padded, tensor=True, slow=True)
    return backward.Rung(request.param, slow=True)


def totals(dtype, case):
    """Of three elements: what threads owe to them, in all sizes that the type has."""
    generator, info = np.random.default_rng(len(case)), np.finfo(dtype)
    exponents = generator.integers(info.minexp - info.nmant, info.maxexp - 8, 120)
    made = np.ldexp(generator.uniform(-1, 1, 120), exponents).astype(dtype)
    if case == "what cancels":
        made[60:] = -made[:60]
        made[60] = info.smallest_subnormal - made[0]
    if case == "the largest and the smallest":
        made = np.tile(np.array([info.max, info.smallest_subnormal, -info.max, info.tiny], dtype), 30)
    if case == "near":
        made = generator.standard_normal(120).astype(dtype)
    apart = case in ("all exponents", "near")
    return made, generator.integers(0, 3, 120) if apart else np.zeros(120, int)


def summed(dtype, made, places):
    """By the kernels that begin and end the sums, and what a thread does at its end."""
    used = uses(score_mod=Function.of("score_mod", lambda s, b, h, i, j, x: s + x[j]), aux=((dtype, 1),))
    config = DauxConfig(dtype, 8, 8, 16, 16, uses=used, wanted_aux=(0,))
    finish, facts = aux_gradient.make(config).finish, (dtype, (dtype,), (0,), 16)
    sums, found = np.full(3 * words(dtype), 7, np.int64), np.zeros(3, dtype)
    sizes = tuple_class("sizes", ("aux_begins",))((0, 3))

    @cuda.jit
    def every_thread(arrays, sizes):
        for total, place in zip(made, places, strict=True):
            finish(aux_gradient.Run([np.int64(place)], [total]), arrays, sizes)

    of_sums = tuple_class("arrays", ("aux_sums",))(read("aux_sums", sums))
    run(lambda: source(AuxStartConfig(*facts)), 1, 16, 0, of_sums, (sizes,))
    run(lambda: every_thread, 1, 1, 0, of_sums, (sizes,))
    of_both = tuple_class("arrays", ("aux_sums", "daux0"))(read("aux_sums", sums), read("daux", found))
    run(lambda: source(AuxRoundConfig(*facts)), 1, 16, 0, of_both, (sizes,))
    return found


@pytest.mark.parametrize("case", ["all exponents", "what cancels", "the largest and the smallest", "near"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_are_exact_in_any_order(dtype, case):
    made, places = totals(dtype, case)
    found = summed(dtype, made, places)
    exact = np.array([math.fsum(made[places == place].astype(np.float64)) for place in range(3)])
    # A float64 takes 60 bits or more of the sum, and is rounded once; float32 is that rounded again.
    assert np.allclose(
        found.astype(np.float64), exact.astype(dtype).astype(np.float64), rtol=np.finfo(dtype).eps, atol=0
    )
    order = np.random.default_rng(1).permutation(len(made))
    assert np.array_equal(found, summed(dtype, made[order], places[order]))


@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_makes_its_element_one(what):
    found = summed("float32", np.array([1, what, 2], np.float32), np.array([0, 1, 2]))
    assert np.isnan(found[1]) and found[0] == 1 and found[2] == 2


def apart(score, b, h, i, j, table, weight):
    return score - weight[h] * table[abs(i), j]


def tempered(score, b, h, i, j, table, weight):
    return weight[b, 1] * math.tanh(score * table[abs(i), j])


BESIDE = {
    "alone": {},
    "scores": dict(softcap=2.0, causal=True, scale=0.4),
    "lengths": dict(seqlens_k=np.array([36, 23], np.int32), window=(25, 4)),
    "dropout": dict(dropout_p=0.3, seed=5, causal=True),
    "mask": dict(mask=np.random.default_rng(7).random((1, 1, 18, 36)) < 0.6),
    "mask_mod": dict(mask_mod=lambda b, h, i, j, table, weight: (i + j) % 3 != 0),
}


# A number that all scores of a head share: wgmma adds up its gradient beside dQ, without a pass of its own. Each option
# is there once, where the sum of a function has most to do with it: lengths beside one that reads b, what hides a score
# beside one whose derivative is a number of each score.
@pytest.mark.parametrize(
    ("beside", "function"),
    [("alone", apart), ("scores", apart), ("mask_mod", apart)]
    + [(name, tempered) for name in ("alone", "lengths", "dropout", "mask")],
)
def test_a_number_of_a_head_is_added_up_beside_dq(beside, function):
    rung = backward.Rung("wgmma", testing.rows_padded, tensor=True, slow=True)
    case = rung.problem(18, 36, batch=2 if beside == "lengths" else 1, heads=2, heads_kv=1, head_dim=8)
    generator = np.random.default_rng(4)
    weight = generator.standard_normal(2 if function is apart else (2, 2)).astype(np.float32)
    table = generator.standard_normal((36, 36)).astype(np.float32)
    case.options |= dict(score_mod=function, aux=(table, weight)) | BESIDE[beside]
    given, wanted = backward.incoming(case), ("dq", "dk", "dv", "daux[1]")
    found = rung(case, given, wanted)
    do, o, lse, dlse = given
    launched = numba_flash.explain_backward(
        do, **case.arguments(lambda x: x), o=o, lse=lse, wanted=wanted, kernel="wgmma"
    )
    names = [config.kernel for config in launched.configs]
    assert "wgmma_dq" in names and "mma_daux" not in names
    testing.check_gradients(case, found, *given, rung.kernel)
    if beside == "alone":
        assert np.array_equal(found.daux[1], rung(case, given, wanted).daux[1])


def by_key(score, b, h, i, j, table, weight):
    return score + weight[j % 2]


def twice(score, b, h, i, j, table, weight):
    return score * weight[h] + weight[h]


def by_value(score, b, h, i, j, table, weight):
    return score + weight[h] if score > 0 else score


@pytest.mark.parametrize(
    ("function", "expected"), [(apart, [True]), (by_key, [False]), (twice, [True, True]), (by_value, None)]
)
def test_what_all_scores_of_a_head_read(function, expected):
    assert reads_by_head(Function.of("score_mod", function), (2, 1), (1,)) == expected
