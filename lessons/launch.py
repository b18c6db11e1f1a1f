"""Runs the kernel of a lesson: on NumPy arrays in the simulator (NUMBA_ENABLE_CUDASIM=1), on CuPy arrays on a GPU.

A lesson's kernel takes the addresses of q, k, v and o, contiguous arrays (heads, rows, head_dim), the numbers of
queries and keys, and the scale. 16-bit elements are shown as their bits, uint16. This is all of numba_flash's path
from a Python function to a launch, without options: compile to PTX, load, pack the parameters.
"""

import dataclasses
import functools
import math
import re
from typing import Any

import numpy as np

from numba_flash import arrays
from numba_flash.abi.tensor_maps import SIZE, TensorMap
from numba_flash.gpu import compiled, launcher
from numba_flash.machine import toolchain
from numba_flash.ptx.sim import launch as simulator

HEAD_DIM = 64


@dataclasses.dataclass(frozen=True)
class Lesson:
    """A kernel with what a launch needs. Calling it computes attention: lesson(q, k, v) -> o."""

    kernel: Any  # made by cuda.jit
    dtype: str
    tile_m: int  # queries of a block
    threads: int
    shared_bytes: int = 0  # of dynamic shared memory
    boxes: tuple[int, ...] = ()  # rows that TMA loads at once of q, k and v, if it loads them

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        """q, k, v: contiguous arrays (batch, heads, rows, 64) of the lesson's dtype, NumPy's or CuPy's. -> o"""
        for name, array in dict(q=q, k=k, v=v).items():
            if array.ndim != 4 or array.shape[3] != HEAD_DIM or array.dtype != self.dtype:
                asked = f"(batch, heads, rows, {HEAD_DIM}) of {self.dtype}"
                raise ValueError(f"{name} must be {asked}, not {array.shape} of {array.dtype}")
            if not array.flags.c_contiguous:
                raise ValueError(f"{name} must be contiguous, not with strides {array.strides}")
        o = q * 0 if q.size and not k.size else q.copy()
        if q.size and k.size:
            self.run(q, k, v, o)
        return o

    def run(self, q: Any, k: Any, v: Any, o: Any) -> None:
        """One launch, which writes o. The arrays as above, none of them empty."""
        heads, queries, keys = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
        blocks = heads * -(-queries // self.tile_m)
        scale = np.float32((1 if self.dtype == "float32" else math.log2(math.e)) / math.sqrt(HEAD_DIM))
        values = (queries, keys, scale)
        bits = np.float32 if self.dtype == "float32" else np.uint16
        given = tuple(arrays.read(name, x.view(bits)) for name, x in zip("qkvo", (q, k, v, o), strict=True))
        maps = tuple(
            (n, TensorMap(self.dtype, (HEAD_DIM, rows, heads), (2 * HEAD_DIM, 2 * HEAD_DIM * rows), (HEAD_DIM, box, 1)))
            for n, (rows, box) in enumerate(zip((queries, keys, keys), self.boxes, strict=False))
        )
        if toolchain.simulated():
            simulator.run(lambda: self.kernel, blocks, self.threads, self.shared_bytes, given, values, maps)
            return
        scalars = launcher.packed(values)
        device = given[0].layout.device
        if device is None:
            raise RuntimeError("NumPy arrays need the simulator: set NUMBA_ENABLE_CUDASIM=1 before Python starts")
        ready = self._launcher(device, len(scalars))
        ready.launch(ready.parameters([x.pointer for x in given], maps, scalars), 0, blocks)

    @functools.cache  # noqa: B019 - lessons live as long as the process
    def _launcher(self, device: int, constants: int) -> launcher.Launcher:
        from cuda.core import Device, ObjectCode

        cc = Device(device).compute_capability
        made = ObjectCode.from_ptx(self.ptx((cc.major, cc.minor)).encode()).get_kernel(self.entry)
        kernel = compiled._opt_in(made, self, device)  # type: ignore[arg-type]
        return launcher.Launcher(
            kernel, self.entry, device, self.threads, self.shared_bytes, 4, len(self.boxes), constants
        )

    @property
    def __name__(self) -> str:
        return self.kernel.py_func.__name__

    @property
    def entry(self) -> str:
        """The name that profilers show."""
        return f"lesson_{self.__name__}"

    def ptx(self, cc: tuple[int, int]) -> str:
        """The kernel for a compute capability. Needs no GPU."""
        cuda = toolchain.cuda()
        from numba.core import types

        element = types.float32 if self.dtype == "float32" else types.uint16
        pointers = (types.CPointer(element),) * 4
        first = (types.uint64,) if self.boxes else ()
        signature = types.void(*first, *pointers, types.int64, types.int64, types.float32)
        target = (*cc, "a") if cc >= (9, 0) else cc
        with toolchain.compiling(), compiled._compiling_for(cc):
            ptx, _ = cuda.compile(
                self.kernel.py_func, signature, device=False, abi="numba", cc=target, output="ptx",
                launch_bounds=(self.threads, 1),
            )  # fmt: skip
        mangled = re.search(r"\.entry\s+(\S+?)\s*\(", ptx)
        assert mangled, "no entry in the PTX"
        ptx = ptx.replace(mangled[1], self.entry)
        if cc in compiled.PTX_VERSIONS:  # the driver that assembles it may be older than the compiler
            ptx = re.sub(r"^\.version \d+\.\d+", f".version {compiled.PTX_VERSIONS[cc]}", ptx, count=1, flags=re.M)
        if self.boxes:  # Numba has no parameter of 128 bytes: the first one, a number by name, becomes the tensor maps
            name = f"{self.entry}_param_0"
            maps = f".param .align 64 .b8 {name}[{SIZE * len(self.boxes)}]"
            ptx = re.sub(rf"\.param\s+\.u64\s+{name}\b", maps, ptx)
        return ptx
