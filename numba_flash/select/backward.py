"""Selects what computes the gradients for a BackwardProblem and a Target, and says why the other rungs do not run."""

import functools
from dataclasses import dataclass

from ..config.backward import BackwardConfig, MmaBackwardConfig
from ..config.wgmma_backward_float32 import NOT_TAKEN
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from ..problem.options import ARRAYS
from .arguments import parameters_of
from .backward_arguments import backward_tensor_maps
from .backward_kernels import kernels_of, one_key_tile, wgmma_configs
from .forward import no_cpu, no_tensor_cores, no_wide_rows
from .rungs import TENSOR, WITH_BACKWARD, Refused, check_request, choose, no_gpu
from .tensor_maps import fits


@dataclass(frozen=True)
class BackwardChoice:
    """What will run. `configs`: of its kernels in the order of their launches; empty for rungs on the host."""

    kernel: str
    configs: tuple[BackwardConfig, ...]
    refused: Refused  # (kernel, why it does not run), in the order in which they were asked


def select_backward(
    problem: BackwardProblem, target: Target, kernel: str, family: str = "numpy", stream: bool = False
) -> BackwardChoice:
    """The rung by name, or for "auto" the fastest rung that can compute the gradients exactly here; like `select`."""
    check_request(kernel, target, family, stream)
    refuses = functools.partial(_refusal, problem=problem, target=target)
    first = "mma" if target.cc is not None and one_key_tile(problem, target) else ""
    name, refused = choose(kernel, target, refuses, first=first)
    return BackwardChoice(name, kernels_of(name, problem, target), refused)


def _refusal(name: str, problem: BackwardProblem, target: Target) -> str | None:
    """Why rung `name` cannot compute these gradients on this machine, or None."""
    if name not in WITH_BACKWARD:
        return "its backward is not built yet"
    if name == "cpu" and (reason := no_cpu(problem.forward)) is not None:
        return reason
    if name in ("reference", "cpu"):
        return None if target.arrays_on_host else "it computes in host memory; copy the arrays there first"
    if target.cc is None:
        return no_gpu(target)
    if target.arrays_on_host and not target.simulated:
        return "it takes arrays on a GPU, and these are in host memory; copy them there first"
    if name in TENSOR:
        reason = _no_tensor_cores(name, problem, target)
        if reason is not None:
            return reason
    needed = max((config.shared_bytes for config in kernels_of(name, problem, target)), default=0)
    if needed > target.shared_bytes:
        forward = problem.forward
        return (
            f"head_dim {forward.head_dim} and {forward.head_dim_v} in {forward.dtype} need {needed} bytes of shared "
            f"memory in the smallest tile, and {target.name} has {target.shared_bytes}"
        )
    return None


def _no_tensor_cores(name: str, problem: BackwardProblem, target: Target) -> str | None:
    """Why the kernels of "mma" or "wgmma" do not take the problem, apart from shared memory."""
    forward = problem.forward
    if not forward.aligned:
        return "q, k, v, o or do begins at an address that is not a multiple of 16 bytes"
    if max(forward.head_dim, forward.head_dim_v) > MmaBackwardConfig.WIDEST:
        widest = MmaBackwardConfig.WIDEST
        return f"it takes head_dim up to {widest}, not {forward.head_dim} and {forward.head_dim_v}"
    for given in ARRAYS:
        if given.gradient in problem.wanted and not given.gradient_on_tensor_cores:
            return f"it has no gradient of {given.name} yet"
    assert target.cc is not None
    if name == "wgmma" and forward.dtype == "float32" and (reason := _no_float32(problem)) is not None:
        return reason
    reason = no_tensor_cores(name, forward, target)
    if reason is None and forward.batch * forward.heads * forward.seqlen_q:
        reason = no_wide_rows("do", problem.do_strides, forward.head_dim_v, forward.dtype)
        if reason is None and name == "wgmma":
            reason = _no_tma(problem, target)
    return reason


def _no_float32(problem: BackwardProblem) -> str | None:
    """Why the kernels of "wgmma" do not take the problem in float32. They support less than those in 16 bits."""
    for option, _ in problem.forward.uses:
        if option in NOT_TAKEN:
            return f"its gradients take no {option} in float32 yet"
    return None


def _no_tma(problem: BackwardProblem, target: Target) -> str | None:
    """Why TMA cannot load an operand, or None. Only the strides decide, and they are the same for every kernel."""
    for config in wgmma_configs(problem, target):
        for operand, tensor_map in backward_tensor_maps(config, problem):
            reason = fits(tensor_map)
            if reason is not None:
                return f"{parameters_of(config).arrays[operand]} cannot be fetched by TMA: {reason}"
    return None
