"""The host's part of the CPU rung's backward, like forward.py for the forward. The kernels are in
backward_kernel.py.

Memory besides the gradients: dk and dv once more in float32 (float64 for float64) with head_dim rounded up to whole
vectors, and each thread's tiles, for any lengths: 0.6 MB with head_dim 64 in float32, 0.9 MB with 128.
"""

# mypy: ignore-errors

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import numba
import numpy as np
from numba import njit, prange

from ..arrays import ITEM_SIZE, host_pointer
from ..machine import forked, interrupt
from ..problem.backward import BackwardProblem
from ..problem.options import ARRAYS
from . import backward_plan as at
from .backward_aux import run_aux_float32, run_aux_float64
from .backward_kernel import GRADIENTS_OF_ROWS, RESULTS, run_phase_float32, run_phase_float64
from .backward_sums import run_sums_float32, run_sums_float64
from .backward_terms import run_terms_float32, run_terms_float64
from .cache import c_function, cached, compile_for
from .elements import INT
from .forward import BYTES_A_SECOND, OPERATIONS_A_SECOND, SERIAL_SECONDS, entry_of, seeded, side_by_side, workers_of
from .functions import OfAux, OwnFunctions, own_functions
from .vectors.build import Shape, call, fetch_add, load, store


@njit(error_model="numpy", inline="always")
def set_up(launch, shared, stop, pointers):
    """Fills a call's frame, which begins the shared memory; returns its address."""
    frame = (shared + 63) // 64 * 64
    for n in range(len(pointers)):
        store(frame, at.POINTERS + n, pointers[n])
    counter = frame + at.FRAME_NUMBERS * 8
    done = counter + 64
    sums_k = done + load(launch, at.DONE_BYTES, INT)
    store(frame, at.COUNTER, counter)
    store(frame, at.DONE, done)
    store(frame, at.SUMS_K, sums_k)
    store(frame, at.SUMS_V, sums_k + load(launch, at.SUMS_K_BYTES, INT))
    store(frame, at.STOP, stop)
    store(frame, at.GIVE_WAY, load(launch, at.ADDRESS_OF_GIVE_WAY, INT))
    return frame


@njit(error_model="numpy", inline="always")
def begin(one, frame):
    """Sets the frame for a pass: its plan, and no task taken. Returns its kernel and phase."""
    store(frame, at.PLAN, load(one, at.PASS_PLAN, INT))
    store(load(frame, at.COUNTER, INT), 0, INT)
    return load(one, at.PASS_KERNEL, INT), load(one, at.PASS_PHASE, INT)


