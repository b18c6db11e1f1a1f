"""How many bytes a kernel moves, counted while it runs in Numba's simulator.

NUMBA_ENABLE_CUDASIM=1 python

>>> numba_flash.debug.traffic(q, k, v, kernel="v1")
>>> numba_flash.debug.traffic(q, k, v, kernel=my_attention)  # launches a kernel of your own
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from .. import arrays
from ..api.forward import prepare_call
from ..dispatch.forward import O
from ..dispatch.launch import make_launch
from ..machine import toolchain
from ..problem.forward import Problem
from ..select.rungs import RUNGS
from .places import check_simulated
from .trace import _with_tile


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The bytes that all threads of a launch requested, and their operations; a multiplication and an addition count as
    two. repr() is a table.

    On a GPU, caches serve some of the reads of global memory; the simulator has no caches.
    """

    kernel: str
    about: str  # the problem in words
    global_read: int
    global_written: int
    shared_read: int
    shared_written: int
    tensor_flops: int  # done by tensor core instructions, with the rows and keys that only fill a tile
    flops: int  # the problem's two products of all queries with all keys, in whichever unit they are computed

    @property
    def global_bytes(self) -> int:
        return self.global_read + self.global_written

    @property
    def intensity(self) -> float:
        """Operations of the problem for each byte of global memory."""
        return self.flops / self.global_bytes

    def __repr__(self) -> str:
        rows = [
            ("global memory", self.global_read, self.global_written),
            ("shared memory", self.shared_read, self.shared_written),
        ]
        lines = [f"{self.kernel}: {self.about}", f"{'bytes':<14}{'read':>14}{'written':>14}"]
        lines += [f"{name:<14}{read:>14,}{written:>14,}" for name, read, written in rows]
        lines.append(f"operations: {self.flops:,} of the problem, {self.tensor_flops:,} by tensor cores")
        return "\n".join([*lines, f"{self.intensity:.1f} operations for each byte of global memory"])


def traffic(
    q: Any,
    k: Any,
    v: Any,
    *,
    kernel: str | Callable[..., Any] = "v2",
    tile: tuple[int, int] | None = None,
    **options: Any,
) -> Traffic:
    """Run attention(q, k, v, **options) in the simulator and count the bytes that its kernel moves.

    >>> numba_flash.debug.traffic(q, k, v, kernel="v2", tile=(16, 16)).global_read

    q, k, v: NumPy arrays, shaped as `attention` takes them. kernel: "v1", "v2", "mma" or "wgmma"; or a function of your
    own, called with q, k, v and the options, that launches kernels made by cuda.jit. tile: (queries, keys) of a tile
    of v1 and v2 instead of what `explain` shows; the keys a multiple of 4.

    Bytes are counted by memory, as the threads ask for them: by index and by address, by cp.async, ldmatrix, TMA and
    wgmma. Operations of tensor cores are counted, those of plain arithmetic are not. Atomic operations in global memory
    count as written; those in shared memory, mbarriers and local arrays do not count.

    Raises what attention raises; ValueError for a kernel that moves nothing on a GPU, NotImplementedError for tile=
    beside other kernels, RuntimeError where the simulator is off.
    """
    check_simulated("traffic")
    rung = None if callable(kernel) else RUNGS.get(kernel)
    if not callable(kernel) and (rung is None or kernel in ("reference", "cpu")):
        of_gpus = [name for name in RUNGS if name not in ("reference", "cpu")]
        raise ValueError(f"kernel must be one of {', '.join(of_gpus)}, or a function that launches, not {kernel!r}")
    if tile is not None and kernel not in ("v1", "v2"):
        raise NotImplementedError(f"tile= is for kernel='v1' and 'v2', not {kernel!r}")
    toolchain.cuda()
    from ..ptx.sim import launch  # Numba comes in with it
    from ..ptx.sim.traffic import counting

    if callable(kernel):
        _, plan = prepare_call(q, k, v, dict(options, kernel="reference"))
        problem, about = plan.problem, ""
        with launch.of_the_caller(), counting() as counts:
            kernel(q, k, v, **options)
        name = getattr(kernel, "__name__", type(kernel).__name__)
    else:
        given, plan = prepare_call(q, k, v, dict(options, kernel=kernel))
        problem, name = plan.problem, kernel
        config: Any = plan.choice.config
        if tile is not None:
            config = _with_tile(tile, plan.target, config)
        choice, about = (
            plan.choice._replace(config=config),
            f", tiles of {config.tile_m} queries x {config.tile_n} keys",
        )
        given[O] = arrays.empty(given[0], problem.o_shape, problem.dtype)
        with counting() as counts:
            make_launch(choice, problem, plan.target).run(given, 0)
    names = ("global_read", "global_written", "shared_read", "shared_written", "tensor_flops")
    counted = {x: getattr(counts, x) for x in names}
    return Traffic(name, _words(problem) + about, **counted, flops=_flops(problem))


def _words(p: Problem) -> str:
    return f"{p.batch} x {p.heads} heads, {p.seqlen_q} queries, {p.seqlen_k} keys, head_dim {p.head_dim}, {p.dtype}"


def _flops(p: Problem) -> int:
    """The operations of Q . K^T and P . V."""
    return 2 * p.batch * p.heads * p.seqlen_q * p.seqlen_k * (p.head_dim + p.head_dim_v)
