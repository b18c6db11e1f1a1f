"""The path of attention() below its signature: read the arrays, plan, run.

A CallPlan is all that follows from layouts and options: Problem, Target, Choice and Launch. The first call creates it,
later calls look it up. So a repeated call reads its arrays, looks up its plan, and launches.
"""

import functools
import math
import operator
from typing import Any, NamedTuple

from .. import arrays
from ..arrays import Layout
from ..machine.target import Target
from ..problem.forward import Problem
from ..problem.memory import check_memory
from ..problem.option_checks import window_sides
from ..problem.options import ARRAY_NAMES, NO_NUMBERS, OPTION_ARRAYS, SEEDED, Operands, Options
from ..select.forward import Choice, select
from .launch import Launch, make_launch
from .repeated import Addresses, Forward, is_repeatable, key_of_options

O, LSE = Operands._fields.index("o"), Operands._fields.index("lse")
BIAS, OWN, SEED = Operands._fields.index("bias"), len(Operands._fields), Options._fields.index("seed")
OF_FUNCTIONS = Options._fields.index("functions")
_NO_OTHERS: list[Any] = [None] * (len(Operands._fields) - 3)
NO_ARRAYS: list[Any] = [None] * len(OPTION_ARRAYS)
NO_AUX: tuple[Any, ...] = ()  # a default with which each call compares; comparing one object takes a fifth of the time


Given = tuple[Any, ...]  # the fields of Options, or an Options


class AttentionOutput(NamedTuple):
    """o in the caller's layout and dtype; lse (batch, heads, seqlen_q), natural logarithm."""

    o: Any
    lse: Any


class CallPlan(NamedTuple):
    """What to compute, where and with which kernel, ready to run."""

    problem: Problem
    target: Target
    choice: Choice
    launch: Launch


def run(q: Any, k: Any, v: Any, options: Given, return_lse: Any, out: Any, stream: Any, kernel: Any) -> Any:
    """`attention` for arrays that have addresses. Raises arrays.NeedsBridge if a framework records the computation."""
    given, found = prepare(q, k, v, options, return_lse, out, stream, kernel)
    problem, launch = found.problem, found.launch
    like, o, lse, seed = given[0], given[O], given[LSE], options[SEED]
    work_on = arrays.stream_of(given, stream)
    empty = arrays.empty if stream is None else functools.partial(arrays.empty_for, work_on)
    if o is None:
        o = given[O] = empty(like, problem.o_shape, problem.dtype)
    if lse is None and return_lse:
        lse = given[LSE] = empty(like, problem.lse_shape, problem.compute_dtype)
    if out is not None:
        arrays.note_writing(o, lse)
    if seed is not None or problem.numbers:
        given = with_seed(given, OWN, problem, seed)
    blocks = None if options[OF_FUNCTIONS] is None else caller_functions().block_mask_of(options[OF_FUNCTIONS])
    with arrays.shown(like.layout.family, "numba_flash.attention"):
        if blocks is None:
            launch.run(given, work_on)
        else:
            launch.run_with_blocks(given, work_on, blocks)
    again = find(q, k, v, options, return_lse, out, kernel) if stream is None else None
    if again is not None and is_repeatable(launch, q, k, v):
        of_o, of_lse = (problem.o_shape, problem.dtype), (problem.lse_shape, problem.compute_dtype)
        layouts = [array.layout for array in (*given[:3], o)]
        known = Forward.of(launch, q, layouts, of_o, of_lse if return_lse else None, options, kernel)
        remember(_plans, again[0], known)
    if lse is None:
        return arrays.give(like, o)
    return AttentionOutput(arrays.give(like, o), arrays.give(like, lse))


def find(
    q: Any, k: Any, v: Any, options: Given, return_lse: Any, out: Any, kernel: Any
) -> tuple[Any, Addresses, bool, Forward | None] | None:
    """For a call that may equal an earlier one, before its key is computed: the addresses of q, k, v and, if given,
    out; whether their library must be told of the call; and what such a call does, if `run` has stored it. None for
    other calls."""
    family = arrays.one_go.get(type(q))
    if family is None:
        return None
    read, asked = family.facts(q, k, v), key_of_options(options)
    if read is None or asked is None:
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
        addresses = (*addresses, address)
    if every & 7:
        return None
    wants_lse = True if recorded else return_lse  # the backward reads it
    key = facts, of_out, asked, wants_lse, type(wants_lse), kernel, every % 16
    try:
        known: Any = _plans.get(key)
    except TypeError:  # unhashable
        return None
    if known is not None and out is not None and known.overlaps(addresses):
        return None  # `prepare` says with which input it shares memory
    return key, addresses, recorded, known


