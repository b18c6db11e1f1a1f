"""Selects the rung and its kernels for a BackwardProblem and a Target, and says why the other rungs do not run."""

import functools
from typing import NamedTuple

from ..config.backward import MmaBackwardConfig
from ..config.forward import LaunchFacts, with_problems
from ..config.wgmma_backward_float32 import NOT_TAKEN
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from ..problem.options import ARRAYS
from .backward_shared import one_key_tile
from .forward import mma_is_sooner, not_on_tensor_cores
from .refusals import no_room, no_tma, no_wide_rows, not_here, too_wide
from .rungs import RUNGS, Refused, Rung, check_request, choose


class BackwardChoice(NamedTuple):
    """The rung that will run. configs: the Configs of its kernels in launch order; empty for rungs on the host."""

    kernel: str
    configs: tuple[LaunchFacts, ...]
    refused: Refused  # (kernel, why it does not run), in the order in which they were asked


def select_backward(
    problem: BackwardProblem, target: Target, kernel: str, family: str = "numpy", stream: bool = False
) -> BackwardChoice:
    """The rung by name, or for "auto" the fastest rung that can compute the gradients exactly here; like `select`."""
    check_request(kernel, target, family, stream)
    refuses = functools.partial(_refusal, problem=problem, target=target)

    def own(name: str) -> list[LaunchFacts]:
        return [config for config in kernels_of(name, problem, target) if config.kernel.startswith(name)]

    first = kernel == "auto" and (one_key_tile(problem, target) or mma_is_sooner(problem.forward, target, refuses, own))
    name, refused = choose(kernel, target, refuses, first="mma" if first else "")
    return BackwardChoice(name, kernels_of(name, problem, target), refused)


def kernels_of(name: str, problem: BackwardProblem, target: Target) -> tuple[LaunchFacts, ...]:
    """The Configs of a rung in the order of their launches; none on the host."""
    if RUNGS[name].on_host:
        return ()
    from .backward_kernels import configs_of  # imports the class of every Config; each takes a millisecond

    return configs_of(name, problem, target)


def _refusal(name: str, problem: BackwardProblem, target: Target) -> str | None:
    """Why a rung cannot compute these gradients on this machine, or None."""
    rung = RUNGS[name]
    if not rung.has_backward:
        return "its backward is not built yet"
    reason = not_here(rung, problem.forward, target)
    if rung.on_host or reason is not None:
        return reason
    if target.arrays_on_host and not target.simulated:
        return "it takes arrays on a GPU, and these are in host memory; copy them there first"
    if rung.tensor_cores and (reason := _not_on_tensor_cores(rung, problem, target)) is not None:
        return reason
    needed = max((config.shared_bytes for config in kernels_of(name, problem, target)), default=0)
    return no_room(problem.forward, target, needed) if needed > target.shared_bytes else None


def _not_on_tensor_cores(rung: Rung, problem: BackwardProblem, target: Target) -> str | None:
    """Why the kernels of a rung on tensor cores do not take the problem, apart from shared memory."""
    forward, wanted = problem.forward, [given for given in ARRAYS if given.gradient in problem.wanted]
    missing = [f"it has no gradient of {given.name} yet" for given in wanted if not given.gradient_on_tensor_cores]
    if rung.name == "wgmma" and forward.dtype == "float32":  # these kernels take fewer options than those in 16 bits
        options = [option for option, _ in forward.uses if option in NOT_TAKEN]
        missing += [f"its gradients take no {option} in float32 yet" for option in options]
    reason = too_wide(forward, MmaBackwardConfig.WIDEST) or next(iter(missing), None)
    reason = reason or not_on_tensor_cores(rung, forward, target)
    if reason or not forward.batch * forward.heads * forward.seqlen_q:
        return reason
    reason = no_wide_rows("do", problem.do_strides, forward.head_dim_v, forward.dtype, rung.least_copy)
    made = () if reason else with_problems(kernels_of(rung.name, problem, target), problem)
    return next((found for config, own in made if (found := no_tma(config, own))), reason)
