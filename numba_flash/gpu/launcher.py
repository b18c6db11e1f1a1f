"""Launches a compiled kernel repeatedly: all its parameters are in one buffer, and a launch is one call of the driver.

Every parameter is 8 bytes long (a pointer, an int64, a float64), or 4 at the end (a float32). So they are contiguous,
as PTX lays them out. Tensor maps, 128 bytes each, come first. The device aligns them to 64 bytes, and the parameters do
not begin at a multiple of 64, so the driver is asked for the offset of the first one. Numbers stay the same from call
to call and are passed packed. cuda.core.launch, which takes the arguments one by one, takes 7 to 9 us on the host
(H200).
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..abi.tensor_maps import SIZE as MAP_SIZE, TensorMap
from ..machine import context
from .tensor_maps import encode

# CUDA driver API, cuLaunchKernel: `extra` is a list of these words, each followed by its value.
END, BUFFER_POINTER, BUFFER_SIZE = 0, 1, 2
CONFIGS = 1000  # most that are kept for a kernel: streams and shapes that change with every call must not accumulate
LEGACY_DEFAULT_STREAM = 1  # 0 also means this one, unless the environment tells cuda.bindings otherwise


def packed(numbers: Sequence[Any]) -> bytes:
    """Numbers in the layout in which a kernel takes them after its pointers: int64, then float32 or float64."""
    kinds = ["f" if isinstance(x, np.float32) else "d" if isinstance(x, float) else "q" for x in numbers]
    return struct.pack("<" + "".join(kinds), *numbers)


class Launcher:
    """Launches a loaded cuda.core kernel; any thread may call it."""

    __slots__ = (
        "_buffer",
        "_configs",
        "_device",
        "_driver",
        "_function",
        "_layout",
        "_name",
        "_serialization",
        "_several_devices",
        "_shared_bytes",
        "_size",
        "_threads",
    )

    def __init__(
        self,
        kernel: Any,
        name: str,
        device: int,
        threads: int,
        shared_bytes: int,
        pointers: int,
        maps: int,
        constants: int,
        behind: bool = False,
    ) -> None:
        """pointers, maps: how many of them the kernel takes; constants: number of bytes of packed scalars; behind: each
        launch may start before the previous kernel has ended, and waits for it itself (ptx/griddepcontrol.py)."""
        from cuda.bindings import driver

        self._driver, self._name, self._device = driver, name, device
        self._threads, self._shared_bytes = threads, shared_bytes
        # with one device, a launch need not ask for the current context
        self._several_devices = driver.cuDeviceGetCount()[1] != 1
        context.ensure(device)
        # A kernel is passed as a function, in the current context, whichever that is.
        self._function = driver.CUfunction(int(kernel.handle))
        error, first, _ = driver.cuKernelGetParamInfo(driver.CUkernel(int(kernel.handle)), 0)
        if error:
            raise RuntimeError(f"the parameters of kernel {name!r} could not be looked up: {error.name}")
        self._size = first + MAP_SIZE * maps + 8 * pointers + constants
        # the five words of `extra` and the size that one of them points to; then the parameters
        self._layout = struct.Struct(f"<6Q{first}x{f'{MAP_SIZE}s' * maps}{pointers}Q{constants}s")
        self._buffer: Any = ctypes.c_char * self._layout.size
        self._serialization = _serialization(driver) if behind else None
        # (stream, blocks) -> the driver's object with both. It is never changed: another thread may be launching
        self._configs: dict[tuple[int, int], Any] = {}

    def parameters(self, addresses: Sequence[int], maps: Sequence[tuple[int, TensorMap]], scalars: bytes) -> Any:
        """The argument of `launch`. It can be used any number of times: a launch copies it and changes nothing.

        maps: (index of the address, the map of the array there); scalars: from `packed`.
        """
        buffer = self._buffer()
        at = ctypes.addressof(buffer)
        self._layout.pack_into(
            buffer, 0, BUFFER_POINTER, at + 6 * 8, BUFFER_SIZE, at + 5 * 8, END, self._size,
            *[encode(tensor_map, addresses[which]) for which, tensor_map in maps], *addresses, scalars,
        )  # fmt: skip
        return buffer

    def launch(self, parameters: Any, stream: int, blocks: int) -> None:
        launch = self._launch_there if self._several_devices else self._launch_here
        error = launch(parameters, stream, blocks)
        if error and error.name == "CUDA_ERROR_INVALID_CONTEXT":  # none is current yet
            error = self._launch_there(parameters, stream, blocks)
        if error:
            raise RuntimeError(
                f"kernel {self._name!r} could not be launched with {blocks} blocks of {self._threads} threads and "
                f"{self._shared_bytes} bytes of shared memory: {error.name}"
            )

    def _launch_here(self, parameters: Any, stream: int, blocks: int) -> Any:
        if self._serialization is not None:
            config = self._configs.get((stream, blocks)) or self._config(stream, blocks)
            (error,) = self._driver.cuLaunchKernelEx(config, self._function, None, ctypes.addressof(parameters))
            return error
        (error,) = self._driver.cuLaunchKernel(
            self._function, blocks, 1, 1, self._threads, 1, 1, self._shared_bytes,
            _streams.get(stream) or _stream(stream), None, ctypes.addressof(parameters),
        )  # fmt: skip
        return error

    def _config(self, stream: int, blocks: int) -> Any:
        if len(self._configs) >= CONFIGS:
            self._configs.clear()
        made = self._driver.CUlaunchConfig()
        made.gridDimX, made.gridDimY, made.gridDimZ = blocks, 1, 1
        made.blockDimX, made.blockDimY, made.blockDimZ = self._threads, 1, 1
        made.sharedMemBytes, made.hStream = self._shared_bytes, _streams.get(stream) or _stream(stream)
        made.attrs, made.numAttrs = [self._serialization], 1
        self._configs[stream, blocks] = made
        return made

    def _launch_there(self, parameters: Any, stream: int, blocks: int) -> Any:
        """Launches with the kernel's device current, and restores the current device afterwards."""
        none, current = self._driver.cuCtxGetDevice()
        if not none and int(current) == self._device:
            return self._launch_here(parameters, stream, blocks)
        from cuda.core import Device

        Device(self._device).set_current()
        error = self._launch_here(parameters, stream, blocks)
        if not none:
            Device(int(current)).set_current()
        return error


def _serialization(driver: Any) -> Any:
    """The launch attribute that lets a kernel start before the previous one in its stream has ended."""
    made = driver.CUlaunchAttribute()
    made.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    made.value.programmaticStreamSerializationAllowed = 1
    return made


# address -> the driver's object, which the binding would otherwise create in each launch
_streams: dict[int, Any] = {}


def _stream(address: int) -> Any:
    from cuda.bindings import driver

    if len(_streams) >= 1000:  # streams that change with every call must not accumulate
        _streams.clear()
    made = _streams[address] = driver.CUstream(address or LEGACY_DEFAULT_STREAM)
    return made
