"""The CPU rung: FlashAttention-2's recurrence over tiles, compiled by Numba, on all threads that it may use.

This is the host's part: the memo for each problem, the decision to use threads, and the launch. The kernel is in
kernel.py, on top of panel.py, elements.py and the vector loops of vectors/. plan.py has the numbers that describe a
problem to the kernel, and cache.py keeps compiled code.
"""

# mypy: ignore-errors

import functools
from collections.abc import Callable
from typing import NamedTuple

import numba
import numpy as np
from numba import njit, prange

from ..arrays import ITEM_SIZE, host_pointer
from ..machine import forked, interrupt, threads
from ..problem.forward import Problem
from . import plan as slot
from .cache import c_function, cached, compile_for
from .elements import INT
from .functions import NO_FUNCTIONS, OwnFunctions, own_functions
from .kernel import run_tasks_float32, run_tasks_float64
from .vectors.build import Shape, call, fetch_add, load, store


@njit(error_model="numpy", inline="always")
def set_up(frame, plan, pointers, shared, stop):
    """Fills a call's frame; the shared memory begins with the counters."""
    store(frame, slot.PLAN, plan)
    store(frame, slot.STOP, stop)
    for n in range(len(pointers)):
        store(frame, slot.POINTERS + n, pointers[n])
    count = 1 + load(plan, slot.TASKS, INT)
    for n in range(count):
        store(shared, n, INT)
    store(frame, slot.COUNTERS, shared)
    store(frame, slot.PARTS, shared + (count * 8 + 63) // 64 * 64)


@cached
@njit(nogil=True, error_model="numpy")
def run_serial(kernel, plan, stop, pointers):
    """Runs all tasks on this thread. pointers: addresses in the order of options.Operands, followed by `behind`, in a
    tuple or an array."""
    shared, scratch = load(plan, slot.SHARED_BYTES, INT), load(plan, slot.SCRATCH_BYTES, INT)
    memory = np.empty((64 + slot.FRAME_NUMBERS * 8 + shared + scratch) // 8, np.int64)
    frame = (memory.ctypes.data + 63) // 64 * 64
    at = frame + slot.FRAME_NUMBERS * 8
    set_up(frame, plan, pointers, at, stop)
    store(at, 0, np.int64(1))
    call(kernel, frame, 0, at + shared)
    memory[0] = 0  # keeps it alive until here


@cached
@njit(nogil=True, error_model="numpy", parallel=True)
def run_parallel(workers, kernel, plan, stop, pointers):
    """Runs all tasks on `workers` threads, each of which takes the next task when it has finished one."""
    shared, scratch = load(plan, slot.SHARED_BYTES, INT), load(plan, slot.SCRATCH_BYTES, INT)
    memory = np.empty((64 + slot.FRAME_NUMBERS * 8 + shared + workers * scratch) // 8, np.int64)
    frame = (memory.ctypes.data + 63) // 64 * 64
    at = frame + slot.FRAME_NUMBERS * 8
    set_up(frame, plan, pointers, at, stop)
    store(at, 0, workers)
    for worker in prange(workers):
        call(kernel, frame, worker, at + shared + worker * scratch)
    memory[0] = 0  # keeps it alive until here


@cached
@njit(nogil=True, error_model="numpy", parallel=True)
def run_side_by_side(workers, kernel, stop, table):
    """Runs a call for each row of `table`, its plan and its pointers, each on one of `workers` threads."""
    counter = np.zeros(1, np.int64)
    for _ in prange(workers):
        n = fetch_add(counter.ctypes.data)
        while n < len(table) and not load(stop, 0, INT):
            run_serial(kernel, table[n, 0], stop, table[n, 1:])
            n = fetch_add(counter.ctypes.data)


POINTERS = numba.types.UniTuple(numba.int64, slot.ALL_POINTERS)

# One thread does everything that takes it less than this, by a rough estimate. Waking threads costs 10 us on an idle
# machine, but on a busy one a join waits until the last worker is scheduled: 8 ms were seen.
SERIAL_SECONDS = 0.3e-3
OPERATIONS_A_SECOND, BYTES_A_SECOND = 70e9, 10e9  # speed of one thread of a server, 2026


@functools.cache
def _kernel(double):
    function = run_tasks_float64 if double else run_tasks_float32
    name = "float64" if double else "float32"
    announcement = f"numba_flash: compiling the CPU kernel for {name} (once, about 10 s) ..."
    return c_function(function, "void(int64, int64, int64)", announcement)


def entry_of(function, types):
    """`function` as compiled for these types. Its dispatcher examines every argument to find it, which takes 0.2 us."""
    compile_for(function, types)
    return function.get_overload(types)


def seeded(functions: OwnFunctions, behind: tuple[int, ...], has_seed: bool) -> tuple[np.ndarray, int]:
    """-> the functions' AUX numbers, and the seed as a signed number. behind: the addresses behind the caller's."""
    if not has_seed:
        return functions.aux(behind), 0
    seed, *aux = behind
    return functions.aux(aux), seed - 2**64 if seed >= 2**63 else seed


def workers_of(serial: bool) -> int:
    """How many threads compute a call. serial: the call is too small for several."""
    return 1 if serial or forked.threads_lost else threads.count()


class Ready(NamedTuple):
    """The part of a call that depends on the problem but not on the arrays."""

    numbers: np.ndarray
    address: int  # address of `numbers`
    kernel: int
    seconds: float  # rough estimate of one thread's time
    nothing: bool
    functions: OwnFunctions
    seeded: bool
    behind: tuple[int, int, int] | None  # AUX, the seed and FIRST_B, if no call has its own
    at_once: Callable[..., None] | None  # `run_serial` without Numba's dispatcher, if nothing else has to be done

    @property
    def serial(self) -> bool:
        return self.seconds < SERIAL_SECONDS

    def run(self, pointers: tuple[int, ...], b: int = 0) -> None:
        """Writes o, and lse if the problem wants it. The addresses are in the order of options.Operands, 0 = none,
        followed by those of aux. b: FIRST_B."""
        behind = self.behind
        if behind is not None and b:
            behind = (*behind[:2], b)
        if self.at_once is not None:
            self.at_once(self.kernel, self.address, interrupt.NEVER, pointers + behind)
            return
        if self.nothing:
            return
        if behind is None:
            aux, seed = seeded(self.functions, pointers[slot.AUX :], self.seeded)
            behind = host_pointer(aux), seed, b
        pointers = (*pointers[: slot.AUX], *behind)
        interrupt.stoppable_if_long(self.seconds, lambda stop: self._run(stop, pointers))
        if self.behind is None:
            self.functions.check(aux)

    def _run(self, stop: int, pointers: tuple[int, ...]) -> None:
        workers = workers_of(self.serial)
        if workers == 1:
            run_serial(self.kernel, self.address, stop, pointers)
            return
        with forked.launch_lock:
            run_parallel(workers, self.kernel, self.address, stop, pointers)


@functools.lru_cache(maxsize=4096)
def ready(problem: Problem) -> Ready:
    """The Ready of a problem, memoised. A caller with many calls of one problem keeps it, since the look-up is slow."""
    p = problem
    double = p.dtype == "float64"
    numbers = slot.make_plan(p, Shape(numba.float64 if double else numba.float32).lanes)
    nothing = p.batch * p.heads * p.seqlen_q == 0
    functions = NO_FUNCTIONS if nothing else own_functions(p, derivative=False)
    functions.go_into(numbers)
    operations = 2 * p.batch * p.heads * p.seqlen_q * p.seqlen_k * (p.head_dim + p.head_dim_v)
    read = p.batch * p.heads_kv * p.seqlen_k * (p.head_dim + p.head_dim_v) * ITEM_SIZE[p.dtype]  # with few queries
    seconds = operations / OPERATIONS_A_SECOND + read / BYTES_A_SECOND
    behind = None if nothing or p.seeded or functions.places else (host_pointer(functions.aux_numbers), 0, 0)
    address, kernel = numbers.ctypes.data, _kernel(double).address
    alone = seconds < SERIAL_SECONDS and not p.aux and behind is not None
    at_once = entry_of(run_serial, (*(numba.int64,) * 3, POINTERS)) if alone else None
    return Ready(numbers, address, kernel, seconds, nothing, functions, p.seeded, behind, at_once)


def run_several(readies: list[Ready], table: np.ndarray) -> None:
    """Runs each problem on one thread. table: for each the address of its numbers, its pointers and `behind`."""
    kernel = readies[0].kernel
    side_by_side(
        sum([ready.seconds for ready in readies]),
        table,
        lambda stop, address, pointers: run_serial(kernel, address, stop, pointers),
        lambda stop, workers: run_side_by_side(workers, kernel, stop, table),
    )


def side_by_side(seconds: float, table: np.ndarray, run_one: Callable, run_all: Callable) -> None:
    """run_all on several threads, or run_one for each row of `table` on this one. seconds: estimate for all rows."""

    def run(stop: int) -> None:
        workers = workers_of(seconds < SERIAL_SECONDS)
        if workers == 1:
            for address, *pointers in table.tolist():
                run_one(stop, address, tuple(pointers))
        else:
            with forked.launch_lock:
                run_all(stop, workers)

    interrupt.stoppable_if_long(seconds, run)


def warm_up(problem: Problem) -> None:
    """Compiles what `Ready.run` would run, or loads it from the cache, and runs nothing."""
    plan = ready(problem)
    if plan.nothing:
        return
    if workers_of(plan.serial) == 1:
        compile_for(run_serial, (*(numba.int64,) * 3, POINTERS))
    else:
        compile_for(run_parallel, (*(numba.int64,) * 4, POINTERS))
