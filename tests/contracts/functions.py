"""score_mod and mask_mod, for whatever kernels the fixtures `rung` and `backward_rung` hold, as in forward.py."""

import functools
import math
import re

import numpy as np
import pytest
from hypothesis import given, strategies as st

from contracts import backward, forward
from contracts.forward import lse_unchanged, unchanged
from contracts.metamorphic import both_close, both_same
from numba_flash import testing

# Random problems with functions: the oracle and the plain formula call them for each score by itself.
FEATURES = ("causal", "window", "seqlens_k", "softcap", "bias", "mask")
LIMITS = dict(max_seqlen=24, max_batch=2, head_dims=(7, 16))


def limits_of(rung):
    return rung.limits | LIMITS | dict(features=(*FEATURES, *testing.FUNCTIONS))


@given(st.data())
def test_random_functions_agree_with_the_oracle(rung, data):
    rung.check(data.draw(testing.cases(**limits_of(rung))))


@given(st.data())
def test_gradients_of_random_functions_agree_with_the_oracle(backward_rung, data):
    case = data.draw(testing.cases(**limits_of(backward_rung)))
    backward_rung.check(case, backward.incoming(case, data.draw(st.integers(0, 100))))


# Every function, in every dtype, with all else that changes a score.
@pytest.mark.parametrize("dtype", testing.DTYPES)
@pytest.mark.parametrize("number", range(len(testing.functions.SCORES)))
def test_every_function(rung, number, dtype):
    rung.check(with_function(number, dtype))


@pytest.mark.parametrize("dtype", testing.DTYPES)
@pytest.mark.parametrize("number", range(len(testing.functions.SCORES)))
def test_gradients_of_every_function(backward_rung, number, dtype):
    backward_rung.check(with_function(number, dtype))


def with_function(number, dtype):
    case = forward.problem(12, 18, batch=1, dtype=dtype)
    case.options |= dict(
        score_mod=testing.functions.SCORES[number], causal=True, softcap=3.0,
        mask_mod=testing.functions.MASKS[number % len(testing.functions.MASKS)],
        aux=testing.functions.aux_for(1, 2, 12, 18, np.random.default_rng(number), dtype),
    )  # fmt: skip
    return case


def alibi(score, b, h, q_pos, k_pos, slopes):
    return score - slopes[h] * abs(q_pos - k_pos)


def added(score, b, h, q_pos, k_pos, bias):
    return score + bias[b, h, q_pos - 10, k_pos]


def capped(cap, score, b, h, q_pos, k_pos):
    return cap * math.tanh(score / cap)


def causal(b, h, q_pos, k_pos):
    return q_pos >= k_pos


def placed(score, b, h, i, j, table, slopes):
    """Another number and another derivative at each position, head and batch entry."""
    return (1.0 + table[b, i % 5, j % 7]) * score - slopes[h] * abs(i - j)


def shown(b, h, i, j, table, slopes):
    return (3 * i + 5 * j + 2 * h + b) % 7 > 1


BY_PLACE = dict(
    score_mod=placed, mask_mod=shown,
    aux=(np.random.default_rng(5).random((2, 5, 7), dtype=np.float32), np.array([0.3, -0.1, 0.2, 0.05], np.float32)),
)  # fmt: skip


SLOPES = np.array([0.25, 2.0], np.float32)
BIAS = np.random.default_rng(3).standard_normal((2, 2, 20, 30), dtype=np.float32)
# What a function computes that is an option, too.
SAME = {
    "alibi": (dict(score_mod=alibi, aux=(SLOPES,)), dict(alibi_slopes=SLOPES)),
    "bias": (dict(score_mod=added, aux=(BIAS,)), dict(bias=BIAS)),
    "softcap": (dict(score_mod=functools.partial(capped, 1.5)), dict(softcap=1.5)),
    "causal": (dict(mask_mod=causal), dict(causal=True)),
    "both": (dict(mask_mod=causal, score_mod=lambda s, b, h, i, j: s * 1), dict(causal=True)),
}


def said_twice(rung, which):
    """A problem with a function, and with the option that it describes."""
    own, option = (dict(options, batch=rung.batch) for options in SAME[which])
    if "bias" in option:
        option["bias"] = BIAS[: rung.batch]
    return rung.problem(**own), rung.problem(**option)


@pytest.mark.parametrize("which", SAME)
def test_a_function_is_the_option_that_it_describes(rung, which):
    case, other = said_twice(rung, which)
    found, expected = rung(case), rung(other)
    assert both_close(found, expected)
    assert not both_same(expected, rung(rung.problem(batch=rung.batch))), "the option must matter"


@pytest.mark.parametrize("which", SAME)
def test_gradients_of_a_function_are_those_of_the_option(backward_rung, which):
    case, other = said_twice(backward_rung, which)
    given = backward.incoming(other)
    wanted = ("dq", "dk", "dv")
    of_own, of_option = (backward_rung(x, given, wanted)[:3] for x in (case, other))
    assert both_close(of_own, of_option)


