"""Copies a bias in 16 bits to rows that begin at multiples of 16 bytes, which TMA can load. Behind a row's last key are
zeros.

A thread copies 16 bytes. Launch: grid (pieces of 16 bytes / config.threads, rounded up).
"""

from numba import cuda, int32, int64, uint32

from ...config.bias_rows import PIECE
from ...ptx import local, memory
from ..steps.basics import divide


def make(config):
    step = 2 if config.pairs else 1  # numbers of a load

    @cuda.jit
    def bias_rows(arrays, strides, sizes):
        heads, rows, row_numbers, keys = sizes.bias_shape
        by, words = strides.bias, local.array(4, uint32)
        piece = int64(cuda.blockIdx.x) * config.threads + cuda.threadIdx.x
        row_of_all = divide(piece, row_numbers // PIECE)
        head_of_all = divide(row_of_all, rows)
        b = divide(head_of_all, heads)
        h, row = int32(head_of_all - b * int32(heads)), int32(row_of_all - head_of_all * int32(rows))
        key = int32(piece - row_of_all * (row_numbers // PIECE)) * PIECE
        if key < keys and b < sizes.batch:
            place = memory.address(arrays.bias, b * by[0] + h * by[1] + row * by[2] + key * by[3])
            for n in range(4):
                words[n] = uint32(0)
                for x in range(2 // step):
                    here = uint32(1) if key + 2 * n + x < keys else uint32(0)
                    if config.pairs:
                        words[n] = memory.load_b32_if(place, here)
                    else:
                        words[n] |= memory.load_b16_if(place, here) << uint32(16 * x)
                    place += 2 * step * by[3]
            memory.store_v4(memory.address(arrays.bias_rows, piece * PIECE), words, 0)

    return bias_rows
