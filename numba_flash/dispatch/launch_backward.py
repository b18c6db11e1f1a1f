"""From a BackwardChoice to running code."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import arrays, reference
from ..config.aux_gradients import AuxElementsConfig
from ..config.backward import BackwardConfig, MmaDkdvConfig, PreprocessConfig
from ..config.forward import ITEM_SIZE
from ..config.mask_bits import MaskBitsConfig
from ..config.score_gradients import MmaDbiasConfig
from ..config.simt_backward import DbiasConfig, DbiasSumConfig, DeltaConfig, DkdvConfig, HeadSumsConfig
from ..config.tile_states import TileOrderConfig, TileStatesConfig
from ..config.wgmma_backward import WgmmaAddPartsConfig, WgmmaDkdvConfig, WgmmaFusedConfig, WgmmaRoundConfig
from ..config.wgmma_backward_float32 import WgmmaDkdvFloat32Config
from ..config.wide_backward import WideDkdvConfig, WideFusedConfig
from ..machine import toolchain
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from ..problem.options import GradientOperands
from ..select import tile_states
from ..select.arguments import (
    AUX_BOUNDS,
    AUX_SUMS,
    BACKWARD_WORKSPACE,
    MASK_BITS,
    MASK_BITS_OF_KEYS,
    Values,
    mask_bits_layout,
    mask_bits_words,
    parameters_of,
)
from ..select.backward import BackwardChoice
from ..select.backward_arguments import aux_elements, backward_arrays, backward_tensor_maps, backward_values
from ..select.backward_kernels import all_parts
from .for_reference import heads_first, reference_options
from .launch import Given, KernelSequence, Launch, OnCpu, Step, WarnsIfSlow, on_gpu


def make_backward_launch(choice: BackwardChoice, problem: BackwardProblem, target: Target) -> Launch:
    """The chosen kernels for this problem; their operands are in the order of options.GradientOperands."""
    if choice.kernel == "reference":
        return _OnReference(problem)
    if choice.kernel == "cpu":
        return OnCpu(problem, _cpu)
    ready = _kernels(choice, problem, target)
    return WarnsIfSlow(problem.forward, ready, times=3.5) if target.simulated else ready


def grid(config: BackwardConfig, problem: BackwardProblem) -> int:
    """Number of blocks; 0 if there is nothing to write."""
    forward = problem.forward
    if isinstance(config, DeltaConfig):
        return forward.batch * forward.heads * -(-forward.seqlen_q // config.rows)
    if isinstance(config, MaskBitsConfig):
        return mask_bits_layout(forward, config.of_keys)[0]
    if isinstance(config, TileStatesConfig):
        return tile_states.blocks(forward, config.tile)
    if isinstance(config, TileOrderConfig):
        return tile_states.order_blocks(forward, config.tile, config.threads)
    if isinstance(config, PreprocessConfig):
        return forward.batch * forward.heads * -(-_row_blocks(problem) * BLOCK_ROWS // config.rows)
    if isinstance(config, WgmmaDkdvConfig):
        return all_parts(problem.forward, config.members) * (1 if config.key_tiles else _key_tiles(config, problem))
    if isinstance(config, WgmmaAddPartsConfig):
        return forward.batch * forward.heads_kv * -(-forward.seqlen_k // 64)
    if isinstance(config, DkdvConfig | MmaDkdvConfig | WgmmaDkdvFloat32Config | WideDkdvConfig | WideFusedConfig):
        return config.cluster * forward.batch * forward.heads_kv * -(-forward.seqlen_k // config.tile_n)
    if isinstance(config, WgmmaRoundConfig):
        return forward.batch * forward.heads * -(-forward.seqlen_q // 64)
    if isinstance(config, DbiasConfig | MmaDbiasConfig):
        batch, heads, rows, keys = problem.dbias_shape
        splits = problem.dbias_splits if config.split else 1
        return splits * batch * heads * -(-rows // config.tile_m) * -(-keys // config.tile_n)
    if isinstance(config, DbiasSumConfig):
        return -(-math.prod(problem.dbias_shape) // config.threads)
    if isinstance(config, AuxElementsConfig):
        return -(-aux_elements(problem) // config.threads)
    if isinstance(config, HeadSumsConfig):
        return math.prod(problem.shape_of(config.gradient))
    # one block, or one cluster, for each query tile
    return config.cluster * forward.batch * forward.heads * -(-forward.seqlen_q // config.tile_m)


def _key_tiles(config: WgmmaDkdvConfig, problem: BackwardProblem) -> int:
    return -(-problem.forward.seqlen_k // config.tile_n)


def blocks_at_a_time(target: Target) -> int:
    """Number of blocks of a persistent kernel, one on each multiprocessor."""
    return max(target.multiprocessors, 1)


def workspace(configs: Sequence[BackwardConfig], problem: BackwardProblem) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of the arrays of BACKWARD_WORKSPACE that these kernels may take."""
    rows: tuple[tuple[int, ...], str] = (problem.forward.lse_shape, problem.forward.compute_dtype)
    facts = problem.forward.batch * problem.forward.heads * _row_blocks(problem) * 2 * BLOCK_ROWS
    of_queries, of_keys = (mask_bits_words(problem.forward, of_keys) for of_keys in (False, True))
    made = dict(delta=rows, row_shares=rows, lse_delta=((facts,), "float32"))
    made |= {MASK_BITS: ((of_queries,), "uint32"), MASK_BITS_OF_KEYS: ((of_keys,), "uint32")}
    if problem.wanted_aux:
        elements, words = aux_elements(problem), 2 if problem.forward.compute_dtype == "float64" else 1
        made |= {AUX_BOUNDS: ((elements + 1,), "uint32"), AUX_SUMS: ((elements * words,), "int64")}
    for config in configs:
        if isinstance(config, DbiasSumConfig):
            made["dbias_sums"] = (problem.dbias_splits * math.prod(problem.dbias_shape),), config.compute_dtype
        if isinstance(config, TileStatesConfig):
            made[config.tile_states] = (tile_states.words(problem.forward, config.tile),), "uint32"
        if isinstance(config, WideFusedConfig):
            tiles = problem.forward.batch * problem.forward.heads * -(-problem.forward.seqlen_q // config.tile_m)
            made["turns"] = (config.TURNS_AT + tiles,), "uint32"
        if isinstance(config, WgmmaDkdvConfig) and config.members:
            rows_of_parts = all_parts(problem.forward, config.members) * _key_tiles(config, problem) * config.tile_n
            if config.of_dk:
                made["dk_sums"] = (rows_of_parts * config.head_dim_padded,), "float32"
            if config.of_dv:
                made["dv_sums"] = (rows_of_parts * config.head_dim_v_padded,), "float32"
        if isinstance(config, WgmmaFusedConfig) and not config.key_tiles:
            tiles = problem.forward.batch * problem.forward.heads * -(-problem.forward.seqlen_q // config.tile_m)
            sums = tiles * config.dq_lines
            made["turns"] = (config.TURNS_AT + 2 * sums,), "uint32"
            made["dq_sums"] = (sums * config.tile_m * config.dq_columns,), "float32"
    return made


def workspace_bytes(configs: Sequence[BackwardConfig], problem: BackwardProblem) -> int:
    """Bytes that these kernels allocate besides the gradients."""
    used = {name for config in configs for name in parameters_of(config).arrays}
    made = workspace(configs, problem).items()
    return sum(math.prod(shape) * ITEM_SIZE[dtype] for name, (shape, dtype) in made if name in used)


BLOCK_ROWS = 16  # queries of a block of backward_preprocess' results (kernels/steps/lse_delta.py)


def _row_blocks(problem: BackwardProblem) -> int:
    """Number of such blocks of each head."""
    return -(-problem.forward.seqlen_q // BLOCK_ROWS)


def _kernels(choice: BackwardChoice, problem: BackwardProblem, target: Target) -> Launch:
    """The kernels of a backward that have something to do, and the workspace between them."""
    configs = [(config, grid(config, problem)) for config in choice.configs]
    every = backward_arrays(problem)
    steps: list[Step] = []
    for config, blocks in configs:
        if blocks:
            values = _values(config, problem)
            if isinstance(config, WgmmaFusedConfig) and config.stays:
                blocks = min(blocks, blocks_at_a_time(target))
            behind = any(step.makes is None for step in steps)  # the others may be left out (run_with_blocks)
            launch = on_gpu(config, target, blocks, values, backward_tensor_maps(config, problem), behind)
            steps.append(Step.of(config, launch, values, every, BACKWARD_WORKSPACE))
    used = {number for step in steps for number in step.taken}
    shapes = workspace(choice.configs, problem)
    made = [shapes.get(name) if every.index(name) in used else None for name in BACKWARD_WORKSPACE]
    return KernelSequence(steps, made)


def _values(config: BackwardConfig, problem: BackwardProblem) -> Values:
    return backward_values(config.kernel, problem, config.tile_states, config.states_tile)


def _cpu() -> Any:
    with toolchain.importing():
        from ..cpu import backward as cpu

    return cpu


class _OnReference(Launch):
    __slots__ = ("_problem",)

    def __init__(self, problem: BackwardProblem) -> None:
        self._problem = problem

    def run(self, operands: Given, stream: int) -> None:
        own = len(GradientOperands._fields)
        _run_reference(self._problem, GradientOperands(*operands[:own]), operands[own:])  # type: ignore[arg-type]


def _run_reference(problem: BackwardProblem, operands: GradientOperands, behind: Given) -> None:
    """Hand NumPy views in (batch, heads, seqlen, dim) order to the oracle and round its results."""
    forward = problem.forward
    do, q, k, v, o = (heads_first(forward, getattr(operands, name)) for name in ("do", "q", "k", "v", "o"))
    daux = behind[-len(forward.aux) :] if problem.wanted_aux else ()
    gradients = reference.backward(
        do,
        q,
        k,
        v,
        o,
        arrays.host_view(operands.lse),
        dlse=None if operands.dlse is None else arrays.host_view(operands.dlse),
        **reference_options(forward, operands, behind[: len(behind) - len(daux)]),
        wanted_aux=problem.wanted_aux,
    )
    for number in problem.wanted_aux:
        array, found = daux[number], gradients.daux[number]
        assert array is not None
        view = arrays.host_view(array)
        with np.errstate(over="ignore"):
            view[...] = found.astype(view.dtype)
    for name in problem.wanted:
        array, found = getattr(operands, name), getattr(gradients, name)
        view = heads_first(forward, array) if name in ("dq", "dk", "dv") else arrays.host_view(array)
        with np.errstate(over="ignore"):  # a result beyond float16's range becomes inf, as in every kernel
            view[...] = found.reshape(view.shape).astype(view.dtype)
