"""The CPU kernel: vector code by LLVM on all cores."""

from ..machine.toolchain import jit_disabled as _jit_disabled

if _jit_disabled():  # before Numba meets functions that it must not compile
    raise NotImplementedError(
        "kernel='cpu' is compiled by Numba, and NUMBA_DISABLE_JIT is set: unset it, or take kernel='reference'. "
        "To step through a kernel, NUMBA_ENABLE_CUDASIM=1 is enough"
    )
