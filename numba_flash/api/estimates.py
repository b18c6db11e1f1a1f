"""Time estimates for `explain`: how long a problem takes, and how much less in a faster kernel that refused it.

Both estimates use the speeds in measured.py, which were measured on one GPU with large problems. They can tell a second
from a minute, and whether to write a call in another way, but nothing finer.
"""

import dataclasses
import os
from typing import Any

from ..config.forward import Config
from ..dispatch.simulated import simulated_seconds
from ..machine.target import Target
from ..problem.forward import Problem
from ..problem.options import BY_NAME
from ..select.forward import Choice, config_of, refusal
from ..select.rungs import GPU as ON_GPU, RUNGS, comes_first, preferred
from .measured import CALL_MICROSECONDS, CPU_GFLOPS, GPU, MULTIPROCESSORS, TFLOPS

SAMPLES = 64  # about how many queries' keys are counted
MEASURED_CC = (9, 0)


def seconds(kernel: str, config: Config | None, problem: Problem, target: Target) -> float | None:
    """An estimate of the run time; None if nothing comparable was measured."""
    if target.simulated and kernel in ("v1", "v2"):
        return simulated_seconds(problem)
    if target.simulated or not _was_measured(kernel, problem):
        return None
    if kernel == "cpu":
        return _products(problem, problem.seqlen_q) / (CPU_GFLOPS * 1e9 * _threads())
    if config is None or target.cc != MEASURED_CC:
        return None
    return _on_measured_gpu(kernel, config, problem, target.multiprocessors)


def _was_measured(kernel: str, problem: Problem) -> bool:
    return problem.dtype != "float64" and not (RUNGS[kernel].tensor_cores and problem.dtype == "float32")


def lost(choice: Choice, problem: Problem, target: Target) -> str | None:
    """Says which faster kernel of this GPU does not run, why, what that costs, and what would let it run."""
    if choice.config is None or choice.copies or target.simulated or target.cc is None:
        return None
    there = (rung for rung in preferred(ON_GPU) if rung.tensor_cores and rung.runs_on(target.cc))
    fastest = next(there, None)
    if fastest is None or choice.kernel == fastest.name:
        return None
    if (fastest.name, comes_first(choice.kernel)) in choice.refused:
        return None  # "auto" found the other one faster here
    why = refusal(fastest.name, problem, target)
    if RUNGS[choice.kernel].tensor_cores and why is not None:
        return None  # only mma is left, which is not much slower
    reason, other, remedy = _cause(fastest.name, why, problem, target)
    text = f"{choice.kernel} instead of {fastest.name} because {reason}"
    stays = f"; {remedy} would run on {fastest.name}" if remedy else ""
    if other is None or not (_was_measured(choice.kernel, problem) and _was_measured(fastest.name, other)):
        return f"{text}{stays}"
    config = config_of(fastest.name, other, target)
    assert config is not None
    slow = _on_measured_gpu(choice.kernel, choice.config, problem, target.multiprocessors)
    times = slow / _on_measured_gpu(fastest.name, config, other, target.multiprocessors)
    expect = f"about {float(f'{times:.2g}'):g} times slower" if times >= 1.5 else "about the same time at this size"
    where = "" if GPU in target.name else f", as on an {GPU}"
    return f"{text}: expect {expect}{where}{stays}"


def _cause(fastest: str, why: str | None, problem: Problem, target: Target) -> tuple[str, Problem | None, str]:
    """(why not, a similar problem that the kernel takes, what the caller can do); None and "" if there is no simple
    remedy."""
    if why is None:
        return "it was asked for", problem, ""
    options = [name for name, _ in problem.uses if not BY_NAME[name].on_tensor_cores]
    functions = tuple(x for x in problem.functions if x[0] not in options)
    without = dataclasses.replace(
        problem,
        arrays=tuple(x for x in problem.arrays if x.name not in options),
        functions=functions,
        aux=problem.aux if functions else (),
    )
    reason = f"of {' and '.join(f'{name}=' for name in options)}" if options else why
    if not options or refusal(fastest, without, target) is not None:
        return reason, None, ""
    remedies = [BY_NAME[name].instead for name in options]
    return reason, without, " and ".join(remedies) if all(remedies) else ""


def _on_measured_gpu(kernel: str, config: Config, problem: Problem, multiprocessors: int) -> float:
    """The run time on the GPU of measured.py, if that had `multiprocessors` multiprocessors."""
    by_head_dim = TFLOPS[kernel]
    speed = by_head_dim[min(by_head_dim, key=lambda measured: abs(measured - problem.widest))] * 1e12
    rows = -(-problem.seqlen_q // config.queries) * config.queries  # a tile costs the same for any number of queries
    busy = min(config.grid(problem) // config.v_parts / max(multiprocessors, 1), 1)  # the used share of the GPU
    speed *= busy * multiprocessors / MULTIPROCESSORS
    products = _products(problem, rows)
    return max(products / speed if products else 0.0, CALL_MICROSECONDS * 1e-6)


def _products(problem: Problem, rows: int) -> float:
    """Operations of both products, for `rows` query rows of each head."""
    p = problem
    return 2.0 * p.batch * p.heads * rows * _keys_of_a_query(p) * (p.head_dim + p.head_dim_v)


def _keys_of_a_query(problem: Problem) -> float:
    """How many keys a query sees on average, from positions alone."""
    step = max(problem.seqlen_q // SAMPLES, 1)
    seen = [problem.keys_seen(i) for i in range(step // 2, problem.seqlen_q, step)]
    return sum(max(end - first, 0) for first, end in seen) / max(len(seen), 1)


def _threads() -> int:
    """The number of threads that Numba will start. Numba is not asked, because it would have to be loaded."""
    asked: Any = os.environ.get("NUMBA_NUM_THREADS", "")
    if asked.isdigit() and int(asked):
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
