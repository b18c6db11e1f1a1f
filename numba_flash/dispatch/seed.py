"""The seed of a call: a number that a launch takes among its operands."""

import math
import operator
from typing import Any, NamedTuple

from .. import arrays
from ..problem.forward import Problem
from ..problem.options import SEEDED

OF_A_KEY = 'of a key of JAX: jax.random.bits(key, dtype="uint32")'


class Seed(NamedTuple):
    """An entry of a launch's operands that is not an array: a kernel takes the number in place of a pointer."""

    pointer: int


def with_seed(given: list[Any], own: int, problem: Problem, seed: Any) -> list[Any]:
    """`given` with the seed of a problem that needs one, after its `own` operands and before aux."""
    if seed is None and not problem.seeded:
        return given
    number = seed_number(seed)
    # A seed is allowed even if nothing is dropped: a model may need it in other calls.
    return [*given[:own], Seed(number), *given[own:]] if problem.seeded else given


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
    """An array of one number as one that NumPy can read: torch's own conversion ends at 2**63. For an array on a GPU
    its library makes a number, and waits for it."""
    array = arrays.read("seed", seed)
    view = seed if array.layout.device is not None else arrays.host_view(array)
    return view.reshape(()) if math.prod(view.shape) == 1 else view