def test_documents_are_separate_calls(rung):
    bounds, documents = (0, 7, 8, 20), np.repeat([3, 1, 2], [7, 1, 12]).astype(np.int64)
    case = rung.problem(20, 20, batch=1, aux=(documents,), mask_mod=lambda b, h, i, j, ids: ids[i] == ids[j])
    o, lse = rung(case)
    for first, end in zip(bounds, bounds[1:], strict=False):
        part = testing.Case(*(x[:, :, first:end] for x in (case.q, case.k, case.v)))
        assert both_close((o[:, :, first:end], lse[:, :, first:end]), rung(part))


def by_row(rung):
    """A problem of several query tiles with a bias and a mask by the row of q, which is not q_pos, both as functions
    and as arrays."""
    rows = 70 if rung.slow and rung.kernel != "wgmma" else 140  # wgmma's query tiles have up to 128
    case = rung.problem(rows, 20, batch=1)
    steps, shown = np.arange(rows, dtype=np.float32) % 5 / 40, np.arange(rows) % 11 * 2
    case.options |= dict(
        score_mod=lambda s, b, h, i, j, steps, q_index, shown: s + steps[q_index] * j,
        mask_mod=lambda b, h, i, j, q_index, *aux: j >= aux[1][q_index],
        aux=(steps, shown),
    )
    keys = np.arange(20)
    arrays = dict(bias=steps[:, None] * keys.astype(np.float32), mask=keys >= shown[:, None])
    return case, testing.Case(case.q, case.k, case.v, arrays)


def test_q_index_is_the_row_of_q(rung):
    by_function, by_arrays = by_row(rung)
    assert both_close(rung(by_function), rung(by_arrays))


def test_gradients_by_the_row_of_q(backward_rung):
    by_function, by_arrays = by_row(backward_rung)
    incoming = backward.incoming(by_function, 0)
    one, other = (backward_rung(case, incoming, wanted=("dq", "dk", "dv")) for case in (by_function, by_arrays))
    for name in ("dq", "dk", "dv"):
        assert np.allclose(getattr(one, name), getattr(other, name), rtol=0.02, atol=0.02)


def test_an_identity_changes_no_bit(rung):
    case = rung.problem(causal=True)
    plain = rung(case)
    case.options |= dict(score_mod=lambda s, b, h, i, j: s, mask_mod=lambda b, h, i, j: True)
    same = both_close if rung.tensor else both_same  # on tensor cores the scale comes in earlier
    assert same(rung(case), plain)


# Every dtype, and strides that no library makes; the element that is read says which it was.
@pytest.mark.parametrize(
    "dtype", "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64".split()
)
def test_aux_arrays_of_every_dtype_and_strides(rung, dtype):
    values = np.arange(3 * 4 * 5).reshape(3, 4, 5) % 2 if dtype == "bool" else np.arange(60).reshape(3, 4, 5)
    larger = np.zeros((4, 8, 5), dtype)
    larger[:3, ::2] = values.astype(dtype)
    strange = larger[:3, ::2].transpose(2, 0, 1)[::-1]

    def reads(score, b, h, i, j, x):
        element = x[4 - i % 5, j % 3, -1 - h]
        return element * 0.5

    case = rung.problem(5, 6, batch=1, score_mod=reads, aux=(strange,), q_offset=0)
    _, lse = rung(case)
    i, j, h = np.arange(5)[:, None], np.arange(6), np.arange(2)[:, None, None]
    scores = values[j % 3, 3 - h, i].astype(np.float64) * 0.5
    assert np.allclose(lse[0], np.log(np.exp(scores).sum(-1)), rtol=16 * testing.EPS["float32"])


def test_arrays_without_dimensions_and_parts_of_arrays(rung):
    def mod(score, b, h, i, j, factor, table):
        row = table[h]
        return score * factor[()] + row[j] + len(row) + table.shape[0]

    table = np.random.default_rng(0).standard_normal((2, 30), dtype=np.float32)
    case = rung.problem(score_mod=mod, aux=(np.array(0.5, np.float32), table))
    rung.check(case)


# A derivative of 0, and rows of which some scores are -inf by the function.
def of_keys_alone(s, b, h, i, j):
    return -0.1 * j if j % 2 else -math.inf


def test_a_score_of_its_own(rung):
    rung.check(rung.problem(score_mod=of_keys_alone))


