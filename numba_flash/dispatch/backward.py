"""The path of attention_backward() below its signature, as forward.py is that of attention()."""

import functools
from typing import Any, NamedTuple

from .. import arrays
from ..arrays import Layout
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from ..problem.memory import check_alignments, check_lengths, named
from ..problem.option_checks import window_sides
from ..problem.options import ARRAY_NAMES, GRADIENT_OF, NO_NUMBERS, AttentionGradients, GradientOperands, Options
from ..select.backward import BackwardChoice, select_backward
from .caller_functions import block_mask_of, read_functions
from .forward import (
    BIAS,
    NO_ARRAYS,
    OF_FUNCTIONS,
    SEED,
    Given,
    read_options,
    remember,
    with_layouts,
    with_seed,
)
from .launch import Launch
from .launch_backward import make_backward_launch
from .repeated import Addresses, Backward, is_repeatable, key_of_options


class CallPlan(NamedTuple):
    """What to compute, where and with which kernels, ready to run."""

    problem: BackwardProblem
    target: Target
    choice: BackwardChoice
    launch: Launch
    shapes: tuple[tuple[tuple[int, ...], str] | None, ...]  # shape and dtype of each wanted gradient
    aux_shapes: tuple[tuple[tuple[int, ...], str] | None, ...]  # likewise of those of aux; () for none at all


def run(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    dlse: Any,
    wanted: Any,
    options: Given,
    deterministic: Any,
    stream: Any,
    kernel: Any,
) -> AttentionGradients:
    """`attention_backward` for arrays that have addresses. Raises arrays.NeedsBridge if a framework records the
    computation."""
    again = find(do, q, k, v, o, lse, wanted, options, deterministic, kernel) if dlse is stream is None else None
    if again is not None:
        _, inputs, incoming, known = again
        if known is not None:
            return AttentionGradients(*known.run(q, inputs, incoming))
    given, (problem, _, _, launch, shapes, aux_shapes) = prepare(
        do, q, k, v, o, lse, dlse, wanted, options, deterministic, stream, kernel
    )
    like = given[0]
    work_on = arrays.stream_of(given, stream)
    empty = arrays.empty if stream is None else functools.partial(arrays.empty_for, work_on)
    results = [None if wanted_shape is None else empty(like, *wanted_shape) for wanted_shape in shapes]
    of_aux = [None if wanted_shape is None else empty(like, *wanted_shape) for wanted_shape in aux_shapes]
    own, seed = len(_READ), options[SEED]
    if seed is not None or problem.forward.numbers:
        given = with_seed(given, own, problem.forward, seed)
    operands = [*given[:own], *results, *given[own:], *of_aux]
    blocks = None if options[OF_FUNCTIONS] is None else block_mask_of(options[OF_FUNCTIONS])
    with arrays.shown(like.layout.family, "numba_flash.attention_backward"):
        if blocks is None:
            launch.run(operands, work_on)
        else:
            launch.run_with_blocks(operands, work_on, blocks)
    if again is not None and is_repeatable(launch, q, k, v, o, lse, do):
        remember(_plans, again[0], Backward.of(launch, q, like.layout, shapes[:3]))
    found, daux = (
        [None if array is None else arrays.give(like, array) for array in made] for made in (results, of_aux)
    )
    return AttentionGradients(*found, **dict(daux=tuple(daux)) if aux_shapes else {})


def find(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, wanted: Any, options: Given, deterministic: Any, kernel: Any
) -> tuple[Any, Addresses, Addresses, Backward | None] | None:
    """For a call that may equal an earlier one, before its key is computed: the addresses of q, k and v, those of o,
    lse and do, and what such a call does, if `run` has stored it. None for other calls."""
    family = arrays.one_go.get(type(q))
    if family is None:
        return None
    read, rest, asked = family.facts(q, k, v), family.facts(o, lse, do), key_of_options(options)
    if read is None or rest is None or asked is None:
        return None
    inputs, facts, recorded = read
    incoming, more_facts, also_recorded = rest
    every = inputs[0] | inputs[1] | inputs[2] | incoming[0] | incoming[2]
    if (every | incoming[1]) & 7 or recorded or also_recorded:
        return None
    key = facts, more_facts, wanted, asked, deterministic, type(deterministic), kernel, every % 16
    try:
        return key, inputs, incoming, _plans.get(key)  # type: ignore[return-value]
    except TypeError:  # unhashable
        return None


