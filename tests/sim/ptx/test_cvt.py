"""Conversions to 16 bits and back."""

import numpy as np
import pytest
from helpers.instructions import KINDS, launch
from numba import cuda

from numba_flash.ptx.sim import cvt


@pytest.mark.parametrize("kind", KINDS)
def test_cvt(kind):
    # ties to even both ways, too large, subnormal in float16, NaN
    numbers = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, 70000, -3e-8, np.nan], np.float32)

    def kernel(x, out, back):
        i = cuda.threadIdx.x
        pack = cvt.pack_f16x2 if kind == "f16" else cvt.pack_bf16x2
        out[i] = pack(x[i], x[7 - i])
        back[2 * i], back[2 * i + 1] = cvt.low_f16(out[i]), cvt.high_f16(out[i])

    out, back = np.zeros(8, np.uint32), np.zeros(16, np.float32)
    launch(kernel, 8, numbers, out, back)
    np.testing.assert_array_equal(back, out.view(np.float16).astype(np.float32))
    with np.errstate(all="ignore"):
        rounded = numbers.astype(KINDS[kind]).view(np.uint16).astype(np.uint32)
    np.testing.assert_array_equal(out, rounded | rounded[::-1] << 16)