def prepare(
    q: Any, k: Any, v: Any, options: Given, return_lse: Any, out: Any, stream: Any, kernel: Any
) -> tuple[list[Any], CallPlan]:
    """Everything before memory is allocated or anything runs; `explain` reports it.

    The arrays are in the order of Operands, followed by those of aux; o and lse are those given as out=, or None.
    """
    read, checks = arrays.read, arrays.checks
    causal, window, q_offset, numbers, option_arrays, functions, layout, _ = options
    o = lse = None
    if out is not None:
        pair = out if isinstance(out, tuple) else (out,)
        if len(pair) != (2 if return_lse and isinstance(out, tuple) else 1):
            raise ValueError("out must be one array, or with return_lse=True also a pair (o, lse)")
        o = read("out", pair[0])
        lse = read("the lse of out", pair[1]) if len(pair) == 2 else None
    offsets = None
    if q_offset is not None and arrays.is_array(q_offset):
        offsets, q_offset = read("q_offset", q_offset), None
    q, k, v = read("q", q), read("k", k), read("v", v)
    more = NO_ARRAYS if option_arrays is None else read_options(option_arrays)
    if window is not None:
        window = window_sides(window)  # before it becomes part of a key: (1.0, 0) and (1, 0) would be equal
    addresses = q.pointer | k.pointer | v.pointer | (o.pointer if o else 0)
    given = [q, k, v, o, lse, *more, offsets]
    blocks = None
    if functions is not None:
        blocks = caller_functions().block_mask_of(functions)
        functions, aux = caller_functions().read_functions(functions)
        given += aux
    if q.layout.family == "jax":
        given[LSE + 1 :] = arrays.beside_jax(q, given[LSE + 1 :])
    if q.layout.family in checks:
        checks[q.layout.family](given)
    # nearly always only q, k and v are given, and absent ones need no individual check
    others = None if given[3:] == _NO_OTHERS else tuple([array and array.layout for array in given[3:]])
    key: tuple[Any, ...] = (
        q.layout, k.layout, v.layout, others, causal, window, q_offset, numbers, functions, layout, return_lse, kernel,
        stream is not None, addresses % 16 == 0, others is not None and given[BIAS] and given[BIAS].pointer % 16 == 0,
        # 1 and True are equal as keys, but causal= accepts only one of them
        type(q_offset), type(causal), type(return_lse), None if numbers is NO_NUMBERS else tuple(map(type, numbers)),
    )  # fmt: skip
    try:
        found: Any = _plans.get(key)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        found = plan(*key[:KEY])  # a value that cannot be part of a key was given: report what is wrong with it
    if found is None:
        found = plan(*key[:KEY])
        remember(_plans, key, found)
    if blocks is not None:
        blocks.check(found.problem)
    if others is not None or addresses & 7:
        check_memory(given, found.problem)
    return given, found


def plan(
    q: Layout,
    k: Layout,
    v: Layout,
    others: tuple[Layout | None, ...] | None,
    causal: Any,
    window: Any,
    q_offset: Any,
    numbers: tuple[Any, ...],
    functions: tuple[Any, ...] | None,
    layout: Any,
    return_lse: Any,
    kernel: Any,
    has_stream: bool,
    aligned: bool,
    bias_aligned: bool = False,
) -> CallPlan:
    """All that follows from layouts and options, so that a repeated call finds its plan.

    others: the layouts of Operands from o on, followed by those of aux; None if there are none. bias_aligned: bias
    begins at a multiple of 16 bytes.
    """
    o, lse, *more = others or _NO_OTHERS
    options = with_layouts(Options(causal, window, q_offset, numbers, None, functions, layout), more)
    problem = Problem.of(q, k, v, options, o, lse, return_lse, aligned, bias_aligned)
    target = Target.of(q.device)
    choice = select(problem, target, kernel, q.family, has_stream)
    if not choice.copies:
        return CallPlan(problem, target, choice, make_launch(choice, problem, target))
    from . import host_copies

    copy = host_copies.layout_of_copy
    others = others and tuple([array and copy(array) for array in others])
    asked = causal, window, q_offset, numbers, functions, layout, return_lse, kernel
    there = plan(copy(q), copy(k), copy(v), others, *asked, has_stream=False, aligned=True, bias_aligned=True)
    choice = there.choice._replace(copies=True)
    return CallPlan(problem, target, choice, host_copies.ThroughGpu(there.launch))


