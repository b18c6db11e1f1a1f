"""Where compiled kernels are kept between processes."""

import contextlib
import os
from pathlib import Path

from .announce import warn_caller

MOST_BYTES = 512 * 2**20  # of each cache


def cache_folder() -> Path:
    """NUMBA_FLASH_CACHE_DIR, or the user's cache folder; each cache has a folder of its own below it."""
    named = os.environ.get("NUMBA_FLASH_CACHE_DIR")
    if named:
        return Path(named).expanduser()  # no shell does that where a file or a service sets the variable
    import platformdirs

    return Path(platformdirs.user_cache_dir("numba_flash", False))


def bundle_folder() -> Path | None:
    """NUMBA_FLASH_BUNDLE, a folder of kernels compiled in advance (gpu/bundle.py), or None."""
    named = os.environ.get("NUMBA_FLASH_BUNDLE")
    return Path(named).expanduser() if named else None


def bundle_only() -> bool:
    """Whether kernels that are not in the bundle are refused (NUMBA_FLASH_BUNDLE_ONLY=1)."""
    return os.environ.get("NUMBA_FLASH_BUNDLE_ONLY", "0") not in ("", "0")


_complained_of: set[Path] = set()


def complain(error: Exception) -> None:
    """Say once for each folder that nothing can be kept there, which costs every process seconds."""
    folder = cache_folder()
    if folder in _complained_of:
        return
    _complained_of.add(folder)
    warn_caller(
        f"numba_flash cannot use its cache folder {folder} ({type(error).__name__}: {error}); kernels are "
        "compiled anew in every process. Set NUMBA_FLASH_CACHE_DIR to a folder that can be written."
    )


def keep_within(folder: Path, suffix: str, most_bytes: int = MOST_BYTES) -> None:
    """Removes the entries that were used longest ago, until the others have a tenth less than most_bytes."""
    found = []
    for entry in os.scandir(folder):
        if entry.name.endswith(suffix):
            with contextlib.suppress(OSError):
                found.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
    total = sum(size for _, size, _ in found)
    if total <= most_bytes:
        return
    for _, size, path in sorted(found):
        if total <= most_bytes * 9 // 10:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)
        total -= size
