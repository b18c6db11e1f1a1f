"""Arguments that several signatures share, and errors in the words of the signature that was called."""

import re
from typing import Any

import numpy as np

NUMBER = (float, int, np.floating, np.integer)


def dropout_of(dropout_p: Any, may_be_one: bool = False) -> float:
    """A probability from a signature that has a default of 0 for none."""
    if not isinstance(dropout_p, NUMBER) or isinstance(dropout_p, bool):
        raise TypeError(f"dropout_p must be a number, not {described(dropout_p)}")
    if not (0 <= dropout_p < 1 or may_be_one and dropout_p == 1):
        allowed = "from 0 to 1" if may_be_one else "from 0 to below 1"
        raise ValueError(f"dropout_p is a probability, {allowed}, not {dropout_p!r}")
    return float(dropout_p)


def number(name: str, value: Any) -> Any:
    """A Python number for a NumPy scalar. An array of one number is refused: a kernel takes a number, and to read it
    from a GPU the host would have to wait."""
    if isinstance(value, int | float):  # first, as torch.compile does not know NumPy's kinds
        return value
    if isinstance(value, np.floating | np.integer):
        return value.item()
    if hasattr(value, "shape"):
        hint = f"write {name}=float(...), which waits for the GPU if the number is there"
        if "scale" in name:
            hint += f"; if it needs a gradient, multiply the queries by it and pass {name}=1.0"
        raise TypeError(f"{name} must be a number or None, not {described(value)}: {hint}")
    return value


def described(value: Any) -> str:
    """What was given, without the numbers of an array, which may be many and on a GPU."""
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"


def renamed(error: Exception, names: dict[str, str]) -> Exception:
    """An error of `numba_flash.attention` with the argument names of another signature. names: ours -> theirs."""
    if error.args and isinstance(error.args[0], str):
        ours = rf"\b({'|'.join(names)})\b"
        error.args = (re.sub(ours, lambda found: names[found[0]], error.args[0]), *error.args[1:])
    return error
