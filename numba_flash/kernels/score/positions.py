"""How many keys of a batch entry are valid, and the position of its query 0 among them. Every range is computed from
these."""

import functools
from typing import Any

from numba import cuda, int64


@functools.cache
def make(config: Any) -> Any:
    """keys_and_start(b, arrays, strides, sizes) -> (valid keys of batch entry b, the position of its query 0)."""
    has_seqlens_k, source = config.has("seqlens_k"), config.q_offset_source
    from_seqlens_k, from_array = source == "seqlens_k", source == "array"

    @cuda.jit(device=True)
    def keys_and_start(b, arrays, strides, sizes):
        keys, start = sizes.seqlen_k, sizes.q_offset
        if has_seqlens_k:
            # Clamped: the lengths are on the device, where the host cannot check them without waiting.
            keys = min(max(int64(arrays.seqlens_k[b * strides.seqlens_k]), 0), sizes.seqlen_k)
        if from_seqlens_k:
            start = start + keys
        if from_array:
            start = start + int64(arrays.q_offset[b * strides.q_offset])
        return keys, start

    return keys_and_start
