"""Converts an option from the caller's form to that of a Problem, and reports what is wrong with it."""

import math
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays import AUX_DTYPES, Layout, refuse_jax_tracer
from ..arrays.dtypes import conversion
from .options import BY_NAME, Option
from .strides import Strides, element_strides

if TYPE_CHECKING:
    from ..functions.function import Function

Window = tuple[int | None, int | None]
MAX_POSITION = 2**31 - 1
# Rows, and heads of all entries. A tile behind the last one, and the next one that a block takes, still has a number of
# 32 bits.
MAX_EXTENT = 2**31 - 2**16
FLOAT32 = np.finfo(np.float32)


class OptionArray(NamedTuple):
    """An array given as an option of attention()."""

    name: str
    dtype: str
    strides: tuple[int, ...]  # in elements; 0 in broadcast dimensions
    pairs: bool = False  # bias: keys 2 i and 2 i + 1 are one read, side by side at a multiple of their size
    boxes: bool = False  # bias in 16 bits: TMA can load its rows


class AuxArray(NamedTuple):
    """One of the arrays that functions read."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements


def window_sides(window: Any) -> Window:
    """(left, right) as Python ints or None."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) and isinstance(window, int | np.integer | float):
        raise ValueError(
            f"window must be a pair (left, right), not {window!r}: a bare number means different things elsewhere. A "
            "query at position p sees keys p - left to p + right, both included; None is unbounded. The last "
            f"{window} keys with its own, Mistral's sliding_window, are window=({window} - 1, 0); {window} before its "
            f"own, flash-attn's ({window}, 0), are ({window}, 0); {window} on either side, JAX's local_window_size, "
            f"are ({window}, {window})"
        )
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window must be a pair (left, right), not {window!r}")
    return _window_side("left", window[0]), _window_side("right", window[1])


def _window_side(name: str, side: Any) -> int | None:
    if side is None:
        return None
    try:
        if isinstance(side, bool):
            raise TypeError
        value = operator.index(side)
    except TypeError:
        raise TypeError(f"window: {name} must be a whole number or None, not {side!r}") from None
    if value < 0:
        raise ValueError(f"window: {name} must be at least 0, not {value}; unbounded is None (flash-attn's -1)")
    return value if value <= 4 * MAX_POSITION else None  # no two positions are that far apart


def q_offset_of(q_offset: Any, seqlen_q: int, seqlen_k: int, has_seqlens_k: bool) -> tuple[int, str]:
    if q_offset is None:  # bottom-right: the last query has the position of the last valid key
        return (-seqlen_q, "seqlens_k") if has_seqlens_k else (seqlen_k - seqlen_q, "number")
    if isinstance(q_offset, bool | np.bool_):
        raise TypeError(f"q_offset must be a whole number, an int32 array (batch,) or None, not {q_offset!r}")
    try:
        number = operator.index(q_offset)
    except TypeError:
        raise TypeError(f"q_offset must be a whole number, an int32 array (batch,) or None, not {q_offset!r}") from None
    if abs(number) > MAX_POSITION:
        raise ValueError(f"q_offset must stay below 2**31, not {number}")
    return number, "number"


