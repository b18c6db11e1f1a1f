"""One compiled kernel, launched again and again: all its parameters in one buffer, one call of the driver.

Every parameter is 8 bytes long (a pointer, an int64, a float64), so they lie side by side just as PTX lays them out;
tensor maps, 128 bytes each, come first, where a multiple of 64 is no matter. What stays the same from call to call is
packed beforehand. cuda.core.launch, which takes the arguments one by one, costs the host 7 to 9 us (H200).
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

from .arrays import Array
from .tensor_maps import SIZE as MAP_SIZE
from .tensor_maps import TensorMap, encode

# CUDA driver API, cuLaunchKernel: `extra` is a list of these words and what each announces.
END, BUFFER_POINTER, BUFFER_SIZE = 0, 1, 2
LEGACY_DEFAULT_STREAM = 1  # 0 is this one too, unless cuda.bindings is told otherwise by the environment


def enqueuer(
    kernel: Any, name: str, device: int, blocks: int, threads: int, shared_bytes: int, pointers: int,
    maps: Sequence[tuple[int, TensorMap]], scalars: Sequence[int | float],
) -> Callable[[Sequence[Array | None], int], None]:  # fmt: skip
    """A function (operands, stream) that launches a loaded cuda.core kernel; any thread may call it.

    pointers: how many operands there will be; maps: of which of them the kernel takes tensor maps.
    """
    from cuda.bindings import driver
    from cuda.core import Device

    function = driver.CUfunction(int(kernel.handle))  # a kernel passes as a function, in whichever context is current
    launch, current_device = driver.cuLaunchKernel, driver.cuCtxGetDevice
    constants = b"".join(struct.pack("<d" if isinstance(x, float) else "<q", x) for x in scalars)
    size = MAP_SIZE * len(maps) + 8 * pointers + len(constants)
    # the five words of `extra` and the size that one of them points to; then the parameters
    layout = struct.Struct(f"<6Q{f'{MAP_SIZE}s' * len(maps)}{pointers}Q{len(constants)}s")
    Buffer: Any = ctypes.c_char * layout.size
    pack_into, size_at, parameters_at = layout.pack_into, 5 * 8, 6 * 8
    address_of = ctypes.addressof

    def enqueue(operands: Sequence[Array | None], stream: int) -> None:
        addresses = [0 if array is None else array.pointer for array in operands]
        buffer = Buffer()  # of this call alone; the driver has copied it when the launch returns
        at = address_of(buffer)
        pack_into(
            buffer, 0, BUFFER_POINTER, at + parameters_at, BUFFER_SIZE, at + size_at, END, size,
            *[encode(tensor_map, addresses[operand]) for operand, tensor_map in maps], *addresses, constants,
        )  # fmt: skip
        none, current = current_device()
        elsewhere = none or int(current) != device
        if elsewhere:
            Device(device).set_current()
        (error,) = launch(
            function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream or LEGACY_DEFAULT_STREAM, None, at
        )
        if elsewhere and not none:
            Device(int(current)).set_current()
        if error:
            raise RuntimeError(
                f"kernel {name!r} could not be launched with {blocks} blocks of {threads} threads and "
                f"{shared_bytes} bytes of shared memory: {error.name}"
            )

    return enqueue