def test_gradients_of_a_score_of_its_own(backward_rung):
    case = backward_rung.problem(score_mod=of_keys_alone)
    gradients = backward_rung(case, wanted=("dq", "dk", "dv"))
    assert (gradients.dq == 0).all() and (gradients.dk == 0).all() and (gradients.dv != 0).any()
    assert (gradients.dv[:, :, ::2] == 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_mask_mod_hides_never_reaches_o(rung, value):
    if rung.slow and value == np.inf:
        pytest.skip("many seconds in the simulator, where NaN must do")
    extents = dict(seqlen_q=8, batch=1) if rung.slow else {}  # every row is computed again by itself
    case = rung.problem(**extents, mask_mod=lambda b, h, i, j: j != 13, score_mod=lambda s, b, h, i, j: s * 0.5)
    clean_o, clean_lse = rung(case)
    case.k[:, :, 13] = case.v[:, :, 13] = value
    o, lse = rung(case)
    assert unchanged(rung, o, clean_o) and lse_unchanged(rung, lse, clean_lse)


def test_a_row_that_mask_mod_empties_is_zero(rung):
    case = rung.problem(mask_mod=lambda b, h, i, j: i % 3 != 0)
    o, lse = rung(case)
    empty = (np.arange(20) + 10) % 3 == 0
    assert (o[:, :, empty] == 0).all() and (lse[:, :, empty] == -np.inf).all() and np.isfinite(lse[:, :, ~empty]).all()


def test_a_row_that_mask_mod_empties_gets_no_gradient(backward_rung):
    case = backward_rung.problem(mask_mod=lambda b, h, i, j: i % 3 != 0)
    empty = (np.arange(20) + 10) % 3 == 0
    dq = backward_rung(case).dq
    assert (dq[:, :, empty] == 0).all() and dq[:, :, ~empty].all()


# A function that changes is another function: its code, a constant, a closure, a global, a default, what it calls.
FACTOR = 0.5


def by_global(score, b, h, i, j):
    return score * FACTOR


def by_call(score, b, h, i, j):
    return by_global(score, b, h, i, j)


def made(factor):
    return lambda score, b, h, i, j: score * factor


def by_default(score, b, h, i, j, factor=0.5):
    return score * factor


@pytest.mark.parametrize("how", ["closure", "global", "called", "default", "code", "partial"])
def test_a_changed_function_is_not_served_old_code(rung, how, monkeypatch):
    half = dict.fromkeys(("closure",), made(0.5)) | {"global": by_global, "called": by_call, "default": by_default}
    half |= {"code": by_default, "partial": functools.partial(by_default, factor=0.5)}
    case = rung.problem(batch=1, score_mod=half[how])
    expected_half, expected_double = (rung(rung.problem(batch=1, scale=scale)) for scale in (0.25, 1.0))
    assert both_close(rung(case), expected_half)
    if how in ("global", "called"):
        monkeypatch.setitem(globals(), "FACTOR", 2.0)
        changed = half[how]
    elif how == "default":
        monkeypatch.setattr(by_default, "__defaults__", (2.0,))
        changed = by_default
    elif how == "code":
        monkeypatch.setattr(by_default, "__code__", (lambda score, b, h, i, j, factor: score * 2.0).__code__)
        changed = by_default
    else:
        changed = made(2.0) if how == "closure" else functools.partial(by_default, factor=2.0)
    case.options["score_mod"] = changed
    assert both_close(rung(case), expected_double)


# What a function does wrong, and what the error has to name.
def returns_text(score, b, h, i, j):
    return "text"


def returns_none(score, b, h, i, j):  # noqa: RET503 - that is what is wrong with it
    if j > 3:
        return score


def returns_pair(score, b, h, i, j):
    return score, score


def returns_truth(score, b, h, i, j):
    return score > 0


def raises(score, b, h, i, j):
    raise ValueError("no")


def unknown(score, b, h, i, j):
    return score.real_part


def reads_at_real(score, b, h, i, j, x):
    return x[score]


def too_deep(score, b, h, i, j, x):
    return x[0, 0]


WRONG = {
    returns_text: ["'text'", "returns_text"],
    returns_none: ["returns None", "returns_none"],
    returns_pair: ["must return a number", "returns_pair"],
    returns_truth: ["must return a number", "returns_truth", "bool"],
    raises: ["raises", "cannot"],
    unknown: ["unknown", "real_part"],
    reads_at_real: ["whole numbers", "int()"],
    too_deep: ["1 dimensions", "2"],
}


@pytest.mark.parametrize("function", WRONG, ids=lambda f: f.__name__)
def test_what_is_wrong_with_a_function_is_said(rung, function):
    aux = (np.ones(3, np.float32),) if function in (reads_at_real, too_deep) else ()
    with pytest.raises(TypeError) as caught:
        rung(rung.problem(score_mod=function, aux=aux))
    text = str(caught.value)
    assert "score_mod" in text and all(words in text for words in WRONG[function]), text
    assert len(text) < 700 and len(text.splitlines()) < 4, text
    assert re.search(r"line \d+", text), text


def test_the_mask_must_be_a_truth(rung):
    with pytest.raises(TypeError, match=r"mask_mod must return True or False, but .*line \d+.* return"):
        rung(rung.problem(mask_mod=lambda b, h, i, j: 0.5 * (i - j)))


def test_a_mask_may_be_a_whole_number(rung):
    """0 removes the key: so `a or b` is what Python has."""
    flags = np.array([0, 3, 0, -1, 1] * 6)
    options = [
        dict(mask_mod=lambda b, h, i, j, flags: i - j < 2 or flags[j], aux=(flags,)),
        dict(mask_mod=lambda b, h, i, j, flags: i - j < 2 or flags[j] != 0, aux=(flags,)),
    ]
    found, expected = (rung(rung.problem(**each)) for each in options)
    assert both_same(found, expected)
