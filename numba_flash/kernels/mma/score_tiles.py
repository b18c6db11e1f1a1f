"""S = Q K^T and dP = dO V^T of a sequence of tiles, of any batch entries, heads, queries and keys.

backward_dbias.py and backward_daux.py share it. A block loops over the tiles of a Range. With two stages Q, dO, K and V
have two places each in shared memory, and the next tile is loaded during the products of this one; with one stage, when
they are done. A tile that shares its queries or its keys with the previous one keeps them.
"""

from collections import namedtuple
from typing import NamedTuple

from numba import cuda, float32, int32, int64

from ...ptx import cp_async, memory
from ..steps import async_tiles, sequence as sequences
from ..steps.basics import TRUE, inlined, named
from ..steps.score_ranges import place_after, place_of
from ..steps.sequence import key_range, key_row, kv_head, query_row, unpacked
from . import backward_16bit

# A tile of a Range: query tile i of head h of a batch entry, the unit-th, and key tile j of [begin, stop), which some
# query sees. All queries of the tile exist and see all keys of [free, cut).
Place = namedtuple("Place", "unit sequence h h_kv i j begin stop free cut")


class Smem(NamedTuple):
    """Shared addresses: where the block's memory begins, and those of a tile."""

    begin: int
    q: int  # (tile_m, head_dim_padded)
    do: int  # (tile_m, head_dim_v_padded)
    k: int  # (tile_n, head_dim_padded)
    v: int  # (tile_n, head_dim_v_padded)
    rows: int  # numbers of each query, such as lse


