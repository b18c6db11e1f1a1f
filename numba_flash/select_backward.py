"""BackwardProblem x Target -> which kernels compute the gradients, and why others do not."""

from collections.abc import Callable
from dataclasses import dataclass

from .backward_problem import BackwardProblem
from .config import Config
from .select import KERNELS, Refused, check_request, first_that_can
from .target import Target

BUILT = ("reference", "cpu")  # of KERNELS, those that have a backward


@dataclass(frozen=True)
class BackwardChoice:
    """What will run. `configs` are those of its kernels in the order of their launches; none of the host's rungs."""

    kernel: str
    configs: tuple[Config, ...]
    refused: Refused  # (kernel, why it does not run), in the order they were asked


def select_backward(
    problem: BackwardProblem,
    target: Target,
    kernel: str,
    family: str,
    stream: bool,
    no_cpu: Callable[[BackwardProblem], str | None],
) -> BackwardChoice:
    """The rung by name, or for "auto" the fastest one that can compute the gradients exactly here.

    family and stream as in `select`; no_cpu: why the CPU rung cannot, or None, asked only where that matters.
    """
    check_request(kernel, target, family, stream)

    def refusal(name: str) -> str | None:
        if name not in BUILT:
            return "its backward is not built yet"
        if not target.arrays_on_host:
            return "it computes in host memory; copy the arrays there first"
        return no_cpu(problem) if name == "cpu" else None

    wanted = _by_preference(target) if kernel == "auto" else (kernel,)
    name, refused = first_that_can(kernel, wanted, KERNELS, refusal, lambda name: _not_asked(kernel, target))
    return BackwardChoice(name, (), refused)


def _by_preference(target: Target) -> tuple[str, ...]:
    return ("cpu", "reference") if target.arrays_on_host else ("wgmma", "mma", "v2", "v1")


def _not_asked(kernel: str, target: Target) -> str:
    if kernel != "auto":
        return f"kernel={kernel!r} was asked for"
    return f"the arrays are {'in host memory' if target.arrays_on_host else 'on a GPU'}"
