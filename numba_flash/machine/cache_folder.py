"""Where compiled kernels are kept between processes."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """NUMBA_FLASH_CACHE_DIR, or the user's cache folder; each cache has a folder of its own below it."""
    named = os.environ.get("NUMBA_FLASH_CACHE_DIR")
    if named:
        return Path(named)
    import platformdirs

    return Path(platformdirs.user_cache_dir("numba_flash", False))
