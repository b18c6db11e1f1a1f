"""mma: products of a warp."""

import numpy as np
import pytest
from helpers.instructions import KINDS, launch, random, rng, wide
from numba import cuda

from numba_flash.ptx.sim import local, mma


@pytest.mark.parametrize("kind", KINDS)
def test_mma(kind):
    a, b = random(16, 16, kind=kind), random(16, 8, kind=kind)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    a_pairs, b_pairs = a.view(np.uint32), np.ascontiguousarray(b.T).view(np.uint32)  # (16, 8), (8, 8)

    def kernel(a, b, c, out):
        lane = cuda.threadIdx.x
        row, pair = lane // 4, lane % 4
        acc = local.array(6, np.dtype(np.float32))
        a_frag, b_frag = local.array(4, np.dtype(np.uint32)), local.array(3, np.dtype(np.uint32))
        for i in range(4):
            a_frag[i] = a[(row + 8 * (i % 2)) * 8 + pair + 4 * (i // 2)]
            acc[2 + i] = c[(row + 8 * (i // 2)) * 8 + 2 * pair + i % 2]
        for i in range(2):
            b_frag[1 + i] = b[row * 8 + pair + 4 * i]
        product = mma.m16n8k16_f16 if kind == "f16" else mma.m16n8k16_bf16
        product(acc, 2, a_frag, 0, b_frag, 1)
        for i in range(4):
            out[(row + 8 * (i // 2)) * 8 + 2 * pair + i % 2] = acc[2 + i]

    out = np.zeros_like(c)
    launch(kernel, 32, a_pairs, b_pairs, c, out)
    np.testing.assert_allclose(out, c + wide(a) @ wide(b), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "depth", "dtype"), [("m16n8k8_tf32", 8, np.float32), ("m16n8k16_f64", 16, np.float64)]
)
def test_mma_of_larger_elements(name, depth, dtype):
    a, b, c = (rng.standard_normal(shape).astype(dtype) for shape in ((16, depth), (depth, 8), (16, 8)))
    if dtype == np.float32:  # of which the hardware sees the first 11 bits
        a, b = ((x.view(np.uint32) | 0x1FFF).view(np.float32) for x in (a, b))

    def kernel(a, b, c, out):
        lane = cuda.threadIdx.x
        row, column = lane // 4, lane % 4
        kind = np.dtype(np.uint32 if dtype == np.float32 else np.float64)
        acc, a_frag = local.array(6, np.dtype(dtype)), local.array(9, kind)
        b_frag = local.array(5, kind)
        for i in range(4):
            acc[2 + i] = c[(row + 8 * (i // 2)) * 8 + 2 * column + i % 2]
        for i in range(depth // 2):
            a_frag[1 + i] = a[(row + 8 * (i % 2)) * depth + column + 4 * (i // 2)]
        for i in range(depth // 4):
            b_frag[1 + i] = b[(column + 4 * i) * 8 + row]
        getattr(mma, name)(acc, 2, a_frag, 1, b_frag, 1)
        for i in range(4):
            out[(row + 8 * (i // 2)) * 8 + 2 * column + i % 2] = acc[2 + i]

    out = np.zeros_like(c)
    as_given = (x.view(np.uint32) if dtype == np.float32 else x for x in (a, b))
    launch(kernel, 32, *as_given, c, out)
    if dtype == np.float32:
        a, b = ((x.view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64) for x in (a, b))
        exact = c + a @ b
        eps = 2.0**-23 * np.abs(exact)
        assert (np.abs(out) <= np.abs(exact)).all() and (np.abs(out - exact) < eps).all()  # cut off
        assert (np.abs(out - exact) > eps / 2).any()
    else:
        np.testing.assert_allclose(out, c + a @ b, rtol=1e-14, atol=1e-14)


def test_sums_are_cut_off():
    next_to_1 = float(np.nextafter(np.float32(1), np.float32(2)))
    x = np.array([0, -0.0, 1, -1, 1 + 2**-30, -1 - 2**-30, next_to_1 - 2**-30, 3e-46, 1e39, -np.inf, np.nan])
    expected = np.array([0, -0.0, 1, -1, 1, -1, 1, 0, np.inf, -np.inf, np.nan], np.float32)
    with np.errstate(all="ignore"):
        found = mma.cut_off(x)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found[:8]), np.signbit(expected[:8]))


def test_mma_of_8_rows():
    a, b, c = (rng.standard_normal(shape) for shape in ((8, 4), (4, 8), (8, 8)))

    def kernel(a, b, c, out):
        lane = cuda.threadIdx.x
        row, column = lane // 4, lane % 4
        values = local.array(5, np.dtype(np.float64))
        values[0], values[1] = a[row * 4 + column], b[column * 8 + row]
        for i in range(2):
            values[3 + i] = c[row * 8 + 2 * column + i]
        mma.m8n8k4_f64(values, 3, values, 0, values, 1)
        for i in range(2):
            out[row * 8 + 2 * column + i] = values[3 + i]

    out = np.zeros_like(c)
    launch(kernel, 32, a, b, c, out)
    np.testing.assert_allclose(out, c + a @ b, rtol=1e-14, atol=1e-14)
