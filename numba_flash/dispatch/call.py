"""Call: what a caller asks for, made once by a public function; and what forward.py and backward.py share of its path,
from its options to its plan and from its operands to the launch."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import arrays
from ..arrays import Array, Layout
from ..problem.option_checks import window_sides
from ..problem.options import ARRAY_NAMES, NO_NUMBERS, OPTION_ARRAYS, Options, Packed

NO_AUX: tuple[Any, ...] = ()  # a default with which each call compares; comparing one object takes a fifth of the time
BIAS = ARRAY_NAMES.index("bias")
NO_ARRAYS: list[Any] = [None] * len(OPTION_ARRAYS)
NO_OTHERS: list[Any] = [None] * len(ARRAY_NAMES)
MOST_PLANS = 4096


class Call(NamedTuple):
    """The arguments of attention() or attention_backward()."""

    operands: tuple[Any, ...]  # q, k, v and out; of a backward q, k, v, o, lse, do and dlse
    options: Options
    return_lse: Any = True
    wanted: Any = None  # the gradients; None: it is a forward
    stream: Any = None
    kernel: Any = "auto"
    key: Any = None  # of the cached call that this one becomes, as `find` made it; None: it is not cached

    @staticmethod
    def of(fields: "Fields", key: Any = None) -> "Call":
        operands, options, return_lse, wanted, stream, kernel = fields
        options = _make(Options, options)
        return _make(Call, (operands, options, return_lse, wanted, stream, kernel, key))


_make: Any = tuple.__new__  # takes half the time of Call(...)
# The fields of a Call but its key, as a plain tuple, and in it those of Options as another one: a repeated call needs
# no more, and plain tuples take a quarter of the time.
Fields = tuple[Any, ...]


class PlanKey(NamedTuple):
    """The layouts and options of a call: all that its plan follows from."""

    operands: tuple[Layout | None, ...]  # q, k, v, o and lse; of a backward also do and dlse
    others: tuple[Layout | None, ...] | None = None  # of ARRAY_NAMES, followed by those of aux; None: there are none
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
    alignment: int = 16  # the operands that kernels load in pieces begin at multiples of so many bytes, at most 16
    bias_aligned: bool = False  # bias begins at a multiple of 16 bytes
    types: Any = None  # of some of these: 1 and True are equal as keys, but causal= accepts only one of them
    kept: bool = False  # a BlockMask keeps what is found about its mask_mod

    def options(self) -> Options:
        """With layouts in the places of arrays."""
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

    operands: q, k, v and so on, as they were read; layouts: theirs; addresses: of those that kernels load in pieces,
    joined by |. plan: makes what is missing in `plans`.
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
        window = window_sides(window)  # before it becomes part of a key: (1.0, 0) and (1, 0) would be equal
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
        found = plan(PlanKey(*key))  # a value that cannot be part of a key was given: report what is wrong with it
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
    """Whether a call becomes one of 4 dimensions first. What is wrong with another q is said where it is read."""
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
    """Launches on `stream`. own: how many operands are no arrays of aux; name: what torch's profiler shows."""
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