# The plans of earlier calls, and under other keys what `find` returns. Each call looks one up. functools.lru_cache,
# which would add the type of every part of the key, takes twice as long.
_plans: dict[tuple[Any, ...], CallPlan | Forward] = {}
MOST_PLANS = 4096


def remember(plans: dict[tuple[Any, ...], Any], key: tuple[Any, ...], found: Any) -> None:
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = found


KEY = 15  # number of entries of a key that are the arguments of `plan`


def read_options(given: tuple[Any, ...]) -> list[arrays.Array | None]:
    """The arrays of OPTION_ARRAYS."""
    read, found = arrays.read, []
    for name, x in zip(OPTION_ARRAYS, given):  # noqa: B905 - strict= takes as long as reading one
        found.append(None if x is None else read(name, x))
    return found


def caller_functions() -> Any:
    """The module caller_functions. It takes a fifth of the time of an import; a plain call does not need it."""
    from . import caller_functions

    return caller_functions


def with_layouts(options: Options, found: list[Layout | None]) -> Options:
    """The options with the layouts of ARRAY_NAMES, and those of aux, in their places."""
    own, aux = found[: len(OPTION_ARRAYS)], tuple(found[len(ARRAY_NAMES) :])
    offsets = found[len(OPTION_ARRAYS)]
    functions = None if options.functions is None else (*options.functions, aux)
    q_offset = options.q_offset if offsets is None else offsets
    return options._replace(arrays=tuple(own), q_offset=q_offset, functions=functions)


class Seed(NamedTuple):
    """An entry of a launch's operands that is no array: a kernel takes it in the place of a pointer."""

    pointer: int


def with_seed(given: list[Any], own: int, problem: Problem, seed: Any) -> list[Any]:
    """`given` with the seed of a problem that needs one, after its `own` operands and before aux."""
    if seed is None and not problem.seeded:
        return given
    number = seed_number(seed)
    # A seed is allowed even if nothing is dropped: a model may need it in other calls.
    return [*given[:own], Seed(number), *given[own:]] if problem.seeded else given


OF_A_KEY = 'of a key of JAX: jax.random.bits(key, dtype="uint32")'


def seed_number(seed: Any) -> int:
    """The seed that a caller gave, as a number."""
    if seed is None:
        raise ValueError(
            f"{SEEDED} needs seed=, a whole number, another one for each call: nothing is drawn from a state that is "
            "not seen, and the backward takes the same one"
        )
    try:
        if isinstance(seed, bool):
            raise TypeError
        number = operator.index(_on_host(seed) if arrays.is_array(seed) else seed)
    except TypeError:
        arrays.refuse_jax_tracer(seed)
        given = f"{seed.dtype} of shape {tuple(seed.shape)}" if arrays.is_array(seed) else repr(seed)
        of_a_key = f"; {OF_A_KEY}" if type(seed).__module__.startswith("jax") else ""
        raise TypeError(f"seed must be a whole number, not {given}{of_a_key}") from None
    if not 0 <= number < 2**64:
        raise ValueError(f"seed must be from 0 to below 2**64, not {number}")
    return number


def _on_host(seed: Any) -> Any:
    """An array of one number as one that NumPy can read: torch's own conversion ends at 2**63. Of a GPU's, its library
    makes a number, and waits for it."""
    array = arrays.read("seed", seed)
    view = seed if array.layout.device is not None else arrays.host_view(array)
    return view.reshape(()) if math.prod(view.shape) == 1 else view


# If torch.compile reaches `attention` directly, it leaves its graph here.
NOT_TO_BE_TRACED: tuple[Any, ...] = (run, find, Forward.run)
for _function in NOT_TO_BE_TRACED:
    _function._torchdynamo_disable = True
