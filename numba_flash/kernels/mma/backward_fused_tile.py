"""A warp's part of a tile of scores in backward_fused.py."""

from collections import namedtuple

from numba import float64, int32

from ...ptx import bar, local, special
from ..score import fragments
from ..score.stage import FragmentAt
from ..steps import lse_delta
from ..steps.basics import first_column_of, first_row_of, inlined, key_queries, lane_and_warp, named
from . import products_float64, shared_weights
from .backward_fp32_fp64 import View

# A warp's part of S^T or dP^T, of dK and dV, and of operands. Shapes are in the kernel.
Registers = namedtuple("Registers", "acc acc_dk acc_dv own_frag other_frag p_frag")


def make(config):
    plan, pitch, blocks, strips = config.shared_layout(), config.pitch, config.tile_m // 8, config.strips
    weights, (weight, _) = shared_weights.make(pitch, strips), fragments.weights_at(config)
    staged = lse_delta.staged(config, config.tile_m, config.LOADERS)

    def products(groups):
        """The products if `groups` warps share rows: each sums up its part of the columns."""
        padded, rows = config.head_dim_padded, (config.tile_n, config.tile_m, config.warp_rows)
        columns, way = (padded, padded // groups), dict(unrolled=True, odd_rows_first=True)
        view = View("float64", *rows, *columns, groups, config.large_f64, **way)
        return products_float64.make(view)

    of_scores, of_sums = products(1), products(2)

    @inlined
    def first_row_of_warp():
        return int32((special.thread_index() >> int32(6)) * config.warp_rows)

    @inlined
    def role_of_warp():
        """-> 1 where the warp computes dP, 0 where it computes S."""
        return int32((special.thread_index() >> int32(5)) & int32(1))

    @inlined
    def meet():
        """Waits for both warps that own the same keys."""
        bar.sync(1 + (special.thread_index() >> int32(6)), 64)

    @inlined
    def find_scores(registers, k_smem):
        """acc <- S^T, or dP^T."""
        thread, role = special.thread_index(), role_of_warp()
        lane = thread & int32(31)
        own = k_smem + role * int32(plan.v)
        other = k_smem + int32(plan.q) + role * int32(plan.do - plan.q)
        own_lane, other_lane, _, _ = of_scores.lanes(lane, thread >> int32(6), own, other, other)
        of_scores.multiply_part(registers.acc, registers.own_frag, registers.other_frag, own_lane, other_lane)

    @inlined
    def give_half(registers, k_smem):
        """Stores the half that the partner warp needs: of S in the place of P, of dP in the place of dS."""
        lane, role = special.thread_index() & int32(31), role_of_warp()
        at = weights.place(lane, k_smem + int32(plan.p) + role * int32(plan.ds - plan.p))
        at = weights.moved(at + (first_row_of_warp() + 8 - 8 * role) * pitch, int32(0))
        for strip in range(strips):
            for n in range(blocks):
                of = (strip * blocks + n) * 4
                first, second = registers.acc[of], registers.acc[of + 1]
                third, fourth = registers.acc[of + 2], registers.acc[of + 3]
                x, y = first if role else third, second if role else fourth
                weights.put(x, y, weights.moved(at + strip * (16 * pitch), n))

    @inlined
    def weigh(i, registers, k_smem, walk, sizes, score):
        """Stores P^T and dS^T of the warp's half in shared memory. No option changes scores."""
        lane, role = special.thread_index() & int32(31), role_of_warp()
        row, to_ds = int32(first_row_of_warp() + 8 * role), int32(plan.ds - plan.p)
        p_place = weights.place(lane, k_smem + int32(plan.p)) + row * pitch
        p_place = weights.moved(p_place, int32(0))
        first_column, key = int32(first_column_of(lane)), row + int32(first_row_of(lane))
        given, lse, delta = local.array(2, float64), local.array(2, float64), local.array(2, float64)
        first_query, end_query = local.array(strips, int32), local.array(strips, int32)  # that see a key
        for strip in range(strips):
            at_key = int32(walk.first_key + key + strip * 16)
            first, end = key_queries(at_key, walk.sequence.q_start, sizes.left, sizes.right, walk.sequence.seqlen_q)
            first_query[strip], end_query[strip] = int32(first), int32(end) if at_key < walk.sequence.keys else int32(0)
        for n in range(blocks):
            lse_at = int32(k_smem + int32(plan.rows) + (first_column + n * 8) * 8)
            staged.lse_pair(lse, 0, lse_at)
            staged.delta_pair(delta, 0, lse_at)
            for strip in range(strips):
                at = weights.moved(p_place + strip * (16 * pitch), n)
                weights.pair(given, at if role else at + to_ds)
                for x in range(2):
                    of = (strip * blocks + n) * 4 + x
                    upper, lower = registers.acc[of], registers.acc[of + 2]
                    s, dp = given[x] if role else upper, lower if role else given[x]
                    query = int32(i * config.tile_m + first_column + n * 8 + x)
                    found, _ = weight(s, FragmentAt(float64(0), float64(0)), score, lse[x])
                    seen = query >= first_query[strip] and query < end_query[strip]
                    registers.acc[of] = found if seen else float64(0)
                    registers.acc[of + 2] = found * (dp - delta[x]) if seen else float64(0)
        for n in range(blocks):  # behind all of them: a lane's elements are worked out side by side
            for strip in range(strips):
                at, of = weights.moved(p_place + strip * (16 * pitch), n), (strip * blocks + n) * 4
                weights.put(registers.acc[of], registers.acc[of + 1], at)
                weights.put(registers.acc[of + 2], registers.acc[of + 3], at + to_ds)

    @inlined
    def add_rows(acc, registers, weights_smem, rows_smem):
        """acc += P^T dO, or dS^T Q."""
        lane, warp = lane_and_warp()
        at = weights.operand_place(lane, weights_smem) + first_row_of_warp() * pitch
        _, _, rows_lane, _ = of_sums.lanes(lane, warp, rows_smem, rows_smem, rows_smem)
        for n in range(config.tile_m // 16):
            weights.operand(registers.p_frag, int32(at + n * 128))
            of_sums.add_16(acc, registers.p_frag, registers.other_frag, int32(rows_lane + n * 2048))

    functions = first_row_of_warp, find_scores, give_half, meet, weigh, add_rows
    return named(*functions, own_count=of_sums.q_count, other_count=of_sums.kv_count)  # registers of own_frag, p_frag
