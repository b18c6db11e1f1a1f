"""Tensor maps: they tell Hopper's copy engine (TMA) where a tensor is and which box of it to load.

A tensor map is 128 bytes, 64-byte aligned. The driver creates it, and a kernel passes it to `cp.async.bulk.tensor`
(CUDA driver API, "Tensor Map Object Management"). The driver's conditions are checked here without CUDA, so that a
problem can be refused before anything runs. This module knows nothing of attention.
"""

import functools
from dataclasses import dataclass
from typing import Any

SIZE = 128  # bytes of one map
ITEM_SIZE = {"float16": 2, "bfloat16": 2}
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

    @functools.cached_property
    def _behind_address(self) -> bytes | None:
        """The encoded map without the address, or None if the address is not in the first 8 bytes alone.

        Encoding takes microseconds, and a call needs a map for every operand. No document says that the address is the
        first 8 bytes, so the map is encoded for two addresses that differ in every bit of an address.
        """
        one, other = (_encoded(self, address) for address in _PROBES)
        if (one[:8], other[:8]) != tuple(address.to_bytes(8, "little") for address in _PROBES):
            return None
        return one[8:] if one[8:] == other[8:] else None


_PROBES = (0x5555_5555_5550, 0x2AAA_AAAA_AAA0)


def fits(tensor_map: TensorMap) -> str | None:
    """Why the driver would refuse the map, or None. Needs no CUDA."""
    m, rank = tensor_map, len(tensor_map.shape)
    if m.dtype not in ITEM_SIZE:
        return f"a tensor map here is of {' or '.join(ITEM_SIZE)}, not {m.dtype}"
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


def encode(tensor_map: TensorMap, pointer: int) -> bytes:
    """The map of a tensor that begins at `pointer`, as the 128 bytes of a kernel's parameter."""
    if pointer % 16:
        raise ValueError(f"a tensor map begins at a multiple of 16 bytes, not at address {pointer:#x}")
    behind_address = tensor_map._behind_address
    if behind_address is None:
        return _encoded(tensor_map, pointer)
    return pointer.to_bytes(8, "little") + behind_address


@functools.lru_cache(maxsize=4096)
def _encoded(tensor_map: TensorMap, pointer: int) -> bytes:
    from cuda.bindings import driver

    reason = fits(tensor_map)
    if reason is not None:
        raise ValueError(reason)
    m, rank = tensor_map, len(tensor_map.shape)
    long, word = driver.cuuint64_t, driver.cuuint32_t
    strides = [
        stride if extent > 1 else 16  # never used as a step, but checked
        for extent, stride in zip(m.shape[1:], m.strides_bytes, strict=True)
    ]
    dtype = f"CU_TENSOR_MAP_DATA_TYPE_{m.dtype.upper()}"
    swizzle = f"CU_TENSOR_MAP_SWIZZLE_{f'{m.swizzle_bytes}B' if m.swizzle_bytes else 'NONE'}"
    promotion = f"CU_TENSOR_MAP_L2_PROMOTION_{f'L2_{m.l2_bytes}B' if m.l2_bytes else 'NONE'}"
    error, encoded = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, dtype),
        rank,
        pointer,
        [long(x) for x in m.shape],
        [long(x) for x in strides],
        [word(x) for x in m.box],
        [word(1)] * rank,  # every element along each dimension
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, swizzle),
        getattr(driver.CUtensorMapL2promotion, promotion),
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver refused {tensor_map} at {pointer:#x}: {error.name}")
    words: Any = encoded.opaque
    return b"".join(int(x).to_bytes(8, "little") for x in words)
