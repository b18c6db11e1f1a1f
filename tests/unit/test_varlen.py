"""Packed sequences on the oracle and on the CPU rung, and what a caller may get wrong."""

import numpy as np
import pytest
from contracts import suite, varlen
from helpers.machines import AMPERE, HOPPER, packed_problem

import numba_flash
from numba_flash.dispatch.launch import Launch, make_launch
from numba_flash.select.forward import select

TestVarlen = suite(varlen)

X = np.zeros((10, 2, 8), np.float32)
ENDS = np.array([0, 4, 10], np.int32)


def called(q=X, k=X, v=X, cu_seqlens_q=ENDS, cu_seqlens_k=None, **options):
    return numba_flash.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, kernel="reference", **options)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (dict(q=X[None]), ValueError, r"q must have 3 dimensions \(total, heads, head_dim\), not shape \(1, 10"),
        (dict(cu_seqlens_q=ENDS.astype(np.int64)), TypeError, r"cu_seqlens_q must be int32, not int64; .*astype"),
        (dict(cu_seqlens_q=ENDS[None]), ValueError, r"cu_seqlens_q must have shape \(batch \+ 1,\), not \(1, 3\)"),
        (dict(cu_seqlens_q=ENDS[:0]), ValueError, r"cu_seqlens_q must have shape \(batch \+ 1,\), not \(0,\)"),
        (dict(cu_seqlens_q=None), TypeError, "cu_seqlens_q must be an int32 array"),
        (dict(cu_seqlens_k=ENDS[:2]), ValueError, r"must have one shape, \(batch \+ 1,\), not \(3,\) and \(2,\)"),
        (dict(cu_seqlens_q=ENDS[::-1].copy()), ValueError, r"cu_seqlens_q must rise .*at most 10.*\[10, 4, 0\]"),
        (dict(cu_seqlens_k=ENDS + np.int32(1)), ValueError, r"cu_seqlens_k must rise .*\[1, 5, 11\]"),
        (dict(max_seqlen_q=5), ValueError, "max_seqlen_q = 5 is less than a length of cu_seqlens_q, 6"),
        (dict(max_seqlen_k=-1), ValueError, "max_seqlen_k must be at least 0, not -1"),
        (dict(max_seqlen_q=5.0), TypeError, "max_seqlen_q must be a whole number or None, not 5.0"),
        (dict(max_seqlen_q=np.array(6)), TypeError, "max_seqlen_q must be a whole number.*leave it out"),
        (dict(seqlens_k=np.array([4, 7], np.int32)), ValueError, r"seqlens_k must lie in .*\[4, 6\], not \[4, 7\]"),
        (dict(k=X[:9]), ValueError, r"seqlen of k and v must be the same, .* k \(9, 2, 8\)"),
        (dict(out=X.copy()[:9]), ValueError, r"out must have shape \(10, 2, 8\)"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_is_said(wrong, error, message):
    with pytest.raises(error, match=message):
        called(**wrong)


def test_out_is_written():
    rows = np.random.default_rng(0).standard_normal((3, 10, 2, 8)).astype(np.float32)
    out = np.full_like(X, np.nan), np.full((2, 10), np.nan, np.float32)
    o, lse = called(*rows, out=out, return_lse=True)
    assert o is out[0] and lse is out[1]
    expected = called(*rows, return_lse=True)
    assert np.array_equal(o, expected.o) and np.array_equal(lse, expected.lse)


def test_auto_takes_wgmma_on_hopper():
    made = packed_problem()
    assert select(made, HOPPER, "auto", "cupy").config.kernel == "wgmma"
    assert select(made, AMPERE, "auto", "cupy").config.kernel == "mma"


# Other rows in a tile change the bits of a query that does not see a key whose V is NaN (with_fastest_rows).
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(100, 0)), dict(q_offset=3, causal=True)], ids=str)
def test_bounds_of_lengths_change_no_bits(options, dtype):
    sizes = (4096, 4, 2, ()), (1000, 1, 1, ()), (4096, 64, 16, (300, 64)), (4096, 1, 2, (200, 7))
    configs = {
        select(
            packed_problem(64, dtype, rows, sequences=n, heads=heads, bounds=bounds, **options), HOPPER, "wgmma", "cupy"
        ).config
        for rows, n, heads, bounds in sizes
    }
    assert len(configs) == 1


@pytest.mark.parametrize("options", [{}, dict(causal=True)], ids=str)
def test_a_sequence_of_few_queries_has_one_small_tile(options):
    assert select(packed_problem(bounds=(60, 60), **options), HOPPER, "wgmma", "cupy").config.tile_m == 64


@pytest.mark.parametrize("kernel", ["wgmma", "mma", "v2"])
def test_nothing_is_launched_for_packed_sequences_without_rows(kernel):
    """A tensor map of no rows cannot be made. One row of no sequence has to be written."""
    without, one = (packed_problem(rows=rows, sequences=1) for rows in (0, 1))
    assert type(make_launch(select(without, HOPPER, kernel, "cupy"), without, HOPPER)) is Launch
    assert type(make_launch(select(one, HOPPER, kernel, "cupy"), one, HOPPER)) is not Launch
