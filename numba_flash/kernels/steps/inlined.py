"""The decorator of a kernel's device functions: each becomes part of what calls it.

LLVM does it, once Numba has typed and lowered each function by itself. Numba's own inline="always" makes one long
function of everything first and then types that, and kernels take up to three times as long to compile.
"""

from numba import config, cuda

inlined = cuda.jit(device=True) if config.ENABLE_CUDASIM else cuda.jit(device=True, forceinline=True)
