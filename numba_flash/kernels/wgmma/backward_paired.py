"""Gradients in float32 for Hopper (sm_90a) with head_dim above 128: dK and dV of a tile of keys, or dQ of a tile of
queries, by two blocks.

Read backward_float32.py first: the products, the parts and the roles are the same. There a consumer has 128 columns of
a gradient in registers, and shared memory has no place for wider tiles. Here a cluster of two blocks, a pair, owns 64
rows, and each block has half of the columns of every tile. So each computes half of the sum of each score,

    S = Q K^T = Q' K'^T + Q" K"^T        dP = dO V^T = dO' V'^T + dO" V"^T

hands it to the other block, and adds up both (paired_scores.py). Then both have P and dS, and each computes its own
columns of dV and dK, or of dQ. No product is computed twice, only P and dS.

Tiles of the walk are of 64 rows: shorter ones would take longer to read from shared memory than to multiply. There
are two places for them, each of two panels of 64 columns. One has a tile of a (Q, or K), the other one of b (dO, or V),
and the tile of a behind it comes to the place of b, panel by panel, as soon as nobody needs b any more:

    tensor cores     S(n)  dP(n)        dV(n)  dK(n)          S(n+1)         dP(n+1) ...
    tile comes                                 a(n+1) for b(n)     b(n+1) for a(n)

Launch: grid (2 * batch * heads_kv * key tiles), or (2 * batch * heads * query tiles); block (config.threads),
config.shared_bytes of dynamic shared memory. Rows of q, k, v and do begin at multiples of 16 bytes and are contiguous
along dim; dq, dk and dv are contiguous.
"""

from numba import cuda, float32, int32, int64, uint8, uint32

from ...ptx import bar, cluster, fence, ld_st, mbarrier, memory, setmaxnreg, shared, shfl, special, wgmma
from ..score import fragments
from ..steps import recompute_keys as of_own_keys
from ..steps import recompute_queries as of_own_queries
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.query_tile import QueryTile, TileKeys
from ..steps.tiles import row_base
from . import (
    backward_key_work,
    backward_products_float32,
    backward_query_work,
    backward_state,
    backward_weights_float32,
    gradient_rows_float32,
    paired_scores,
    panel_loader,
    parts,
)
from .backward_state import BATCH, BEGIN, FIRST_ROW, HEAD, HEAD_KV, KEYS, MEMBERS, STOP


