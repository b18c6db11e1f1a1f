"""The decorator of a kernel's device functions: each becomes part of its caller.

LLVM inlines them, after Numba has typed and lowered each function by itself. Numba's own inline="always" first makes
one long function of everything and then types that; kernels then take up to three times as long to compile.

Numba needs most of a kernel's compile time, and compiles each function once for each set of argument types. So a maker
of device functions returns the same ones for equal arguments (functools.cache). A function with optional work takes
TRUE or FALSE: for Python's own constants Numba would compile it twice. LLVM drops the dead code as well.
"""

import numpy as np
from numba import config, cuda

inlined = cuda.jit(device=True) if config.ENABLE_CUDASIM else cuda.jit(device=True, forceinline=True)
TRUE, FALSE = np.bool_(True), np.bool_(False)


@inlined
def nothing(*arguments):
    """In place of a step that a dtype or an option does not need."""
