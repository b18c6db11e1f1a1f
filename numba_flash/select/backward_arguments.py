"""The parameters of the backward kernels: values, arrays and tensor maps, as arguments.py has them for all kernels."""

import itertools
import math
from typing import Any

from ..config.states_of_tiles import StatesTile
from ..problem.backward import BackwardProblem
from ..problem.options import GRADIENT_OF, GradientOperands, daux_name
from .arguments import BACKWARD_WORKSPACE, Values, behind, bias_map, numbers_of
from .heads_abreast import heads_abreast
from .tensor_maps import TensorMap


def backward_values(kernel: str, problem: BackwardProblem, states: str = "", tile: StatesTile | None = None) -> Values:
    numbers = numbers_of(problem.forward, tile if states else None)
    numbers["strides"] |= dict(do=problem.do_strides, dlse=problem.dlse_strides)
    numbers["strides"] |= zip(GRADIENT_OF, problem.strides, strict=True)
    numbers["sizes"] |= dict(
        dbias_shape=problem.dbias_shape, dbias_splits=problem.dbias_splits, **_sizes_of_aux(problem)
    )
    numbers["sizes"] |= dict(heads_abreast=heads_abreast(problem.forward))
    return Values.of(kernel, len(problem.forward.aux), problem.forward.seeded, states, **numbers)


RUN_ROWS = 4  # rows of which a thread has scores, at most


def _sizes_of_aux(problem: BackwardProblem) -> dict[str, Any]:
    """aux_begins: the index of each array's first element, and the number of elements. kernels/score/owed.py explains
    the bits."""
    p = problem.forward
    sizes = [math.prod(p.aux[number].shape) for number in problem.wanted_aux]
    scores = max(p.batch * p.heads * p.seqlen_q * p.seqlen_k, 1)
    of_thread = min(scores, RUN_ROWS * max(p.seqlen_k, 1))
    bits = dict(term_bits=(scores - 1).bit_length(), run_bits=(of_thread - 1).bit_length())
    return dict(aux_begins=tuple(itertools.accumulate(sizes, initial=0)), **bits)


def aux_elements(problem: BackwardProblem) -> int:
    """Number of elements of all aux arrays that have a gradient."""
    return _sizes_of_aux(problem)["aux_begins"][-1]


def backward_arrays(problem: BackwardProblem) -> tuple[str, ...]:
    daux = map(daux_name, range(len(problem.forward.aux) if problem.wanted_aux else 0))
    return GradientOperands._fields + (*behind(problem.forward), *daux) + BACKWARD_WORKSPACE


def backward_tensor_maps(config: Any, problem: BackwardProblem) -> tuple[tuple[int, TensorMap], ...]:
    """tensor_maps for a backward kernel."""
    if not config.tensor_maps:
        return ()
    p = problem.forward
    given = (
        (0, p.q_strides, p.seqlen_q, p.heads, p.head_dim, config.tile_m),
        (1, p.k_strides, p.seqlen_k, p.heads_kv, p.head_dim, config.tile_n),
        (2, p.v_strides, p.seqlen_k, p.heads_kv, p.head_dim_v, config.tile_n),
        (3, problem.do_strides, p.seqlen_q, p.heads, p.head_dim_v, config.tile_m),
    )
    # A map cannot have an extent of 0, and an empty array has no address: one element of another array replaces it,
    # past which a tile is zeros.
    present = next((operand for operand, _, rows, *_ in given if rows), 0)
    maps = []
    for operand, strides, rows, heads, columns, tile in given:
        batch, head, row = (2 * stride for stride in strides[:3])
        shape = (columns, rows, heads, p.batch) if rows else (1, 1, 1, 1)
        made = TensorMap(p.dtype, shape, (row, head, batch), (64, tile, 1, 1))
        maps.append((operand if rows else present, made))
    if config.bias_boxes:
        maps.append(bias_map(config, p, config.tile_m, present))
    return tuple(maps)
