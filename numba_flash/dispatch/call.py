"""Call: a caller's arguments, made once by a public function. And the steps that forward.py and backward.py share:
from options to the plan, and from operands to the launch."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import arrays
from ..arrays import Array, Layout
from ..problem.option_checks import window_sides
from ..problem.options import ARRAY_NAMES, NO_NUMBERS, OPTION_ARRAYS, Options, Packed

NO_AUX: tuple[Any, ...] = ()  # the default: calls compare with `is`, which takes a fifth of the time of ==
BIAS = ARRAY_NAMES.index("bias")
NO_ARRAYS: list[Any] = [None] * len(OPTION_ARRAYS)
NO_OTHERS: list[Any] = [None] * len(ARRAY_NAMES)
MOST_PLANS = 4096


class Call(NamedTuple):
    """The arguments of attention() or attention_backward()."""

    operands: tuple[Any, ...]  # forward: q, k, v and out; backward: q, k, v, o, lse, do and dlse
    options: Options
    return_lse: Any = True
    wanted: Any = None  # the gradients; None: it is a forward
    stream: Any = None
    kernel: Any = "auto"
    key: Any = None  # the key under which this call will be cached, from `find`; None: it is not cached

    @staticmethod
    def of(fields: "Fields", key: Any = None) -> "Call":
        operands, options, return_lse, wanted, stream, kernel = fields
        options = _make(Options, options)
        return _make(Call, (operands, options, return_lse, wanted, stream, kernel, key))


_make: Any = tuple.__new__  # takes half the time of Call(...)
# A Call's fields without its key, as a plain tuple, with the fields of Options as another one. A repeated call needs no
# more, and plain tuples take a quarter of the time.
Fields = tuple[Any, ...]


class PlanKey(NamedTuple):
    """The layouts and options of a call. They determine its plan."""

    operands: tuple[Layout | None, ...]  # q, k, v, o and lse; backward: also do and dlse
    others: tuple[Layout | None, ...] | None = None  # layouts of ARRAY_NAMES, then of aux; None: there are none
    causal: Any = False
    window: Any = None
    q_offset: Any = None
    numbers: tuple[Any, ...] = NO_NUMBERS
    functions: tuple[Any, ...] | None = None  # without aux
    layout: Any = "bhsd"
    return_lse: Any = True
    wanted: Any = None
    kernel: Any = "auto"
    has_stream: bool = False
    alignment: int = 16  # alignment in bytes, at most 16, of all operands that kernels load in vectors
    bias_aligned: bool = False  # bias begins at a multiple of 16 bytes
    types: Any = None  # types of some fields: 1 and True are equal as keys, but causal= accepts only one of them
    kept: bool = False  # a BlockMask keeps its mask_mod's tile states

    def options(self) -> Options:
        """The call's options, with layouts in place of arrays."""
        others = self.others or (None,) * len(ARRAY_NAMES)
        own, offsets, aux = others[: len(OPTION_ARRAYS)], others[len(OPTION_ARRAYS)], others[len(ARRAY_NAMES) :]
        q_offset = self.q_offset if offsets is None else offsets
        functions = None if self.functions is None else (*self.functions, aux)
        return Options(self.causal, self.window, q_offset, self.numbers, own, functions, self.layout)


def alignment_of(addresses: int) -> int:
    """The largest of 16, 8, 4, 2 and 1 that all of some addresses, joined by |, are multiples of."""
    return 16 if addresses % 16 == 0 else addresses & -addresses


