"""Dropout on the GPU kernels, simulated."""

import functools
from unittest import mock

import pytest
from contracts import backward, dropout, forward, suite

from numba_flash import testing
from numba_flash.kernels.score import kept_weights
from numba_flash.select import rungs

TestDropout = suite(dropout)

TENSOR = dict(dtypes=("float16", "bfloat16"), strange_strides=False, max_seqlen=40)
SMALL = dict(max_seqlen=36, max_batch=2, head_dims=(1, 7, 16, 32))  # every row is a thread, run by Python


@pytest.fixture(autouse=True, scope="module")
def words_are_remembered():
    """The words of a counter are computed once. In Python they take a millisecond, and kernels compute them often."""
    words = functools.cache(kept_weights.random_words.fn)
    with mock.patch.object(kept_weights, "random_words", words):
        yield


@pytest.fixture(scope="session", params=["v1", "v2", "mma", "wgmma"])
def rung(request):
    if rungs.RUNGS[request.param].tensor_cores:
        return forward.Rung(request.param, testing.rows_padded, tensor=True, tile=32, slow=True, limits=TENSOR)
    return forward.Rung(request.param, slow=True, limits=SMALL)


@pytest.fixture(scope="session", params=["v2", "mma"])
def backward_rung(request):
    if rungs.RUNGS[request.param].tensor_cores:
        limits = TENSOR | dict(head_dims=(8, 16), features=("causal", "window", "softcap"))
        return backward.Rung(request.param, testing.rows_padded, tensor=True, slow=True, limits=limits)
    return backward.Rung("v2", slow=True, limits=SMALL)
