"""Why a rung does not take a problem: a sentence for each reason, or None. Rungs, directions and caches share them."""

from typing import Any

from ..abi.tensor_maps import fits
from ..arrays.dtypes import ITEM_SIZE
from ..machine.target import Target
from ..problem.forward import Problem
from ..problem.strides import Strides

FLOAT64_CORES = ((8, 0), (9, 0), (10, 0))  # tensor cores with float64 at full speed


def not_here(rung: Any, problem: Problem, target: Target) -> str | None:
    """Why a rung cannot compute where the arrays are, or None. For a rung on the host, also why it does not take an
    option."""
    if rung.on_host:
        elsewhere = None if target.arrays_on_host else "it computes in host memory; copy the arrays there first"
        return rung.not_taken(problem) or elsewhere
    return no_gpu(target) if target.cc is None else None


def no_room(problem: Problem, target: Target, needed: int) -> str:
    return (
        f"head_dim {problem.head_dim} and {problem.head_dim_v} in {problem.dtype} need {needed} bytes of shared memory "
        f"in the smallest tile, and {target.name} has {target.shared_bytes}"
    )


def no_gpu(target: Target) -> str:
    return (
        f"no GPU is usable ({target.why_no_gpu}); to step through it without one, set NUMBA_ENABLE_CUDASIM=1 before "
        "Python starts"
    )


def no_tensor_cores(rung: Any, problem: Problem, target: Target) -> str | None:
    """Why the GPU's tensor cores do not serve a rung, its dtype or an option, or None."""
    cc, gpu = target.cc, target.name
    assert cc is not None
    has = f"and {gpu} has {cc[0]}.{cc[1]}"
    if rung.only_cc not in (None, cc):
        return f"its instructions exist on compute capability {_version(rung.only_cc)} only, {has}"
    if cc < rung.least_cc:
        return f"its instructions need compute capability {_version(rung.least_cc)}, {has}"
    if problem.dtype not in rung.dtypes:
        return f"it takes {', '.join(rung.dtypes)}, not {problem.dtype}"
    if problem.dtype == "float64" and cc not in FLOAT64_CORES:
        *first, last = map(_version, FLOAT64_CORES)
        where = f"{', '.join(first)} and {last}"
        return f"it takes float64 where tensor cores have it at full speed, on compute capability {where}, {has}"
    return rung.not_taken(problem)


def _version(cc: tuple[int, int] | None) -> str:
    return "" if cc is None else f"{cc[0]}.{cc[1]}"


def too_wide(problem: Problem, widest: int) -> str | None:
    """Why a head_dim is too large, or None."""
    if problem.widest <= widest:
        return None
    return f"it takes head_dim up to {widest}, not {problem.head_dim} and {problem.head_dim_v}"


def no_copies(problem: Problem, least: int, arrays: str) -> str | None:
    """Why rows of q, k and v cannot be copied one element, or `least` bytes, at a time, or None. arrays: the names of
    the arrays whose addresses matter."""
    least = max(least, ITEM_SIZE[problem.dtype])
    if problem.alignment < least:
        return f"{arrays} begins at an address that is not a multiple of {least} bytes"
    columns = dict(q=problem.head_dim, k=problem.head_dim, v=problem.head_dim_v)
    given = strides_that_matter(problem)
    found = (no_wide_rows(name, strides, columns[name], problem.dtype, least) for name, strides in given)
    return next((reason for reason in found if reason is not None), None)


def no_tma(config: Any, problem: Any) -> str | None:
    """Why TMA cannot load an operand, or None. Only the strides decide, and they are the same for every tile."""
    for operand, tensor_map in config.operand_maps(problem):
        if (reason := fits(tensor_map)) is not None:
            return f"{config.parameters.arrays[operand]} cannot be fetched by TMA: {reason}"
    return None


def no_wide_rows(operand: str, strides: Strides, columns: int, dtype: str, least: int = 16) -> str | None:
    """Why the rows of an array cannot be copied `least` bytes at a time, or None."""
    if strides[3] not in (0, 1) or (strides[3] == 0 and columns > 1):
        return f"{operand} is not contiguous along dim"
    if any(stride * ITEM_SIZE[dtype] % least for stride in strides[:3]):
        return f"{operand} has rows, heads or batch entries that do not begin at multiples of {least} bytes"
    return None


def strides_that_matter(problem: Problem) -> list[tuple[str, Strides]]:
    """The strides of arrays with elements; a library may give an empty array any strides."""
    p = problem
    named = [("q", p.q_strides)] * (p.seqlen_q > 0) + [("k", p.k_strides), ("v", p.v_strides)] * (p.seqlen_k > 0)
    return named * (p.batch * p.heads > 0)
