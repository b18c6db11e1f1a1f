"""The CPU rung's backward: the host's part, as cpu.py is of the forward. The kernels are in cpu_backward_kernel.py.

Memory beside the gradients: dk and dv once more in float32 (float64 for float64) with head_dim rounded up to whole
vectors, and for each thread its tiles, whatever the lengths: 0.6 MB with head_dim 64 in float32, 0.9 MB with 128.
"""

# mypy: ignore-errors

import ctypes
import functools
import sys
from typing import NamedTuple

import numba
import numpy as np
from numba import njit, prange

from . import cpu_backward_plan as at
from . import forked
from .arrays import ITEM_SIZE
from .backward_problem import GRADIENTS, BackwardProblem
from .cpu import BYTES_A_SECOND, OPERATIONS_A_SECOND, SERIAL_SECONDS
from .cpu_backward_kernel import GRADIENTS_OF_ROWS, RESULTS, run_phase_float32, run_phase_float64
from .cpu_backward_sums import run_sums_float32, run_sums_float64
from .cpu_cache import c_function, cached
from .simd import Shape, call


@cached
@njit(nogil=True, error_model="numpy")
def run_serial(kernel, frame, phase, scratch_bytes):
    """All tasks of a pass on this thread."""
    memory = np.empty((64 + scratch_bytes) // 8, np.int64)
    call(kernel, frame, phase, (memory.ctypes.data + 63) // 64 * 64)
    memory[0] = 0  # keeps it alive until here


@cached
@njit(nogil=True, error_model="numpy", parallel=True)
def run_parallel(workers, kernel, frame, phase, scratch_bytes):
    """All tasks of a pass on `workers` threads, each of which fetches the next task when it is done with one."""
    memory = np.empty((64 + workers * scratch_bytes) // 8, np.int64)
    scratch = (memory.ctypes.data + 63) // 64 * 64
    for worker in prange(workers):
        call(kernel, frame, phase, scratch + worker * scratch_bytes)
    memory[0] = 0  # keeps it alive until here


_FUNCTIONS = {
    ("rows", False): run_phase_float32,
    ("rows", True): run_phase_float64,
    ("sums", False): run_sums_float32,
    ("sums", True): run_sums_float64,
}


@functools.cache
def _kernel(what, double):
    name = "float64" if double else "float32"
    announcement = f"numba_flash: compiling the CPU's backward kernel for {name} (once, about 10 s) ..."
    return c_function(_FUNCTIONS[what, double], "void(int64, int64, int64)", announcement)


@functools.cache
def _give_way():
    """Address of the system's function by which a thread lets others run."""
    function = ctypes.windll.kernel32.SwitchToThread if sys.platform == "win32" else ctypes.CDLL(None).sched_yield
    return ctypes.cast(function, ctypes.c_void_p).value


class _Pass(NamedTuple):
    """What runs on all threads before the next begins."""

    kernel: int
    numbers: np.ndarray
    address: int
    phase: int
    scratch_bytes: int


class _Launch(NamedTuple):
    passes: tuple[_Pass, ...]
    done: int  # how many key tiles there are in all
    sums_bytes: tuple[int, int]
    serial: bool


@functools.lru_cache(maxsize=4096)
def _launch(problem):
    p = problem.forward
    double = p.dtype == "float64"
    shape = Shape(numba.float64 if double else numba.float32)
    plan = at.make_plan(problem, shape.lanes, shape.width)
    passes = []

    def add(what, numbers, phase, scratch_bytes):
        passes.append(_Pass(_kernel(what, double).address, numbers, numbers.ctypes.data, phase, scratch_bytes))

    if {"dq", "dk", "dv"} & set(problem.wanted):
        add("rows", plan.numbers, GRADIENTS_OF_ROWS, plan.scratch_bytes)
    if {"dk", "dv"} & set(problem.wanted):
        add("rows", plan.numbers, RESULTS, 0)
    for name, shape_of_sum in zip(GRADIENTS, problem.shapes, strict=True):
        if name in ("dbias", "dalibi_slopes") and name in problem.wanted and 0 not in shape_of_sum:
            numbers, scratch_bytes = at.make_sums_plan(problem, name, shape.lanes)
            add("sums", numbers, 0, scratch_bytes)
    operations = 4 * p.batch * p.heads * p.seqlen_q * p.seqlen_k * (p.head_dim + p.head_dim_v)
    moved = p.batch * p.heads_kv * p.seqlen_k * (p.head_dim + p.head_dim_v) * ITEM_SIZE[p.dtype]
    serial = operations / OPERATIONS_A_SECOND + moved / BYTES_A_SECOND < SERIAL_SECONDS
    return _Launch(tuple(passes), plan.units * plan.key_tiles, plan.sums_bytes, serial)


def _whole_lines(memory):
    """The first address in `memory` at which a cache line begins."""
    return (memory.ctypes.data + 63) // 64 * 64


def backward(problem: BackwardProblem, pointers: list[int]) -> None:
    """Write the gradients wanted; pointers are addresses in the order of arrays.GradientOperands, 0 = none."""
    launch = _launch(problem)
    frame, counter, done = np.zeros(at.FRAME_NUMBERS, np.int64), np.zeros(1, np.int64), np.zeros(launch.done, np.int64)
    sums_k, sums_v = (np.zeros(64 + count, np.uint8) for count in launch.sums_bytes)
    frame[at.POINTERS : at.POINTERS + len(pointers)] = pointers
    frame[at.COUNTER : at.GIVE_WAY + 1] = (
        counter.ctypes.data, done.ctypes.data, _whole_lines(sums_k), _whole_lines(sums_v), _give_way()
    )  # fmt: skip
    for one in launch.passes:
        frame[at.PLAN], counter[0] = one.address, 0
        _run(one, frame.ctypes.data, launch.serial)


def _run(one, frame, serial):
    if serial or forked.threads_lost:
        run_serial(one.kernel, frame, one.phase, one.scratch_bytes)
        return
    with forked.launch_lock:
        run_parallel(numba.get_num_threads(), one.kernel, frame, one.phase, one.scratch_bytes)


def warm_up(problem: BackwardProblem) -> None:
    """Compile what `backward` would run, or load it from the cache, and run nothing."""
    if _launch(problem).serial or forked.threads_lost:
        run_serial.compile((numba.int64,) * 4)
    else:
        run_parallel.compile((numba.int64,) * 5)