def make(config):
    load_q, load_do, load_k, load_v = async_tiles.of_backward(config, threads=32)
    sequence_of, plan, wait_all = sequences.make(config), config.shared_layout(), cp_async.wait_group(0)
    packed, warps = config.packed, config.threads // 32
    varies = packed or config.has("seqlens_k") or config.q_offset_source == "array"
    products, last_stage = backward_16bit.make(config), config.stages - 1
    (q_bytes, do_bytes, k_bytes, v_bytes), rows_bytes = config.tiles(), config.rows_bytes
    multiply_q_k, multiply_do_v = map(products.scores_product, (config.head_dim_padded, config.head_dim_v_padded))

    @inlined
    def kept(sequence, b):
        """The sequence as that of entry b. A loop keeps it, without numbers that all entries share."""
        if packed:
            return sequence
        return unpacked(b, sequence.seqlen_q, sequence.keys, sequence.q_start)

    @inlined
    def first_sequence(arrays, strides, sizes):
        if packed:
            return sequence_of(int32(0), arrays, strides, sizes)
        return unpacked(int32(0), sizes.seqlen_q, int64(0), int64(0))

    @inlined
    def seek(unit, b, h, i, tiles, arrays, strides, sizes):
        """The first tile that some query sees, from this unit on, which is at (b, h, i)."""
        begin, stop, free, cut = int32(0), int32(0), int32(0), int32(0)
        sequence = first_sequence(arrays, strides, sizes)
        while unit < tiles.end_unit:
            sequence = sequence_of(b, arrays, strides, sizes)
            end_query = int64(i * config.tile_m + config.tile_m)
            last_query = min(end_query, sequence.seqlen_q) - 1
            begin_, free_, cut_, stop_ = key_range(sequence, i * config.tile_m, last_query, sizes, config.tile_n)
            begin, stop = max(int32(begin_), tiles.j), min(int32(stop_), tiles.end_j)
            free, cut = int32(free_), int32(cut_) if end_query <= sequence.seqlen_q else int32(0)
            if begin < stop:
                break
            unit = int32(unit + 1)
            b, h, i = place_after(b, h, i, tiles)
        return Place(unit, kept(sequence, int32(b)), int32(h), kv_head(h, sizes), i, begin, begin, stop, free, cut)

    @inlined
    def following(place, tiles, arrays, strides, sizes):
        """-> Place; its unit is tiles.end_unit after the last."""
        unit, sequence, h, h_kv, i, j, begin, stop, free, cut = place
        j = int32(j + 1)
        if j >= stop:
            b, own_h, own_i = place_after(sequence.b, h, i, tiles)
            unit, j = int32(unit + 1), begin
            if varies or own_i != i or own_h != h:
                return seek(unit, b, own_h, own_i, tiles, arrays, strides, sizes)
            sequence = kept(sequence, b)  # the same queries of another entry see the same keys
        return Place(unit, sequence, h, h_kv, i, j, begin, stop, free, cut)

    @inlined
    def load(place, queries, keys, smem, arrays, strides, sizes, thread):
        """Starts the copies of a tile's queries and keys, as far as they are asked for. Each warp has one of the four
        arrays, or some of them: so it computes one address."""
        lane, warp = thread & int32(31), thread >> int32(5)
        sequence, h = place.sequence, place.h
        if queries:
            first_query = int64(place.i) * config.tile_m
            left = int32(min(sequence.seqlen_q - first_query, config.tile_m))
            if warp == 0:
                source = memory.address(arrays.q, query_row(strides.q, sequence, h, first_query))
                load_q(smem.q, source, 2 * strides.q[2], 0, left, config.head_dim, lane)
            if warp == 1 % warps:
                source = memory.address(arrays.do, query_row(strides.do, sequence, h, first_query))
                load_do(smem.do, source, 2 * strides.do[2], 0, left, config.head_dim_v, lane)
        if keys:
            h_kv, first_key = place.h_kv, int64(place.j) * config.tile_n
            left = int32(sequence.keys - first_key)
            if warp == 2 % warps:
                source = memory.address(arrays.k, key_row(strides.k, sequence, h_kv, first_key))
                load_k(smem.k, source, 2 * strides.k[2], 0, left, config.head_dim, lane)
            if warp == 3 % warps:
                source = memory.address(arrays.v, key_row(strides.v, sequence, h_kv, first_key))
                load_v(smem.v, source, 2 * strides.v[2], 0, left, config.head_dim_v, lane)

    @inlined
    def multiply(registers, smem, thread):
        """acc_s <- Q K^T, acc_dp += dO V^T."""
        for x in range(config.tile_n // 2):
            registers.acc_s[x] = float32(0)
        own_lane, other_lane, _ = products.lanes(thread)
        multiply_q_k(registers.acc_s, registers.q_frag, registers.b_frag, smem.q + own_lane, smem.k + other_lane)
        multiply_do_v(registers.acc_dp, registers.do_frag, registers.b_frag, smem.do + own_lane, smem.v + other_lane)

    @inlined
    def places(address):
        """-> Smem of the first stage, in shared memory that begins at `address`."""
        return in_stage(async_tiles.aligned(address), int32(0), int32(0))

    @inlined
    def in_stage(begin, of_queries, of_keys):
        q, do = begin + of_queries * q_bytes, begin + int32(plan.do) + of_queries * do_bytes
        k, v = begin + int32(plan.k) + of_keys * k_bytes, begin + int32(plan.v) + of_keys * v_bytes
        return Smem(begin, int32(q), int32(do), int32(k), int32(v), int32(begin + plan.rows + of_queries * rows_bytes))

    def loop(copy, before, products, behind):
        """-> the loop over the tiles of a Range, a device function: what a kernel copies beside a tile's queries; what
        it does before its products, to get them, and with its scores."""

        @inlined
        def over_tiles(tiles, registers, smem, thread, arrays, strides, sizes, score):
            begin, of_queries, of_keys = smem.begin, int32(0), int32(0)
            b, h, i = place_of(tiles.unit, tiles)
            place = seek(tiles.unit, b, h, i, tiles, arrays, strides, sizes)
            if place.unit < tiles.end_unit:
                load(place, TRUE, TRUE, smem, arrays, strides, sizes, thread)
                copy(place, smem, arrays, sizes)
            cp_async.commit_group()
            while place.unit < tiles.end_unit:
                before(place, registers, smem, thread, arrays, strides, sizes)
                here = in_stage(begin, of_queries, of_keys)
                if last_stage == 0:
                    wait_all()
                    cuda.syncthreads()  # the tile has arrived, and all threads have finished with the last scores
                    products(place, registers, here, thread, score)
                after = following(place, tiles, arrays, strides, sizes)
                entry, exists = after.sequence.b != place.sequence.b, after.unit < tiles.end_unit
                queries = exists and (after.i != place.i or after.h != place.h or entry)
                keys = exists and (after.j != place.j or after.h_kv != place.h_kv or entry)
                of_queries = int32(of_queries ^ last_stage) if queries else of_queries
                of_keys = int32(of_keys ^ last_stage) if keys else of_keys
                there = in_stage(begin, of_queries, of_keys)
                if last_stage == 1:
                    wait_all()
                cuda.syncthreads()  # all threads have finished with the places; with two stages, the tile has arrived
                load(after, queries, keys, there, arrays, strides, sizes, thread)
                if queries:
                    copy(after, there, arrays, sizes)
                cp_async.commit_group()
                if last_stage == 1:
                    products(place, registers, here, thread, score)
                behind(place, registers, here, thread, arrays, strides, sizes, score)
                place = after

        return over_tiles

    # q_words, do_words: of registers.q_frag and do_frag
    return named(places, multiply, loop, q_words=config.head_dim_padded // 4, do_words=config.head_dim_v_padded // 4)
