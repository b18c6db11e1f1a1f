"""The threads that load for a block of wgmma/backward_dkdv and wgmma/backward_fused, which owns keys: one loads K and V
once, and then Q with its lse, -delta and bias, tile after tile; the other dO. They are in two warps, so that neither
waits for the other."""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import int32

from ...ptx import griddepcontrol, memory, tma
from ..steps import lse_delta
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.sequence import queries_of
from . import backward_producer, backward_query_walk, backward_state, bias_boxes, block
from .backward_producer import DO_MAP, K_MAP, Q_MAP, V_MAP
from .block import FIRST_ROW, H_KV, B, H


class KeyProducer(NamedTuple):
    """Device functions for one thread. work: where the words of the block's key tile are; n: the number of tiles of Q,
    or of dO, loaded before."""

    load_q: Callable[..., Any]  # (base, work, n, w, arrays, strides, sizes) -> n, for the block's w-th key tile
    load_no_q: Callable[..., Any]  # (base, n, seqlen_q)
    load_do: Callable[..., Any]  # (base, work, n, arrays, strides) -> n


def make(config):
    plan, rings = config.shared_layout(), backward_state.pipelines(config)
    word = block.words(plan.state).read_alone
    fetch_bias = bias_boxes.make(config, config.tile_m, of_keys=True).fetch
    load_own, load_a, load_b = backward_producer.make(config, (K_MAP, V_MAP if config.of_dk else None), (Q_MAP, DO_MAP))
    walk, tile_blocks = backward_query_walk.make(config, whole_warp=False), config.tile_m // 16

    @inlined
    def load_keys(base, work):
        """Loads K and V."""
        load_own(base, word(work, FIRST_ROW), word(work, H_KV), word(work, B))

    @inlined
    def load_beside_q(base, work, i, h, n, count, arrays, strides, sizes):
        """Loads lse, -delta and bias of query tile i, in place with its Q, which is the n-th."""
        sequence, stage, full = (
            queries_of(word(work, B), arrays, strides, sizes),
            rings.a.stage(n),
            rings.a.full(base, n),
        )
        source = memory.address(arrays.lse_delta, lse_delta.row_block(sequence, h, i * tile_blocks, sizes))
        tma.load_bytes(base + plan.lse_delta + stage * config.lse_delta_bytes, source, full, count)
        if config.bias_boxes:
            to = base + plan.bias + stage * config.bias_bytes
            fetch_bias(to, full, int32(i * config.tile_m), word(work, FIRST_ROW), h, sequence.b, strides)

    @inlined
    def load_q(base, work, n, w, arrays, strides, sizes):
        """From the second key tile on, a Q is loaded before K and V, because consumers release K and V last."""
        waits = config.stays and w > 0
        if not waits:
            load_keys(base, work)
        i, member = walk.first(work, arrays, strides)
        while walk.more(work, i, member):
            h = int32(word(work, H) + member)
            # masks hide what lies past the last block
            blocks_left = int32(lse_delta.row_blocks(sizes.seqlen_q) - i * tile_blocks)
            count = int32(min(blocks_left, int32(tile_blocks)) * int32(4 * lse_delta.BLOCK_WORDS))
            load_a(base, n, int32(i * config.tile_m), h, word(work, B), int32(count + config.bias_bytes))
            if n == 0:
                griddepcontrol.wait()  # it writes lse and delta
            load_beside_q(base, work, i, h, n, count, arrays, strides, sizes)
            if waits:
                rings.own.producer_acquire(base, w)
                load_keys(base, work)
                waits = False
            n = int32(n + 1)
            i, member = walk.next(work, i, member, arrays, strides)
        if waits:
            rings.own.producer_acquire(base, w)
            load_keys(base, work)
        return n

    @inlined
    def load_no_q(base, n, seqlen_q):
        """After the last Q loads one past the end, zeros: its S is issued and dropped, so that consumers need no
        branch."""
        load_a(base, n, int32((divide(int32(seqlen_q), config.tile_m) + 1) * config.tile_m), 0, 0, 0)

    @inlined
    def load_do(base, work, n, arrays, strides):
        i, member = walk.first(work, arrays, strides)
        while walk.more(work, i, member):
            load_b(base, n, int32(i * config.tile_m), int32(word(work, H) + member), word(work, B))
            n = int32(n + 1)
            i, member = walk.next(work, i, member, arrays, strides)
        return n

    return KeyProducer(load_q, load_no_q, load_do)
