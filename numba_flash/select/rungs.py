"""The rungs, and what choosing a rung has in common for attention and for its gradients."""

from collections.abc import Callable

from ..machine.target import Target

KERNELS = ("reference", "v1", "v2", "mma", "wgmma", "cpu")
TENSOR = ("mma", "wgmma")  # rungs on tensor cores
WITH_BACKWARD = ("reference", "v2", "mma", "wgmma", "cpu")

Refused = tuple[tuple[str, str], ...]  # (rung, why it does not run)


def check_request(kernel: str, target: Target, family: str, stream: bool) -> None:
    """Raises for a call that is wrong for every problem.

    family: the kind of the given arrays; stream: whether a stream was named, which only a GPU has.
    """
    check_name(kernel)
    if stream and target.arrays_on_host:
        raise ValueError("stream was given, but the arrays are in host memory, where there are no streams")
    if target.simulated and family != "numpy" and kernel not in ("cpu", "reference"):
        raise NotImplementedError(
            f"the simulator (NUMBA_ENABLE_CUDASIM) takes NumPy arrays only, and {family} arrays were given; "
            "unset NUMBA_ENABLE_CUDASIM, or pass NumPy arrays"
        )


def check_name(kernel: str) -> None:
    if not isinstance(kernel, str) or kernel not in ("auto", *KERNELS):
        raise ValueError(f"kernel must be one of {', '.join(('auto', *KERNELS))}, not {kernel!r}")


def choose(
    kernel: str, target: Target, refusal: Callable[[str], str | None], copies: bool = False, first: str = ""
) -> tuple[str, Refused]:
    """The first of the requested rungs that can run, and why each other rung does not.

    refusal: why a rung cannot compute the problem here, or None. copies: whether arrays in host memory are copied to
    the GPU for a rung that is named. first: the rung that "auto" asks before the others on a GPU. Raises
    NotImplementedError if no rung can run.
    """
    wanted = _by_preference(target) if kernel == "auto" else (kernel,)
    wanted = tuple(sorted(wanted, key=lambda name: name != first))
    refused = [(name, _not_asked(name, kernel, target, copies)) for name in KERNELS if name not in wanted]
    for index, name in enumerate(wanted):
        reason = refusal(name)
        if reason is None:
            return name, (*refused, *((later, f"{name} comes first") for later in wanted[index + 1 :]))
        refused.append((name, reason))
    reasons = "; ".join(f"{name}: {why}" for name, why in refused if name in wanted)
    others = [name for name in KERNELS if name not in wanted and refusal(name) is None]
    possible = f" What would run: kernel={' or '.join(map(repr, others))}." if others else ""
    raise NotImplementedError(f"kernel={kernel!r} cannot run this problem here. {reasons}.{possible}")


def _by_preference(target: Target) -> tuple[str, ...]:
    if target.simulated:
        return ("v2",)
    return ("cpu",) if target.arrays_on_host else ("wgmma", "mma", "v2", "v1")


def _not_asked(name: str, kernel: str, target: Target, copies: bool) -> str:
    if kernel != "auto":
        return f"kernel={kernel!r} was asked for"
    if name == "reference":
        return "the oracle holds the whole score matrix; it runs when named"
    if not target.arrays_on_host:
        return "the arrays are on a GPU"
    if target.simulated:
        return "v2 comes first in the simulator; it runs when named"
    if target.cc is None:
        return no_gpu(target)
    return "the arrays are in host memory" + "; it runs when named, with copies to the GPU and back" * copies


def no_gpu(target: Target) -> str:
    return (
        f"no GPU is usable ({target.why_no_gpu}); to step through it without one, set NUMBA_ENABLE_CUDASIM=1 before "
        "Python starts"
    )
