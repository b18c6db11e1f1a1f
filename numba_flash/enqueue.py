"""One compiled kernel, launched again and again: all its parameters in one buffer, one call of the driver.

Every parameter is 8 bytes long (a pointer, an int64, a float64), so they lie side by side just as PTX lays them out;
tensor maps, 128 bytes each, come first. They are aligned to 64 bytes where they arrive, which is not at a multiple of
64 from the beginning of the parameters, so the driver is asked where the first one lies. Scalars stay the same from
call to call and come packed. cuda.core.launch, which takes the arguments one by one, costs the host 7 to 9 us (H200).
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


def packed(scalars: Sequence[Any]) -> bytes:
    """Scalars, and tuples of them laid out, as a kernel takes them behind its pointers."""
    flat: list[int | float] = []
    for value in scalars:
        flat.extend(value) if isinstance(value, tuple) else flat.append(value)
    return struct.pack("<" + "".join(["d" if isinstance(x, float) else "q" for x in flat]), *flat)


def enqueuer(
    kernel: Any, name: str, device: int, threads: int, shared_bytes: int, pointers: int, maps: int, constants: int
) -> Callable[..., None]:
    """A function that launches a loaded cuda.core kernel; any thread may call it.

    pointers and maps: how many of them the kernel takes; constants: how many bytes of packed scalars.
    """
    from cuda.bindings import driver
    from cuda.core import Device

    function = driver.CUfunction(int(kernel.handle))  # a kernel passes as a function, in whichever context is current
    launch, current_device = driver.cuLaunchKernel, driver.cuCtxGetDevice
    error, first, _ = driver.cuKernelGetParamInfo(driver.CUkernel(int(kernel.handle)), 0)
    if error:
        raise RuntimeError(f"the parameters of kernel {name!r} could not be looked up: {error.name}")
    size = first + MAP_SIZE * maps + 8 * pointers + constants
    # the five words of `extra` and the size that one of them points to; then the parameters
    layout = struct.Struct(f"<6Q{first}x{f'{MAP_SIZE}s' * maps}{pointers}Q{constants}s")
    Buffer: Any = ctypes.c_char * layout.size
    pack_into, size_at, parameters_at = layout.pack_into, 5 * 8, 6 * 8
    address_of = ctypes.addressof

    def enqueue(
        operands: Sequence[Array | None],
        stream: int,
        blocks: int,
        maps: Sequence[tuple[int, TensorMap]],
        scalars: bytes,
    ) -> None:
        """maps: (which operand, its map); scalars: what `packed` made of them."""
        addresses = [0 if array is None else array.pointer for array in operands]
        buffer = Buffer()  # of this call alone; the driver has copied it when the launch returns
        at = address_of(buffer)
        pack_into(
            buffer, 0, BUFFER_POINTER, at + parameters_at, BUFFER_SIZE, at + size_at, END, size,
            *[encode(tensor_map, addresses[operand]) for operand, tensor_map in maps], *addresses, scalars,
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
