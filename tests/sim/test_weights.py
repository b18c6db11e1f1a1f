"""Weights, column sums and facts of rows by the kernels of GPUs."""

import numpy as np
import pytest

import numba_flash

rng = np.random.default_rng(0)


@pytest.mark.parametrize(("kernel", "dtype"), [("v2", np.float32), ("mma", np.float32), ("mma", np.float16)])
def test_they_are_those_of_the_oracle(kernel, dtype):
    q = rng.standard_normal((1, 2, 18, 16)).astype(dtype)
    k = rng.standard_normal((1, 1, 20, 16)).astype(dtype)
    options = dict(causal=True, bias=rng.standard_normal((1, 20)).astype(np.float32))
    lse = numba_flash.attention_lse(q, k, **options, kernel=kernel)
    exact = numba_flash.attention_lse(q.astype(float), k.astype(float), causal=True, bias=options["bias"].astype(float))
    np.testing.assert_allclose(lse, exact, atol=2e-5)
    found = numba_flash.weights(q, k, lse, rows=slice(3, 15), **options, kernel=kernel)
    expected = numba_flash.weights(q, k, lse, **options, kernel="reference")
    np.testing.assert_allclose(found, expected[:, :, 3:15], atol=2e-5)
    sums = numba_flash.column_sums(q, k, lse, **options, kernel=kernel)
    np.testing.assert_allclose(sums, expected.sum(-2), atol=1e-4)
    facts = numba_flash.row_statistics(q, k, lse, **options, kernel=kernel)
    right = numba_flash.row_statistics(q, k, lse, **options, kernel="reference")
    np.testing.assert_allclose(facts.max_logit, right.max_logit, atol=5e-5)
    np.testing.assert_allclose(facts.entropy, right.entropy, atol=1e-4)
