"""Encodes tensor maps (abi/tensor_maps.py): the driver makes the 128 bytes of each."""

import functools
from typing import Any

from ..abi.tensor_maps import TensorMap, fits

_PROBES = (0x5555_5555_5550, 0x2AAA_AAAA_AAA0)


def encode(tensor_map: TensorMap, pointer: int) -> bytes:
    """The map of a tensor that begins at `pointer`, as the 128 bytes of a kernel's parameter."""
    if pointer % 16:
        raise ValueError(f"a tensor map begins at a multiple of 16 bytes, not at address {pointer:#x}")
    kept = vars(tensor_map)  # functools.cached_property would keep it there, too
    if "behind_address" not in kept:
        kept["behind_address"] = _behind_address(tensor_map)
    behind_address: bytes | None = kept["behind_address"]
    if behind_address is None:
        return _encoded(tensor_map, pointer)
    return pointer.to_bytes(8, "little") + behind_address


def _behind_address(tensor_map: TensorMap) -> bytes | None:
    """The encoded map without the address, or None if the address is not in the first 8 bytes alone.

    Encoding takes microseconds, and a call needs a map for every operand. No document says that the address is the
    first 8 bytes, so the map is encoded for two addresses that differ in every bit of an address.
    """
    one, other = (_encoded(tensor_map, address) for address in _PROBES)
    if (one[:8], other[:8]) != tuple(address.to_bytes(8, "little") for address in _PROBES):
        return None
    return one[8:] if one[8:] == other[8:] else None


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
