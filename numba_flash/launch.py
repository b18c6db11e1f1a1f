"""From a choice to running code: grid, block, shared bytes, stream, pointers."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from . import arrays, reference
from .arguments import Scalars, pointer_types, scalars, tensor_maps
from .arrays import Array, Operands
from .compiled import AnyConfig, compiled, entry_name, source
from .config import Config
from .enqueue import enqueuer
from .problem import Problem
from .select import Choice
from .target import Target
from .tensor_maps import TensorMap

Given = Sequence[Array | None]


class Launch(NamedTuple):
    """What was decided, ready to be run again and again on arrays of the same layouts.

    Making one compiles and loads nothing; the first `run` does, or ahead of it `load`.
    """

    load: Callable[[], object]
    run: Callable[[Given, int], None]  # (operands, stream): enqueue it there, or compute at once in host memory


def prepare(choice: Choice, problem: Problem, target: Target) -> Launch:
    """The chosen kernel for this problem; its operands come in the order of arrays.Operands."""
    if choice.kernel == "reference":
        return Launch(_nothing, lambda operands, stream: _run_reference(problem, operands))
    if choice.kernel == "cpu":
        return _on_cpu(problem)
    if not problem.batch * problem.heads * problem.seqlen_q:
        return Launch(_nothing, _nothing)
    config = choice.config
    assert config is not None
    blocks, pointers = grid(config, problem), len(pointer_types(config))
    ready = on_gpu(config, target, blocks, pointers, scalars(problem), tensor_maps(config, problem))
    if choice.kernel == "v1":
        ready = _with_workspace(problem, ready)
    return _announced(problem, ready) if target.simulated else ready


def _nothing(*_: object) -> None:
    """A kernel without a single block, or one that needs no loading."""


@functools.lru_cache(maxsize=4096)
def on_gpu(
    config: AnyConfig,
    target: Target,
    blocks: int,
    pointers: int,
    scalars: Scalars,
    maps: tuple[tuple[int, TensorMap], ...] = (),
) -> Launch:
    """One kernel on the GPU, or in the simulator; its operands are `pointers` arrays or None.

    maps: (which operand, the tensor map of it that the kernel takes) in the kernel's order.
    """
    if target.simulated:
        from .sim.launch import run as simulate

        def run_simulated(operands: Given, stream: int) -> None:
            simulate(
                lambda: source(config), blocks, config.threads, config.shared_bytes, tuple(operands), scalars, maps
            )

        return Launch(_nothing, run_simulated)

    @functools.cache
    def load() -> Callable[[Given, int], None]:
        kernel = compiled(config, target.device, target.cc or (0, 0))
        return enqueuer(
            kernel, entry_name(config), target.device, blocks, config.threads, config.shared_bytes, pointers, maps,
            _flat(scalars),
        )  # fmt: skip

    def run(operands: Given, stream: int) -> None:
        load()(operands, stream)

    return Launch(load, run)


def _flat(scalars: Scalars) -> list[int | float]:
    """Tuples laid out, as the compiled kernel takes them."""
    flat: list[int | float] = []
    for value in scalars:
        flat.extend(value) if isinstance(value, tuple) else flat.append(value)
    return flat


def grid(config: Config, problem: Problem) -> int:
    """How many blocks: v1 walks over all queries of a head itself, v2 has a block for each query tile."""
    blocks = problem.batch * problem.heads
    return blocks if config.kernel == "v1" else blocks * -(-problem.seqlen_q // config.tile_m)


def _with_workspace(problem: Problem, ready: Launch) -> Launch:
    """v1 with what it keeps in global memory between its outer steps: O before rounding, and l and m."""
    rows, dtype = problem.lse_shape, problem.compute_dtype

    def run(operands: Given, stream: int) -> None:
        shapes = ((*rows, problem.head_dim_v), rows, rows)
        q = operands[0]
        assert q is not None
        workspace = [arrays.scratch(q, shape, dtype) for shape in shapes]
        ready.run((*operands, *workspace), stream)

    return Launch(ready.load, run)


def _announced(problem: Problem, ready: Launch) -> Launch:
    """In the simulator, where a call may take minutes: then said at the line that called attention()."""
    from .sim.launch import warn_if_long

    def run(operands: Given, stream: int) -> None:
        warn_if_long(problem)
        ready.run(operands, stream)

    return Launch(ready.load, run)


def _on_cpu(problem: Problem) -> Launch:
    def load() -> None:
        from . import cpu  # Numba comes in with it

        cpu.warm_up(problem)

    @functools.cache
    def forward() -> Callable[[Problem, list[int]], None]:
        from . import cpu

        return cpu.forward

    def run(operands: Given, stream: int) -> None:
        forward()(problem, [0 if array is None else array.pointer for array in operands])

    return Launch(load, run)


def _run_reference(problem: Problem, given: Given) -> None:
    """Hand NumPy views in (batch, heads, seqlen, dim) order to the oracle and round its results."""
    operands = Operands(*given)  # type: ignore[arg-type]

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
