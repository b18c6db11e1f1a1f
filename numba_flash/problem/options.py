"""The options of attention() that decide which keys a query sees and what its scores are: a table with a row for each.

Options travel as one value from the public signature through the bridges and dispatch to Problem, which checks arrays
by this table. Config has the options for which a kernel is compiled, select refuses by it, and abi/parameters.py
derives the kernels' arrays, strides and numbers. docs/adding_an_option.md adds an option and names every place.
"""

from collections import namedtuple
from typing import Any, NamedTuple

FLOATS = ("float32", "q")  # or q's own dtype


class Option(NamedTuple):
    """One argument of attention()."""

    name: str
    # "keys": which keys, by position; "score"; "mask": which scores are removed; "sum": the sum of a row's weights;
    # "weights": the factors of v
    acts_on: str
    # of an array: "scores" broadcasts to (batch, heads, seqlen_q, seqlen_k); "heads"; "batch"; "ends": (batch + 1,)
    shape: str = ""
    dtypes: tuple[str, ...] = ()  # if it is an array; "q" is the dtype of q
    gradient: str = ""  # its field of AttentionGradients
    gradient_on_tensor_cores: bool = True
    positive: bool = False  # it is a number that must be above 0
    by_distance: bool = False  # it takes a number of the row times |q_pos - k_pos| from a score
    derivative: bool = False  # whether a score after it has a derivative by the score before it that is not 1
    function: bool = False  # a function of the caller's own
    seeded: bool = False  # each call brings a seed
    packed: bool = False  # only attention_varlen takes it: where sequences are (problem/packed.py)
    on_tensor_cores: bool = True
    instead: str = ""  # if not: an option on tensor cores that does part of the same
    on_cpu: bool = True

    @property
    def per_score(self) -> bool:
        """Whether it decides about each score, or weight, on its own."""
        return self.function or self.seeded or self.shape == "scores"

    @property
    def per_row(self) -> bool:
        """Whether it asks whose row a score is of."""
        return self.per_score or (self.shape == "heads" and self.acts_on == "score")


OPTIONS = (
    Option("scale", "score"),
    Option("score_mod", "score", function=True, derivative=True),
    Option("softcap", "score", positive=True, derivative=True),
    Option("bias", "score", "scores", FLOATS, gradient="dbias"),
    Option("mask", "mask", "scores", ("bool",)),
    Option(
        "alibi_slopes",
        "score",
        "heads",
        FLOATS,
        gradient="dalibi_slopes",
        gradient_on_tensor_cores=False,
        by_distance=True,
    ),
    Option("mask_mod", "mask", function=True),
    Option("aux", "functions"),  # any number of arrays that the functions read
    Option("seqlens_k", "keys", "batch", ("int32",)),
    Option("sinks", "sum", "heads", FLOATS, gradient="dsinks"),
    Option("dropout_p", "weights", seeded=True),
    Option("cu_seqlens_q", "keys", "ends", ("int32",), packed=True),
    Option("cu_seqlens_k", "keys", "ends", ("int32",), packed=True),
    Option("q_offset", "keys", "batch", ("int32",)),  # or a whole number
)
BY_NAME = {option.name: option for option in OPTIONS}
ARRAYS = tuple(option for option in OPTIONS if option.shape)
_NUMBERS = tuple(x for x in OPTIONS if x.acts_on in ("score", "weights") and not (x.shape or x.function))
NUMBERS = tuple(option.name for option in _NUMBERS)
SCORE_NUMBERS = tuple(option.name for option in _NUMBERS if option.acts_on == "score")  # every kernel takes these
FUNCTIONS = tuple(option.name for option in OPTIONS if option.function)
OF_HEADS = tuple(option.name for option in ARRAYS if option.shape == "heads")  # a number for each head
OF_PAIRS = tuple(option.name for option in ARRAYS if option.shape == "scores")  # one for each query and key
(SEEDED,) = (option.name for option in OPTIONS if option.seeded)
DROP_STEPS = 2**16  # number of values of a weight's random number


def dropped_steps(dropout_p: float) -> int:
    """How many random numbers, the largest, drop a weight: a probability is a multiple of 1 / DROP_STEPS, below 1."""
    return min(round(dropout_p * DROP_STEPS), DROP_STEPS - 1)


def kept_count(dropped: int) -> float:
    """How often a kept weight counts, so that the expected output stays the same."""
    return DROP_STEPS / (DROP_STEPS - dropped)


NO_NUMBERS: tuple[Any, ...] = (None,) * len(NUMBERS)  # as an object, with which each call compares


def _tuple_of(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)


# The option of an array, and the array of a gradient.
ARRAY_NAMES = tuple(option.name for option in ARRAYS)
GRADIENT_OF = dict(dq="q", dk="k", dv="v") | {option.gradient: option.name for option in ARRAYS if option.gradient}

