"""Single instructions and pointers that Numba does not offer, one family a file; no attention here.

Every function has a twin of the same name in the package `sim`, which takes its place when Numba's
simulator is on (NUMBA_ENABLE_CUDASIM=1), so one kernel source serves both.
"""

from numba import config as _numba_config

if _numba_config.ENABLE_CUDASIM:
    from ..sim import shared
else:
    from . import shared

__all__ = ["shared"]
