"""lse and delta of one query, computed by a few neighbouring lanes that read 16 bytes of dO and of O at a time.

delta = rowsum(dO * O) - dlse          (kernels/simt/delta.py says why)
"""

import math
from typing import Any

import numpy as np
from numba import float32, int32, uint32

from ...ptx import cvt, local, memory, shfl
from ..steps import elements, lse_delta
from ..steps.inlined import inlined
from ..steps.sequence import lse_row, query_row
from ..steps.units import LOG2_E


def make(config: Any) -> Any:
    """config: a PreprocessConfig. -> of_row(sequence, h, query, lane, arrays, strides, sizes) -> (lse in the scores'
    units, -delta), a device function, for config.lanes lanes together; lse +inf and 0 for a query that does not
    exist."""
    steps, is_float16 = -(-config.head_dim_v // (8 * config.lanes)), config.dtype == "float16"
    distances = tuple(2**i for i in range(config.lanes.bit_length() - 1))
    load, product = elements.loader(config.dtype, float32), lse_delta.product(config)
    unit, inf = float32(1.0 if config.natural else LOG2_E), float32(math.inf)

    @inlined
    def low(two):
        return cvt.low_f16(two) if is_float16 else uint32(two << uint32(16)).view(np.float32)

    @inlined
    def high(two):
        return cvt.high_f16(two) if is_float16 else uint32(two & uint32(0xFFFF0000)).view(np.float32)

    @inlined
    def of_row(sequence, h, query, lane, arrays, strides, sizes):
        four_do, four_o = local.array(4, uint32), local.array(4, uint32)
        part, lse = float32(0), inf
        if query < sequence.seqlen_q:
            do_base, o_base = query_row(strides.do, sequence, h, query), query_row(strides.o, sequence, h, query)
            for step in range(steps):
                x = int32((lane + step * config.lanes) * 8)
                if config.wide and x + 8 <= config.head_dim_v:
                    memory.load_v4(four_do, 0, memory.address(arrays.do, do_base + x))
                    memory.load_v4(four_o, 0, memory.address(arrays.o, o_base + x))
                    for i in range(4):
                        part += product(low(four_do[i]), low(four_o[i])) + product(high(four_do[i]), high(four_o[i]))
                else:
                    for column in range(x, min(x + 8, config.head_dim_v)):
                        from_do = load(arrays.do, do_base + column * strides.do[3])
                        part += product(from_do, load(arrays.o, o_base + column * strides.o[3]))
        for distance in distances:
            part += shfl.bfly_f32(part, distance)
        if query < sequence.seqlen_q:
            lse = float32(arrays.lse[lse_row(sequence, h, query, sizes)]) * unit
            lse = inf if lse == -inf else lse
            if config.has_dlse:
                part -= arrays.dlse[query_row(strides.dlse, sequence, h, query)]
        return lse, -part

    return of_row
