"""Launching a kernel in Numba's CUDA simulator: memory that checks its bounds, one launch at a time."""

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .. import toolchain
from ..arrays import Array, host_view
from ..problem import Problem

_one_at_a_time = threading.Lock()  # a second launch beside a running one would be taken for a device call

SWITCH_INTERVAL = 1e-4  # s; Numba's barriers wait by polling, ten times cheaper so than at Python's 5 ms


class Pointer:
    """What a kernel sees of an array: an address that can be indexed, like a C pointer, but checked.

    Index 0 is the array's first element; with negative strides the others lie before it. bfloat16
    is shown as its 16 bits, as it is to the compiled kernel.
    """

    __slots__ = ("_first", "_flat", "array")

    def __init__(self, array: np.ndarray):
        self.array = array  # for a person in the debugger
        if array.dtype.name == "bfloat16":
            array = array.view(np.uint16)
        elif array.dtype == bool:
            array = array.view(np.uint8)
        item = array.itemsize
        backwards: Any = (*[slice(None, None, -1 if s < 0 else 1) for s in array.strides], ...)
        lowest = array[backwards]
        reach = [s // item * (n - 1) for s, n in zip(array.strides, array.shape, strict=True)] if array.size else []
        length = 1 + sum(abs(x) for x in reach) if array.size else 0
        self._first = -sum(min(0, x) for x in reach)
        self._flat = np.lib.stride_tricks.as_strided(lowest, (length,), (item,), writeable=array.flags.writeable)

    def __getitem__(self, index: int) -> Any:
        return self._flat[self._checked(index)]

    def __setitem__(self, index: int, value: Any) -> None:
        self._flat[self._checked(index)] = value

    def _checked(self, index: int) -> int:
        position = int(index) + self._first
        if not 0 <= position < self._flat.size:
            raise IndexError(f"element {index} lies outside of an array of shape {self.array.shape}")
        return position

    def __repr__(self) -> str:
        return f"Pointer to {self.array.dtype} {self.array.shape}\n{self.array}"


def run(
    make_kernel: Callable[[], Any], blocks: int, threads: int, shared_bytes: int, arrays: tuple[Array | None, ...],
    scalars: tuple,
) -> None:  # fmt: skip
    """Make a kernel with @cuda.jit and run it. Exceptions in it are raised here, with thread and block."""
    pointers = [None if array is None else Pointer(host_view(array)) for array in arrays]
    with _one_at_a_time, _fast_switching():
        _run(make_kernel(), blocks, threads, shared_bytes, (*pointers, *scalars))


def _run(kernel: Any, blocks: int, threads: int, shared_bytes: int, arguments: tuple) -> None:

    @toolchain.cuda().jit
    def quiet(*arguments: Any) -> None:
        # Infinities are the kernels' business. NumPy's error state belongs to a thread, so each sets its own.
        with np.errstate(all="ignore"):
            kernel(*arguments)  # inside a launch the simulator takes it for a device function

    try:
        quiet[blocks, threads, 0, shared_bytes](*arguments)
    except Exception:
        _wait_for_abandoned_threads()
        raise


def _wait_for_abandoned_threads() -> None:
    """Numba raises one thread's exception while the block's others still run to their next barrier.

    In device functions they would swap the module `cuda` under whatever is done next.
    """
    for thread in threading.enumerate():
        if hasattr(thread, "threadIdx"):
            thread.join(timeout=10)  # not for ever: a kernel may hang


@contextlib.contextmanager
def _fast_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


# Seconds for one score, and more for each element of its products: v1 and v2 on one core of a server, 2026.
# The lines of a kernel run one at a time in all threads together, so nothing but the amount of work counts.
SCORE_SECONDS, PRODUCT_SECONDS = 70e-6, 4e-6


def predicted_seconds(problem: Problem) -> float:
    """How long v1 or v2 will take; half of it where causal hides half of the scores."""
    scores = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
    return scores * (SCORE_SECONDS + PRODUCT_SECONDS * (problem.head_dim + problem.head_dim_v))


def warn_if_long(problem: Problem) -> None:
    """A warning at the line that called attention(), before a wait of more than a minute."""
    seconds = predicted_seconds(problem)
    if seconds > 60:
        warnings.warn(
            f"this will take about {seconds / 60:.0f} min in Numba's CUDA simulator, which runs every GPU thread "
            "as a Python thread; kernel='cpu' is fast",
            RuntimeWarning,
            stacklevel=4,
        )
