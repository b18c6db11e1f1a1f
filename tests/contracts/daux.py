"""Gradients of what a score_mod reads, for whatever kernels the fixture `aux_rung` holds, as in forward.py."""

import functools
import math

import numpy as np
import pytest

import numba_flash
from contracts import backward, forward
from numba_flash import testing


def everything(score, b, h, i, j, table, slopes, ids):
    """Reads whole rows and elements, in a loop, by what was read, with branches; some of them count nothing."""
    row = table[h]
    y = score * slopes[h] + row[min(max(i - j, 0), 6)]
    for n in range(j % 3):
        y = y + table[n, ids[j]] * math.tanh(score * slopes[n]) / (2 + slopes[h] ** 2)
    return max(y, -1.0) if y < 5 else y * slopes[0]


def hides(b, h, i, j, table, slopes, ids):
    return i >= j or table[h, 0] > 0


def case_of(dtype="float64", seqlens=(5, 8), strange=False, **options):
    generator = np.random.default_rng(7)
    case = forward.problem(*seqlens, dtype=dtype, **options)
    table, slopes = generator.standard_normal((4, 7)), generator.standard_normal(4)
    if strange:
        table, slopes = np.repeat(table[::-1], 2, axis=1)[::-1, ::2], np.flip(np.flip(slopes).copy())
    ids = generator.integers(0, 7, seqlens[1])
    case.options |= dict(score_mod=everything, mask_mod=hides, aux=(table.astype(dtype), slopes.astype(dtype), ids))
    return case


WANTED = ("daux[0]", "daux[1]")


def found_by(rung, case, wanted=WANTED):
    """daux of float64, given the oracle's o and lse."""
    return [None if x is None else np.asarray(x) for x in rung(case, wanted=wanted).daux]


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_finite_differences_of_aux(softcap):
    """Of the oracle, which the others are compared with."""
    case = case_of(softcap=softcap)
    do, o, lse, dlse = backward.incoming(case)
    arguments = case.arguments(lambda x: x)
    aux = arguments["aux"]
    gradients = numba_flash.attention_backward(
        do, **arguments, o=o, lse=lse, dlse=dlse, kernel="reference", wanted=WANTED
    )
    assert gradients.dq is None and gradients.daux[2] is None

    def value(changed):
        o, lse = numba_flash.attention(**arguments | dict(aux=changed), kernel="reference", return_lse=True)
        return np.sum(o * do) + np.sum(np.where(np.isfinite(lse), lse, 0) * dlse)

    for number in (0, 1):
        for at in np.ndindex(aux[number].shape):
            values = []
            for step in (1e-6, -1e-6):
                moved = aux[number].copy()
                moved[at] += step
                values.append(value(tuple(moved if n == number else x for n, x in enumerate(aux))))
            # steps of 1e-6: the difference is off by 1e-12 times a third derivative, and by rounding of 1e-15 / 1e-6
            assert math.isclose((values[0] - values[1]) / 2e-6, gradients.daux[number][at], rel_tol=1e-6, abs_tol=1e-7)


@functools.cache
def oracle(dtype, options):
    return found_by(backward.Rung("reference"), case_of(dtype, **dict(options)))


def agree(found, expected, dtype):
    # sums of some hundred terms of about 1, each off by some dozens of roundings; in 16 bits they are rounded once
    size = testing.EPS[dtype if dtype == "float64" else "float32"]
    return found.dtype == dtype and np.allclose(
        found.astype(np.float64), expected.astype(np.float64), rtol=testing.EPS[dtype], atol=2000 * size
    )


CAPPED, STRANGE, LONG = (("softcap", 2.0), ("causal", True)), (("strange", True),), (("seqlens", (37, 8)),)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(dtype, options) for dtype in testing.DTYPES for options in ((), CAPPED, STRANGE)]
    + [("float32", LONG), ("float64", LONG)],
    ids=str,
)
def test_gradients_of_aux_agree_with_the_oracle(aux_rung, dtype, options):
    if aux_rung.slow and options == LONG and (dtype == "float32") != aux_rung.tensor:
        pytest.skip("many rows with one dtype in the simulator, where it takes seconds")
    found, expected = found_by(aux_rung, case_of(dtype, **dict(options))), oracle(dtype, options)
    assert all(agree(one, other, dtype) for one, other in zip(found[:2], expected[:2], strict=True))


