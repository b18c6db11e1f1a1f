"""The CUDA context of the calling thread: a new thread has none until something makes a device current there."""


def ensure(device: int) -> None:
    """Makes this device current in a thread that has none, as those in which torch runs a backward."""
    from cuda.bindings import driver

    nothing_current, _ = driver.cuCtxGetDevice()
    if nothing_current:
        from cuda.core import Device

        Device(device).set_current()
