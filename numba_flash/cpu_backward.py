"""The CPU rung's backward: the host's part, as cpu.py is of the forward. The kernels are in cpu_backward_kernel.py.

Memory beside the gradients: dk and dv once more in float32 (float64 for float64) with head_dim rounded up to whole
vectors, and for each thread its tiles, whatever the lengths: 0.5 MB with head_dim 64 in float32, 0.8 MB with 128.
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
from .arrays import ITEM_SIZE
from .backward_problem import BackwardProblem
from .cpu import BYTES_A_SECOND, OPERATIONS_A_SECOND, SERIAL_SECONDS, launch_lock
from .cpu_backward_kernel import GRADIENTS_OF_ROWS, RESULTS, run_phase_float32, run_phase_float64
from .cpu_cache import c_function, cached
from .simd import Shape, call


@cached
@njit(nogil=True, error_model="numpy")
def run_phase_serial(kernel, frame, phase, scratch_bytes):
    """All tasks of a phase on this thread."""
    memory = np.empty((64 + scratch_bytes) // 8, np.int64)
    call(kernel, frame, phase, (memory.ctypes.data + 63) // 64 * 64)
    memory[0] = 0  # keeps it alive until here


@cached
@njit(nogil=True, error_model="numpy", parallel=True)
def run_phase_parallel(workers, kernel, frame, phase, scratch_bytes):
    """All tasks of a phase on `workers` threads, each of which fetches the next task when it is done with one."""
    memory = np.empty((64 + workers * scratch_bytes) // 8, np.int64)
    scratch = (memory.ctypes.data + 63) // 64 * 64
    for worker in prange(workers):
        call(kernel, frame, phase, scratch + worker * scratch_bytes)
    memory[0] = 0  # keeps it alive until here


@functools.cache
def _kernel(double):
    function = run_phase_float64 if double else run_phase_float32
    name = "float64" if double else "float32"
    announcement = f"numba_flash: compiling the CPU's backward kernel for {name} (once, about 15 s) ..."
    return c_function(function, "void(int64, int64, int64)", announcement)


@functools.cache
def _give_way():
    """Address of the system's function by which a thread lets others run."""
    function = ctypes.windll.kernel32.SwitchToThread if sys.platform == "win32" else ctypes.CDLL(None).sched_yield
    return ctypes.cast(function, ctypes.c_void_p).value


class _Launch(NamedTuple):
    plan: at.Plan
    kernel: int
    serial: bool
    phases: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _launch(problem):
    p = problem.forward
    double = p.dtype == "float64"
    shape = Shape(numba.float64 if double else numba.float32)
    plan = at.make_plan(problem, shape.lanes, shape.width)
    operations = 4 * p.batch * p.heads * p.seqlen_q * p.seqlen_k * (p.head_dim + p.head_dim_v)
    moved = p.batch * p.heads_kv * p.seqlen_k * (p.head_dim + p.head_dim_v) * ITEM_SIZE[p.dtype]
    serial = operations / OPERATIONS_A_SECOND + moved / BYTES_A_SECOND < SERIAL_SECONDS
    phases = (GRADIENTS_OF_ROWS, RESULTS) if {"dk", "dv"} & set(problem.wanted) else (GRADIENTS_OF_ROWS,)
    return _Launch(plan, _kernel(double).address, serial, phases if {"dq", "dk", "dv"} & set(problem.wanted) else ())


def _whole_lines(memory):
    """The first address in `memory` at which a cache line begins."""
    return (memory.ctypes.data + 63) // 64 * 64


def backward(problem: BackwardProblem, pointers: list[int]) -> None:
    """Write the gradients wanted; pointers are addresses in the order of arrays.GradientOperands, 0 = none."""
    plan, kernel, serial, phases = _launch(problem)
    frame = np.zeros(at.FRAME_NUMBERS, np.int64)
    counters, done = np.zeros(2, np.int64), np.zeros(plan.units * plan.key_tiles, np.int64)
    sums_k, sums_v = (np.zeros(64 + count, np.uint8) for count in plan.sums_bytes)
    frame[at.PLAN] = plan.numbers.ctypes.data
    frame[at.POINTERS : at.POINTERS + len(pointers)] = pointers
    frame[at.COUNTERS :] = (
        counters.ctypes.data, done.ctypes.data, _whole_lines(sums_k), _whole_lines(sums_v), _give_way(), 0
    )  # fmt: skip
    for phase in phases:
        _run(kernel, frame.ctypes.data, phase, plan.scratch_bytes, serial)


def _run(kernel, frame, phase, scratch_bytes, serial):
    if serial:
        run_phase_serial(kernel, frame, phase, scratch_bytes)
        return
    with launch_lock:
        run_phase_parallel(numba.get_num_threads(), kernel, frame, phase, scratch_bytes)


def reasons(problem: BackwardProblem) -> list[str]:
    """Why this problem cannot be run here; nothing = it can."""
    wanted = [name for name in ("dbias", "dalibi_slopes") if name in problem.wanted]
    return [f"the CPU kernels do not compute {name} yet" for name in wanted]


def warm_up(problem: BackwardProblem) -> None:
    """Compile what `backward` would run, or load it from the cache, and run nothing."""
    if _launch(problem).serial:
        run_phase_serial.compile((numba.int64,) * 4)
    else:
        run_phase_parallel.compile((numba.int64,) * 5)
