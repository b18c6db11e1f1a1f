"""An array of any library with other dimensions over the same memory."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np


def viewed(name: str, x: Any, shape: tuple[int, ...]) -> Any:
    """Argument `name` with this shape, which has as many elements.

    Raises NotImplementedError where its strides allow that only to a copy. JAX's arrays have no strides, and are
    reshaped by JAX.
    """
    if tuple(x.shape) == shape:
        return x
    if type(x) is np.ndarray and x.flags.c_contiguous:
        return x.reshape(shape)  # the quickest, of the kind that is the most frequent
    if "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor):
        try:
            return x.view(shape)
        except RuntimeError:
            raise NotImplementedError(_needs_a_copy(name, x, shape, x.stride(), "contiguous()")) from None
    if "jax" in sys.modules and isinstance(x, sys.modules["jax"].Array):
        return x.reshape(shape)
    package = type(x).__module__.partition(".")[0]
    if not (isinstance(x, np.ndarray) or package in ("cupy", "numba", "numba_cuda")):
        known = "NumPy, CuPy, Numba, torch and JAX"
        raise NotImplementedError(f"{name} must have 4 dimensions, not shape {tuple(x.shape)}: views are of {known}")
    strides = strides_of_view(x.shape, x.strides, shape)
    if strides is None:
        raise NotImplementedError(_needs_a_copy(name, x, shape, x.strides, "copy()"))
    if package in ("numba", "numba_cuda"):  # its own reshape takes contiguous arrays alone
        return type(x)(shape=shape, strides=strides, dtype=x.dtype, stream=x.stream, gpu_data=x.gpu_data)
    return x.reshape(shape)


def _needs_a_copy(name: str, x: Any, shape: tuple[int, ...], strides: Any, copy: str) -> str:
    # a copy of out would be written to, and lost
    instead = "a contiguous array" if name == "out" else f"{name}.{copy}"
    return (
        f"{name} of shape {tuple(x.shape)} and strides {tuple(strides)} cannot become {shape}, which is computed, "
        f"without a copy: pass {instead}"
    )


def strides_of_view(shape: Sequence[int], strides: Sequence[int], new: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides by which the elements of an array have the shape `new`, in the same order; None if none do."""
    if 0 in shape:
        return (0,) * len(new)
    # dimensions through which one stride leads, from the last: (elements, stride)
    runs: list[tuple[int, int]] = []
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent == 1:
            continue
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = runs[-1][0] * extent, runs[-1][1]
        else:
            runs.append((extent, stride))
    found: list[int] = []
    left, stride = runs.pop(0) if runs else (1, 0)
    for extent in reversed(new):
        if left == 1 and runs and extent > 1:
            left, stride = runs.pop(0)
        if left % extent:
            return None
        found.insert(0, stride)
        left, stride = left // extent, stride * extent
    return tuple(found)
