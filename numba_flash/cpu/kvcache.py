"""Attention over a cache on the CPU rung: the kernel of kernel.py, with a line for each sequence.

The kernel has three paths, for sequences with few rows, with some more and with many. Each path is a call of its own,
so a row's bits depend on its own sequence alone.
"""

# mypy: ignore-errors

import dataclasses
import functools

import numpy as np

from ..arrays import ITEM_SIZE, host_pointer
from ..machine import interrupt
from ..problem.forward import Problem
from . import plan as slot
from .forward import (
    BYTES_A_SECOND,
    OPERATIONS_A_SECOND,
    SERIAL_SECONDS,
    forked,
    ready,
    run_parallel,
    run_serial,
    seeded,
    workers_of,
)

BOUNDS = 0, slot.MAX_ROWS_ALONE, slot.MAX_ROWS_SPLIT, 2**62


def run(problem: Problem, pointers: tuple[int, ...], lines: np.ndarray) -> None:
    """Attention of all sequences. pointers: in the order of options.Operands, followed by a seed and those of aux.
    lines: a row for each sequence, with the numbers that plan.py names (LINE_*)."""
    if problem.packed is None:  # all sequences have the same queries
        if lines.size and problem.heads and problem.seqlen_q:
            _run_alike(problem, pointers, lines)
        return
    rows = lines[:, slot.LINE_QUERIES] * (problem.heads // max(problem.heads_kv, 1))
    for low, high in zip(BOUNDS, BOUNDS[1:], strict=False):
        own = lines[(rows > low) & (rows <= high)]
        if len(own) and problem.heads:
            _run_alike(problem, pointers, own)


@functools.lru_cache(maxsize=1024)
def _of_queries(problem: Problem, queries: int) -> Problem:
    return dataclasses.replace(problem, seqlen_q=queries)


def _run_alike(problem: Problem, pointers: tuple[int, ...], lines: np.ndarray) -> None:
    """Runs the sequences of `lines`, which all take the same path through the kernel."""
    if len(lines) > 1:
        lines = lines[np.argsort(-lines[:, slot.LINE_KEYS], kind="stable")]  # long ones first
    p = _of_queries(problem, int(lines[:, slot.LINE_QUERIES].max()))
    known = ready(p)
    numbers = known.numbers.copy()
    chunks = -(-int(lines[0, slot.LINE_KEYS]) // slot.NODE_KEYS) if numbers[slot.LEAF_TILES] else 1
    slot.set_tasks(numbers, len(lines), max(chunks, 1))
    aux, seed = seeded(known.functions, pointers[slot.AUX :], known.seeded)
    given = (*pointers[: slot.AUX], host_pointer(aux), seed, host_pointer(lines))
    dims, keys = p.head_dim + p.head_dim_v, lines[:, slot.LINE_KEYS]
    operations = 2 * p.heads * dims * float(lines[:, slot.LINE_QUERIES] @ keys)
    read = p.heads_kv * dims * ITEM_SIZE[p.dtype] * float(keys.sum())
    seconds = operations / OPERATIONS_A_SECOND + read / BYTES_A_SECOND

    def start(stop: int) -> None:
        workers = workers_of(seconds < SERIAL_SECONDS)
        if workers == 1:
            run_serial(known.kernel, host_pointer(numbers), stop, given)
            return
        with forked.launch_lock:
            run_parallel(workers, known.kernel, host_pointer(numbers), stop, given)

    interrupt.stoppable_if_long(seconds, start)
    if p.functions:
        known.functions.check(aux)
