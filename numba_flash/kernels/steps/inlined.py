"""The decorator of a kernel's device functions: each becomes part of what calls it.

LLVM does it, once Numba has typed and lowered each function by itself. Numba's own inline="always" makes one long
function of everything first and then types that, and kernels take up to three times as long to compile.

Most of a kernel's compile time is Numba's, and goes by functions and types of arguments. So a maker of device functions
that is asked for the same twice gives the same (functools.cache), and a function that does a little more or less is
told by TRUE or FALSE: for Python's own constants Numba would compile it twice. LLVM drops what these make dead as well.
"""

import numpy as np
from numba import config, cuda

inlined = cuda.jit(device=True) if config.ENABLE_CUDASIM else cuda.jit(device=True, forceinline=True)
TRUE, FALSE = np.bool_(True), np.bool_(False)