def prepare(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    dlse: Any,
    wanted: Any,
    options: Given,
    deterministic: Any,
    stream: Any,
    kernel: Any,
) -> tuple[list[Any], CallPlan]:
    """Everything before memory is allocated or anything runs. The arrays are in the order of GradientOperands, followed
    by those of aux."""
    read, checks = arrays.read, arrays.checks
    causal, window, q_offset, numbers, option_arrays, functions, layout, _ = options
    offsets = None
    if q_offset is not None and arrays.is_array(q_offset):
        offsets, q_offset = read("q_offset", q_offset), None
    q, k, v, o, lse = read("q", q), read("k", k), read("v", v), read("o", o), read("lse", lse)
    more = NO_ARRAYS if option_arrays is None else read_options(option_arrays)
    do = read("do", do)
    dlse = None if dlse is None else read("dlse", dlse)
    if window is not None:
        window = window_sides(window)  # before it becomes part of a key: (1.0, 0) and (1, 0) would be equal
    given = [q, k, v, o, lse, *more, offsets, do, dlse]
    blocks = None
    if functions is not None:
        blocks = block_mask_of(functions)
        functions, aux = read_functions(functions)
        given += aux
    if q.layout.family == "jax":
        given[5:_DO] = arrays.beside_jax(q, given[5:_DO])
        given[len(_READ) :] = arrays.beside_jax(q, given[len(_READ) :])
    if q.layout.family in checks:
        checks[q.layout.family](given)
    addresses = q.pointer | k.pointer | v.pointer | o.pointer | do.pointer
    # nearly always none of them is given, and absent ones need no individual check
    rare = given[5:_DO] + given[len(_READ) :]
    optional = None if rare == _NO_OPTIONAL else tuple([array and array.layout for array in rare])
    key: tuple[Any, ...] = (
        q.layout, k.layout, v.layout, o.layout, lse.layout, do.layout, dlse and dlse.layout, optional, wanted, causal,
        window, q_offset, numbers, functions, layout, deterministic, kernel, stream is not None, addresses % 16 == 0,
        optional is not None and given[BIAS] and given[BIAS].pointer % 16 == 0,
        # 1 and True are equal as keys, but causal= accepts only one of them
        type(q_offset), type(causal), type(deterministic), None if numbers is NO_NUMBERS else tuple(map(type, numbers)),
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
        blocks.check(found.problem.forward)
    if optional is not None or dlse is not None or (addresses | lse.pointer) & 7:
        check_alignments([array for array in given if array is not None], lambda: named(_READ, given))
        if given[_SEQLENS_K] is not None:
            check_lengths(given[_SEQLENS_K], found.problem.forward)
    return given, found


KEY = 20  # number of entries of a key that are the arguments of `plan`
_NO_OPTIONAL: list[Any] = [None] * len(ARRAY_NAMES)
_DO, _SEQLENS_K = (GradientOperands._fields.index(name) for name in ("do", "seqlens_k"))
_READ = GradientOperands._fields[: _DO + 2]  # the names of the given arrays; dlse is the last


def plan(
    q: Layout,
    k: Layout,
    v: Layout,
    o: Layout,
    lse: Layout,
    do: Layout,
    dlse: Layout | None,
    optional: tuple[Layout | None, ...] | None,
    wanted: Any,
    causal: Any,
    window: Any,
    q_offset: Any,
    numbers: tuple[Any, ...],
    functions: tuple[Any, ...] | None,
    layout: Any,
    deterministic: Any,
    kernel: Any,
    has_stream: bool,
    aligned: bool,
    bias_aligned: bool = False,
) -> CallPlan:
    """All that follows from layouts and options, so that a repeated call finds its plan.

    optional: the layouts of ARRAY_NAMES, followed by those of aux; None if there are none. bias_aligned: bias begins at
    a multiple of 16 bytes.
    """
    options = Options(causal, window, q_offset, numbers, None, functions, layout)
    options = with_layouts(options, list(optional or _NO_OPTIONAL))
    problem = BackwardProblem.of(do, q, k, v, o, lse, dlse, options, wanted, deterministic, aligned, bias_aligned)
    target = Target.of(q.device)
    choice = select_backward(problem, target, kernel, q.family, has_stream)
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
_plans: dict[tuple[Any, ...], CallPlan | Backward] = {}
