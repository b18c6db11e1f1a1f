"""The path of attention_backward(), below its signature; as forward.py is of attention()."""

import functools
from typing import Any, NamedTuple

from .. import arrays
from ..arrays import GradientOperands, Layout
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from ..problem.forward import check_alignments, check_lengths, window_sides
from ..select.backward import BackwardChoice, select_backward
from .forward import MOST_PLANS, NO_AUX, read_functions
from .launch import Launch
from .launch_backward import make_backward_launch


class AttentionGradients(NamedTuple):
    """dq, dk and dv in the layout, shape and dtype of q, k and v; dbias and dalibi_slopes in those of bias and
    alibi_slopes. None for what was not wanted."""

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dalibi_slopes: Any = None


class CallPlan(NamedTuple):
    """What is to be computed, where and by what; and that, ready to be run."""

    problem: BackwardProblem
    target: Target
    choice: BackwardChoice
    launch: Launch
    shapes: tuple[tuple[tuple[int, ...], str] | None, ...]  # shape and dtype of each gradient that is wanted


def run(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, wanted: Any, causal: Any, window: Any, q_offset: Any,
    seqlens_k: Any, scale: Any, softcap: Any, alibi_slopes: Any, bias: Any, mask: Any, score_mod: Any, mask_mod: Any,
    aux: Any, layout: Any, deterministic: Any, stream: Any, kernel: Any,
) -> AttentionGradients:  # fmt: skip
    """`attention_backward` for arrays that have addresses. Raises arrays.NeedsBridge as `forward.run` does."""
    given, (_, _, _, launch, shapes) = prepare(
        do, q, k, v, o, lse, dlse, wanted, causal, window, q_offset, seqlens_k, scale, softcap, alibi_slopes, bias,
        mask, score_mod, mask_mod, aux, layout, deterministic, stream, kernel,
    )  # fmt: skip
    like = given[0]
    work_on = arrays.stream_of(given, stream)
    empty = arrays.empty if stream is None else functools.partial(arrays.empty_for, work_on)
    results = [None if wanted_shape is None else empty(like, *wanted_shape) for wanted_shape in shapes]
    own = len(_READ)
    launch.run([*given[:own], *results, *given[own:]], work_on)
    return AttentionGradients(*[None if array is None else arrays.give(like, array) for array in results])


def prepare(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, wanted: Any, causal: Any, window: Any, q_offset: Any,
    seqlens_k: Any, scale: Any, softcap: Any, alibi_slopes: Any, bias: Any, mask: Any, score_mod: Any, mask_mod: Any,
    aux: Any, layout: Any, deterministic: Any, stream: Any, kernel: Any,
) -> tuple[list[Any], CallPlan]:  # fmt: skip
    """Everything before memory is allocated or anything runs. The arrays come in the order of GradientOperands, and
    behind them those of aux."""
    read, checks = arrays.read, arrays.checks
    offsets = None
    if q_offset is not None and arrays.is_array(q_offset):
        offsets, q_offset = read("q_offset", q_offset), None
    q, k, v, o, lse = read("q", q), read("k", k), read("v", v), read("o", o), read("lse", lse)
    bias = None if bias is None else read("bias", bias)
    mask = None if mask is None else read("mask", mask)
    alibi_slopes = None if alibi_slopes is None else read("alibi_slopes", alibi_slopes)
    seqlens_k = None if seqlens_k is None else read("seqlens_k", seqlens_k)
    do = read("do", do)
    dlse = None if dlse is None else read("dlse", dlse)
    if window is not None:
        window = window_sides(window)  # before it is part of a key: (1.0, 0) and (1, 0) would be the same one
    given = [q, k, v, o, lse, bias, mask, alibi_slopes, seqlens_k, offsets, do, dlse]
    if not (score_mod is mask_mod is None and aux is NO_AUX):
        score_mod, mask_mod, more = read_functions(score_mod, mask_mod, aux)
        given += more
    if q.layout.family in checks:
        checks[q.layout.family](given)
    addresses = q.pointer | k.pointer | v.pointer | o.pointer | do.pointer
    # nearly always there is none of them, and what is not there need not be looked at one by one
    optional = None if given[5:10] == _NO_OPTIONAL else tuple([array and array.layout for array in given[5:10]])
    functions = None
    if not score_mod is mask_mod is None or len(given) > len(_READ):
        functions = score_mod, mask_mod, tuple([array.layout for array in given[len(_READ) :]])
    key = (
        q.layout, k.layout, v.layout, o.layout, lse.layout, do.layout, dlse and dlse.layout, optional, functions,
        wanted, q_offset, causal, window, scale, softcap, layout, deterministic, kernel, stream is not None,
        addresses % 16 == 0, bias is not None and bias.pointer % 8 == 0,
        # 1 and True are equal as keys, but only one of them is a causal=
        type(q_offset), type(causal), type(scale), type(softcap), type(deterministic),
    )  # fmt: skip
    try:
        found = _plans.get(key)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        found = plan(*key[:-5])  # something that cannot be a key was given: say what is wrong with it
    if found is None:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        found = _plans[key] = plan(*key[:-5])
    if optional is not None or functions is not None or dlse is not None or (addresses | lse.pointer) & 7:
        names = [*_READ, *(f"aux[{number}]" for number in range(len(given) - len(_READ)))]
        check_alignments([array for array in given if array is not None], names, given)
        if found.problem.forward.array("seqlens_k") is not None:
            check_lengths(seqlens_k, found.problem.forward)
    return given, found


_NO_OPTIONAL = [None] * 5
_READ = GradientOperands._fields[:12]  # the names of what is given


def plan(
    q: Layout, k: Layout, v: Layout, o: Layout, lse: Layout, do: Layout, dlse: Layout | None,
    optional: tuple[Layout | None, ...] | None, functions: tuple[Any, ...] | None, wanted: Any, q_offset: Any,
    causal: Any, window: Any, scale: Any, softcap: Any, layout: Any, deterministic: Any, kernel: Any, has_stream: bool,
    aligned: bool, bias_aligned: bool = False,
) -> CallPlan:  # fmt: skip
    """All that follows from layouts and options, so that the plan of a call seen before is looked up.

    optional: the layouts of GradientOperands from bias to q_offset; None for none at all. functions: score_mod,
    mask_mod and the layouts of aux; None for none at all. bias_aligned: bias begins at a multiple of 8 bytes.
    """
    bias, mask, alibi_slopes, seqlens_k, q_offsets = optional or _NO_OPTIONAL
    problem = BackwardProblem.of(
        do, q, k, v, o, lse, dlse, bias, mask, alibi_slopes, seqlens_k, q_offsets, q_offset, causal, window, scale,
        softcap, layout, wanted, deterministic, aligned, bias_aligned, *(functions or ()),
    )  # fmt: skip
    target = Target.of(q.device)
    choice = select_backward(problem, target, kernel, q.family, has_stream)
    of_options = [problem.forward.array(name) for name in ("bias", "alibi_slopes")]
    dtypes = [*(problem.forward.dtype,) * 3, *[array and array.dtype for array in of_options]]
    shapes = tuple(
        (shape, str(dtype)) if name in problem.wanted else None
        for name, shape, dtype in zip(AttentionGradients._fields, problem.shapes, dtypes, strict=True)
    )
    return CallPlan(problem, target, choice, make_backward_launch(choice, problem, target), shapes)


# The plans of calls seen before, as in forward.py.
_plans: dict[tuple[Any, ...], CallPlan] = {}