def number_of(name: str, value: Any, dtype: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        refuse_jax_tracer(value)  # the bridge says what to write where JAX traces
        raise TypeError(f"{name} must be a number or None, not {value!r}{_of_one(name, value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {number}")
    if dtype != "float64" and abs(number) > float(FLOAT32.max):
        raise ValueError(f"{name} must fit into float32, in which {dtype} is computed, not {number}")
    least = 0.0 if dtype == "float64" else float(FLOAT32.tiny)  # with a smaller number float32 would divide by zero
    if BY_NAME[name].acts_on == "weights":
        if not 0 <= number < 1:
            raise ValueError(f"{name} is a probability, from 0 to below 1, not {number}")
        return number or None
    if BY_NAME[name].positive and number <= least:
        raise ValueError(f"{name} must be above {least:.3g} (None = none), not {number}")
    return number


def _of_one(name: str, value: Any) -> str:
    """-> a hint if `value` is an array of one number. A kernel takes a number; reading it makes the host wait."""
    if getattr(value, "shape", None) != ():
        return ""
    hint = f": write {name}=float(...), which waits for the GPU if the number is there"
    return hint if name != "scale" else f"{hint}; head_dim ** -0.5 is one of Python's"


def option_array(
    option: Option, array: Layout, q_dtype: str, sizes: tuple[int, int, int, int], bias_aligned: bool
) -> OptionArray:
    strides = _strides(option, array, q_dtype, sizes)
    if option.name != "bias" or not bias_aligned or strides[3] != 1:
        return OptionArray(option.name, array.dtype, strides)
    pairs = sizes[3] % 2 == 0 and not any(stride % 2 for stride in strides[:3])
    by_16_bytes = all(stride % 8 == 0 and 0 <= stride < 2**39 for stride in strides[:3])
    boxes = array.dtype in ("float16", "bfloat16") and by_16_bytes and strides[2] > 0
    return OptionArray(option.name, array.dtype, strides, pairs, boxes)


def _strides(option: Option, array: Layout, q_dtype: str, sizes: tuple[int, int, int, int]) -> tuple[int, ...]:
    """The strides by which kernels read an array option. Checks its dtype and shape."""
    name, dtypes = option.name, tuple(dict.fromkeys(q_dtype if dtype == "q" else dtype for dtype in option.dtypes))
    if array.dtype not in dtypes and option.shape not in ("batch", "ends"):
        if dtypes == ("bool",):
            raise TypeError(f"{name} must be bool (True = attend), not {array.dtype}; an additive one goes to bias=")
        is_mask = name == "bias" and array.dtype == "bool"
        advice = "a mask goes to mask=, True = attend" if is_mask else conversion(name, array.family, dtypes[0])
        raise TypeError(f"{name} must be {' or '.join(dtypes)} beside q of {q_dtype}, not {array.dtype}; {advice}")
    if option.shape == "scores":
        return _broadcast_strides(name, array, sizes)
    if option.shape == "ends":
        return element_strides(array)  # packed.sizes has checked it
    return _by_head(name, array, *sizes[:2]) if option.shape == "heads" else _by_batch(name, array, sizes[0])


ARGUMENTS = dict(score_mod="score, b, h, q_pos, k_pos", mask_mod="b, h, q_pos, k_pos")  # of the caller's functions


def aux_arrays(aux: tuple[Layout, ...], functions: tuple[tuple[str, "Function"], ...]) -> tuple[AuxArray, ...]:
    """The arrays that functions read. Checks that each function accepts the arguments of its calls."""
    if aux and not functions:
        raise ValueError("aux is what score_mod and mask_mod read, and neither was given")
    for number, array in enumerate(aux):
        if array.dtype not in AUX_DTYPES:
            raise TypeError(f"aux[{number}] must be {', '.join(AUX_DTYPES)}, not {array.dtype}")
    for name, function in functions:
        check_arguments(name, function, len(aux))
    return tuple(AuxArray(array.dtype, array.shape, element_strides(array)) for array in aux)


def check_arguments(name: str, function: "Function", aux: int) -> None:
    """Checks that a function accepts the arguments of its calls, with `aux` arrays."""
    wrong = function.takes(len(ARGUMENTS[name].split(", ")) + aux)
    if wrong:
        each = "".join(f", aux[{number}]" for number in range(aux))
        raise TypeError(f"{name} is called with ({ARGUMENTS[name]}{each}), and of {function.where} {wrong}")


def _by_batch(name: str, array: Layout, batch: int) -> tuple[int, ...]:
    if array.dtype != "int32" or array.shape != (batch,):
        library = "jax.numpy" if array.family == "jax" else "numpy" if array.family == "foreign" else array.family
        one = f"; one number for all entries is {library}.full(({batch},), {name})" if array.shape == () else ""
        advice = one or ("" if array.dtype == "int32" else f"; {conversion(name, array.family, 'int32')}")
        raise (TypeError if array.dtype != "int32" else ValueError)(
            f"{name} must be int32 of shape (batch,) = ({batch},), not {array.dtype} of shape {array.shape}{advice}"
        )
    return element_strides(array)


def _by_head(name: str, array: Layout, batch: int, heads: int) -> tuple[int, int]:
    strides = element_strides(array)
    if array.shape == (heads,):
        return (0, strides[0])
    if array.shape == (batch, heads):
        return (strides[0], strides[1])
    raise ValueError(
        f"{name} must have shape (heads,) = ({heads},) or (batch, heads) = ({batch}, {heads}), not {array.shape}"
    )


def _broadcast_strides(name: str, array: Layout, shape: tuple[int, ...]) -> Strides:
    """The strides that read `array` as if it had `shape`, by NumPy's rule: missing axes and axes of length 1 repeat."""
    missing = len(shape) - len(array.shape)
    extents = (1,) * missing + array.shape
    if missing < 0 or any(have not in (1, want) for have, want in zip(extents, shape, strict=True)):
        of_keys = f"; one for each key is {name}[:, None, None]" if array.shape == (shape[0], shape[3]) else ""
        raise ValueError(
            f"{name} must be broadcastable to (batch, heads, seqlen_q, seqlen_k) = {shape}, not shape {array.shape}"
            f"{of_keys}"
        )
    strides = (0,) * missing + element_strides(array)
    return (strides[0], strides[1], strides[2], strides[3])
