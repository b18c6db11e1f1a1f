"""The path of attention_backward() below its signature, as forward.py is that of attention()."""

import functools
from typing import Any, NamedTuple

from .. import arrays
from ..arrays import Array
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from ..problem.memory import check_alignments, check_lengths, named
from ..problem.option_checks import window_sides
from ..problem.options import ARRAY_NAMES, GRADIENT_OF, NO_NUMBERS, AttentionGradients, GradientOperands
from ..select.backward import BackwardChoice, select_backward
from .cached_call import Addresses, CachedBackward, is_cacheable
from .call import NO_OTHERS, Call, Fields, PlanKey, enqueue, folded, has_other_dimensions, look_up, store
from .launch import Launch
from .launch_backward import make_backward_launch

_SEQLENS_K = GradientOperands._fields.index("seqlens_k")
_READ = GradientOperands._fields[: -len(GRADIENT_OF)]  # the names of the given arrays


class CallPlan(NamedTuple):
    """A planned backward, ready to run: the problem, the device and the kernels."""

    problem: BackwardProblem
    target: Target
    choice: BackwardChoice
    launch: Launch
    shapes: tuple[tuple[tuple[int, ...], str] | None, ...]  # shape and dtype of each wanted gradient
    aux_shapes: tuple[tuple[tuple[int, ...], str] | None, ...]  # likewise for each array of aux; () if none is wanted


def run(fields: Fields) -> AttentionGradients:
    """`attention_backward` for arrays that have addresses. Raises arrays.NeedsBridge if a framework records the
    computation."""
    seen, key = find(fields), None
    if seen is not None:
        key, cached, inputs, incoming = seen
        if cached is not None:
            return AttentionGradients(*cached.run(fields[0][0], inputs, incoming))
    call = Call.of(fields)
    if has_other_dimensions(call.operands[0], call.options.layout):
        call, unfold = folded(call)
        return unfold(run(call[:-1]))  # type: ignore[no-any-return]
    given, found = prepare(call)
    like = given[0]
    assert like is not None
    work_on = arrays.stream_of(given, call.stream)
    empty = arrays.empty if call.stream is None else functools.partial(arrays.empty_for, work_on)
    results = [wanted and empty(like, *wanted) for wanted in found.shapes]
    of_aux = [wanted and empty(like, *wanted) for wanted in found.aux_shapes]
    operands = [*given[: len(_READ)], *results, *given[len(_READ) :], *of_aux]
    enqueue(call, found, operands, len(GradientOperands._fields), work_on, "numba_flash.attention_backward")
    if key is not None and is_cacheable(found.launch, *call.operands[:6]):
        store(_plans, key, CachedBackward.of(found.launch, call.operands[0], like.layout, found.shapes[:3]))
    gradients = [array and arrays.give(like, array) for array in results]
    if not of_aux:
        return AttentionGradients(*gradients)
    daux = tuple([array and arrays.give(like, array) for array in of_aux])
    return AttentionGradients._make((*gradients, daux))


def find(fields: Fields) -> tuple[Any, CachedBackward | None, Addresses, Addresses] | None:
    """For a call that may equal an earlier one: the key of its cached call; that cached call, if `run` has stored it;
    the addresses of q, k and v, and those of o, lse and do. None for other calls."""
    (q, k, v, o, lse, do, dlse), options, _, wanted, stream, kernel = fields
    causal, window, q_offset, numbers, option_arrays, functions, layout, seed = options
    if not option_arrays is functions is seed is stream is dlse is None:
        return None
    if not (q_offset is None or type(q_offset) is int):
        return None
    if not (causal is False or causal is True):
        return None  # 1 and True are equal as keys, but causal= accepts only one of them
    family = arrays.fast_paths[type(q)]
    if family is None:
        return None
    read, rest = family.facts(q, k, v), family.facts(o, lse, do)
    if read is None or rest is None:
        return None
    inputs, facts, recorded = read
    incoming, more_facts, also_recorded = rest
    every = inputs[0] | inputs[1] | inputs[2] | incoming[0] | incoming[2]
    if (every | incoming[1]) & 7 or recorded or also_recorded:
        return None
    if window is not None:
        window = window_sides(window)
    types = None if numbers is NO_NUMBERS else tuple(map(type, numbers))
    key = (
        facts, more_facts, causal, window, q_offset, numbers, types, layout, wanted, kernel, every % 16,
    )  # fmt: skip
    try:
        return key, _plans.get(key), inputs, incoming  # type: ignore[return-value]
    except TypeError:  # unhashable
        return None


def prepare(call: Call) -> tuple[list[Array | None], CallPlan]:
    """Does everything before memory is allocated or anything runs. The arrays are in the order of GradientOperands,
    followed by those of aux."""
    read = arrays.read
    q, k, v, o, lse, do, dlse = call.operands
    q, k, v, o, lse = read("q", q), read("k", k), read("v", v), read("o", o), read("lse", lse)
    do = read("do", do)
    dlse = None if dlse is None else read("dlse", dlse)
    operands = q, k, v, o, lse, do, dlse
    layouts = q.layout, k.layout, v.layout, o.layout, lse.layout, do.layout, dlse and dlse.layout
    addresses = q.pointer | k.pointer | v.pointer | o.pointer | do.pointer
    others, found = look_up(call, operands, layouts, addresses, plan, _plans)
    own = len(ARRAY_NAMES)
    given = [q, k, v, o, lse, *others[:own], do, dlse, *others[own:]]
    every = addresses | lse.pointer | (dlse.pointer if dlse else 0)
    if others is not NO_OTHERS or every & 7:
        check_alignments([array for array in given if array is not None], lambda: named(_READ, given))
        if given[_SEQLENS_K] is not None or found.problem.forward.packed is not None:
            check_lengths(dict(zip(_READ, given, strict=False)), found.problem.forward)
    return given, found


def plan(key: PlanKey) -> CallPlan:
    """Makes the plan from layouts and options alone, so that a repeated call finds it again."""
    q, k, v, o, lse, do, dlse = key.operands
    assert q is not None and k is not None and v is not None and o is not None and lse is not None and do is not None
    problem = BackwardProblem.of(do, q, k, v, o, lse, dlse, key.options(), key.wanted, key.alignment, key.bias_aligned)
    problem = problem.if_kept(key.kept)
    target = Target.of(q.device)
    choice = select_backward(problem, target, key.kernel, q.family, key.has_stream)
    given = {array.name: array.dtype for array in problem.forward.arrays}
    shapes = tuple(
        (shape, given.get(of, problem.forward.dtype)) if name in problem.wanted else None
        for (name, of), shape in zip(GRADIENT_OF.items(), problem.shapes, strict=True)
    )
    aux_shapes = tuple(
        (array.shape, array.dtype) if number in problem.wanted_aux else None
        for number, array in enumerate(problem.forward.aux if problem.wanted_aux else ())
    )
    return CallPlan(problem, target, choice, make_backward_launch(choice, problem, target), shapes, aux_shapes)


# The plans of earlier calls, as in forward.py.
_plans: dict[tuple[Any, ...], CallPlan | CachedBackward] = {}