@pytest.mark.parametrize("dtype", testing.DTYPES)
def test_gradients_of_aux_have_the_same_bits_each_time(aux_rung, dtype):
    found, again = (found_by(aux_rung, case_of(dtype, **dict(CAPPED))) for _ in range(2))
    assert all(np.array_equal(x, y) for x, y in zip(found[:2], again[:2], strict=True))


# Where o and lse are the kernel's own, and rounded: within the tolerance that is derived from the problem.
@pytest.mark.parametrize("dtype", testing.DTYPES)
def test_gradients_of_aux_are_within_the_derived_tolerance(aux_rung, dtype):
    case = case_of(dtype, softcap=2.0, causal=True)
    given = backward.incoming(case)
    found = aux_rung(case, given, (*testing.gradients_of(case), *WANTED))
    testing.check_gradients(case, found, *given, aux_rung.kernel)
    assert found.daux[0] is not None and found.daux[2] is None


def test_each_gradient_of_aux_by_itself(aux_rung):
    both = found_by(aux_rung, case_of())
    for number in (0, 1):
        alone = found_by(aux_rung, case_of(), WANTED[number : number + 1])
        assert np.array_equal(alone[number], both[number]) and alone[1 - number] is None
    with_others = aux_rung(case_of(), wanted=("dq", "dk", "dv", *WANTED))
    assert np.array_equal(np.asarray(with_others.daux[0]), both[0]) and with_others.dq is not None


def test_what_score_mod_does_not_read_has_no_gradient(aux_rung):
    case = case_of()
    case.options["score_mod"] = lambda s, b, h, i, j, table, slopes, ids: s * 2
    assert not any(x.any() for x in found_by(aux_rung, case)[:2])
    case.options["score_mod"] = None
    assert not any(x.any() for x in found_by(aux_rung, case)[:2])


def test_a_gradient_of_whole_numbers_is_refused(aux_rung):
    with pytest.raises(TypeError, match=r"daux\[2\], but aux\[2\] is int64, and real numbers alone"):
        aux_rung(case_of(), wanted=("daux[2]",))
    with pytest.raises(ValueError, match=r"wanted must name some of .*daux\[2\], not \('daux\[3\]',\)"):
        aux_rung(case_of(), wanted=("daux[3]",))


def of_table(aux_rung, score_mod, *aux, case=None, given=None):
    """The gradient of aux[0], and of which problem it is."""
    case = case or aux_rung.problem(9, 11, heads=3, heads_kv=1)
    case.options |= dict(score_mod=score_mod, aux=aux)
    given = given or backward.incoming(case, 5)
    return np.asarray(aux_rung(case, given, ("daux[0]",)).daux[0]), case, given


def by_reference(case, given, wanted="daux[0]"):
    found = backward.Rung("reference")(case, given, (wanted,))
    return np.asarray(found.daux[0] if wanted == "daux[0]" else getattr(found, wanted))


def near(x, y):
    """Sums of some hundred terms of about 1, in another order."""
    assert y.any()
    return np.allclose(x.astype(np.float64), y.astype(np.float64), rtol=0, atol=500 * np.finfo(x.dtype).eps)


def real(case):
    """The dtype of arrays that are as exact as sums."""
    return np.float64 if case.q.dtype == np.float64 else np.float32


@pytest.mark.parametrize("shape", [(2, 3, 9, 11), (1, 3, 1, 11), (2, 1, 9, 1)], ids=str)
def test_the_gradient_of_a_bias_in_aux_is_that_of_a_bias(aux_rung, shape):
    steps = tuple(int(n > 1) for n in shape)

    def added(score, b, h, i, j, table):
        return score + table[b * steps[0], h * steps[1], (i - 2) * steps[2], j * steps[3]]

    case, biased = (aux_rung.problem(9, 11, heads=3, heads_kv=1) for _ in range(2))
    bias = np.random.default_rng(3).standard_normal(shape).astype(real(case))
    biased.options["bias"] = bias
    given = backward.incoming(biased, 5)
    found, *_ = of_table(aux_rung, added, bias, case=case, given=given)
    assert near(found, by_reference(biased, given, "dbias"))