def make(config):
    of_keys, rows, own_rows = config.of_keys, config.stream_rows, config.own_rows
    sums_dv = of_keys and config.of_dv  # by the first consumer
    has_second = not of_keys or config.of_dk
    both_sum = sums_dv and has_second
    columns_a, columns_b = config.head_dim_padded, config.head_dim_v_padded  # of a block
    plan, at, panels = config.shared_plan(), config.barriers(), config.panels
    panel_bytes = config.PARTS * rows * 128
    place_bytes = panels * panel_bytes

    a, b = (backward_products_float32.make(config, n) for n in (columns_a, columns_b))
    s_count, frag_count, dv_count = a.score_count, a.frag_count, b.sum_count if sums_dv else 1
    gradient_count = a.sum_count
    a_first, a_second = a.panel_counts
    b_first, b_second = b.panel_counts
    first_s, second_s, finish_s = a.issue_first_scores, a.issue_second_scores, a.finish_scores
    first_dp, second_dp, finish_dp = b.issue_first_scores, b.issue_second_scores, b.finish_scores
    issue_ds, finish_first_ds, finish_second_ds = a.issue_sums, a.finish_first_sums, a.finish_second_sums
    issue_dv, finish_first_dv, finish_second_dv = b.issue_sums, b.finish_first_sums, b.finish_second_sums
    two_a, two_b, commit = a.panels > 1, b.panels > 1, wgmma.commit_group
    to_parts = parts.to_operand(rows)
    stream_words, fetches_a, stores_a = panel_loader.of_streamed(config, config.head_dim, columns_a)
    _, fetches_b, stores_b = panel_loader.of_streamed(config, config.head_dim_v, columns_b)
    fetch_a0, fetch_a1, store_a0, store_a1 = fetches_a[0], fetches_a[-1], stores_a[0], stores_a[-1]
    fetch_b0, fetch_b1, store_b0, store_b1 = fetches_b[0], fetches_b[-1], stores_b[0], stores_b[-1]
    own_words, load_own_a = panel_loader.of_own(config, config.head_dim, columns_a)
    _, load_own_b = panel_loader.of_own(config, config.head_dim_v, columns_b)

    give_registers = setmaxnreg.decrease(config.registers[0])
    take_registers = setmaxnreg.increase(config.registers[1])
    put, _, word, position = backward_state.words(config)
    if of_keys:
        _, work_of, set_up_keys = backward_key_work.make(config)
    else:
        set_up_queries = backward_query_work.make(config)
    made = backward_weights_float32.make(config, has_second)
    mask_words, row_numbers, (bias_words, bits_words, bias_type) = made.mask_words, made.row_numbers, made.loaded_words
    own_thread, rows_of_lane, of_columns, of_rows = made.own_thread, made.rows_of_lane, made.of_columns, made.of_rows
    term_of, load_for_scores, find_visible = made.term_of, made.load, made.find_visible
    to_weights, to_score_gradients = made.to_weights, made.to_score_gradients
    of_s = paired_scores.make(rows, plan.scores, at.scores_full, at.scores_empty)
    of_dp = paired_scores.make(rows, plan.score_gradients, at.score_gradients_full, at.score_gradients_empty)
    give_s, take_s, give_back_s = of_s.give, of_s.take, of_s.give_back
    give_dp, take_dp, give_back_dp = of_dp.give, of_dp.take, of_dp.give_back
    arrivals = of_s.arrivals
    store_gradient = gradient_rows_float32.of_half(config.head_dim, columns_a)
    store_dv = gradient_rows_float32.of_half(config.head_dim_v, columns_b)
    row_term = fragments.chain(config).row_term
    if of_keys:
        recompute_dk = of_own_keys.make(config, True, False)
        recompute_dv = of_own_keys.make(config, False, True)
    else:
        recompute_dq = of_own_queries.make(config)

    # What all roles do.

    @inlined
    def set_up(base, arrays, strides, sizes):
        """The mbarriers and the block's work, by one thread. A warp arrives once."""
        for panel in range(panels):
            mbarrier.init(base + at.a_full + 8 * panel, 4)
            for place in range(2):
                mbarrier.init(base + at.a_empty + 8 * (place * panels + panel), 4 + 4 * has_second)
            mbarrier.init(base + at.b_full + 8 * panel, 4)
            mbarrier.init(base + at.b_empty + 8 * panel, 4 * sums_dv + 4 * has_second)
        mbarrier.init(base + at.scores_full, arrivals)
        mbarrier.init(base + at.scores_empty, arrivals)
        mbarrier.init(base + at.score_gradients_full, arrivals)
        mbarrier.init(base + at.score_gradients_empty, arrivals)
        mbarrier.init(base + at.weights_full, 4)
        fence.mbarrier_init()
        if of_keys:
            b, part, first_key = work_of(divide(special.block_index(), 2), arrays, strides, sizes)
            set_up_keys(base, b, part, first_key, arrays, strides, sizes)
        else:
            set_up_queries(base, arrays, strides, sizes)
            put(base, MEMBERS, 1)

    @inlined
    def elected():
        """Whether the lane is the one that acts for its warp."""
        return special.thread_index() & int32(31) == 0

    @inlined
    def behind(base, i, member):
        """-> (tile, member) of the walk behind these: all tiles of a member first, the last of them first."""
        i = int32(i - 1)
        if i < word(base, BEGIN):
            i, member = int32(word(base, STOP) - 1), int32(member + 1)
        return i, member

    @inlined
    def steps_of(base):
        return int32(word(base, MEMBERS) * (word(base, STOP) - word(base, BEGIN)))

    @inlined
    def place_of_a(base, n):
        return int32(base + plan.streamed + (n & 1) * place_bytes)

    @inlined
    def place_of_b(base, n):
        return int32(base + plan.streamed + ((n & 1) ^ 1) * place_bytes)

    @inlined
    def empty_of_a(base, n):
        return int32(base + at.a_empty + (n & 1) * 8 * panels)

    @inlined
    def release(empty, first):
        """The panels of a tile from `first` on have been read; also those that only the other tile has."""
        for panel in range(first, panels):
            mbarrier.arrive_if(empty + 8 * panel, elected())

    # The producer.

    @inlined
    def source_of(array, of_array, base, i, member, sizes):
        """-> (address of the first row of tile i of the walk, how many rows there are)."""
        first = int32(i * rows)
        if of_keys:
            head, rows_left = int32(word(base, HEAD) + member), int32(sizes.seqlen_q - first)
        else:
            head, rows_left = word(base, HEAD_KV), int32(word(base, KEYS) - first)
        return memory.address(array, row_base(of_array, word(base, BATCH), head, int64(first))), rows_left

    @inlined
    def hand_over(full):
        """What the warp wrote is there for wgmma."""
        fence.proxy_async()
        bar.warp_sync()
        mbarrier.arrive_if(full, elected())

    @inlined
    def produce(base, arrays, strides, sizes):
        """The producer warpgroup: the parts of the tiles that the consumers will need."""
        raw = cuda.local.array(stream_words, uint32)
        two = cuda.local.array(2, uint32)
        array_a, of_a = (arrays.q, strides.q) if of_keys else (arrays.k, strides.k)
        array_b, of_b = (arrays.do, strides.do) if of_keys else (arrays.v, strides.v)
        n, member, i, steps = int32(0), int32(0), int32(word(base, STOP) - 1), steps_of(base)
        while n < steps:
            last = (n & 1) ^ 1
            a_empty, a_last = empty_of_a(base, int32(n - 1)), int32(n - 1) >> 1 & 1
            source, rows_left = source_of(array_a, of_a, base, i, member, sizes)
            to = place_of_a(base, n)
            fetch_a0(raw, source, 4 * of_a[2], rows_left, own_thread())
            mbarrier.wait(base + at.b_empty, last)
            store_a0(raw, to, two, own_thread())
            hand_over(base + at.a_full)
            if two_a:
                fetch_a1(raw, source, 4 * of_a[2], rows_left, own_thread())
                mbarrier.wait(base + at.b_empty + 8, last)
                store_a1(raw, int32(to + panel_bytes), two, own_thread())
                hand_over(base + at.a_full + 8)
            source, rows_left = source_of(array_b, of_b, base, i, member, sizes)
            to = place_of_b(base, n)
            fetch_b0(raw, source, 4 * of_b[2], rows_left, own_thread())
            mbarrier.wait(a_empty, a_last)
            store_b0(raw, to, two, own_thread())
            hand_over(base + at.b_full)
            if two_b:
                fetch_b1(raw, source, 4 * of_b[2], rows_left, own_thread())
                mbarrier.wait(a_empty + 8, a_last)
                store_b1(raw, int32(to + panel_bytes), two, own_thread())
                hand_over(base + at.b_full + 8)
            n = int32(n + 1)
            i, member = behind(base, i, member)

    # The consumers; me: 0 is the first.

    @inlined
    def my_turn(me):
        if has_second:
            bar.sync(me + 1, 256)  # threads of two warpgroups

    @inlined
    def next_turn(me):
        if has_second:
            bar.arrive(int32(2 - me), 256)

    @inlined
    def load_own(base, me, raw, load, target, array, of_array, sizes):
        """The parts of the block's own rows of a tile."""
        first = word(base, FIRST_ROW)
        head = word(base, HEAD_KV) if of_keys else word(base, HEAD)
        rows_left = int32((word(base, KEYS) if of_keys else sizes.seqlen_q) - first)
        source = memory.address(array, row_base(of_array, word(base, BATCH), head, int64(first)))
        load(raw, source, 4 * of_array[2], rows_left, target, own_thread())
        fence.proxy_async()
        bar.sync(me + 3, 128)

    @inlined
    def consume_first(base, me, arrays, strides, sizes, score):
        """S and P of all tiles of the walk; with keys dV."""
        raw = cuda.local.array(own_words, uint32)
        acc_s = cuda.local.array(s_count, float32)  # (rows / 8, 4)
        other = cuda.local.array(s_count, float32)
        acc_dv = cuda.local.array(dv_count, float32)  # (columns_b / 8, 4)
        p_frag = cuda.local.array(frag_count, uint32)  # (3, rows / 8, 2)
        even, odd = cuda.local.array(b_first, float32), cuda.local.array(b_second, float32)
        lse, delta = cuda.local.array(row_numbers, float32), cuda.local.array(2, float32)
        mask_bits = cuda.local.array(mask_words, uint32)
        distance = cuda.local.array(2, float32)
        loaded = cuda.local.array(bias_words, bias_type)  # (2, rows / 8, 2)
        shown_bits = cuda.local.array(bits_words, uint32)  # by the mask that was given
        for x in range(dv_count):
            acc_dv[x] = float32(0)
        for x in range(mask_words):
            mask_bits[x] = uint32(0)
        for r in range(2):
            distance[r] = float32(0)
        array, of_array = (arrays.k, strides.k) if of_keys else (arrays.q, strides.q)
        own = int32(base + plan.own_a)
        load_own(base, me, raw, load_own_a, own, array, of_array, sizes)
        if not of_keys:
            of_rows(lse, delta, base, arrays, sizes)
        weights = int32(base + plan.scores + own_thread() * 16)
        n, member, i, steps = int32(0), int32(0), int32(word(base, STOP) - 1), steps_of(base)
        while n < steps:
            term = term_of(base, member, arrays, strides)
            if of_keys:
                of_columns(lse, arrays.lse, base, i, member, sizes)
            load_for_scores(base, i, member, loaded, shown_bits, arrays, strides, sizes)
            mbarrier.wait(base + at.a_full, n & 1)
            my_turn(me)
            first_s(acc_s, own, place_of_a(base, n))
            if two_a:
                mbarrier.wait(base + at.a_full + 8, n & 1)
                second_s(other, own, place_of_a(base, n))
            commit()
            next_turn(me)
            find_visible(base, i, sizes, mask_bits, shown_bits, distance)
            finish_s(acc_s, other)
            release(empty_of_a(base, n), 0)
            give_s(acc_s, base, n)
            take_s(acc_s, base, n)
            to_weights(acc_s, base, i, lse, mask_bits, loaded, term, distance, score, weights)
            if has_second:
                bar.warp_sync()
                mbarrier.arrive_if(base + at.weights_full, elected())
            else:
                give_back_s(base)
            if sums_dv:
                to_parts(acc_s, p_frag)
                mbarrier.wait(base + at.b_full, n & 1)
                if two_b:
                    mbarrier.wait(base + at.b_full + 8, n & 1)
                if both_sum:
                    my_turn(me)
                issue_dv(even, odd, p_frag, place_of_b(base, n))
                if both_sum:
                    next_turn(me)
                finish_first_dv(acc_dv, even)
                mbarrier.arrive_if(base + at.b_empty, elected())
                finish_second_dv(acc_dv, odd, p_frag)
                release(base + at.b_empty, 1)
            n = int32(n + 1)
            i, member = behind(base, i, member)
        my_turn(me)  # takes the turn that was given on when there was nothing left to do
        if sums_dv:
            write_dv(base, acc_dv, arrays, strides, sizes, score)
        else:
            cluster.sync()

    @inlined
    def consume_second(base, me, arrays, strides, sizes, score):
        """dP and dS of all tiles of the walk, and dK or dQ."""
        raw = cuda.local.array(own_words, uint32)
        acc_dp = cuda.local.array(s_count, float32)  # (rows / 8, 4)
        other = cuda.local.array(s_count, float32)
        acc = cuda.local.array(gradient_count, float32)  # (columns_a / 8, 4)
        ds_frag = cuda.local.array(frag_count, uint32)  # (3, rows / 8, 2)
        even, odd = cuda.local.array(a_first, float32), cuda.local.array(a_second, float32)
        delta, lse = cuda.local.array(row_numbers, float32), cuda.local.array(2, float32)
        for x in range(gradient_count):
            acc[x] = float32(0)
        next_turn(me)  # the first turn is the first consumer's
        array, of_array = (arrays.v, strides.v) if of_keys else (arrays.do, strides.do)
        own = int32(base + plan.own_b)
        load_own(base, me, raw, load_own_b, own, array, of_array, sizes)
        if not of_keys:
            of_rows(lse, delta, base, arrays, sizes)
        weights = int32(base + plan.scores + own_thread() * 16)
        n, member, i, steps = int32(0), int32(0), int32(word(base, STOP) - 1), steps_of(base)
        while n < steps:
            if of_keys:
                of_columns(delta, arrays.delta, base, i, member, sizes)
            mbarrier.wait(base + at.b_full, n & 1)
            my_turn(me)
            first_dp(acc_dp, own, place_of_b(base, n))
            if two_b:
                mbarrier.wait(base + at.b_full + 8, n & 1)
                second_dp(other, own, place_of_b(base, n))
            commit()
            next_turn(me)
            finish_dp(acc_dp, other)
            release(base + at.b_empty, 0)
            give_dp(acc_dp, base, n)
            take_dp(acc_dp, base, n)
            give_back_dp(base)
            mbarrier.wait(base + at.weights_full, n & 1)
            to_score_gradients(acc_dp, delta, weights)
            give_back_s(base)
            to_parts(acc_dp, ds_frag)
            if both_sum:
                my_turn(me)
            issue_ds(even, odd, ds_frag, place_of_a(base, n))
            if both_sum:
                next_turn(me)
            finish_first_ds(acc, even)
            mbarrier.arrive_if(empty_of_a(base, n), elected())
            finish_second_ds(acc, odd, ds_frag)
            release(empty_of_a(base, n), 1)
            n = int32(n + 1)
            i, member = behind(base, i, member)
        if of_keys:
            write_dk(base, acc, arrays, strides, sizes, score)
        else:
            write_dq(base, acc, arrays, strides, sizes, score)

    # Their results. A row that is not finite in one of the blocks is computed again by the first one, as a whole.

    @inlined
    def of_both(found, base):
        """-> the bits of rows that are not finite in either block, in the first one; in the other none. All writes of
        both blocks are done, and none of them needs the other any more."""
        note = int32(base + plan.struck + (special.thread_index() - 128 >> int32(5)) * 4)
        first = cluster.rank() == 0
        if not first and elected():
            cluster.store_b32(cluster.place_in(note, 0), found)
        cluster.sync()
        return uint32(found | ld_st.load_b32(note)) if first else uint32(0)

    @inlined
    def key_rows(base, sizes):
        """-> (first row of the warp, lane, first key, how many rows there are, how many of valid keys)."""
        first_row, lane = rows_of_lane()
        first = int32(word(base, FIRST_ROW) + first_row)
        return first_row, lane, first, int32(sizes.seqlen_k - first), int32(word(base, KEYS) - first)

    @inlined
    def write_dk(base, acc, arrays, strides, sizes, score):
        first_row, lane, first, rows_left, valid = key_rows(base, sizes)
        b, h_kv, first_key = word(base, BATCH), word(base, HEAD_KV), word(base, FIRST_ROW)
        to, step = row_base(strides.dk, b, h_kv, first), strides.dk[2]
        found = store_gradient(acc, score.scale, lane, arrays.dk, to, step, rows_left, valid)
        nonfinite = of_both(found, base)
        if nonfinite != 0:
            q_start = first_key - position(base)
            recompute_dk(nonfinite, first_row, lane, b, h_kv, first_key, q_start, arrays, strides, sizes, score)

    @inlined
    def write_dv(base, acc, arrays, strides, sizes, score):
        first_row, lane, first, rows_left, valid = key_rows(base, sizes)
        b, h_kv, first_key = word(base, BATCH), word(base, HEAD_KV), word(base, FIRST_ROW)
        to, step = row_base(strides.dv, b, h_kv, first), strides.dv[2]
        found = store_dv(acc, float32(1), lane, arrays.dv, to, step, rows_left, valid)
        nonfinite = of_both(found, base)
        if nonfinite != 0:
            q_start = first_key - position(base)
            recompute_dv(nonfinite, first_row, lane, b, h_kv, first_key, q_start, arrays, strides, sizes, score)

    @inlined
    def write_dq(base, acc, arrays, strides, sizes, score):
        first_row, lane = rows_of_lane()
        tile = QueryTile(word(base, BATCH), word(base, HEAD), word(base, FIRST_ROW), int32(0))
        first = int32(tile.first_query + first_row)
        left = int32(sizes.seqlen_q - first)
        to, step = row_base(strides.dq, tile.b, tile.h, first), strides.dq[2]
        nonfinite = of_both(store_gradient(acc, score.scale, lane, arrays.dq, to, step, left, left), base)
        if nonfinite != 0:
            term = row_term(tile.b, tile.h, arrays, strides)
            tile_keys = TileKeys(word(base, HEAD_KV), word(base, KEYS), position(base))
            recompute_dq(nonfinite, first_row, lane, tile, tile_keys, term, arrays, strides, sizes, score)

    @cuda.jit
    def flash_attention_wgmma_gradients_paired(arrays, strides, sizes, score):
        smem = cuda.shared.array(0, uint8)
        base = shared.address(smem)
        thread = special.thread_index()
        warpgroup = int32(shfl.idx_b32(uint32(thread >> int32(7)), 0))  # known to be the same in a whole warp
        if thread == 0:
            set_up(base, arrays, strides, sizes)
        cluster.sync()
        if warpgroup == 0:
            give_registers()
            produce(base, arrays, strides, sizes)
            cluster.sync()
        elif warpgroup == 1:
            take_registers()
            consume_first(base, int32(0), arrays, strides, sizes, score)
        elif has_second:
            take_registers()
            consume_second(base, int32(1), arrays, strides, sizes, score)

    return flash_attention_wgmma_gradients_paired
