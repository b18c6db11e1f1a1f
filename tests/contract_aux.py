"""Gradients of what a score_mod reads, for whatever kernels the fixture `aux_rung` holds, as in contract.py."""

import functools
import math

import contract
import contract_backward
import numpy as np
import pytest

import numba_flash
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
    case = contract.problem(*seqlens, dtype=dtype, **options)
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
    do, o, lse, dlse = contract_backward.incoming(case)
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
    return found_by(contract_backward.Rung("reference"), case_of(dtype, **dict(options)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "options", [(), (("softcap", 2.0), ("causal", True)), (("strange", True),), (("seqlens", (37, 8)),)], ids=str
)
def test_gradients_of_aux_agree_with_the_oracle(aux_rung, dtype, options):
    found, expected = found_by(aux_rung, case_of(dtype, **dict(options))), oracle(dtype, options)
    for one, other in zip(found[:2], expected[:2], strict=True):
        # sums of some hundred terms of about 1, each off by some dozens of roundings
        assert one.dtype == dtype and np.allclose(one, other, rtol=0, atol=2000 * testing.EPS[dtype])
    again = found_by(aux_rung, case_of(dtype, **dict(options)))
    assert all(np.array_equal(x, y) for x, y in zip(found[:2], again[:2], strict=True))


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
