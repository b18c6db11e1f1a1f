"""What a warp computes of a tile of scores in backward_wide_fused.py."""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import int32, int64

from ...ptx import bar, local, special
from ..score import fragments
from ..score.stage import FragmentAt
from ..steps import lse_delta, numbers
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.plain import first_column_of, first_row_of, key_queries, lane_and_warp
from . import backward_wide, shared_weights


class Registers(NamedTuple):
    """What a warp holds of S^T or dP^T, of dK and dV, of operands, and of its keys. Shapes are in the kernels."""

    acc: Any
    acc_dk: Any
    acc_dv: Any
    own_frag: Any
    other_frag: Any
    p_frag: Any


class Counts(NamedTuple):
    """Numbers of registers: acc; acc_dk or acc_dv; own_frag or p_frag; other_frag."""

    scores: int
    sums: int
    own: int
    other: int


class FusedTile(NamedTuple):
    """Device functions, and what Registers are made of."""

    first_row_of_warp: Callable[..., Any]
    turn: Callable[..., Any]
    find_scores: Callable[..., Any]
    give_half: Callable[..., Any]
    meet: Callable[..., Any]
    weigh: Callable[..., Any]
    add_rows: Callable[..., Any]
    counts: Counts
    fragment: Any  # the type of the last two, own_frag and other_frag


