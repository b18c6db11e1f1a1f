"""Any number of dimensions, and what comes out besides o, of arrays on a GPU."""

import numpy as np
import pytest

import numba_flash

rng = np.random.default_rng(0)
SHAPES = {"two": (70, 64), "three": (4, 70, 64), "five": (2, 3, 4, 70, 64)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_arrays_of_cupy_and_numba(shape):
    import cupy
    from numba import cuda

    x = rng.standard_normal(shape).astype(np.float32)
    o, lse = numba_flash.attention(x, x, x, causal=True, return_lse=True)
    on_gpu = cupy.asarray(x)
    found, of_rows = numba_flash.attention(on_gpu, on_gpu, on_gpu, causal=True, return_lse=True)
    np.testing.assert_allclose(found.get(), o, atol=2e-5)
    np.testing.assert_allclose(of_rows.get(), lse, atol=2e-5)
    given = cuda.to_device(x)
    np.testing.assert_allclose(numba_flash.attention(given, given, given, causal=True).copy_to_host(), o, atol=2e-5)
    gradients = numba_flash.attention_backward(found, on_gpu, on_gpu, on_gpu, found, of_rows, causal=True)
    right = numba_flash.attention_backward(o, x, x, x, o, lse, causal=True)
    for one, other in zip(gradients[:3], right[:3], strict=True):
        np.testing.assert_allclose(one.get(), other, atol=2e-4)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_weights_of_cupy(dtype):
    import cupy

    x = rng.standard_normal((2, 4, 200, 64)).astype(dtype)
    lse = numba_flash.attention_lse(x, x, causal=True)
    on_gpu, of_rows = cupy.asarray(x), numba_flash.attention_lse(cupy.asarray(x), cupy.asarray(x), causal=True)
    np.testing.assert_allclose(of_rows.get(), lse, atol=2e-4)
    near = dict(atol=1e-3)
    some = numba_flash.weights(on_gpu, on_gpu, of_rows, rows=slice(50, 114), heads=slice(1, 3), causal=True)
    right = numba_flash.weights(x, x, lse, rows=slice(50, 114), heads=slice(1, 3), causal=True)
    np.testing.assert_allclose(some.get(), right, **near)
    received = numba_flash.column_sums(on_gpu, on_gpu, of_rows, causal=True)
    np.testing.assert_allclose(received.get(), numba_flash.column_sums(x, x, lse, causal=True), atol=1e-2)
    facts, expected = (numba_flash.row_statistics(*of, causal=True) for of in ((on_gpu, on_gpu, of_rows), (x, x, lse)))
    np.testing.assert_allclose(facts.max_logit.get(), expected.max_logit, **near)
    np.testing.assert_allclose(facts.entropy.get(), expected.entropy, atol=1e-2)
