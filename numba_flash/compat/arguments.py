"""Arguments that several signatures share, and errors with the argument names of the signature that was called."""

import operator
import re
from typing import Any

import numpy as np

NUMBER = (float, int, np.floating, np.integer)


def probability(name: str, value: Any, may_be_one: bool = False) -> float:
    """Checks a probability that weights are dropped, of a signature where 0 means none. -> a Python float"""
    if not isinstance(value, NUMBER) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {described(value)}")
    if not (0 <= value < 1 or may_be_one and value == 1):
        allowed = "from 0 to 1" if may_be_one else "from 0 to below 1"
        raise ValueError(f"{name} is a probability, {allowed}, not {value!r}")
    return float(value)


def number(name: str, value: Any) -> Any:
    """A NumPy scalar as a Python number. Refuses an array of one number: a kernel takes a number, and the host would
    have to wait to read it from a GPU."""
    if isinstance(value, (int, float)):  # first, as torch.compile does not know NumPy's kinds
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
    """A value's text for an error message: type and shape of an array, since its numbers may be many and on a GPU."""
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"


def renamed(error: Exception, names: dict[str, str]) -> Exception:
    """An error of `numba_flash.attention` with the argument names of another signature. names: ours -> theirs."""
    if error.args and isinstance(error.args[0], str):
        ours = rf"\b({'|'.join(names)})\b"
        error.args = (re.sub(ours, lambda found: names[found[0]], error.args[0]), *error.args[1:])
    return error


def window_sides(window_size: Any) -> tuple[int | None, int | None]:
    """A pair in which -1 is unbounded, as `numba_flash.attention` takes it."""
    allowed = "window_size must be a pair (left, right) of whole numbers from 0, or -1 for unbounded"
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"{allowed}, not {described(window_size)}")
    if not all(side is None or hasattr(side, "__index__") and not isinstance(side, bool) for side in window_size):
        raise TypeError(f"{allowed}, not {window_size!r}")
    left, right = (-1 if side is None else operator.index(side) for side in window_size)
    if min(left, right) < -1:
        raise ValueError(f"{allowed}, not {window_size!r}")
    return None if left == -1 else left, None if right == -1 else right


def refuse_pages(block_table: Any, num_splits: int | None = None) -> None:
    """Raises for block_table and num_splits of packed signatures, which no kernel implements yet."""
    if block_table is not None:
        raise NotImplementedError(
            "block_table: pages of a cache are not implemented yet; pass keys and values that follow each other"
        )
    if num_splits not in (None, 0, 1):
        raise NotImplementedError(
            f"num_splits of {num_splits}: keys are not split among blocks yet; pass 1, or None, which is the same here"
        )


def refuse_nested(instead: str, **tensors: Any) -> None:
    for name, x in tensors.items():
        if getattr(x, "is_nested", False):
            raise NotImplementedError(f"{name} is a nested tensor, which is not taken. {instead}")
