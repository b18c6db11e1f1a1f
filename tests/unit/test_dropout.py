"""Dropout on the kernels of the CPU, and which weights it leaves out."""

import numpy as np
import pytest
from contracts import backward, dropout, forward, suite

import numba_flash
from numba_flash.testing import dropout_mask

TestDropout = suite(dropout)

X = np.zeros((1, 1, 4, 8), np.float32)


@pytest.fixture(scope="session", params=["reference", "cpu"])
def rung(request):
    return forward.Rung(request.param)


@pytest.fixture(scope="session", params=["reference", "cpu"])
def backward_rung(request):
    return backward.Rung(request.param)


def words(counter, key):
    """The four words of one counter, from masks: by bisection of the p at which each half begins to be dropped."""
    keys, q_pos, h, b = counter
    found = np.zeros((4, 2), np.int64)  # how much less than 2^16 - 1 the lower and the upper half of each are
    for bit in reversed(range(16)):
        for place, upper in np.ndindex(4, 2):
            p = (int(found[place, upper]) + 2**bit) / 2**16
            k_pos = (keys >> 1 << 4) + 4 * (keys & 1) + place + 8 * upper
            mask = dropout_mask((b + 1, h + 1, 1, k_pos + 1), p, key, q_pos)
            found[place, upper] += mask[b, h, 0, k_pos] * 2**bit
    low, high = 2**16 - 1 - found.T
    return [int(x) for x in low + (high << 16)]


def test_random_bits_are_those_of_philox():
    """The first of the known answers that Random123 publishes for philox4x32 with 7 rounds."""
    assert words((0, 0, 0, 0), 0) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_as_many_count_as_should(p):
    """Within five standard deviations of a binomial, and its expected value is 1."""
    mask = dropout_mask((2, 4, 256, 512), p, seed=7)
    assert abs(mask.mean() - (1 - p)) < 5 * (p * (1 - p) / mask.size) ** 0.5


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("apart", [1, 2, 3, 4, 8, 16, 32])
def test_neighbours_are_independent(axis, apart):
    """The correlation of weights so far apart, by their positions, is within five standard deviations of 0."""
    shape = [2, 2, 64, 64]
    shape[axis] = max(shape[axis], 64)
    mask = np.moveaxis(dropout_mask(tuple(shape), 0.5, seed=11), axis, 0) - 0.5
    one, other = mask[:-apart].ravel(), mask[apart:].ravel()
    assert abs(4 * np.mean(one * other)) < 5 / one.size**0.5


def test_seeds_are_independent():
    one, other = (dropout_mask((2, 2, 64, 64), 0.5, seed) - 0.5 for seed in (2**40, 2**40 + 1))
    assert abs(4 * np.mean(one * other)) < 5 / one.size**0.5
    assert (dropout_mask((1, 1, 64, 64), 0.5, 2**33) != dropout_mask((1, 1, 64, 64), 0.5, 1)).any()  # all 64 bits


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (dict(dropout_p=0.1), ValueError, "dropout_p needs seed="),
        (dict(dropout_p=0.1, seed=None), ValueError, "another one for each call"),
        (dict(dropout_p=1.0, seed=1), ValueError, "dropout_p is a probability, from 0 to below 1, not 1.0"),
        (dict(dropout_p=-0.1, seed=1), ValueError, "from 0 to below 1"),
        (dict(dropout_p=float("nan"), seed=1), ValueError, "dropout_p must be finite"),
        (dict(dropout_p="a tenth", seed=1), TypeError, "dropout_p must be a number"),
        (dict(dropout_p=0.1, seed=1.0), TypeError, "seed must be a whole number, not 1.0"),
        (dict(dropout_p=0.1, seed=True), TypeError, "seed must be a whole number, not True"),
        (dict(dropout_p=0.1, seed=-1), ValueError, "seed must be from 0 to below 2\\*\\*64, not -1"),
        (dict(dropout_p=0.1, seed=2**64), ValueError, "seed must be from 0"),
        (dict(seed=-1), ValueError, "seed must be from 0"),  # and nothing that needs it
    ],
)
def test_wrong_dropout_is_named(given, error, words):
    with pytest.raises(error, match=words):
        numba_flash.attention(X, X, X, **given, kernel="reference")
    with pytest.raises(error, match=words):
        numba_flash.attention_backward(X, X, X, X, X, X[..., 0].copy(), **given, kernel="reference")


def test_a_seed_alone_changes_nothing():
    assert np.array_equal(numba_flash.attention(X, X, X, seed=3), numba_flash.attention(X, X, X))


def test_another_seed_is_no_other_plan():
    """What is made ready for a problem is found again for every seed."""
    from numba_flash.dispatch import forward

    given = dict(dropout_p=0.25, kernel="reference")
    numba_flash.attention(X, X, X, **given, seed=1)
    before = len(forward._plans)
    for seed in range(5):
        numba_flash.attention(X, X, X, **given, seed=seed)
    assert len(forward._plans) == before


def test_warmup_and_explain_need_no_seed():
    numba_flash.warmup(X, X, X, dropout_p=0.1, kernel="reference")
    assert numba_flash.explain(X, X, X, dropout_p=0.1, kernel="reference").kernel == "reference"


def test_the_expected_output_is_that_without_dropout():
    case = forward.problem(8, 24, batch=1)
    without = numba_flash.attention(**case.arguments())
    outs = [numba_flash.attention(**case.arguments(), dropout_p=0.5, seed=s, kernel="reference") for s in range(400)]
    deviation = np.std(outs, axis=0) / len(outs) ** 0.5
    assert (np.abs(np.mean(outs, axis=0) - without) < 6 * deviation + 1e-6).all()


def test_gradients_are_those_of_finite_differences():
    case = forward.problem(5, 40, dtype="float64", causal=True, softcap=3.0)
    case.options |= dict(dropout_p=0.4, seed=9)
    do, o, lse, dlse = backward.incoming(case)
    arguments = case.arguments()
    found = numba_flash.attention_backward(do, **arguments, o=o, lse=lse, dlse=dlse, kernel="reference")

    def loss(**changed):
        o, lse = numba_flash.attention(**arguments | changed, return_lse=True, kernel="reference")
        return (o * do).sum() + (lse * dlse).sum()

    rng = np.random.default_rng(0)
    for name in "qkv":
        direction = rng.standard_normal(arguments[name].shape)
        step = 1e-5
        slope = (
            loss(**{name: arguments[name] + step * direction}) - loss(**{name: arguments[name] - step * direction})
        ) / (2 * step)
        assert np.isclose(slope, (getattr(found, "d" + name) * direction).sum(), rtol=1e-7, atol=1e-7)
