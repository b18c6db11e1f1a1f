"""How many threads a call of the CPU kernel uses."""

import functools
import os
import sys
from typing import Any

import numba


def count() -> int:
    """Numba's number, but no more than OMP_NUM_THREADS says, nor torch.get_num_threads() where torch is imported.

    torchrun sets the first and a worker of a DataLoader the second, to 1, as each is a process among many. Who sets
    NUMBA_NUM_THREADS means this kernel, and OMP_NUM_THREADS does not count.
    """
    try:
        own = numba.get_num_threads()  # starts them
    except ValueError as error:
        config: Any = numba.config
        reason, layer = str(error).strip().partition("\n")[0], config.THREADING_LAYER
        raise NotImplementedError(
            f"the threads of kernel='cpu' cannot be started with NUMBA_THREADING_LAYER={layer!r} ({reason}): unset it, "
            "or set it to 'workqueue', which is always there"
        ) from None
    limits = [own, _of_openmp()]
    of_torch = getattr(sys.modules.get("torch"), "get_num_threads", None)  # absent while another thread imports torch
    if of_torch is not None:
        limits.append(of_torch())
    return min(limits)


@functools.cache
def _of_openmp() -> int:
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # each nested region has its number
    if "NUMBA_NUM_THREADS" in os.environ or not first.isdecimal() or int(first) == 0:
        return sys.maxsize
    return int(first)
