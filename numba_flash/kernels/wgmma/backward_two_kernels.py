"""What wgmma/backward_dkdv and wgmma/backward_dq do alike: the roles of a block, and P and dS of a tile.

The previous kernel may still run when a block starts (ptx/griddepcontrol.py). It and those before it write lse, delta,
the bits of a mask and the states of tiles. The bits and the states determine the block's work, so with either of them
all threads wait for it at the start. Consumers always do, so every block has waited. The two producer threads load K,
V, Q and dO, which no backward kernel writes, and wait before they read lse and delta.
"""

from typing import Any, NamedTuple

from numba import cuda, uint8

from ...ptx import griddepcontrol, special, wgmma
from ..steps.basics import inlined, named, nothing
from . import backward_products, backward_scores, backward_work, block, pipeline
from .block import aligned, warpgroup_index
from .operands import wait_all


class TileStep(NamedTuple):
    """A tile in the loop of a consumer."""

    n: Any  # its number among those that the block loads
    i: Any
    member: Any  # index of the head in its group
    masked: Any  # some row does not see some column, or a mask hides something
    asks: Any  # mask_mod removes something


class Queries(NamedTuple):
    """What P and dS need of the queries of a tile: lse and -delta as backward_scores.py takes them."""

    lse_log2: Any
    minus_delta: Any
    term: Any  # of the head (kernels/score/fragments.py)


def kernel(config, produce_a, produce_b, consume):
    """-> the kernel of a block. produce_a, produce_b: of one thread each, of two warps; consume: of a warpgroup."""
    tiles, set_up = backward_work.tiles(config), pipeline.starter_of_backward(config)
    work = (backward_work.of_keys if config.of_keys else backward_work.of_queries)(config)
    give_registers, take_registers = block.register_moves(config)
    finds_by_kernels = config.has("mask") or bool(config.tile_states)  # previous kernels write what determines the work

    @cuda.jit
    def flash_attention_wgmma_backward(tensor_maps, arrays, strides, sizes, score):
        base = aligned(cuda.shared.array(0, uint8), config.ALIGNMENT)
        thread, warpgroup = special.thread_index(), warpgroup_index()
        if config.packed:
            if tiles.behind(special.block_index(), arrays, strides, sizes):
                griddepcontrol.wait()
                return
        if finds_by_kernels:
            griddepcontrol.wait()
        if thread == 0:
            set_up(base)
            work.write(base, special.block_index(), arrays, strides, sizes)
        cuda.syncthreads()
        if warpgroup == 0:
            give_registers()
            if thread == 0:
                produce_a(base, arrays, strides, sizes)
            if thread == 32:
                produce_b(base, arrays, strides)
        else:
            take_registers()
            griddepcontrol.wait()
            griddepcontrol.launch_dependents()
            consume(base, warpgroup, arrays, strides, sizes, score)

    return flash_attention_wgmma_backward


def scores_of(config):
    """-> device functions of a consumer, and `words` of backward_scores.py."""
    of_a, of_b = config.of_ds, config.of_p  # which sums it adds up; dQ is a sum of dS as dK is
    plan, rings, products = config.shared_layout(), pipeline.of_backward(config), backward_products.make(config)
    scores, pin_s = backward_scores.make(config), wgmma.pin(config.other_rows // 2)
    cuts_queries = config.packed and config.of_keys
    zero_behind = backward_products.zero_behind(config) if cuts_queries else nothing

    @inlined
    def to_ds(base, step, queries, tile, own_desc, elected, arrays, strides, sizes, score):
        """P of a tile, whose S has been issued; and dS, for which it computes dP. own_desc: of the warpgroup's rows of
        V or dO."""
        every = scores.prepare(base, step, tile, arrays, strides, sizes)
        wait_all()
        pin_s(tile.acc_s)
        if cuts_queries and step.masked:  # as a tile is that has rows behind the last query
            zero_behind(base, base, step)
        if of_a:
            products.issue_dp(base, tile.acc_dp, own_desc, step.n)
        bias = base + plan.bias + rings.a.stage(step.n) * config.bias_bytes
        scores.to_weights(base, step, tile, queries.lse_log2, bias, queries.term, every, arrays, strides, sizes, score)
        if of_a:
            wait_all()
            pin_s(tile.acc_dp)
            if not of_b:
                rings.b.consumer_release(base, step.n, elected)  # only dP reads it
            scores.to_gradients(tile, queries.minus_delta, score, every)
        else:
            products.release_a(base, step.n, elected)  # only S reads Q, and P has its lse

    return named(to_ds, load_ahead=scores.load_ahead, words=scores.words)
