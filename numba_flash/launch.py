"""From a choice to running code: grid, block, shared bytes, stream, pointers."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from . import arrays, reference
from .arguments import Scalars, scalars
from .arrays import Array, Operands
from .compiled import AnyConfig, compiled, source
from .config import Config
from .problem import Problem
from .select import Choice
from .target import Target


def launch(choice: Choice, problem: Problem, target: Target, operands: Operands, stream: int) -> None:
    """Run the chosen kernel: enqueue it on `stream`, or compute at once in host memory."""
    if choice.kernel == "reference":
        _run_reference(problem, operands)
    elif choice.kernel == "cpu":
        _cpu_forward()(problem, [0 if array is None else array.pointer for array in operands])
    elif problem.batch * problem.heads * problem.seqlen_q:
        assert choice.config is not None
        if target.simulated:
            from .sim.launch import warn_if_long

            warn_if_long(problem)
        every: tuple[Array | None, ...] = operands
        if choice.kernel == "v1":
            every = (*operands, *_workspace(problem, operands.q))
        launch_on_gpu(choice.config, target, grid(choice.config, problem), every, scalars(problem), stream)


@functools.cache
def _cpu_forward() -> Any:
    from .cpu import forward  # Numba comes in with it

    return forward


def launch_on_gpu(
    config: AnyConfig, target: Target, blocks: int, operands: tuple[Array | None, ...], scalars: Scalars, stream: int
) -> None:
    """One kernel on the GPU, or in the simulator: pointers first, then scalars and tuples of scalars."""
    if target.simulated:
        from .sim.launch import run

        run(lambda: source(config), blocks, config.threads, config.shared_bytes, operands, scalars)
        return
    kernel = compiled(config, target.device, target.cc or (0, 0))
    addresses = [0 if array is None else array.pointer for array in operands]
    cuda = _cuda()
    error, current = cuda.current_device()
    if error or int(current) != target.device:
        with _switched(target.device, None if error else int(current)):
            cuda.launch(_stream(stream), _launch_config(blocks, config), kernel, *addresses, *_flat(scalars))
    else:
        cuda.launch(_stream(stream), _launch_config(blocks, config), kernel, *addresses, *_flat(scalars))


class _Cuda(NamedTuple):
    launch: Any
    current_device: Any


@functools.cache
def _cuda() -> _Cuda:
    # An import statement costs microseconds even when there is nothing left to import.
    from cuda.bindings import driver
    from cuda.core import launch

    return _Cuda(launch, driver.cuCtxGetDevice)


@functools.lru_cache(maxsize=4096)
def _flat(scalars: Scalars) -> tuple[int | float, ...]:
    """Tuples laid out, as the compiled kernel takes them."""
    flat: list[int | float] = []
    for value in scalars:
        flat.extend(value) if isinstance(value, tuple) else flat.append(value)
    return tuple(flat)


def grid(config: Config, problem: Problem) -> int:
    """How many blocks: v1 walks over all queries of a head itself, v2 has a block for each query tile."""
    blocks = problem.batch * problem.heads
    return blocks if config.kernel == "v1" else blocks * -(-problem.seqlen_q // config.tile_m)


def _workspace(problem: Problem, like: Array) -> tuple[Array, Array, Array]:
    """What v1 keeps in global memory between its outer steps: O before rounding, and l and m."""
    rows, dtype = problem.lse_shape, problem.compute_dtype
    acc_o = arrays.scratch(like, (*rows, problem.head_dim_v), dtype)
    return acc_o, arrays.scratch(like, rows, dtype), arrays.scratch(like, rows, dtype)


@functools.lru_cache(maxsize=4096)
def _launch_config(blocks: int, config: Any) -> Any:
    from cuda.core import LaunchConfig

    return LaunchConfig(grid=blocks, block=config.threads, shmem_size=config.shared_bytes)


@functools.lru_cache(maxsize=64)
def _stream(address: int) -> Any:
    from cuda.core import LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM, Stream

    if address in (0, 1):
        return LEGACY_DEFAULT_STREAM
    return PER_THREAD_DEFAULT_STREAM if address == 2 else Stream.from_handle(address)


@contextlib.contextmanager
def _switched(device: int, before: int | None) -> Iterator[None]:
    """Make `device` current for a launch, and put the caller's device back."""
    from cuda.core import Device

    Device(device).set_current()
    try:
        yield
    finally:
        if before is not None:
            Device(before).set_current()


def _run_reference(problem: Problem, operands: Operands) -> None:
    """Hand NumPy views in (batch, heads, seqlen, dim) order to the oracle and round its results."""

    def ordered(array: Array) -> np.ndarray:
        view = arrays.host_view(array)
        return view if problem.layout == "bhsd" else view.transpose(0, 2, 1, 3)

    def optional(array: Array | None) -> np.ndarray | None:
        return None if array is None else arrays.host_view(array)

    full = np.full(problem.batch, problem.seqlen_k)
    lengths = optional(operands.seqlens_k)
    seqlens_k = full if lengths is None else lengths.astype(np.int64)
    q_offset = np.full(problem.batch, problem.q_offset)
    if problem.q_offset_source == "seqlens_k":
        q_offset = q_offset + seqlens_k
    elif operands.q_offset is not None:
        q_offset = q_offset + arrays.host_view(operands.q_offset)
    slopes = optional(operands.alibi_slopes)
    o, lse = reference.forward(
        ordered(operands.q),
        ordered(operands.k),
        ordered(operands.v),
        scale=problem.scale,
        softcap=problem.softcap,
        alibi_slopes=slopes if slopes is None or slopes.ndim == 2 else slopes[None],
        q_offset=q_offset,
        bias=optional(operands.bias),
        visible=reference.visible_keys(
            problem.batch,
            problem.seqlen_q,
            problem.seqlen_k,
            left=problem.left,
            right=problem.right,
            q_offset=q_offset,
            seqlens_k=seqlens_k,
            mask=optional(operands.mask),
        ),
    )
    assert operands.o is not None
    with np.errstate(over="ignore"):  # a result beyond float16's range becomes inf, as in every kernel
        ordered(operands.o)[...] = o.astype(arrays.host_view(operands.o).dtype)
    if operands.lse is not None:
        arrays.host_view(operands.lse)[...] = lse
