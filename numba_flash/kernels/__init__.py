"""The kernels: one file each, behind one `make(config)`. Read simt/v1.py, then simt/v2.py.

All are launched with config.grid(problem) blocks of config.threads, and config.shared_bytes of dynamic shared memory.
"""

from numba import config

if not config.ENABLE_CUDASIM:
    from . import attributes  # noqa: F401  for Numba: `config.tile_m` in a kernel is a constant
