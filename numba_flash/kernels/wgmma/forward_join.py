"""Query tiles whose keys several blocks share: a few query tiles with many keys would leave multiprocessors idle.

With config.parts each block of wgmma/forward takes a part of the key tiles that a query tile sees (producer.py). It
leaves what the online softmax has of them in registers: O before it is divided by l, m, and each lane's share of l.
This kernel adds up the parts of a query tile in their order, so equal calls give equal bits, and writes O and lse.

All threads wait for wgmma/forward before they read what it left.

Launch: grid (query tiles of all heads), block (config.threads), config.shared_bytes of dynamic shared memory; acc_o
(query tiles, parts, consumers, head_dim_v_padded / 8 + 1, 128, 4), of which a thread reads what one thread wrote. As in
wgmma/forward a consumer warpgroup has 64 rows; a thread of the first warpgroup describes the query tile.
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from ...ptx import griddepcontrol, local, memory, special
from ..score import fragment_softmax
from ..score.fragments import exponential_of
from ..steps.basics import inlined, named
from . import block, forward_outputs, pipeline
from .producer import query_tiles
from .tile_scores import ConsumerRegisters, ScoreRegisters

CHUNK = 128 * 16  # bytes of four numbers of each thread of a warpgroup


def of_parts(config):
    """-> device functions of a consumer's threads: registers <-> acc_o."""
    chunks, consumers, parts = config.head_dim_v_padded // 8, config.consumers, config.parts
    exponential = exponential_of(config)

    @inlined
    def place(piece, arrays):
        """Where the thread's numbers of a part begin. piece: its number among the parts of all query tiles."""
        thread = special.thread_index() - 128
        of_warpgroup = (int64(piece) * consumers + (thread >> int32(7))) * (chunks + 1)
        return memory.address(arrays.acc_o, (of_warpgroup * 128 + (thread & int32(127))) * 4)

    @inlined
    def leave(piece, registers, arrays):
        """acc_o of the array <- acc_o, m and l of the registers."""
        four, at = local.array(4, uint32), place(piece, arrays)
        for chunk in range(chunks):
            for x in range(4):
                four[x] = registers.acc_o[4 * chunk + x].view(np.uint32)
            memory.store_v4(at + int64(chunk * CHUNK), four, 0)
        for r in range(2):
            four[r], four[2 + r] = registers.m[r].view(np.uint32), registers.l[r].view(np.uint32)
        memory.store_v4(at + int64(chunks * CHUNK), four, 0)

    @inlined
    def add(piece, registers, older, arrays):
        """Joins acc_o, m and l of the registers with those of all parts, of which `piece` is the first. older (2,)."""
        four, m, l, newer = local.array(4, uint32), registers.m, registers.l, registers.alpha
        for part in range(parts):
            at = place(piece + part, arrays)
            memory.load_v4(four, 0, at + int64(chunks * CHUNK))
            for r in range(2):
                before, own = m[r], four[r].view(np.float32)
                m[r] = max(before, own)
                older[r], newer[r] = exponential(before - m[r]), exponential(own - m[r])
                l[r] = l[r] * older[r] + four[2 + r].view(np.float32) * newer[r]
            for chunk in range(chunks):
                memory.load_v4(four, 0, at + int64(chunk * CHUNK))
                for x in range(4):
                    now = registers.acc_o[4 * chunk + x] * older[x // 2]
                    registers.acc_o[4 * chunk + x] = now + four[x].view(np.float32) * newer[x // 2]

    return named(leave, add)


def make(config):
    o_count, parts, rings = config.head_dim_v_padded // 2, config.parts, pipeline.of_forward(config)
    start, _, finish = fragment_softmax.make(config, 1)
    outputs, work, add = forward_outputs.make(config, finish), query_tiles(config), of_parts(config).add

    @inlined
    def join(base, arrays, strides, sizes, score):
        acc_o = local.array(o_count, float32)
        m, l, alpha = local.array(2, float32), local.array(2, float32), local.array(2, float32)
        distance, none = local.array(2, float32), local.array(1, uint32)
        scores = ScoreRegisters(distance, none, none, none, distance, distance)
        registers = ConsumerRegisters(scores, acc_o, none, m, l, alpha, none)
        work_tile = rings.work_tile(base, int32(0))
        start(m, l)
        block.clear(acc_o, o_count)
        add(special.block_index() * parts, registers, distance, arrays)
        outputs.load_sinks(distance, work_tile, arrays, strides)
        outputs.write(work_tile, registers, arrays, strides, sizes, score)

    @cuda.jit
    def flash_attention_wgmma_join(arrays, strides, sizes, score):
        base = block.aligned(cuda.shared.array(0, uint8), config.ALIGNMENT)
        if special.thread_index() == 0:
            tile = work.work_tile_of(base, int32(0), special.block_index() * parts, arrays, strides, sizes)
            block.write_tile(rings.work_tile(base, int32(0)), tile)
        cuda.syncthreads()
        griddepcontrol.wait()
        if block.warpgroup_index() != 0:
            join(base, arrays, strides, sizes, score)

    return flash_attention_wgmma_join
