"""merge: parts joined exactly, whatever they hold. That merged parts equal the whole is in test_metamorphic."""

import itertools

import numpy as np
import pytest
from contracts.forward import problem
from hypothesis import given, strategies as st

import numba_flash
from numba_flash import merge, testing
from numba_flash.testing import Case


def parts_of(case, cuts):
    edges = [0, *cuts, case.k.shape[2]]
    for a, b in itertools.pairwise(edges):
        part = Case(case.q, case.k[:, :, a:b], case.v[:, :, a:b])
        yield numba_flash.attention(**part.arguments(), kernel="reference", return_lse=True)


# Each dtype of o, with the dtype that lse has beside it.
@pytest.mark.parametrize("dtype", testing.DTYPES)
@given(cuts=st.lists(st.integers(0, 30), max_size=5).map(sorted))
def test_any_split_gives_the_whole(dtype, cuts):
    case = problem(dtype=dtype)
    merged = merge(*itertools.chain.from_iterable(parts_of(case, cuts)))
    expected_o, expected_lse = testing.oracle(case)
    assert merged.o.dtype == case.q.dtype and merged.lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    eps = testing.EPS[dtype]  # o was rounded once in each part, and once more here
    assert np.allclose(merged.o.astype(np.float64), expected_o, rtol=4 * eps, atol=4 * eps)
    assert np.allclose(merged.lse, expected_lse, rtol=1e-6, atol=1e-6)


def test_the_order_of_the_parts_does_not_matter():
    parts = list(parts_of(problem(dtype="float64"), [4, 4, 19]))
    for order in itertools.permutations(parts):
        merged = merge(*itertools.chain.from_iterable(order))
        assert np.allclose(merged.o, merge(*itertools.chain.from_iterable(parts)).o, rtol=1e-14, atol=1e-14)


def test_one_part_is_itself():
    o, lse = next(parts_of(problem(), []))
    merged = merge(o, lse)
    assert np.array_equal(merged.o, o) and np.array_equal(merged.lse, lse)
    assert merged.o is not o


def test_layouts():
    parts = list(parts_of(problem(), [11]))
    turned = [x for o, lse in parts for x in (o.transpose(0, 2, 1, 3), lse)]
    merged, expected = merge(*turned, layout="bshd"), merge(*itertools.chain.from_iterable(parts))
    assert np.array_equal(merged.o.transpose(0, 2, 1, 3), expected.o) and np.array_equal(merged.lse, expected.lse)


def test_a_part_without_keys_counts_nothing_whatever_it_holds():
    o, lse = next(parts_of(problem(), []))
    nothing = np.full_like(lse, -np.inf)
    for strange in (np.nan, np.inf, 0.0):
        merged = merge(np.full_like(o, strange), nothing, o, lse)
        assert np.array_equal(merged.o, o) and np.array_equal(merged.lse, lse)
        merged = merge(np.full_like(o, strange), nothing, np.full_like(o, strange), nothing)
        assert (merged.o == 0).all() and (merged.lse == -np.inf).all()


def test_nan_is_passed_on():
    o, lse = next(parts_of(problem(), []))
    broken = o.copy()
    broken[0, 0, 3] = np.nan
    assert np.isnan(merge(o, lse, broken, lse).o[0, 0, 3]).all()
    broken_lse = lse.copy()
    broken_lse[0, 0, 3] = np.nan
    for pair in ((o, lse, o, broken_lse), (o, broken_lse, o, lse)):
        merged = merge(*pair)
        assert np.isnan(merged.o[0, 0, 3]).all() and np.isnan(merged.lse[0, 0, 3])
        assert not np.isnan(merged.o[0, 0, 4:]).any()


def test_scores_far_apart_do_not_overflow():
    o = np.ones((1, 1, 1, 2))
    low, high = np.full((1, 1, 1), -1e4), np.full((1, 1, 1), 1e4)
    merged = merge(o, low, 3 * o, high)
    assert np.array_equal(merged.o, 3 * o) and np.array_equal(merged.lse, high)
    same = merge(o, high, 3 * o, high)
    assert np.allclose(same.o, 2) and np.allclose(same.lse, 1e4 + np.log(2))


def test_torch_and_jax_tensors_stay_what_they_are():
    torch = pytest.importorskip("torch", reason="needs torch")
    parts = [x for pair in parts_of(problem(), [7]) for x in pair]
    merged, expected = merge(*(torch.from_numpy(x) for x in parts)), merge(*parts)
    assert isinstance(merged.o, torch.Tensor) and merged.o.dtype == torch.float32
    assert np.allclose(merged.o.numpy(), expected.o, rtol=1e-6, atol=1e-6)
    with pytest.raises(TypeError, match="one library"):
        merge(parts[0], torch.from_numpy(parts[1]))


def test_softmax_of_arrays_in_host_memory_needs_no_gpu():
    x = np.array([[1.0, 2.0, 3.0]])
    assert np.array_equal(numba_flash.softmax(x), numba_flash.softmax(x, kernel="reference"))
