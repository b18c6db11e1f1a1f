"""The kernels: one file each, behind one `make(config)`. Read simt/v1.py, then simt/v2.py."""

from numba import config

if not config.ENABLE_CUDASIM:
    from . import attributes  # noqa: F401  for Numba: `config.tile_m` in a kernel is a constant
