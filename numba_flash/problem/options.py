"""The options of attention() that say which keys a query sees and what its scores are: one row each.

Problem checks arrays by this table, Config says which options a kernel is compiled for, select refuses by it, and
select/arguments.py derives the kernels' arrays, strides and numbers. The public signatures, the bridges and the CPU
kernel do not read it yet. docs/adding_an_option.md adds an option and names every place.
"""

from typing import Any, NamedTuple

FLOATS = ("float32", "q")  # or q's own dtype


class Option(NamedTuple):
    """One argument of attention()."""

    name: str
    acts_on: str  # "keys": which keys, by position; "score"; "mask": which scores are removed; "sum": of a row's weights
    shape: str = ""  # of an array: "scores" broadcasts to (batch, heads, seqlen_q, seqlen_k); "heads"; "batch"
    dtypes: tuple[str, ...] = ()  # of an array; "q" is the dtype of q
    gradient: str = ""  # its field of AttentionGradients
    derivative: bool = False  # whether the score behind it has a derivative by the score before it that is not 1
    function: bool = False  # one of the caller's own
    on_tensor_cores: bool = True
    instead: str = ""  # of one that is not: what says a part of the same, and is
    on_cpu: bool = True


OPTIONS = (
    Option("scale", "score"),
    Option("score_mod", "score", function=True, derivative=True, on_cpu=False),
    Option("softcap", "score", derivative=True),
    Option("alibi_slopes", "score", "heads", FLOATS, gradient="dalibi_slopes"),
    Option("bias", "score", "scores", FLOATS, gradient="dbias"),
    Option("mask", "mask", "scores", ("bool",)),
    Option("mask_mod", "mask", function=True, on_cpu=False),
    Option("aux", "functions"),  # any number of arrays, which the functions read
    Option("seqlens_k", "keys", "batch", ("int32",)),
    Option("q_offset", "keys", "batch", ("int32",)),  # or a whole number
    Option("sinks", "sum", "heads", FLOATS, gradient="dsinks"),
)
BY_NAME = {option.name: option for option in OPTIONS}
ARRAYS = tuple(option for option in OPTIONS if option.shape)
NUMBERS = tuple(
    option.name for option in OPTIONS if option.acts_on == "score" and not (option.shape or option.function)
)
FUNCTIONS = tuple(option.name for option in OPTIONS if option.function)

Uses = tuple[tuple[str, Any], ...]


def uses(**given: Any) -> Uses:
    """What a problem uses: (option, dtype of its array, a Function, or "" for a number), in the order of OPTIONS.

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


def of_scores(used: Uses) -> Uses:
    """Without what only lse depends on, which a backward is given."""
    return tuple((name, given) for name, given in used if BY_NAME[name].acts_on != "sum")