def make(config):
    size, padded, pitch, double = config.item_size, config.head_dim_padded, config.pitch, config.dtype == "float64"
    v_at, p_at, ds_at = config.own_places()
    groups, shift = config.column_groups, config.column_groups.bit_length() - 1
    parts, part_shift = groups // 2, shift - 1  # of the queries, in which warps compute S or dP
    strips, columns, own_columns = config.warp_rows // 16, padded // groups, config.tile_m // parts
    blocks, steps_16 = own_columns // 8, config.tile_m // 16
    s_count, sum_count = strips * blocks * 4, strips * columns // 2

    real = numbers.of(config.compute_dtype).real
    of_scores, of_sums = (backward_wide.fused_products(config, n) for n in (parts, groups))
    weights = shared_weights.make(pitch, strips, double)
    weight, _ = fragments.weights_at(config)
    staged = lse_delta.staged(config, config.tile_m, config.threads)

    @inlined
    def first_row_of_warp():
        return int32((special.thread_index() >> int32(5 + shift)) * config.warp_rows)

    @inlined
    def part_and_role():
        """-> which part of the queries the warp computes S or dP of, and 1 where it is dP."""
        within = (special.thread_index() >> int32(5)) & int32(groups - 1)
        return int32(within >> int32(1)), int32(within & int32(1))

    @inlined
    def meet():
        """All warps that own the same keys."""
        bar.sync(1 + (special.thread_index() >> int32(5 + shift)), 32 * groups)

    @inlined
    def turn(t, walk, sizes):
        """-> (i, h) of the t-th tile of queries."""
        member = divide(t, walk.tiles)
        h = walk.h_kv * divide(sizes.heads, sizes.heads_kv) + member
        return int32(walk.begin + walk.tiles - 1 - (t - member * walk.tiles)), int32(h)

    @inlined
    def find_scores(registers, k_smem, to_q, to_do):
        """acc <- S of the warp's part, or dP. to_q, to_do: how far behind K those tiles are."""
        thread = special.thread_index()
        lane, (part, role) = thread & int32(31), part_and_role()
        own = k_smem + role * int32(v_at)
        other = k_smem + to_q + role * int32(to_do - to_q)
        warp = ((thread >> int32(5 + shift)) << int32(part_shift)) + part
        own_lane, other_lane, _, _ = of_scores.lanes(lane, warp, own, other, other)
        of_scores.multiply_part(registers.acc, registers.own_frag, registers.other_frag, own_lane, other_lane)

    @inlined
    def give_half(registers, k_smem):
        """What the other warp makes P and dS of, to where it puts them: S to P, dP to dS."""
        lane, (part, role) = special.thread_index() & int32(31), part_and_role()
        at = weights.place(lane, k_smem + int32(p_at) + role * int32(ds_at - p_at))
        at = weights.moved(at + (first_row_of_warp() + 8 - 8 * role) * (pitch * size), part * (own_columns // 8))
        for strip in range(strips):
            for n in range(blocks):
                of = (strip * blocks + n) * 4
                first, second = registers.acc[of], registers.acc[of + 1]
                third, fourth = registers.acc[of + 2], registers.acc[of + 3]
                x, y = first if role else third, second if role else fourth
                weights.put(x, y, weights.moved(at + strip * (16 * pitch * size), n))

    @inlined
    def weigh(i, registers, k_smem, rows_smem, walk, term, sizes, score):
        """P^T and dS^T of the warp's half to shared memory."""
        lane, (part, role) = special.thread_index() & int32(31), part_and_role()
        row = int32(first_row_of_warp() + 8 * role)
        p_place = weights.place(lane, k_smem + int32(p_at)) + row * (pitch * size)
        p_place = weights.moved(p_place, part * (own_columns // 8))
        to_ds = int32(ds_at - p_at)
        first_column, key = int32(part * own_columns + int32(first_column_of(lane))), row + int32(first_row_of(lane))
        given = local.array(2, real)
        lse, delta = local.array(2, real), local.array(2, real)
        first_query, end_query = local.array(strips, int32), local.array(strips, int32)  # that see a key
        for strip in range(strips):
            at_key = int32(walk.first_key + key + strip * 16)
            first, end = key_queries(at_key, walk.sequence.q_start, sizes.left, sizes.right, walk.sequence.seqlen_q)
            first_query[strip], end_query[strip] = int32(first), int32(end) if at_key < walk.sequence.keys else int32(0)
        for n in range(blocks):
            lse_at = int32(rows_smem + (first_column + n * 8) * size)
            staged.lse_pair(lse, 0, lse_at)
            staged.delta_pair(delta, 0, lse_at)
            for strip in range(strips):
                at = weights.moved(p_place + strip * (16 * pitch * size), n)
                weights.pair(given, at if role else at + to_ds)
                for x in range(2):
                    of = (strip * blocks + n) * 4 + x
                    upper, lower = registers.acc[of], registers.acc[of + 2]
                    s, dp = given[x] if role else upper, lower if role else given[x]
                    query = int32(i * config.tile_m + first_column + n * 8 + x)
                    distance = real(int64(query) + walk.sequence.q_start - walk.first_key - (key + strip * 16))
                    found, derivative = weight(s, FragmentAt(term, distance, real(0)), score, lse[x])
                    seen = query >= first_query[strip] and query < end_query[strip]
                    registers.acc[of] = found if seen else real(0)
                    registers.acc[of + 2] = found * (dp - delta[x]) * derivative if seen else real(0)
        for n in range(blocks):  # behind all of them: a lane's elements are worked out side by side
            for strip in range(strips):
                at, of = weights.moved(p_place + strip * (16 * pitch * size), n), (strip * blocks + n) * 4
                weights.put(registers.acc[of], registers.acc[of + 1], at)
                weights.put(registers.acc[of + 2], registers.acc[of + 3], at + to_ds)

    @inlined
    def add_step(acc, registers, at, rows_lane):
        weights.operand(registers.p_frag, at)
        of_sums.add_16(acc, registers.p_frag, registers.other_frag, rows_lane)

    @inlined
    def add_steps_in_loop(acc, registers, at, rows_lane):
        for _ in range(special.opaque(steps_16)):
            add_step(acc, registers, at, rows_lane)
            at, rows_lane = int32(at + 16 * size), int32(rows_lane + 2048)

    @inlined
    def add_steps_written_out(acc, registers, at, rows_lane):
        """Of a loop LLVM would make a copy for odd numbers of steps, and sums would move between registers."""
        for n in range(steps_16):
            add_step(acc, registers, int32(at + n * (16 * size)), int32(rows_lane + n * 2048))

    add_steps = add_steps_written_out if double else add_steps_in_loop

    @inlined
    def add_rows(acc, registers, weights_smem, rows_smem):
        """acc += P^T dO, or dS^T Q."""
        lane, warp = lane_and_warp()
        at = weights.operand_place(lane, weights_smem) + first_row_of_warp() * (pitch * size)
        _, _, rows_lane, _ = of_sums.lanes(lane, warp, rows_smem, rows_smem, rows_smem)
        add_steps(acc, registers, at, rows_lane)

    of_lane = Counts(s_count, sum_count, of_sums.q_count, of_sums.kv_count)
    return FusedTile(
        first_row_of_warp, turn, find_scores, give_half, meet, weigh, add_rows, of_lane, of_scores.register
    )
