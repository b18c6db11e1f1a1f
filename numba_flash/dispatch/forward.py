"""The path of attention() below its signature: read the arrays, plan, run.

Layouts and options determine the CallPlan: Problem, Target, Choice and Launch. The first call creates it, later calls
look it up. So a repeated call reads its arrays, looks up its plan, and launches.
"""

import functools
from typing import Any, NamedTuple

from .. import arrays
from ..arrays import Array
from ..machine.target import Target
from ..problem.forward import Problem
from ..problem.memory import check_memory
from ..problem.option_checks import window_sides
from ..problem.options import NO_NUMBERS, Operands
from ..select.forward import Choice, select
from .cached_call import Addresses, CachedForward, is_cacheable
from .call import NO_OTHERS, Call, Fields, PlanKey, enqueue, look_up, store
from .launch import Launch, make_launch

O, LSE = Operands._fields.index("o"), Operands._fields.index("lse")
OWN = len(Operands._fields)


class AttentionOutput(NamedTuple):
    """o in the caller's layout and dtype; lse (batch, heads, seqlen_q), natural logarithm."""

    o: Any
    lse: Any


class CallPlan(NamedTuple):
    """A planned forward, ready to run: the problem, the device and the kernel."""

    problem: Problem
    target: Target
    choice: Choice
    launch: Launch


def run(call: Call) -> Any:
    """`attention` for arrays that have addresses. Raises arrays.NeedsBridge if a framework records the computation."""
    given, found = prepare(call)
    problem, launch = found.problem, found.launch
    like, o, lse = given[0], given[O], given[LSE]
    assert like is not None
    work_on = arrays.stream_of(given, call.stream)
    empty = arrays.empty if call.stream is None else functools.partial(arrays.empty_for, work_on)
    if o is None:
        o = given[O] = empty(like, problem.o_shape, problem.dtype)
    else:
        arrays.note_writing(o, lse)
    if lse is None and call.return_lse:
        lse = given[LSE] = empty(like, problem.lse_shape, problem.compute_dtype)
    enqueue(call, found, given, OWN, work_on, "numba_flash.attention")
    if call.key is not None and is_cacheable(launch, *call.operands[:3]):
        of_o, of_lse = (problem.o_shape, problem.dtype), (problem.lse_shape, problem.compute_dtype)
        layouts = [array.layout for array in (*given[:3], o)]
        store(_plans, call.key, CachedForward.of(launch, call, layouts, of_o, of_lse if call.return_lse else None))
    if lse is None:
        return arrays.give(like, o)
    return AttentionOutput(arrays.give(like, o), arrays.give(like, lse))


def find(fields: Fields) -> tuple[Any, CachedForward | None, Addresses, bool] | None:
    """For a call that may equal an earlier one: the key of its cached call; that cached call, if `run` has stored it;
    the addresses of q, k, v and, if given, out; and whether a framework records the call. None for other calls."""
    (q, k, v, out), options, return_lse, _, stream, kernel = fields
    causal, window, q_offset, numbers, option_arrays, functions, layout, seed = options
    if not option_arrays is functions is seed is stream is None or not (q_offset is None or type(q_offset) is int):
        return None
    if not (causal is False or causal is True) or not (return_lse is False or return_lse is True):
        return None  # 1 and True are equal as keys, but causal= accepts only one of them
    family = arrays.fast_paths[type(q)]
    read = None if family is None else family.facts(q, k, v)
    if read is None:
        return None
    addresses: Addresses
    addresses, facts, recorded = read
    every = addresses[0] | addresses[1] | addresses[2]
    of_out: Any = None
    if out is not None:
        written = family.facts_of_output(out) if type(out) is type(q) and not recorded else None
        if written is None:
            return None
        address, of_out = written
        every |= address
        addresses += (address,)
    if every & 7:
        return None
    if window is not None:
        window = window_sides(window)
    wants_lse = recorded or return_lse  # the backward reads it
    types = None if numbers is NO_NUMBERS else tuple(map(type, numbers))
    key = facts, of_out, causal, window, q_offset, numbers, types, layout, wants_lse, kernel, every % 16
    try:
        cached: Any = _plans.get(key)
    except TypeError:  # unhashable
        return None
    if cached is not None and out is not None and cached.overlaps(addresses):
        return None  # `prepare` reports the input with which it shares memory
    return key, cached, addresses, recorded


def prepare(call: Call) -> tuple[list[Array | None], CallPlan]:
    """Does everything before memory is allocated or anything runs; `explain` reports it.

    The arrays are in the order of Operands, followed by those of aux; o and lse are those given as out=, or None.
    """
    read = arrays.read
    q, k, v, out = call.operands
    o = lse = None
    if out is not None:
        pair = out if isinstance(out, tuple) else (out,)
        if len(pair) != (2 if call.return_lse and isinstance(out, tuple) else 1):
            raise ValueError("out must be one array, or with return_lse=True also a pair (o, lse)")
        o = read("out", pair[0])
        lse = read("the lse of out", pair[1]) if len(pair) == 2 else None
    q, k, v = read("q", q), read("k", k), read("v", v)
    operands = q, k, v, o, lse
    layouts = q.layout, k.layout, v.layout, o and o.layout, lse and lse.layout
    addresses = q.pointer | k.pointer | v.pointer | (o.pointer if o else 0)
    others, found = look_up(call, operands, layouts, addresses, plan, _plans)
    given = [*operands, *others]
    if o is not None or others is not NO_OTHERS or addresses & 7:
        check_memory(given, found.problem)
    return given, found


def plan(key: PlanKey) -> CallPlan:
    """Makes the plan from layouts and options alone, so that a repeated call finds it again."""
    q, k, v, o, lse = key.operands
    assert q is not None and k is not None and v is not None
    problem = Problem.of(q, k, v, key.options(), o, lse, key.return_lse, key.alignment, key.bias_aligned)
    problem = problem.if_kept(key.kept)
    target = Target.of(q.device)
    choice = select(problem, target, key.kernel, q.family, key.has_stream)
    if not choice.copies:
        return CallPlan(problem, target, choice, make_launch(choice, problem, target))
    from . import host_copies

    operands, others = (
        host_copies.layouts_of_copies(key.operands),
        key.others and host_copies.layouts_of_copies(key.others),
    )
    there = plan(key._replace(operands=operands, others=others, has_stream=False, alignment=16, bias_aligned=True))
    choice = there.choice._replace(copies=True)
    return CallPlan(problem, target, choice, host_copies.ThroughGpu(there.launch))


# The plans of earlier calls, and under other keys the cached calls that `find` returns. Each call looks one up.
# functools.lru_cache would take twice as long, since it adds the type of every part of the key.
_plans: dict[tuple[Any, ...], CallPlan | CachedForward] = {}

# If torch.compile reaches `attention` directly, it leaves its graph here.
NOT_TO_BE_TRACED: tuple[Any, ...] = (run, find, CachedForward.run)
for _function in NOT_TO_BE_TRACED:
    _function._torchdynamo_disable = True