def test_the_gradient_of_slopes_in_aux_is_that_of_slopes(aux_rung):
    case, sloped = (aux_rung.problem(9, 11, heads=3, heads_kv=1) for _ in range(2))
    slopes = sloped.options["alibi_slopes"] = np.array([0.5, 0.25, 0.125], real(case))
    given = backward.incoming(sloped, 5)
    found, *_ = of_table(aux_rung, lambda s, b, h, i, j, x: s - x[h] * abs(i - j), slopes, case=case, given=given)
    assert near(found, by_reference(sloped, given, "dalibi_slopes"))


# Terms of some elements are 2^80 times those of others: each element has the precision of its own terms.
def test_the_size_of_other_elements_does_not_matter(aux_rung):
    zeros, powers = np.zeros(11, "float32"), np.ldexp(np.float32(1), [-40, 40, 0, -20, 20, -30, 30, 10, -10, 5, -5])
    plain, *_ = of_table(aux_rung, lambda s, b, h, i, j, x: s + x[j], zeros)
    scaled, *_ = of_table(aux_rung, lambda s, b, h, i, j, x, y: s + x[j] * y[j], zeros, powers)
    assert plain.all() and np.array_equal(scaled, plain * powers)


# The derivative of a square root is infinite at 0, while the score is a number.
def test_what_is_no_number_stays_in_its_element(aux_rung):
    table = np.array([1, 4, 0, 9, 1, 1, 1, 1, 1, 1, 1], "float32")
    found, case, given = of_table(aux_rung, lambda s, b, h, i, j, x: s + math.sqrt(x[j]), table)
    expected, others = by_reference(case, given), np.arange(11) != 2
    assert not np.isfinite(found[2]) and not np.isfinite(expected[2])
    assert near(found[others], expected[others])


def steep(s, b, h, i, j, x):
    return s + x[0] if j < 4 else s - 1000 + math.sqrt(x[0])


# The weight of those keys is 0, and so is what they owe, whatever the derivative is.
def test_an_infinite_derivative_of_a_score_without_weight(aux_rung):
    case = aux_rung.problem(64, 64, batch=1, heads=1, heads_kv=1)
    found, case, given = of_table(aux_rung, steep, np.zeros(1, real(case)), case=case)
    assert near(found, by_reference(case, given))


def often(s, b, h, i, j, x):
    for _ in range(40):
        s = s + x[0]
    return s


# One score, which owes to one number forty times: all its terms are as large as the largest.
def test_a_number_that_is_read_many_times(aux_rung):
    case = aux_rung.problem(1, 1, batch=1, heads=1)
    found, case, given = of_table(aux_rung, often, np.zeros(1, real(case)), case=case)
    assert near(found, by_reference(case, given))


# Everything else that a score and a weight may have, around score_mod.
BESIDE = {
    "lengths": dict(seqlens_k=np.array([21, 12], np.int32), q_offset=np.array([5, -1], np.int32), window=(9, 3)),
    "scores": dict(softcap=2.0, alibi_slopes=np.array([0.1, 0.3], np.float32), causal=True, scale=0.4),
    "bias and mask": dict(
        bias=np.random.default_rng(6).standard_normal((2, 19, 21), dtype=np.float32),
        mask=np.random.default_rng(7).random((2, 1, 19, 21)) < 0.7,
        mask_mod=lambda b, h, i, j, x: (i + j) % 5 > 0,
    ),
    "dropout": dict(dropout_p=0.3, seed=5),
}


@pytest.mark.parametrize("beside", BESIDE)
def test_gradients_of_aux_with_all_else(aux_rung, beside):
    case = aux_rung.problem(19, 21, head_dim=8)
    table = np.random.default_rng(8).standard_normal((2, 60)).astype(real(case))
    case.options |= BESIDE[beside] | dict(score_mod=placed, aux=(table,))
    given = backward.incoming(case, 5)
    found, *_ = of_table(aux_rung, placed, table, case=case, given=given)
    assert near(found, by_reference(case, given))


def placed(s, b, h, i, j, x):
    return s * x[h, 0] + x[h, i - j + 30]