# The number of dimensions of an array with all written out, the batch first. Those of BROADCAST may have fewer.
_RANK_OF_SHAPE = dict(scores=4, heads=2, batch=1, ends=1)
RANKS = dict(q=4, k=4, v=4, o=4, lse=3) | {option.name: _RANK_OF_SHAPE[option.shape] for option in ARRAYS}
RANKS |= dict(do=4, dlse=3) | {gradient: RANKS[name] for gradient, name in GRADIENT_OF.items()}
HEAD_GRADIENTS = {option.gradient: option for option in ARRAYS if option.gradient and option.shape == "heads"}
BROADCAST = tuple(option.name for option in ARRAYS if option.shape in ("scores", "heads"))
PACKED_ARRAYS = tuple(option.name for option in ARRAYS if option.packed)

# The arrays of a call, each an Array or None, in the order of the kernels' pointers. attention writes o and lse, and
# attention_backward reads them.
Operands = _tuple_of("Operands", ("q", "k", "v", "o", "lse", *ARRAY_NAMES))
GradientOperands = _tuple_of("GradientOperands", (*Operands._fields, "do", "dlse", *GRADIENT_OF))


def daux_name(number: int) -> str:
    """The name of the gradient of aux[number]."""
    return f"daux[{number}]"


class AttentionGradients(NamedTuple):
    """dq, dk and dv in the layout, shape and dtype of q, k and v; dbias, dalibi_slopes and dsinks in those of bias,
    alibi_slopes and sinks; daux a tuple as long as aux. None for what was not wanted."""

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dalibi_slopes: Any = None
    dsinks: Any = None
    daux: Any = None


class Packed(NamedTuple):
    """Stands in the place of layout= if sequences are packed (packed.py): upper bounds of their lengths. None: the
    arrays' rows are the bound."""

    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None


class Options(NamedTuple):
    """The arguments of a call besides q, k and v: as the caller gave them, or with layouts in the place of arrays.

    numbers, arrays and functions are in the order of the table, so that nothing in between has to name them.
    """

    causal: Any = False
    window: Any = None
    q_offset: Any = None  # a number or an array
    numbers: tuple[Any, ...] = NO_NUMBERS
    arrays: tuple[Any, ...] | None = None  # those of ARRAYS, without q_offset; None: there are none
    functions: tuple[Any, ...] | None = None  # those of FUNCTIONS, followed by the tuple aux; None: there are none
    layout: Any = "bhsd"
    seed: Any = None  # an integer for SEEDED. It is no part of the problem, because each call has another one

    @staticmethod
    def of(
        causal: Any = False,
        window: Any = None,
        q_offset: Any = None,
        layout: Any = "bhsd",
        aux: Any = (),
        seed: Any = None,
        **named: Any,
    ) -> "Options":
        """Makes Options from keyword arguments, as attention() takes them."""
        unknown = set(named) - {*NUMBERS, *OPTION_ARRAYS, *FUNCTIONS}
        if unknown:
            from .keywords import unexpected  # a call without a mistake does not load it

            raise unexpected("attention", min(unknown))
        numbers = tuple([named.get(name) for name in NUMBERS])
        given = tuple([named.get(name) for name in OPTION_ARRAYS])
        own = [named.get(name) for name in FUNCTIONS]
        no_functions = all(x is None for x in own) and isinstance(aux, tuple) and not aux
        return Options(
            causal,
            window,
            q_offset,
            numbers,
            None if all(x is None for x in given) else given,
            None if no_functions else (*own, aux),
            layout,
            seed,
        )

    def array(self, name: str) -> Any:
        """An array of ARRAYS; None if it is not given."""
        if name == "q_offset":
            return self.q_offset
        return None if self.arrays is None else self.arrays[OPTION_ARRAYS.index(name)]


OPTION_ARRAYS = ARRAY_NAMES[:-1]  # without q_offset
_NAMED = (name for name in OPTION_ARRAYS if name not in PACKED_ARRAYS)
OPTION_NAMES = ("causal", "window", "q_offset", *NUMBERS, *_NAMED, *FUNCTIONS, "aux", "layout", "seed")
assert ARRAY_NAMES[-1] == "q_offset"

Uses = tuple[tuple[str, Any], ...]


def uses(**given: Any) -> Uses:
    """The options of a problem: (option, dtype of its array, a Function, or "" for a number), in the order of OPTIONS.

    given: for an array its dtype, for a function the Function, for aux (dtype, dimensions) of each, for a number True.
    """
    unknown = set(given) - set(BY_NAME)
    if unknown:
        raise ValueError(f"options must be some of {', '.join(BY_NAME)}, not {', '.join(sorted(unknown))}")
    named = [(option.name, given.get(option.name, False)) for option in OPTIONS]
    return tuple((name, "" if value is True else value) for name, value in named if value is not False)


def changes_scores(used: Uses) -> bool:
    """Whether a score is more than scale * product."""
    return any(BY_NAME[name].acts_on == "score" for name, _ in used)


def changes_by_distance_alone(used: Uses) -> bool:
    """Whether a score is scale * product less a number of its row times |q_pos - k_pos|."""
    changing = [BY_NAME[name] for name, _ in used if BY_NAME[name].acts_on == "score"]
    return len(changing) == 1 and changing[0].by_distance


def of_scores(used: Uses) -> Uses:
    """Drops the options that change only lse: a backward is given lse."""
    return tuple((name, given) for name, given in used if BY_NAME[name].acts_on != "sum")
