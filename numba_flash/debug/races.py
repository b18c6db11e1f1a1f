"""A caller's own kernel with the simulator's checks."""

import contextlib
from collections.abc import Iterator

from ..machine import toolchain
from .places import check_simulated


@contextlib.contextmanager
def race_check() -> Iterator[None]:
    """Check the kernels that you launch meanwhile, in Numba's simulator: races, deadlocks, misused instructions.

    NUMBA_ENABLE_CUDASIM=1 python

    >>> with numba_flash.debug.race_check():
    ...     my_kernel[blocks, threads](q, k, v, o)

    my_kernel: made by cuda.jit, launched as Numba launches it. Our own kernels are always checked.

    A race is two accesses of one element of shared memory by two threads, at least one a write, with no barrier in
    between: on a GPU the result is luck. It raises RuntimeError with the thread, its line, the address and the other
    thread. So does a barrier to which not all threads come: the message says who waits where. Shared memory is NaN
    until it is written. An index past an array's end raises IndexError with the thread.

    Not seen: races in global memory, between blocks, and of elements of fewer than 4 bytes. RuntimeError where the
    simulator is off. Serves one `with` at a time.
    """
    check_simulated("race_check")
    toolchain.cuda()
    from ..ptx.sim import launch  # Numba comes in with it

    with launch.of_the_caller():
        yield
