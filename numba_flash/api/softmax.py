"""softmax: the kernels that prepare for attention. Each adds one idea to the one before."""

from typing import Any

import numpy as np

from .. import arrays
from ..abi.arguments import Values
from ..arrays import DTYPES, Array
from ..config.softmax import SOFTMAX
from ..dispatch.launch import kernel_launch
from ..machine.target import Target
from ..problem.memory import check_alignment, check_output

KERNELS = tuple(SOFTMAX)


def softmax(x: Any, *, kernel: str = "auto", out: Any = None, stream: Any = None) -> Any:
    """softmax(x)_i = e^(x_i - max x) / sum_j e^(x_j - max x) over the last axis.

    >>> numba_flash.softmax(cupy.array([1.0, 2.0, 3.0]), kernel="blocked")

    kernel: "safe" reads a row three times (maximum, sum, result); "online" twice, correcting the sum
    whenever the maximum grows; "blocked" uses a whole block for a row and joins the maxima and sums of its
    threads; "reference" is NumPy in float64, in host memory. The three kernels run on a GPU, or on
    NumPy arrays in Numba's simulator. "auto" is "online" where that runs, and "reference" for other arrays in
    host memory. Equations 2 to 5 of docs/algorithm.md; Milakov and Gimelshein (2018).

    x: float16, bfloat16, float32 or float64, any shape whose leading axes can be walked with one
    stride; computed in float32 (float64 for float64). A row that is all -inf gives NaN, as in
    NumPy. Returns an array of x's kind and shape, or out. Raises TypeError and ValueError for invalid arrays or
    names, and NotImplementedError without a GPU and without the simulator.
    """
    if kernel not in ("auto", *KERNELS, "reference"):
        raise ValueError(f"kernel must be one of {', '.join(('auto', *KERNELS, 'reference'))}, not {kernel!r}")
    given = arrays.read("x", x)
    if given.layout.dtype not in DTYPES:
        raise TypeError(f"x must be float16, bfloat16, float32 or float64, not {given.layout.dtype}")
    if not given.layout.shape or given.layout.shape[-1] == 0:
        raise ValueError(f"x must have a last axis of at least one element, not shape {given.layout.shape}")
    check_alignment("x", given)
    if out is None:
        y = arrays.empty(given, given.layout.shape, given.layout.dtype)
    else:
        y = arrays.read("out", out)
        check_output("out", y, given)
    if given.layout.family in arrays.checks:
        arrays.checks[given.layout.family]((given, y))
    if out is not None:
        arrays.note_writing(y)
    target = Target.of(given.layout.device)
    if kernel == "auto":
        kernel = "reference" if given.layout.device is None and not target.simulated else "online"
    if kernel == "reference":
        if given.layout.device is not None:
            raise NotImplementedError("kernel='reference' computes in host memory; copy x there first")
        _reference(given, y)
    else:
        _run(kernel, given, y, target, arrays.stream_of((given, y), stream))
    return arrays.give(given, y) if out is None else out


def _reference(x: Array, y: Array) -> None:
    values = arrays.host_view(x).astype(np.float64)
    with np.errstate(invalid="ignore"):
        e = np.exp(values - values.max(axis=-1, keepdims=True))
        arrays.host_view(y)[...] = e / e.sum(axis=-1, keepdims=True)


def _run(kernel: str, x: Array, y: Array, target: Target, stream: int) -> None:
    if target.simulated and x.layout.family != "numpy":
        raise NotImplementedError(f"the simulator takes NumPy arrays only, not {x.layout.family}")
    if not target.simulated and x.layout.device is None:
        raise NotImplementedError(
            f"kernel={kernel!r} runs on a GPU array, or on NumPy arrays in the simulator "
            "(NUMBA_ENABLE_CUDASIM=1 before Python starts); kernel='reference' runs anywhere"
        )
    n = x.layout.shape[-1]
    rows = int(np.prod(x.layout.shape[:-1]))
    if rows == 0:
        return
    strides = dict(x=_row_strides("x", x), y=_row_strides("out", y))
    threads = 32 if target.simulated else 128
    config = SOFTMAX[kernel](x.layout.dtype, threads)
    blocks = rows if kernel == "blocked" else -(-rows // threads)
    values = Values.of(config, strides=strides, sizes=dict(rows=rows, n=n))
    kernel_launch(config, target, blocks, values).run((x, y), stream)


def _row_strides(name: str, array: Array) -> tuple[int, int]:
    """(from row to row, from element to element) in elements, for the leading axes walked as one."""
    layout = array.layout
    size = arrays.ITEM_SIZE[layout.dtype]
    axes = [(n, s * layout.unit // size) for n, s in zip(layout.shape, layout.strides, strict=True)]
    leading = [axis for axis in axes[:-1] if axis[0] > 1]
    for (_, outer), (extent, inner) in zip(leading, leading[1:], strict=False):
        if outer != extent * inner:
            raise ValueError(
                f"{name} has shape {layout.shape} and strides {layout.strides}: its leading axes cannot be walked "
                "with one stride; make it contiguous first"
            )
    return (leading[-1][1] if leading else 0, axes[-1][1])
