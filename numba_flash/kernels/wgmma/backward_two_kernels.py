"""What blocks of wgmma/backward_dkdv and of wgmma/backward_dq do alike: how they begin, and P and dS of a tile."""

from typing import Any, NamedTuple

from numba import cuda

from ...ptx import griddepcontrol, special, wgmma
from ..steps.basics import inlined, named, nothing
from . import backward_products, backward_scores, backward_work, pipeline
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


def of_both(config):
    """-> device functions, and `words` of backward_scores.py."""
    of_a, of_b = (config.of_dk, config.of_dv) if config.of_keys else (True, False)  # which sums it adds up
    plan, rings, products = config.shared_layout(), pipeline.of_backward(config), backward_products.make(config)
    work = (backward_work.of_keys if config.of_keys else backward_work.of_queries)(config)
    scores, pin_s = backward_scores.make(config), wgmma.pin(config.other_rows // 2)
    set_up = pipeline.starter_of_backward(config)
    cuts_queries = config.packed and config.of_keys
    zero_behind = backward_products.zero_behind(config) if cuts_queries else nothing
    finds_by_kernels = config.has("mask") or bool(config.tile_states)  # previous kernels write what determines the work

    @inlined
    def begin(base, thread, arrays, strides, sizes):
        """All threads. -> whether the block has work. If not, the whole block leaves."""
        if config.packed:
            if work.behind(special.block_index(), arrays, strides, sizes):
                griddepcontrol.wait()
                return False
        if finds_by_kernels:
            griddepcontrol.wait()
        if thread == 0:
            set_up(base)
            work.write(base, special.block_index(), arrays, strides, sizes)
        cuda.syncthreads()
        return True

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

    return named(begin, to_ds, load_ahead=scores.load_ahead, words=scores.words)
