"""The parameters of the kernels that compute gradients, by name: their types for compiling, their values for launching.

A kernel's names are those of its `def` line, in that order.
"""

from typing import Any

from .arguments import Scalars
from .arrays import GradientOperands
from .backward_problem import BackwardProblem
from .config_backward import BackwardConfig
from .config_wgmma_backward import WgmmaBackwardConfig
from .ranges import UNBOUNDED
from .tensor_maps import TensorMap

# In the computing type; of what shape, launch_backward.workspace says.
WORKSPACE = ("delta", "slope_rows", "row_facts")
# As the kernels call them: an array of offsets goes beside the number that is added to it.
OPERANDS = tuple("q_offsets" if name == "q_offset" else name for name in (*GradientOperands._fields, *WORKSPACE))

_INPUTS = "q k v do lse delta bias mask alibi_slopes seqlens_k q_offsets".split()
_LAYOUTS = "q_strides k_strides v_strides do_strides bias_strides mask_strides alibi_strides batch_strides".split()
_TENSOR_INPUTS = "q k v do row_facts alibi_slopes seqlens_k q_offsets".split()
_TENSOR_LAYOUTS = [name for name in _LAYOUTS if name not in ("bias_strides", "mask_strides")]
_SIZES = "batch heads heads_kv seqlen_q seqlen_k left right q_offset scale softcap".split()
# kernel -> (its arrays, of OPERANDS; its numbers)
PARAMETERS: dict[str, tuple[list[str], list[str]]] = {
    "delta": ("do o dlse delta".split(), "do_strides o_strides dlse_strides heads seqlen_q".split()),
    "v2_dkdv": ([*_INPUTS, "dk", "dv"], [*_LAYOUTS, "dk_strides", "dv_strides", *_SIZES]),
    "v2_dq": ([*_INPUTS, "dq", "slope_rows"], [*_LAYOUTS, "dq_strides", *_SIZES]),
    "v2_dbias": ([*_INPUTS, "dbias"], [*_LAYOUTS, "dbias_strides", "dbias_shape", *_SIZES]),
    "v2_dalibi": (["slope_rows", "dalibi_slopes"], "dalibi_strides batch heads seqlen_q".split()),
    "mma_rows": ("do o lse dlse row_facts".split(), "do_strides o_strides dlse_strides heads seqlen_q".split()),
    "mma_dkdv": ([*_TENSOR_INPUTS, "dk", "dv"], [*_TENSOR_LAYOUTS, "dk_strides", "dv_strides", *_SIZES]),
    "mma_dq": ([*_TENSOR_INPUTS, "dq"], [*_TENSOR_LAYOUTS, "dq_strides", *_SIZES]),
}
PARAMETERS |= {f"wgmma_{name}": PARAMETERS[f"mma_{name}"] for name in ("dkdv", "dq")}  # behind the tensor maps
_TUPLES = dict(dlse_strides=3, alibi_strides=2, dalibi_strides=2, batch_strides=2)


def pointer_types(config: BackwardConfig) -> tuple[str, ...]:
    """The element types behind the pointers."""
    types = dict.fromkeys(("q", "k", "v", "o", "do", "dq", "dk", "dv"), config.dtype)
    types |= dict.fromkeys(("lse", "dlse", *WORKSPACE), config.compute_dtype)
    types |= dict(mask="uint8", seqlens_k="int32", q_offsets="int32")
    types |= dict.fromkeys(("bias", "dbias"), getattr(config, "bias_dtype", None) or "float32")
    types |= dict.fromkeys(("alibi_slopes", "dalibi_slopes"), getattr(config, "alibi_dtype", None) or "float32")
    return tuple(types[name] for name in PARAMETERS[config.kernel][0])


def scalar_types(config: BackwardConfig) -> tuple[Any, ...]:
    """Behind the pointers: ("int64", n) for a tuple of n, "int64" or "float64"."""

    def of(name: str) -> Any:
        if name in ("scale", "softcap"):
            return "float64"
        return ("int64", _TUPLES.get(name, 4)) if name.endswith(("_strides", "_shape")) else "int64"

    return tuple(map(of, PARAMETERS[config.kernel][1]))


def scalars(config: BackwardConfig, problem: BackwardProblem) -> Scalars:
    """The values for scalar_types."""
    forward = problem.forward
    values = vars(forward) | vars(problem)
    values |= dict(
        batch_strides=(forward.seqlens_k_stride, forward.q_offset_stride),
        left=UNBOUNDED if forward.left is None else forward.left,
        right=UNBOUNDED if forward.right is None else forward.right,
        softcap=forward.softcap or 0.0,
    )
    return tuple(values[name] for name in PARAMETERS[config.kernel][1])


def tensor_maps(config: BackwardConfig, problem: BackwardProblem) -> tuple[tuple[int, TensorMap], ...]:
    """(which operand, how it is fetched) for each of the kernel's TMA descriptors, in the kernel's order."""
    if not isinstance(config, WgmmaBackwardConfig):
        return ()
    p = problem.forward
    given = (
        (0, p.q_strides, p.seqlen_q, p.heads, p.head_dim, config.tile_m),
        (1, p.k_strides, p.seqlen_k, p.heads_kv, p.head_dim, config.tile_n),
        (2, p.v_strides, p.seqlen_k, p.heads_kv, p.head_dim_v, config.tile_n),
        (3, problem.do_strides, p.seqlen_q, p.heads, p.head_dim_v, config.tile_m),
    )
    # A map has no extent of 0, and an empty array lies nowhere: one element of another stands for it, past which a
    # tile is zeros.
    present = next((operand for operand, _, rows, *_ in given if rows), 0)
    maps = []
    for operand, strides, rows, heads, columns, tile in given:
        batch, head, row = (2 * stride for stride in strides[:3])
        shape = (columns, rows, heads, p.batch) if rows else (1, 1, 1, 1)
        made = TensorMap(p.dtype, shape, (row, head, batch), (64, tile, 1, 1))
        maps.append((operand if rows else present, made))
    return tuple(maps)


def operands(config: BackwardConfig) -> tuple[int, ...]:
    """Where in OPERANDS the kernel's arrays stand."""
    return tuple(map(OPERANDS.index, PARAMETERS[config.kernel][0]))
