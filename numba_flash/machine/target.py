"""Target: the machine that a problem would run on. Facts only; tests make their own."""

import functools
from dataclasses import dataclass

from . import toolchain


@dataclass(frozen=True)
class Target:
    """The machine, as far as `select` may know it. cc is None where no GPU is usable, and `why_no_gpu` says why."""

    arrays_on_host: bool  # the caller's arrays are in host memory
    simulated: bool = False  # Numba's CUDA simulator stands in for the GPU
    device: int = 0
    cc: tuple[int, int] | None = None
    shared_bytes: int = 0  # largest dynamic shared memory of one block, opted in
    multiprocessors: int = 0
    name: str = "no GPU"
    why_no_gpu: str | None = None

    @staticmethod
    @functools.cache
    def of(device: int | None) -> "Target":
        """The machine for arrays on CUDA device `device`, or in host memory for None."""
        if toolchain.simulated():
            return Target(True, True, 0, (9, 0), 227 * 1024, 132, "Numba's CUDA simulator")
        reason = toolchain.unusable()
        if reason is not None:
            return Target(device is None, why_no_gpu=reason)
        from cuda.core import Device

        gpu = Device(device or 0)
        return Target(
            arrays_on_host=device is None,
            device=device or 0,
            cc=(gpu.compute_capability.major, gpu.compute_capability.minor),
            shared_bytes=gpu.properties.max_shared_memory_per_block_optin,
            multiprocessors=gpu.properties.multiprocessor_count,
            name=gpu.name,
        )
