"""Selects the kernel and its Config for a Problem and a Target, and says why the other kernels do not run.

Nothing here uses CUDA or Numba, so every choice can be tested for GPUs that this machine does not have.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..config.forward import Config
from ..machine.target import Target
from ..problem.forward import Problem
from .cost_model import FLOAT32, microseconds
from .forward_kernels import few_queries, mma, short, simt, wgmma, with_fastest_rows
from .refusals import no_copies, no_room, no_tensor_cores, no_tma, not_here, too_wide
from .rungs import RUNGS, Rung, check_request, choose
from .tiles import TABLES, rows_of

# The Configs of each rung on a GPU, the best first; the last needs the least shared memory.
CANDIDATES: dict[str, Callable[[Problem, Target], Iterator[Config]]] = dict(
    v1=functools.partial(simt, "v1"), v2=functools.partial(simt, "v2"), mma=mma, wgmma=wgmma
)


class Choice(NamedTuple):
    """The kernel that will run. `config` is None for rungs that are not compiled for CUDA."""

    kernel: str
    config: Config | None
    copies: bool  # arrays are copied to the GPU and the result back: only for a GPU kernel asked for by name
    refused: tuple[tuple[str, str], ...]  # (kernel, why it does not run), in the order in which they were asked


def select(problem: Problem, target: Target, kernel: str, family: str = "numpy", stream: bool = False) -> Choice:
    """The kernel by name, or for "auto" the fastest kernel that can compute the problem exactly here. family: the kind
    of the given arrays; stream: whether a stream was named, which only a GPU has."""
    check_request(kernel, target, family, stream)
    refuses = functools.partial(refusal, problem=problem, target=target)

    def own(name: str) -> list[Config | None]:
        return [_fitting(name, problem, target)]

    in_small_tiles = short(problem, target) or few_queries(problem, target) is not None
    first = kernel == "auto" and (in_small_tiles or mma_is_sooner(problem, target, refuses, own))
    name, refused = choose(kernel, target, refuses, copies=True, first="mma" if first else "")
    config = None if RUNGS[name].on_host else config_of(name, problem, target)
    copies = config is not None and target.arrays_on_host and not target.simulated
    return Choice(name, config, copies, refused)


def refusal(name: str, problem: Problem, target: Target) -> str | None:
    """Why a rung cannot compute the problem on this machine, or None."""
    rung = RUNGS[name]
    reason = not_here(rung, problem, target)
    if rung.on_host or reason is not None:
        return reason
    if rung.tensor_cores:
        reason = not_on_tensor_cores(rung, problem, target)
    if reason is None and _fitting(name, problem, target) is None:
        return no_room(problem, target, min(config.shared_bytes for config in CANDIDATES[name](problem, target)))
    return reason


def not_on_tensor_cores(rung: Rung, problem: Problem, target: Target) -> str | None:
    """Why a rung on tensor cores does not take the problem on this GPU, apart from shared memory."""
    widest = max(row.when.head_dim for row in rows_of(TABLES, rung.name, problem.dtype, target))
    reason = no_tensor_cores(rung, problem, target) or too_wide(problem, widest)
    reason = reason or no_copies(problem, rung.least_copy, "q, k, v or out")
    if reason or not problem.batch * problem.heads * problem.seqlen_q:
        return reason
    return no_tma(next(CANDIDATES[rung.name](problem, target)), problem)


def config_of(name: str, problem: Problem, target: Target) -> Config | None:
    found: Any = _fitting(name, problem, target)
    return with_fastest_rows(found, problem, target) if found and name == "wgmma" else found


def _fitting(name: str, problem: Problem, target: Target) -> Config | None:
    return next((c for c in CANDIDATES[name](problem, target) if c.shared_bytes <= target.shared_bytes), None)


def mma_is_sooner(
    problem: Problem, target: Target, refuses: Callable[[str], str | None], configs: Callable[[str], list[Any]]
) -> bool:
    """Whether mma is faster than wgmma in float32, because its tiles are smaller and its blocks begin sooner. refuses:
    why a rung does not run; configs: its own kernels. For packed sequences it is False."""
    both = target.cc == RUNGS["wgmma"].only_cc and not target.simulated
    if not both or problem.dtype != "float32" or problem.packed is not None or any(map(refuses, FLOAT32)):
        return False
    time = {name: sum(microseconds(problem, config, name) for config in configs(name)) for name in FLOAT32}
    return time["mma"] < time["wgmma"]
