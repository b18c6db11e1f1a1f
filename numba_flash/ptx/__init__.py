"""Single instructions and addresses that Numba does not offer, one family a file; no attention here.

The files carry the PTX manual's names. Every function has a stand-in of the same name in the folder
`sim`, which takes its place when Numba's simulator is on (NUMBA_ENABLE_CUDASIM=1), so one kernel source
serves both. fragments.py has neither: it is arithmetic.

Addresses are signed: int32 in shared memory, int64 in global memory. Numba adds an unsigned 64-bit and a
signed integer as float64, and widens every 32-bit sum; with signed ones the sums stay integers.
"""

from numba import config as _numba_config

from . import fragments

if _numba_config.ENABLE_CUDASIM:
    from .sim import (
        approx,
        bar,
        bits,
        cluster,
        cp_async,
        cvt,
        elect,
        fence,
        griddepcontrol,
        ld_st,
        ldmatrix,
        local,
        mbarrier,
        memory,
        minmax,
        mma,
        setmaxnreg,
        shared,
        shfl,
        special,
        stmatrix,
        tma,
        vote,
        wgmma,
    )
else:
    from ..machine import toolchain

    toolchain.cuda()  # first: NumPy 2.5 lacks a name that numba-cuda asks for when its modules are imported
    from . import (
        approx,
        bar,
        bits,
        cluster,
        cp_async,
        cvt,
        elect,
        fence,
        griddepcontrol,
        ld_st,
        ldmatrix,
        local,
        mbarrier,
        memory,
        minmax,
        mma,
        setmaxnreg,
        shared,
        shfl,
        special,
        stmatrix,
        tma,
        vote,
        wgmma,
    )

__all__ = [
    "approx", "bar", "bits", "cluster", "cp_async", "cvt", "elect", "fence", "fragments", "griddepcontrol", "ld_st",
    "ldmatrix", "local", "mbarrier", "memory", "minmax", "mma", "setmaxnreg", "shared", "shfl", "special", "stmatrix",
    "tma", "vote", "wgmma",
]  # fmt: skip
