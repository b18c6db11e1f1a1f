"""The CUDA context of the calling thread: a new thread has none until something makes a device current there."""

import contextlib
from collections.abc import Iterator


def ensure(device: int) -> None:
    """Makes this device current in a thread that has none, as those in which torch runs a backward."""
    from cuda.bindings import driver

    nothing_current, _ = driver.cuCtxGetDevice()
    if nothing_current:
        from cuda.core import Device

        Device(device).set_current()


@contextlib.contextmanager
def of(device: int) -> Iterator[None]:
    """Makes this device current, and then the one that was, if there was one."""
    from cuda.bindings import driver

    none, current = driver.cuCtxGetDevice()
    if not none and int(current) == device:
        yield
        return
    from cuda.core import Device

    Device(device).set_current()
    try:
        yield
    finally:
        if not none:
            Device(int(current)).set_current()