def look_up(
    call: Call,
    operands: tuple[Array | None, ...],
    layouts: tuple[Layout | None, ...],
    addresses: int,
    plan: Callable[[PlanKey], Any],
    plans: dict[tuple[Any, ...], Any],
) -> tuple[list[Array | None], Any]:
    """The arrays of ARRAY_NAMES and aux, which are NO_OTHERS itself if there are none; and the plan.

    operands: q, k, v and so on, as they were read; layouts: theirs; addresses: those of operands that kernels load in
    vectors, joined by |. plan: makes a plan that is missing in `plans`.
    """
    _, options, return_lse, wanted, stream, kernel, _ = call
    causal, window, q_offset, numbers, option_arrays, functions, layout, _ = options
    q: Any = operands[0]
    others, blocks = NO_OTHERS, None
    offsets = None
    if q_offset is not None and arrays.is_array(q_offset):
        offsets, q_offset = arrays.read("q_offset", q_offset), None
    if not option_arrays is offsets is functions is None:
        others = [*(NO_ARRAYS if option_arrays is None else read_options(option_arrays)), offsets]
        if functions is not None:
            blocks = caller_functions().block_mask_of(functions)
            functions, aux = caller_functions().read_functions(functions)
            others += aux
        if q.layout.family == "jax":
            others = arrays.beside_jax(q, others)
    if window is not None:
        window = window_sides(window)  # checked before it is part of a key, where (1.0, 0) equals (1, 0)
    if q.layout.family in arrays.checks:
        arrays.checks[q.layout.family]((*operands, *others))
    bias = others[BIAS]
    key = (  # the fields of PlanKey, as a plain tuple: it is made in a fifth of the time
        layouts, None if others is NO_OTHERS else tuple([array and array.layout for array in others]), causal, window,
        q_offset, numbers, functions, layout, return_lse, wanted, kernel, stream is not None,
        alignment_of(addresses), bias is not None and bias.pointer % 16 == 0,
        (
            type(q_offset), type(causal), type(return_lse),
            None if numbers is NO_NUMBERS else tuple(map(type, numbers)),
        ),
        blocks is not None,
    )  # fmt: skip
    try:
        found = plans.get(key)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        found = plan(PlanKey(*key))  # an unhashable value was given; `plan` reports what is wrong with it
    if found is None:
        found = plan(PlanKey(*key))
        store(plans, key, found)
    if blocks is not None:
        blocks.check(getattr(found.problem, "forward", found.problem))
    return others, found


def store(plans: dict[tuple[Any, ...], Any], key: tuple[Any, ...], found: Any) -> None:
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = found


def read_options(given: tuple[Any, ...]) -> list[Array | None]:
    """The arrays of OPTION_ARRAYS."""
    read, found = arrays.read, []
    for name, x in zip(OPTION_ARRAYS, given):  # noqa: B905 - strict= takes as long as reading one
        found.append(None if x is None else read(name, x))
    return found


@functools.cache  # an import that was made before takes 1 us again
def caller_functions() -> Any:
    """The module caller_functions. It takes a fifth of the time of an import; a plain call does not need it."""
    from . import caller_functions

    return caller_functions


def has_other_dimensions(q: Any, layout: Any) -> bool:
    """Whether a call must first become one of 4 dimensions. An invalid q is reported where it is read."""
    if getattr(q, "ndim", 4) == 4 or isinstance(layout, Packed):
        return False
    return not getattr(q, "is_nested", False) and arrays.is_array(q)


def folded(call: Call) -> tuple[Call, Callable[[Any], Any]]:
    """`leading.folded`, in a module that a plain call does not need."""
    from . import leading

    return leading.folded(call)


@functools.cache
def seeds() -> Any:
    """The module seed, which a plain call does not need."""
    from . import seed

    return seed


def enqueue(call: Call, found: Any, operands: list[Any], own: int, stream: int, name: str) -> None:
    """Launches on `stream`. own: the number of operands before aux; name: the name in torch's profiler."""
    problem = getattr(found.problem, "forward", found.problem)
    seed, functions = call.options.seed, call.options.functions
    if seed is not None or problem.numbers:
        operands = seeds().with_seed(operands, own, problem, seed)
    blocks = None if functions is None else caller_functions().block_mask_of(functions)
    with arrays.shown(operands[0].layout.family, name):
        if blocks is None:
            found.launch.run(operands, stream)
        else:
            found.launch.run_with_blocks(operands, stream, blocks)
