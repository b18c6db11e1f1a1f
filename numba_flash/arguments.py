"""The parameters of the attention kernels, in order: their types for compiling, their values for launching.

One list for both, so that they cannot drift apart. The order is that of the kernels' `def` lines.
"""

import functools

from .config import Config, WgmmaConfig
from .problem import Problem
from .ranges import UNBOUNDED
from .tensor_maps import TensorMap


def pointer_types(config: Config) -> tuple[str, ...]:
    """The element types behind the pointers, in the order of arrays.Operands; masks are bytes."""
    types: tuple[str, ...] = (
        config.dtype, config.dtype, config.dtype, config.dtype, config.compute_dtype,
        config.bias_dtype or "float32", "uint8", config.alibi_dtype or "float32", "int32", "int32",
    )  # fmt: skip
    if config.kernel == "v1":
        types += (config.compute_dtype,) * 3  # its workspace: O before rounding, l and m
    if config.counted:
        types += ("uint32",)  # its tile counter
    return types


# After the pointers: ("int64", n) is a tuple of n strides, "int64" and "float64" are scalars.
SCALAR_TYPES = (
    *[("int64", 4)] * 6,  # q, k, v, o, bias, mask strides: (batch, head, query or key, dim or key)
    ("int64", 2),  # alibi strides (batch, head)
    ("int64", 2),  # batch strides of seqlens_k and of q_offset
    *["int64"] * 8,  # batch, heads, heads_kv, seqlen_q, seqlen_k, left, right, q_offset
    *["float64"] * 2,  # scale, softcap
)


Scalars = tuple[tuple[int, ...] | int | float, ...]


@functools.lru_cache(maxsize=4096)
def scalars(problem: Problem) -> Scalars:
    """The values for SCALAR_TYPES."""
    return (
        problem.q_strides, problem.k_strides, problem.v_strides, problem.o_strides,
        problem.bias_strides, problem.mask_strides, problem.alibi_strides,
        (problem.seqlens_k_stride, problem.q_offset_stride),
        problem.batch, problem.heads, problem.heads_kv, problem.seqlen_q, problem.seqlen_k,
        UNBOUNDED if problem.left is None else problem.left,
        UNBOUNDED if problem.right is None else problem.right,
        problem.q_offset, problem.scale, problem.softcap or 0.0,
    )  # fmt: skip


def tensor_maps(config: Config, problem: Problem) -> tuple[tuple[int, TensorMap], ...]:
    """(which operand, how it is fetched) for each of the kernel's TMA descriptors, in the kernel's order."""
    if not isinstance(config, WgmmaConfig):
        return ()
    p, group = problem, config.group
    q_batch, q_head, q_row = (2 * stride for stride in p.q_strides[:3])
    # The heads of a group are a dimension of their own, so that a box holds some queries with all of them.
    q_shape = (p.head_dim, group, p.seqlen_q, p.heads // group, p.batch)
    q = TensorMap(p.dtype, q_shape, (q_head, q_row, group * q_head, q_batch), (64, group, config.queries, 1, 1))
    maps = [(0, q)]
    for operand, strides, columns in ((1, p.k_strides, p.head_dim), (2, p.v_strides, p.head_dim_v)):
        batch, head, row = (2 * stride for stride in strides[:3])
        # Without keys the kernel fetches a tile past the end, which is zeros. But a map has no extent of 0, and an
        # empty array lies nowhere: one element of q stands for it.
        shape = (columns, p.seqlen_k, p.heads_kv, p.batch) if p.seqlen_k else (1, 1, 1, 1)
        box = (64, config.tile_n // config.cluster, 1, 1)
        maps.append((operand if p.seqlen_k else 0, TensorMap(p.dtype, shape, (row, head, batch), box)))
    return tuple(maps)
