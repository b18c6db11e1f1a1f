"""The rungs: a row of facts for each, and the choice of one, which attention and its gradients share."""

from collections.abc import Callable
from typing import NamedTuple

from ..machine.target import Target
from ..problem.forward import Problem
from ..problem.options import BY_NAME
from .refusals import no_gpu

Refused = tuple[tuple[str, str], ...]  # (rung, why it does not run)
GPU, HOST, SIMULATOR = "gpu", "host", "simulator"  # where arrays are


class Rung(NamedTuple):
    """The facts of a rung. forward.CANDIDATES and backward.kernels_of have its Configs."""

    name: str
    auto: tuple[str, ...]  # where "auto" may take it
    on_host: bool = False
    option: str = ""  # the field of Option that says whether it takes an option
    dtypes: tuple[str, ...] = ()  # (): all
    tensor_cores: bool = False
    least_copy: int = 16  # bytes of its smallest copies: rows must begin at multiples of it
    least_cc: tuple[int, int] = (0, 0)
    only_cc: tuple[int, int] | None = None
    has_backward: bool = True
    sums: dict[str, str] = {}  # {dtype: how exact its sums are}, if they could be less exact than the dtype

    def runs_on(self, cc: tuple[int, int]) -> bool:
        return cc >= self.least_cc and self.only_cc in (None, cc)

    def not_taken(self, problem: Problem) -> str | None:
        """Why it does not take the problem's options, wherever the arrays are, or None."""
        missing = (name for name, _ in problem.uses if self.option and not getattr(BY_NAME[name], self.option))
        return next((f"it takes no {name} yet" for name in missing), None)


RUNGS = {
    rung.name: rung
    for rung in (
        Rung("reference", (), on_host=True),
        Rung("v1", (GPU,), has_backward=False),
        Rung("v2", (GPU, SIMULATOR)),
        Rung(
            "mma",
            (GPU,),
            option="on_tensor_cores",
            dtypes=("float16", "bfloat16", "float32", "float64"),
            tensor_cores=True,
            least_copy=2,
            least_cc=(8, 0),
            sums=dict(
                float32="as exact as in float32: each factor is split into two of 11 bits (3xTF32)",
                float64="in float64",
            ),
        ),
        Rung(
            "wgmma",
            (GPU,),
            option="on_tensor_cores",
            dtypes=("float16", "bfloat16", "float32"),
            tensor_cores=True,
            least_cc=(9, 0),
            only_cc=(9, 0),
            sums=dict(float32="as exact as in float32: each factor is split into three of 8 bits, in bfloat16"),
        ),
        Rung("cpu", (HOST,), on_host=True, option="on_cpu"),
    )
}


def preferred(place: str) -> list[Rung]:
    """The rungs that "auto" may take for arrays there, the fastest first."""
    return [rung for rung in reversed(RUNGS.values()) if place in rung.auto]


def check_request(kernel: str, target: Target, family: str, stream: bool) -> None:
    """Raises for a call that is wrong for every problem. family: the kind of the given arrays; stream: whether a stream
    was named, which only a GPU has."""
    check_name(kernel)
    if stream and target.arrays_on_host:
        raise ValueError("stream was given, but the arrays are in host memory, where there are no streams")
    if target.simulated and family != "numpy" and not (kernel in RUNGS and RUNGS[kernel].on_host):
        raise NotImplementedError(
            f"the simulator (NUMBA_ENABLE_CUDASIM) takes NumPy arrays only, and {family} arrays were given; "
            "unset NUMBA_ENABLE_CUDASIM, or pass NumPy arrays"
        )


def check_name(kernel: str) -> None:
    if not isinstance(kernel, str) or kernel not in ("auto", *RUNGS):
        raise ValueError(f"kernel must be one of {', '.join(('auto', *RUNGS))}, not {kernel!r}")


def choose(
    kernel: str, target: Target, refusal: Callable[[str], str | None], copies: bool = False, first: str = ""
) -> tuple[str, Refused]:
    """The first of the requested rungs that can run, and why each other rung does not.

    refusal: why a rung cannot compute the problem here, or None. copies: whether arrays in host memory are copied to
    the GPU for a rung that is named. first: the rung that "auto" asks before the others on a GPU. Raises
    NotImplementedError if no rung can run.
    """
    place = SIMULATOR if target.simulated else HOST if target.arrays_on_host else GPU
    wanted = [rung.name for rung in preferred(place)] if kernel == "auto" else [kernel]
    wanted.sort(key=lambda name: name != first)
    refused = [(name, _not_asked(rung, kernel, target, copies)) for name, rung in RUNGS.items() if name not in wanted]
    for index, name in enumerate(wanted):
        reason = refusal(name)
        if reason is None:
            return name, (*refused, *((later, comes_first(name)) for later in wanted[index + 1 :]))
        refused.append((name, reason))
    reasons = "; ".join(f"{name}: {why}" for name, why in refused if name in wanted)
    others = [name for name in RUNGS if name not in wanted and refusal(name) is None]
    possible = f" What would run: kernel={' or '.join(map(repr, others))}." if others else ""
    raise NotImplementedError(f"kernel={kernel!r} cannot run this problem here. {reasons}.{possible}")


def comes_first(name: str) -> str:
    """Why the rungs after it are not asked."""
    return f"{name} comes first"


def _not_asked(rung: Rung, kernel: str, target: Target, copies: bool) -> str:
    if kernel != "auto":
        return f"kernel={kernel!r} was asked for"
    if not rung.auto:
        return "the oracle holds the whole score matrix; it runs when named"
    if not target.arrays_on_host:
        return "the arrays are on a GPU"
    if target.simulated:
        return f"{preferred(SIMULATOR)[0].name} comes first in the simulator; it runs when named"
    if target.cc is None:
        return no_gpu(target)
    return "the arrays are in host memory" + "; it runs when named, with copies to the GPU and back" * copies