@cached
@njit(nogil=True, error_model="numpy")
def run_serial(launch, stop, pointers):
    """Runs all passes on this thread. pointers: addresses in the order of options.GradientOperands, followed by
    `behind`, in a tuple or an array."""
    shared_numbers = load(launch, at.SHARED, INT)
    memory = np.empty((64 + load(launch, at.SCRATCH, INT)) // 8 + shared_numbers, np.int64)
    scratch = (memory.ctypes.data + 63) // 64 * 64
    shared = scratch + load(launch, at.SCRATCH, INT)
    for n in range(shared_numbers):
        store(shared, n, INT)
    frame = set_up(launch, shared, stop, pointers)
    for n in range(load(launch, at.PASSES, INT)):
        kernel, phase = begin(launch + (at.FIRST_PASS + n * at.PASS_NUMBERS) * 8, frame)
        call(kernel, frame, phase, scratch)
    memory[0] = 0  # keeps it alive until here


@cached
@njit(nogil=True, error_model="numpy", parallel=True)
def run_parallel(workers, launch, shared, stop, pointers):
    """Runs all passes on `workers` threads, each of which takes the next task when it has finished one."""
    scratch_bytes = load(launch, at.SCRATCH, INT)
    memory = np.empty((64 + workers * scratch_bytes) // 8, np.int64)
    scratch = (memory.ctypes.data + 63) // 64 * 64
    frame = set_up(launch, shared, stop, pointers)
    for n in range(load(launch, at.PASSES, INT)):
        kernel, phase = begin(launch + (at.FIRST_PASS + n * at.PASS_NUMBERS) * 8, frame)
        for worker in prange(workers):
            call(kernel, frame, phase, scratch + worker * scratch_bytes)
    memory[0] = 0  # keeps it alive until here


@cached
@njit(nogil=True, error_model="numpy", parallel=True)
def run_side_by_side(workers, stop, table):
    """Runs the calls of `table` on `workers` threads, as forward.run_side_by_side does."""
    counter = np.zeros(1, np.int64)
    for _ in prange(workers):
        n = fetch_add(counter.ctypes.data)
        while n < len(table) and not load(stop, 0, INT):
            run_serial(table[n, 0], stop, table[n, 1:])
            n = fetch_add(counter.ctypes.data)


POINTERS = numba.types.UniTuple(numba.int64, at.ALL_POINTERS)

_FUNCTIONS = {
    ("rows", False): run_phase_float32,
    ("rows", True): run_phase_float64,
    ("sums", False): run_sums_float32,
    ("sums", True): run_sums_float64,
    ("aux", False): run_aux_float32,
    ("aux", True): run_aux_float64,
    ("terms", False): run_terms_float32,
    ("terms", True): run_terms_float64,
}


@functools.cache
def _kernel(what, double):
    name = "float64" if double else "float32"
    announcement = f"numba_flash: compiling the CPU's backward kernel for {name} (once, about 10 s) ..."
    return c_function(_FUNCTIONS[what, double], "void(int64, int64, int64)", announcement)


@functools.cache
def _give_way():
    """Address of the system's function with which a thread lets others run."""
    function = ctypes.windll.kernel32.SwitchToThread if sys.platform == "win32" else ctypes.CDLL(None).sched_yield
    return ctypes.cast(function, ctypes.c_void_p).value


class Ready(NamedTuple):
    """The part of a call that depends on the problem but not on the arrays."""

    numbers: np.ndarray  # the arguments of run_serial and run_parallel
    address: int
    seconds: float  # as in forward.Ready
    plans: tuple[np.ndarray, ...]  # their addresses are among the numbers
    functions: tuple[OwnFunctions, ...]  # their addresses are in the plans; all read the same
    of_aux: OfAux | None
    seeded: bool
    behind: tuple[int, int, int] | None  # AUX, the seed and FIRST_B, if no call has its own
    at_once: Callable[..., None] | None  # as in forward.Ready

    @property
    def serial(self) -> bool:
        return self.seconds < SERIAL_SECONDS

    def run(self, pointers: tuple[int, ...], b: int = 0, sums: np.ndarray | None = None) -> None:
        """Writes the wanted gradients. The addresses are in the order of options.GradientOperands, 0 = none, followed
        by those of aux. b: FIRST_B. sums: shared by several calls; gradients of aux are added to it, not written."""
        if self.behind is not None:
            behind = (*self.behind[:2], b) if b else self.behind
            if self.at_once is not None:
                self.at_once(self.address, interrupt.NEVER, pointers + behind)
            else:
                self._start((*pointers[: at.AUX], *behind))
            return
        behind = pointers[at.AUX :]
        if self.of_aux is not None:
            count = len(self.functions[0].places)
            behind, results = behind[:-count], behind[-count:]
        aux, seed = seeded(self.functions[0], behind, self.seeded)
        alone = sums is None
        if self.of_aux is not None:
            sums = self.of_aux.no_sums() if alone else sums
            aux[-1] = host_pointer(sums)
        self._start((*pointers[: at.AUX], host_pointer(aux), seed, b))
        self.functions[0].check(aux)
        if self.of_aux is not None and alone:
            self.of_aux.write(sums, results)

    def _start(self, pointers: tuple[int, ...]) -> None:
        interrupt.stoppable_if_long(self.seconds, lambda stop: self._run(stop, pointers))

    def _run(self, stop: int, pointers: tuple[int, ...]) -> None:
        workers = workers_of(self.serial)
        if workers == 1:
            run_serial(self.address, stop, pointers)
            return
        shared = np.zeros(self.numbers[at.SHARED], np.int64)
        with forked.launch_lock:
            run_parallel(workers, self.address, host_pointer(shared), stop, pointers)


@functools.lru_cache(maxsize=4096)
def ready(problem: BackwardProblem) -> Ready:
    """A caller with many calls of one problem keeps the result, as with forward.ready."""
    p = problem.forward
    double = p.dtype == "float64"
    shape = Shape(numba.float64 if double else numba.float32)
    plan = at.make_plan(problem, shape.lanes, shape.width)
    passes = []  # each runs on all threads before the next begins
    slopes = {"dq", "dk"} & set(problem.wanted)
    functions = [own_functions(p, derivative=bool(slopes))]
    functions[0].go_into(plan.numbers)

    def add(what, numbers, phase, scratch_bytes):
        passes.append((_kernel(what, double).address, numbers, phase, scratch_bytes))

    if {"dq", "dk", "dv"} & set(problem.wanted):
        add("rows", plan.numbers, GRADIENTS_OF_ROWS, plan.scratch_bytes)
    if any(plan.sums_bytes):
        add("rows", plan.numbers, RESULTS, 0)
    for option in ARRAYS:
        name = option.gradient
        if name in problem.wanted and 0 not in problem.shape_of(name):
            term = option.acts_on == "sum"
            make_plan = at.make_terms_plan if term else at.make_sums_plan
            numbers, scratch_bytes = make_plan(problem, name, shape.lanes)
            if not term:
                functions.append(own_functions(p, derivative=False))
                functions[-1].go_into(numbers)
            add("terms" if term else "sums", numbers, 0, scratch_bytes)
    of_aux = None
    if problem.wanted_aux:
        of_aux = OfAux.of(problem)
        if of_aux.function is not None:
            numbers, scratch_bytes = at.make_aux_plan(problem, shape.lanes)
            functions.append(own_functions(p, derivative=False))
            functions[-1].go_into(numbers)
            numbers[at.AUX_FUNCTION], numbers[at.AUX_BYTES] = of_aux.function.address, 8 * of_aux.elements
            numbers[at.AUX_SUMS] = len(functions[-1].aux_numbers) - 1
            add("aux", numbers, 0, scratch_bytes)
    operations = 4 * p.batch * p.heads * p.seqlen_q * p.seqlen_k * (p.head_dim + p.head_dim_v)
    moved = p.batch * p.heads_kv * p.seqlen_k * (p.head_dim + p.head_dim_v) * ITEM_SIZE[p.dtype]
    seconds = operations / OPERATIONS_A_SECOND + moved / BYTES_A_SECOND
    numbers = at.make_launch(plan, passes, _give_way())
    plans = tuple(numbers_of_pass for _, numbers_of_pass, _, _ in passes)
    own, has_seed = tuple(functions), problem.forward.seeded
    behind = None if has_seed or own[0].places else (host_pointer(own[0].aux_numbers), 0, 0)
    at_once = None
    if seconds < SERIAL_SECONDS and not p.aux and behind is not None:
        at_once = entry_of(run_serial, (numba.int64, numba.int64, POINTERS))
    return Ready(numbers, numbers.ctypes.data, seconds, plans, own, of_aux, has_seed, behind, at_once)


def run_several(readies: list[Ready], table: np.ndarray) -> None:
    """Runs several problems, as forward.run_several does."""
    side_by_side(
        sum([ready.seconds for ready in readies]),
        table,
        lambda stop, address, pointers: run_serial(address, stop, pointers),
        lambda stop, workers: run_side_by_side(workers, stop, table),
    )


def warm_up(problem: BackwardProblem) -> None:
    """Compiles what `Ready.run` would run, or loads it from the cache, and runs nothing."""
    if workers_of(ready(problem).serial) == 1:
        compile_for(run_serial, (numba.int64, numba.int64, POINTERS))
    else:
        compile_for(run_parallel, (*(numba.int64,) * 4, POINTERS))
