"""Chooses the form of wgmma's backward: one kernel or two, how many heads and key tiles a block has, and how dQ is
added up. docs/adding_a_tile_row.md has the measurements."""

from ..config.blocks import AT_A_TIME
from ..config.wgmma_backward import WgmmaFusedConfig, all_parts
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from ..problem.groups import parts_of
from ..problem.options import changes_scores
from .backward_line import dq_stays, fastest, loses_nowhere

LONGEST_STAY = 8192  # the most queries of a block that stays, if it walks over all of them
# The most queries of a head with one key tile. Few heads leave the GPU idle: 2 x 10 of 4096 queries and 77 keys take
# 106 us, and 77 as two kernels (H200).
LONGEST_OF_ONE_TILE = 1024
MOST_QUERIES_ALONE = 512  # of packed sequences: with more queries, too few blocks would run side by side
MOST_TURNS = (1 << 16) - 1  # key tiles under a mask: half of a counter counts them (kernels/wgmma/backward_dq_sums.py)


def can_be_one_kernel(problem: BackwardProblem) -> bool:
    """Whether wgmma/backward_fused, which computes five products instead of seven, can compute the gradients. It needs
    a query: without one no previous kernel would set its ticket to 0."""
    forward = problem.forward
    if not forward.seqlen_q:
        return False
    bias = forward.array("bias")
    plain = not forward.functions and not changes_scores(tuple(use for use in forward.uses if use[0] != "bias"))
    plain = plain and (bias is None or bias.boxes)
    counted = forward.array("mask") is None or -(-forward.seqlen_k // WgmmaFusedConfig.KEYS) <= MOST_TURNS
    plain = plain and not (forward.seeded and (bias is not None or forward.array("mask") is not None))
    # Where weights drop, registers do not suffice for tiles of 128 queries. At head_dim 128 two kernels take 15
    # to 16 % longer (H200).
    taken = forward.widest <= 128 and (forward.widest > 64 or not forward.seeded)
    taken = taken and not (forward.seeded and forward.packed is not None)  # packed: blocks stay (`blocks_stay`)
    return plain and counted and {"dq", "dk", "dv"} <= set(problem.wanted) and taken


def gains_by_one_kernel(problem: BackwardProblem, target: Target) -> bool:
    """Whether the one kernel is faster than two. docs/adding_a_tile_row.md has the measurements.

    If every query sees every key, parts of dQ wait in a line, and a model estimates the cost (backward_line.py). The
    same holds if most queries see most keys, as in a chunk after other chunks' keys. Under another mask two long heads
    walk in opposite directions, and parts of a group count as heads. The batch size may not decide: a row's bits must
    not depend on it. Short sequences are assumed to come in batches. The lengths of packed sequences are not known.
    """
    forward = problem.forward
    one_tile = 0 < forward.seqlen_k <= WgmmaFusedConfig.KEYS  # a head is one block, which walks all of its queries
    if target.simulated or forward.packed is not None:
        return not target.simulated
    if forward.every_key:
        return fastest(forward).one and not (one_tile and forward.group == 1 and forward.seqlen_q > LONGEST_OF_ONE_TILE)
    if one_tile and 64 < forward.widest <= 80:
        return False
    if max(forward.seqlen_q, forward.seqlen_k) <= 512:
        return True
    if one_tile:
        return forward.seqlen_q <= LONGEST_OF_ONE_TILE
    lines = forward.heads_kv * parts_of(forward.group, heads_per_block(problem, one_kernel=True))
    two_ways = lines == 2 and forward.seqlen_k >= AT_A_TIME * WgmmaFusedConfig.KEYS
    few = lines < 4 and not two_ways and dq_partials(problem) == 1
    if few or forward.heads * min(forward.seqlen_q, forward.seqlen_k) < 8192:
        return False
    return not forward.most_keys or loses_nowhere(forward, dq_partials(problem))


def key_tiles_of_a_block(problem: BackwardProblem, target: Target) -> int:
    """How many key tiles a block of the one kernel has: all of a head if dQ stays in shared memory; otherwise 0.

    With one tile dQ need not stay there. Without a key no block would write dQ. If every query sees every key, both
    forms have the same order of sums, and so the same bits. Then a block has one tile if the GPU can run all blocks at
    a time: 12 heads of 197 tokens take 20 us instead of 26, 256 heads 64 instead of 53 (H200).
    """
    forward = problem.forward
    key_tiles = -(-forward.seqlen_k // WgmmaFusedConfig.KEYS)
    if forward.packed is not None:  # the bound may decide: one tile gives the same bits either way
        return int(key_tiles == 1 and forward.seqlen_q <= MOST_QUERIES_ALONE)
    if key_tiles == 1:
        return 1
    few = forward.every_key and forward.batch * forward.heads_kv * key_tiles <= target.multiprocessors
    return key_tiles if dq_stays(forward) and not few else 0


def dq_partials(problem: BackwardProblem) -> int:
    """How many sums of dQ the key tiles of a head add to in rotation.

    With more sums key tiles wait less for each other (backward_line.py), but the sums take more of the L2 cache. Under
    a mask blocks hardly wait, except for one head with as many key tiles as a GPU runs blocks.
    docs/adding_a_tile_row.md has the measurements.
    """
    forward = problem.forward
    if forward.packed is not None:
        return 1
    if forward.every_key:
        return fastest(forward).sums
    one_long = forward.heads == 1 and forward.seqlen_k >= AT_A_TIME * WgmmaFusedConfig.KEYS
    return 4 if one_long and forward.widest > 64 else 1


def blocks_stay(problem: BackwardProblem, target: Target, members: int, key_tiles: int) -> bool:
    """Whether blocks of the one kernel process several tiles, if there are more tiles than blocks that run at a time.
    It changes no order of sums, and so no bit.

    Above head_dim 64 it makes long loops 2 % slower and short ones up to 14 % faster (docs/adding_a_tile_row.md). There
    a block with the only key tile of a head does not stay: the compiler would serialise its products. Nor does a block
    stay where weights drop, or if a mask decides over which queries each of many key tiles loops: registers are
    scarce. Nor does a block of many heads with a bias stay: the bias overlays dS, whose last place is released behind
    the last query of a tile, and a tile might meet no query.
    """
    forward = problem.forward
    if forward.packed is not None and not key_tiles:  # blocks skip the numbers of tiles that do not exist
        return True
    tiles = all_parts(forward, members) * -(-forward.seqlen_k // WgmmaFusedConfig.KEYS)
    many = key_tiles > 1 or tiles > target.multiprocessors
    long = forward.every_key and forward.seqlen_q * (members or forward.group) > LONGEST_STAY
    leaves = forward.widest > 64 and (key_tiles > 0 or forward.seeded or long)
    masked = forward.array("mask") is not None and not key_tiles
    return many and not masked and (forward.array("bias") is None or key_tiles > 1) and not leaves


def heads_per_block(problem: BackwardProblem, one_kernel: bool) -> int:
    """How many query heads of a group a block that owns keys processes; 0: all, so it writes dK and dV itself.

    Under a causal mask the blocks of a head process different query tiles at a time, each of all its members. With two
    members the concurrent tiles and the sums of dQ stay in L2; with eight they do not. The two kernels gain only with
    few blocks. If every query sees every key, a model decides. 4 x 32 heads over 8 of 2k causal queries take 784 us
    with two members and 927 with all, 2 x 8 heads over one of head_dim 256 1017 and 1513 (H200).
    """
    forward = problem.forward
    short = max(forward.seqlen_q, forward.seqlen_k) <= 512
    if forward.packed is not None or forward.function("mask_mod") is not None:
        return 0  # lengths of packed sequences are not known, and members change bits
    if forward.every_key:
        return fastest(forward, one_kernel).members
    if short or not (one_kernel or forward.heads_kv <= 4):
        return 0
    members = 2 if forward.widest > (64 if one_kernel else 192) else 4
    return members if forward.heads > members * forward.heads_kv else 0
