"""S = Q K^T and dP = dO V^T of a sequence of tiles, of any batch entries, heads, queries and keys.

backward_dbias.py and backward_daux.py share it. A block loops over the tiles of a Range. Q, dO, K and V have one place
each in shared memory. When the products of a tile are done, the next tile is loaded while the block finishes the
scores. A tile that shares its queries or its keys with the previous one keeps them.
"""

from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64

from ...ptx import cp_async, memory
from ..steps import async_tiles, fragment_products
from ..steps import sequence as sequences
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.named import named
from ..steps.score_ranges import place_of
from ..steps.sequence import key_range, key_row, query_row, unpacked


class Place(NamedTuple):
    """A tile of a Range: query tile i of head h of a batch entry, the unit-th, and key tile j below stop."""

    unit: int
    sequence: Any
    h: int
    i: int
    j: int
    stop: int


class Smem(NamedTuple):
    """Shared addresses."""

    q: int  # (tile_m, head_dim_padded)
    do: int  # (tile_m, head_dim_v_padded)
    k: int  # (tile_n, head_dim_padded)
    v: int  # (tile_n, head_dim_v_padded)


def make(config):
    load_q, load_do, load_k, load_v = async_tiles.of_backward(config)
    sequence_of, plan, wait_all = sequences.make(config), config.shared_layout(), cp_async.wait_group(0)
    packed = config.packed
    products = fragment_products.make(config)
    multiply_q_k, multiply_do_v = map(products.scores_product, (config.head_dim_padded, config.head_dim_v_padded))

    @inlined
    def kept(sequence):
        """What a loop keeps of it: nothing of what is the same for all."""
        if packed:
            return sequence
        return unpacked(sequence.b, sequence.seqlen_q, sequence.keys, sequence.q_start)

    @inlined
    def first_sequence(arrays, strides, sizes):
        if packed:
            return sequence_of(int32(0), arrays, strides, sizes)
        return unpacked(int32(0), sizes.seqlen_q, int64(0), int64(0))

    @inlined
    def seek(unit, tiles, arrays, strides, sizes):
        """The first tile that some query sees, from this unit on."""
        h, i, j, stop = int32(0), int32(0), int32(0), int32(0)
        sequence = first_sequence(arrays, strides, sizes)
        while unit < tiles.end_unit:
            b, h, i = place_of(unit, tiles)
            sequence = sequence_of(b, arrays, strides, sizes)
            last_query = min(int64(i * config.tile_m + config.tile_m), sequence.seqlen_q) - 1
            begin, _, _, end = key_range(sequence, i * config.tile_m, last_query, sizes, config.tile_n)
            j, stop = max(int32(begin), tiles.j), min(int32(end), tiles.end_j)
            if j < stop:
                break
            unit = int32(unit + 1)
        return Place(unit, kept(sequence), h, i, j, stop)

    @inlined
    def following(place, tiles, arrays, strides, sizes):
        """-> Place; its unit is tiles.end_unit after the last."""
        unit, sequence, h, i, j, stop = place
        j = int32(j + 1)
        if j >= stop:
            unit, sequence, h, i, j, stop = seek(int32(unit + 1), tiles, arrays, strides, sizes)
        return Place(unit, sequence, h, i, j, stop)

    @inlined
    def load_queries(place, smem, arrays, strides, thread):
        first_query = int64(place.i) * config.tile_m
        left = int32(min(place.sequence.seqlen_q - first_query, config.tile_m))
        q_global = memory.address(arrays.q, query_row(strides.q, place.sequence, place.h, first_query))
        do_global = memory.address(arrays.do, query_row(strides.do, place.sequence, place.h, first_query))
        load_q(smem.q, q_global, 2 * strides.q[2], 0, left, config.head_dim, thread)
        load_do(smem.do, do_global, 2 * strides.do[2], 0, left, config.head_dim_v, thread)

    @inlined
    def load_keys(place, h_kv, smem, arrays, strides, thread):
        first_key = int64(place.j) * config.tile_n
        left = int32(place.sequence.keys - first_key)
        k_global = memory.address(arrays.k, key_row(strides.k, place.sequence, h_kv, first_key))
        v_global = memory.address(arrays.v, key_row(strides.v, place.sequence, h_kv, first_key))
        load_k(smem.k, k_global, 2 * strides.k[2], 0, left, config.head_dim, thread)
        load_v(smem.v, v_global, 2 * strides.v[2], 0, left, config.head_dim_v, thread)

    @inlined
    def load_first(place, smem, arrays, strides, sizes, thread):
        """Starts the copies of a tile."""
        load_queries(place, smem, arrays, strides, thread)
        h_kv = divide(place.h, divide(sizes.heads, sizes.heads_kv))
        load_keys(place, h_kv, smem, arrays, strides, thread)

    @inlined
    def load_next(place, before, smem, arrays, strides, sizes, thread):
        """Likewise, of what the tile does not share with the one before."""
        group = divide(sizes.heads, sizes.heads_kv)
        h_kv = divide(place.h, group)
        if place.i != before.i or place.h != before.h or place.sequence.b != before.sequence.b:
            load_queries(place, smem, arrays, strides, thread)
        if place.j != before.j or h_kv != divide(before.h, group) or place.sequence.b != before.sequence.b:
            load_keys(place, h_kv, smem, arrays, strides, thread)

    @inlined
    def multiply(registers, smem, thread):
        """acc_s, acc_dp += the products."""
        own_lane, other_lane, _ = products.lanes(thread)
        multiply_q_k(registers.acc_s, registers.q_frag, registers.b_frag, smem.q + own_lane, smem.k + other_lane)
        multiply_do_v(registers.acc_dp, registers.do_frag, registers.b_frag, smem.do + own_lane, smem.v + other_lane)

    @inlined
    def places(address):
        """-> Smem, in shared memory that begins at `address`."""
        q = async_tiles.aligned(address)
        return Smem(q, q + int32(plan.do), q + int32(plan.k), q + int32(plan.v))

    def loop(before, between, behind):
        """-> the loop over the tiles of a Range, a device function. before, between and behind the copies of the next
        tile: what a kernel does with a tile before its products, with its products, and with its scores."""

        @inlined
        def over_tiles(tiles, registers, smem, thread, arrays, strides, sizes, score):
            place = seek(tiles.unit, tiles, arrays, strides, sizes)
            if place.unit < tiles.end_unit:
                load_first(place, smem, arrays, strides, sizes, thread)
            cp_async.commit_group()
            while place.unit < tiles.end_unit:
                before(place, registers, smem, thread, arrays, strides, sizes)
                for x in range(config.tile_n // 2):
                    registers.acc_s[x] = float32(0)
                    registers.acc_dp[x] = float32(0)
                wait_all()
                cuda.syncthreads()  # the tile has arrived, and all threads have finished with the last scores
                multiply(registers, smem, thread)
                between(registers, smem.q, thread)
                following_place = following(place, tiles, arrays, strides, sizes)
                cuda.syncthreads()  # all threads have finished with the tile
                if following_place.unit < tiles.end_unit:
                    load_next(following_place, place, smem, arrays, strides, sizes, thread)
                cp_async.commit_group()
                behind(place, registers, smem, thread, arrays, strides, sizes, score)
                place = following_place

        return over_tiles

    # q_words, do_words: of registers.q_frag and do_frag
    return named(places, loop, q_words=config.head_dim_padded // 4, do_words=config.head_dim_v_padded // 4)
