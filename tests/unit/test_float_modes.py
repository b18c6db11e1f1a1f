"""Results do not depend on how the calling thread's floating-point unit rounds and flushes."""

import platform
import subprocess
import sys

import pytest

# Where the C library's fenv_t has the modes, and the bits that flush subnormal numbers to 0 and that round upwards.
MODES = {
    ("Linux", "x86_64"): (28, 0x8040, 0x4000),
    ("Darwin", "x86_64"): (4, 0x8040, 0x4000),
    ("Linux", "aarch64"): (0, 1 << 24, 1 << 22),
    ("Darwin", "arm64"): (8, 1 << 24, 1 << 22),
}
HERE = MODES.get((platform.system(), platform.machine()), (0, 0, 0))

# A process of its own: threads inherit the modes of the one that starts them. It prints the bytes of all results.
PROGRAM = """
import ctypes, ctypes.util, hashlib, sys
import ml_dtypes
import numpy as np
import numba_flash

at, bits = map(int, sys.argv[1:])
inputs = []
for name in ("float16", "bfloat16", "float32", "float64"):
    dtype = getattr(ml_dtypes, name, name)
    tiny = float(ml_dtypes.finfo(dtype).tiny) / 8  # values of o and dv are subnormal
    for seqlen in (3, 40, 700):  # a row alone, a panel, several threads
        x = (np.arange(2 * seqlen * 16) % 63 / 32).astype(dtype).reshape(1, 2, seqlen, 16)
        inputs.append((x, (x.astype(float) * tiny).astype(dtype)))
libm, memory = ctypes.CDLL(ctypes.util.find_library("m")), ctypes.create_string_buffer(64)
modes = np.frombuffer(memory, np.uint32)[at // 4 : at // 4 + 1]
if bits:
    libm.fegetenv(memory)
    modes |= bits
    libm.fesetenv(memory)
for x, small in inputs:
    o, lse = numba_flash.attention(x, x, small, scale=0.25, return_lse=True)
    gradients = numba_flash.attention_backward(small, x, x, small, o, lse, scale=0.25)
    results = o, lse, *gradients[:3]
    print(x.dtype, x.shape[2], *(hashlib.sha256(y.tobytes()).hexdigest() for y in results))
libm.fegetenv(memory)
assert modes[0] & bits == bits, "the caller's modes are changed"
"""


@pytest.mark.skipif(not HERE[1], reason="where fenv_t has the modes is not known for this system")
def test_bits_do_not_depend_on_the_callers_modes():
    at, *changes = HERE
    usual, flushed, upwards = (
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(at), str(bits)], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for bits in (0, *changes)
    )
    assert len(usual) == 12 and len(set(usual)) == 12
    assert flushed == usual and upwards == usual
