"""NumPy arrays through a GPU kernel asked for by name: copied there and back, and waited for.

The one place where numba_flash copies arrays, and `explain` says so.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arrays import Operands, host_view


class DeviceCopy:
    """A contiguous copy in GPU memory that the CUDA Array Interface describes."""

    def __init__(self, host: np.ndarray, stream: Any, upload: bool = True):
        from cuda.core import Device

        self.dtype, self.shape = host.dtype, host.shape
        self._buffer = Device().allocate(max(host.nbytes, 1), stream=stream)
        self._stream = stream
        if upload and host.nbytes:
            self._copy(int(self._buffer.handle), host.ctypes.data, host.nbytes)

    def _copy(self, destination: int, origin: int, size: int) -> None:
        from cuda.bindings import driver

        (error,) = driver.cuMemcpyAsync(destination, origin, size, int(self._stream.handle))
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"a copy of {size} bytes between host and GPU failed: {error.name}")
        self._stream.sync()  # the host array may go away or be written next

    def into(self, host: np.ndarray) -> None:
        if host.nbytes:
            self._copy(host.ctypes.data, int(self._buffer.handle), host.nbytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        typestr = "<V2" if self.dtype.name == "bfloat16" else self.dtype.str
        return {"shape": self.shape, "typestr": typestr, "data": (int(self._buffer.handle), False), "version": 3}


def through_gpu(
    attention: Callable[..., Any], operands: Operands, keywords: dict[str, Any], aux: Sequence[Any] = ()
) -> None:
    """Call `attention` on copies of the operands and of aux, and copy what it wrote into o and lse."""
    from cuda.core import LEGACY_DEFAULT_STREAM, Device

    Device(0).set_current()
    stream = LEGACY_DEFAULT_STREAM
    given = {name: array for name, array in operands._asdict().items() if array is not None}
    views = [host_view(given.pop(name)) for name in ("o", "lse") if name in given]
    there: dict[str, Any] = {
        name: DeviceCopy(np.ascontiguousarray(host_view(array)), stream) for name, array in given.items()
    }
    there["aux"] = tuple(DeviceCopy(np.ascontiguousarray(host_view(array)), stream) for array in aux)
    written = [DeviceCopy(np.empty(view.shape, view.dtype), stream, upload=False) for view in views]
    attention(**there, **keywords, out=tuple(written) if len(written) > 1 else written[0], return_lse=len(written) > 1)
    for view, copy in zip(views, written, strict=True):
        result = np.empty(view.shape, view.dtype)
        copy.into(result)
        view[...] = result
