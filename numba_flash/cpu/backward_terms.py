"""Gradients of terms of every row's sum, on the CPU (compiled), by the formula of kernels/score/sum_term.py.

One task is one element of the result, so its sum has one order for any number of threads. Sums are in float64.
"""

# mypy: ignore-errors

import math

import numpy as np

from . import backward_plan as at, plan as slot
from .elements import INT, compiled, gather, get, put, row_address
from .kernel import inlined
from .panel import INFINITY
from .vectors.build import fetch_add, load, size_of


@compiled
def delta_of(row, plan, pointers, b, head, i, zero):
    """rowsum(do * o) - dlse of a query; `row` is work space for two rows. Where o is 0, as in a row without keys, do
    does not count."""
    head_dim_v, dtype = load(plan, slot.HEAD_DIM_V, INT), load(plan, slot.DTYPE, INT)
    other = row + head_dim_v * size_of(zero)
    o = row_address(load(pointers, slot.O_AT, INT), plan, slot.O_STRIDE, b, head, i)
    do = row_address(load(pointers, at.DO, INT), plan, at.DO_STRIDE, b, head, i)
    gather(row, o, 0, load(plan, slot.O_STRIDE + 3, INT), 1, head_dim_v, dtype, zero)
    gather(other, do, 0, load(plan, at.DO_STRIDE + 3, INT), 1, head_dim_v, dtype, zero)
    delta = 0.0
    for d in range(head_dim_v):
        if load(row, d, zero) != 0:
            delta += np.float64(load(row, d, zero)) * np.float64(load(other, d, zero))
    if load(plan, at.HAS_DLSE, INT):
        dlse = row_address(load(pointers, at.DLSE, INT), plan, at.DLSE_STRIDE, b, head, i)
        delta -= np.float64(load(dlse, 0, zero))
    return delta


@inlined
def run_task(task, frame, scratch, zero):
    """Task number `task`: the term of one head, or of one head of one batch entry."""
    plan, pointers = load(frame, at.PLAN, INT), frame + at.POINTERS * 8
    batch, heads, seqlen_q = load(plan, slot.BATCH, INT), load(plan, slot.HEADS, INT), load(plan, slot.SEQLEN_Q, INT)
    own_b, head = task // heads + load(pointers, at.FIRST_B, INT), task % heads
    end_b = own_b + 1 if load(plan, at.OWN_BATCH, INT) else batch
    dtype = load(plan, at.SUM_DTYPE, INT)
    source = own_b * load(plan, at.TERM_STRIDE, INT) + head * load(plan, at.TERM_STRIDE + 1, INT)
    term = get(load(pointers, load(plan, at.TERM_POINTER, INT), INT) + source, dtype, 0.0)
    total = 0.0
    for b in range(own_b, end_b):
        if load(load(frame, at.STOP, INT), 0, INT):
            break  # the result is no longer wanted
        for i in range(seqlen_q):
            lse_at = b * load(plan, slot.LSE_BATCH, INT) + head * load(plan, slot.LSE_HEAD, INT) + i
            lse = np.float64(load(load(pointers, slot.LSE_AT, INT), lse_at, zero))
            weight = math.exp(min(term - lse, 0.0)) if lse != -INFINITY else 0.0  # only rounding makes it positive
            if weight != 0:
                total -= weight * delta_of(scratch, plan, pointers, b, head, i, zero)
    to = own_b * load(plan, at.SUM_STRIDE, INT) + head * load(plan, at.SUM_STRIDE + 1, INT)
    put(load(pointers, load(plan, at.SUM_POINTER, INT), INT) + to, dtype, total)


@inlined
def run_tasks(frame, scratch, zero):
    plan, counter = load(frame, at.PLAN, INT), load(frame, at.COUNTER, INT)
    task = fetch_add(counter)
    while task < load(plan, slot.TASKS, INT):
        run_task(task, frame, scratch, zero)
        if load(load(frame, at.STOP, INT), 0, INT):
            break
        task = fetch_add(counter)


def run_terms_float32(frame, _, scratch):
    """One thread's part of the tasks."""
    run_tasks(frame, scratch, np.float32(0))


def run_terms_float64(frame, _, scratch):
    """run_terms_float32 in double precision."""
    run_tasks(frame, scratch, np.float64(0))
