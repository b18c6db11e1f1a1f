"""Tensor maps: they tell Hopper's copy engine (TMA) where a tensor is and which box of it to load.

A tensor map is 128 bytes, 64-byte aligned. The driver creates it (gpu/tensor_maps.py), and a kernel passes it to
`cp.async.bulk.tensor` (CUDA driver API, "Tensor Map Object Management"). The driver's conditions are checked here
without CUDA, so that a problem can be refused before anything runs.
"""

from dataclasses import dataclass
from typing import Any

from ..arrays.dtypes import ITEM_SIZE
from ..problem.forward import Problem

SIZE = 128  # bytes of one map
DTYPES = ("float16", "bfloat16")
SWIZZLES = (0, 32, 64, 128)
PROMOTIONS = (0, 64, 128, 256)


@dataclass(frozen=True)
class TensorMap:
    """A map without its address. The innermost dimension is the first, and its elements are contiguous.

    A box that reaches past an extent is filled with zeros. `strides_bytes` leaves out the innermost dimension; the
    stride of a dimension of one element does not matter.
    """

    dtype: str  # "float16" or "bfloat16"
    shape: tuple[int, ...]  # elements
    strides_bytes: tuple[int, ...]  # from the second dimension on
    box: tuple[int, ...]  # elements that one copy loads
    swizzle_bytes: int = 128  # over how many bytes 16-byte pieces are permuted in shared memory; 0: not at all
    l2_bytes: int = 256  # bytes that L2 reads from memory at a time


def fits(tensor_map: TensorMap) -> str | None:
    """Why the driver would refuse the map, or None. Needs no CUDA."""
    m, rank = tensor_map, len(tensor_map.shape)
    if m.dtype not in DTYPES:
        return f"a tensor map here is of {' or '.join(DTYPES)}, not {m.dtype}"
    if not 2 <= rank <= 5 or len(m.box) != rank or len(m.strides_bytes) != rank - 1:
        return f"a tensor map has 2 to 5 dimensions, not shape {m.shape}, box {m.box}, strides {m.strides_bytes}"
    for extent in m.shape:
        if not 1 <= extent <= 2**32:
            return f"an extent in a tensor map is 1 to 2**32, not {extent}"
    for extent, stride in zip(m.shape[1:], m.strides_bytes, strict=True):
        if extent > 1 and (not 0 < stride < 2**40 or stride % 16):
            # The manual derives strides from the inner extents; a broadcast dimension, stride 0, does not fit that.
            return f"a stride in a tensor map is a multiple of 16 bytes, above 0 and below 2**40, not {stride}"
    for extent in m.box:
        if not 1 <= extent <= 256:
            return f"a box of a tensor map has 1 to 256 elements along a dimension, not {extent}"
    row = m.box[0] * ITEM_SIZE[m.dtype]
    if m.swizzle_bytes not in SWIZZLES or row % 16 or row > (m.swizzle_bytes or row):
        return f"a box row of {row} bytes must be a multiple of 16 and no longer than the swizzle, {m.swizzle_bytes}"
    if m.l2_bytes not in PROMOTIONS:
        return f"L2 reads {', '.join(map(str, PROMOTIONS))} bytes at a time for a tensor map, not {m.l2_bytes}"
    return None


OperandMaps = tuple[tuple[int, TensorMap], ...]  # (operand, its map), in the kernel's order


def extents(p: Problem) -> tuple[int, int, int]:
    """-> rows of q, rows of k and v, and batch entries, of the arrays."""
    return (p.seqlen_q, p.seqlen_k, p.batch) if p.packed is None else (*p.packed, 1)


NONE = (1, 1, 1, 1)  # a map cannot have an extent of 0, so that of an empty array is of one element


def map_of_rows(
    dtype: str, operand: int, strides: tuple[int, ...], shape: tuple[int, ...], box: tuple[int, int], present: int
) -> tuple[int, TensorMap]:
    """The map of an operand of 16 bits with (batch, head, row) strides; shape: columns, rows, heads, batch.

    An empty array has no address, so one element of `present`, another operand, replaces it: past that a tile is zeros.
    """
    batch, head, row = (ITEM_SIZE[dtype] * stride for stride in strides[:3])
    rows = shape[1]
    made = TensorMap(dtype, shape if rows else NONE, (row, head, batch), (*box, 1, 1))
    return operand if rows else present, made


def bias_map(config: Any, p: Problem, queries: int, present: int) -> tuple[int, TensorMap]:
    """The map of a bias in boxes of `queries` queries. A broadcast bias has one batch entry, or one head. present: an
    array that is not empty."""
    bias = p.array("bias")
    assert bias is not None
    by_batch, by_head, by_row = (ITEM_SIZE[bias.dtype] * stride for stride in bias.strides[:3])
    empty = 0 in (p.seqlen_k, p.seqlen_q)
    shape = NONE if empty else (p.seqlen_k, p.seqlen_q, p.heads if by_head else 1, p.batch if by_batch else 1)
    box = (config.bias_panel, queries, 1, 1)
    operand = present if empty else config.parameters.arrays.index("bias")
    return operand, TensorMap(
        bias.dtype, shape, (by_row, by_head, by_batch), box, ITEM_SIZE[bias.dtype] * config.bias_panel
    )
