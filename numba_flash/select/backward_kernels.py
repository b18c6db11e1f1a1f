"""The kernels of each rung's backward for a BackwardProblem, and their Configs, from the row of a table and the
problem."""

import dataclasses
import functools
from collections.abc import Sequence

from ..config.aux_gradients import AuxElementsConfig, DauxConfig
from ..config.backward import BackwardConfig, MmaBackwardConfig, MmaDkdvConfig, MmaDqConfig, PreprocessConfig
from ..config.blocks import AT_A_TIME
from ..config.forward import ITEM_SIZE, Config
from ..config.mask_bits import MaskBitsConfig
from ..config.score_gradients import MmaDauxConfig, MmaDbiasConfig
from ..config.simt_backward import DbiasConfig, DbiasSumConfig, DkdvConfig, DqConfig
from ..config.tile_states import TileStatesConfig
from ..config.wgmma_backward import (
    BY_ELEMENT,
    WgmmaAddPartsConfig,
    WgmmaBackwardConfig,
    WgmmaDkdvConfig,
    WgmmaDqConfig,
    WgmmaFusedConfig,
    WgmmaRoundConfig,
)
from ..config.wgmma_backward_float32 import (
    WgmmaBackwardFloat32Config,
    WgmmaDkdvFloat32Config,
    WgmmaDqFloat32Config,
)
from ..config.wgmma_paired_float32 import WgmmaPairedDkdvConfig, WgmmaPairedDqConfig
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from ..problem.forward import Problem
from ..problem.groups import parts_of
from ..problem.options import HEAD_GRADIENTS, SEEDED, changes_scores
from . import backward_tiles as tiles
from .backward_shared import (
    apart_or_together,
    bias_boxes_of,
    bias_pairs_of,
    delta_config,
    features_of,
    first_that_fits,
    head_sums,
    preprocess_config,
    usable,
    with_what_goes_before,
)
from .backward_simt import simt_config
from .backward_wide import wide_configs
from .forward import halved
from .tiles import columns


def kernels_of(name: str, problem: BackwardProblem, target: Target) -> tuple[BackwardConfig, ...]:
    """A rung's kernels in the order of their launches; empty for rungs on the host."""
    own = dict(v2=v2_configs, wgmma=wgmma_configs, mma=mma_configs).get(name)
    if own is None:
        return ()
    made = own(problem, target)
    if "dbias" in problem.wanted and problem.dbias_splits > 1:
        bias = problem.forward.array("bias")
        assert bias is not None
        made = (*made, DbiasSumConfig(problem.forward.dtype, bias.dtype, 16 if target.simulated else 256))
    return (*made, *_aux_configs(problem, target, made)) if problem.wanted_aux else made


def _aux_configs(problem: BackwardProblem, target: Target, before: Sequence[BackwardConfig]) -> list[BackwardConfig]:
    """The kernels of the gradients of aux, which run after those of a rung."""
    dtypes = tuple(problem.forward.aux[number].dtype for number in problem.wanted_aux)
    facts = (problem.forward.compute_dtype, dtypes, problem.wanted_aux, 16 if target.simulated else 256)
    start, end = (AuxElementsConfig(kernel, *facts) for kernel in ("daux_start", "daux_round"))
    if problem.forward.function("score_mod") is None:
        return [start, end]
    sums: MmaDauxConfig | DauxConfig
    needed: list[BackwardConfig] = []
    if any(
        isinstance(config, PreprocessConfig | MmaBackwardConfig) for config in before
    ):  # products on tensor cores in 16 bits
        sums = _mma_daux(problem, target)
        if problem.forward.array("mask") is not None:
            needed.append(MaskBitsConfig(threads=32 if target.simulated else 512))
    else:
        found = simt_config(DauxConfig, (), problem, target)
        assert isinstance(found, DauxConfig)
        sums = found
        needed.append(delta_config(problem, target))
    bounds = dataclasses.replace(sums, kernel=sums.kernel.replace("sums", "bounds"), of_bounds=True)
    return [*(config for config in needed if config not in before), start, bounds, sums, end]


@functools.lru_cache(maxsize=4096)
def v2_configs(problem: BackwardProblem, target: Target) -> tuple[BackwardConfig, ...]:
    """v2's kernels for the wanted gradients, each with its best tile that fits, or the smallest one."""
    wanted = problem.wanted
    made: list[BackwardConfig] = [delta_config(problem, target)]
    in_rows = tuple(name for name, option in HEAD_GRADIENTS.items() if option.acts_on == "score")
    for kind, gradients in ((DkdvConfig, ("dk", "dv")), (DqConfig, ("dq", *in_rows)), (DbiasConfig, ("dbias",))):
        own = tuple(name for name in gradients if name in wanted)
        if own:
            config = simt_config(kind, own, problem, target)
            if config.tile_states:
                made.append(TileStatesConfig.before(config, 32 if target.simulated else 512))
            made.append(config)
    return (*made, *head_sums(problem, target, of_blocks=False))


@functools.lru_cache(maxsize=4096)
def mma_configs(problem: BackwardProblem, target: Target) -> tuple[BackwardConfig, ...]:
    """mma's kernels for the wanted gradients, each with its best tile that fits, or the smallest one."""
    if ITEM_SIZE[problem.forward.dtype] > 2:
        return wide_configs(problem, target)
    rows = one_key_tile(problem, target)
    if rows:
        own = [*first_that_fits([[_mma_one_key_tile(problem, row, target)] for row in rows], target)]
        made = with_what_goes_before([*own, *_dbias(problem, target)], target)
        return (*made, *head_sums(problem, target, of_blocks=True))
    rows = usable("mma_dkdv", problem, target)
    if not {"dk", "dv"} <= set(problem.wanted):
        rows = [row for row in rows if row.column_groups == 1]  # warps that exchange scores add up both
    made: list[BackwardConfig] = [preprocess_config(problem, target)]
    own: list[Config] = [*first_that_fits([_mma_dkdv(problem, row) for row in rows], target)]
    if "dq" in problem.wanted:
        own += first_that_fits([_mma_dq(problem, row) for row in usable("mma_dq", problem, target)], target)
    made += with_what_goes_before([*own, *_dbias(problem, target)], target)
    return (*made, *head_sums(problem, target, of_blocks=True))


@functools.lru_cache(maxsize=4096)
def wgmma_configs(problem: BackwardProblem, target: Target) -> tuple[BackwardConfig, ...]:
    """wgmma's kernels for the wanted gradients, each with its best tile that fits, or the smallest one."""
    if problem.forward.dtype == "float32":
        return _wgmma_float32(problem, target)
    if _can_be_one_kernel(problem) and gains_by_one_kernel(problem, target):
        return (*_wgmma_fused(problem, target), *head_sums(problem, target, of_blocks=True))
    made: list[WgmmaBackwardConfig] = []
    made += first_that_fits([_wgmma_dkdv(problem, row) for row in usable("wgmma_dkdv", problem, target)], target)
    if "dq" in problem.wanted:
        made += first_that_fits([_wgmma_dq(problem, row) for row in usable("wgmma_dq", problem, target)], target)
    members = members_of_a_part(problem, one_kernel=False)
    made = [dataclasses.replace(x, members=members) if isinstance(x, WgmmaDkdvConfig) else x for x in made]
    halved = [_halved(config, problem, target) for config in made]
    own = with_what_goes_before([*halved, *_dbias(problem, target)], target)
    own += _add_parts(problem, halved)
    start = dataclasses.replace(preprocess_config(problem, target), early=True)
    return (start, *own, *head_sums(problem, target, of_blocks=True))


def _wgmma_float32(problem: BackwardProblem, target: Target) -> tuple[BackwardConfig, ...]:
    """wgmma's kernels in float32, for the problems that select_backward leaves to them."""
    features, wanted = features_of(problem) | bias_pairs_of(problem), set(problem.wanted)
    paired = max(problem.forward.head_dim, problem.forward.head_dim_v) > WgmmaBackwardFloat32Config.WIDEST
    kinds = (WgmmaPairedDkdvConfig, WgmmaPairedDqConfig) if paired else (WgmmaDkdvFloat32Config, WgmmaDqFloat32Config)
    form, own = "paired" if paired else "float32", list[Config]()
    if {"dk", "dv"} & wanted:
        row = usable("wgmma_dkdv", problem, target)[0]
        of_both = dict(of_dk="dk" in wanted, of_dv="dv" in wanted)
        own.append(kinds[0](**features | columns(row) | of_both, kernel=f"wgmma_dkdv_{form}"))
    if "dq" in wanted:
        row = usable("wgmma_dq", problem, target)[0]
        own.append(kinds[1](**features | columns(row), kernel=f"wgmma_dq_{form}"))
    made = [delta_config(problem, target), *with_what_goes_before(own, target)]
    if "dbias" in wanted:  # wgmma has no dbias kernel yet
        made.append(simt_config(DbiasConfig, ("dbias",), problem, target))
    return (*made, *head_sums(problem, target, of_blocks=False))


def _dbias(problem: BackwardProblem, target: Target) -> Sequence[Config]:
    """mma's dbias kernel, if dbias is wanted."""
    if "dbias" not in problem.wanted:
        return []
    return first_that_fits([_mma_dbias(problem, row) for row in usable("mma_dbias", problem, target)], target)


def _halved(config: WgmmaBackwardConfig, problem: BackwardProblem, target: Target) -> WgmmaBackwardConfig:
    """Blocks own 64 rows instead of 128 if those of 128 leave half of the multiprocessors idle.

    The order of sums stays, and so do a row's bits. With head_dim 256 and one KV head of 4096 keys it is 1.65 times as
    fast, with head_dim 160 and 256 keys of 32 heads 1.2 times (H200).
    """
    forward = problem.forward
    heads, rows = forward.batch * forward.heads, forward.seqlen_q
    if isinstance(config, WgmmaDkdvConfig):
        heads, rows = all_parts(forward, config.members), forward.seqlen_k
    if config.own_rows != 128 or 2 * heads * -(-rows // 128) > target.multiprocessors:
        return config
    if isinstance(config, WgmmaDkdvConfig):
        return dataclasses.replace(config, tile_n=64, stages_b=2)
    return dataclasses.replace(config, tile_m=64, stages_b=2)


def _can_be_one_kernel(problem: BackwardProblem) -> bool:
    """Whether wgmma/backward_fused, which computes five products instead of seven, can compute the gradients. It needs
    a query: without one no previous kernel would set its ticket to 0."""
    forward = problem.forward
    if not forward.seqlen_q:
        return False
    by_element = any(name in BY_ELEMENT and name != SEEDED for name, _ in forward.uses)
    plain, widest = not changes_scores(forward.uses) and not by_element, max(forward.head_dim, forward.head_dim_v)
    # Where weights are dropped, registers do not suffice for tiles of 128 queries.
    taken = widest <= 128 and (widest > 64 or not forward.seeded)
    return plain and {"dq", "dk", "dv"} <= set(problem.wanted) and taken


def gains_by_one_kernel(problem: BackwardProblem, target: Target) -> bool:
    """Whether the one kernel is faster than two. docs/adding_a_tile_row.md has the measurements.

    If every query sees every key, parts of dQ wait in a line (kernels/steps/dq_order.py). That costs little if a head
    has no more key tiles than query tiles, or few query tiles, and if a batch entry has enough work for the line to
    pass: eight heads, or more key tiles than run at a time, because only the first ones wait. Under a mask two long
    heads go two ways, and parts of a group count as heads. With several sums of dQ (dq_lines) lines are short. Without
    an order there is no line. The batch size may not decide: a row's bits must not depend on it. Short sequences are
    assumed to come in batches. If all keys are one tile, there are no parts.
    """
    forward = problem.forward
    widest, every_key = max(forward.head_dim, forward.head_dim_v), forward.left is None and forward.right is None
    short = max(forward.seqlen_q, forward.seqlen_k) <= 512
    one_tile = 0 < forward.seqlen_k <= WgmmaFusedConfig.KEYS  # a head is one block, which walks all of its queries
    if target.simulated or (one_tile and 64 < widest <= 80):
        return False
    if short:
        return True
    if one_tile:
        return forward.seqlen_q <= 1024
    group = forward.heads // max(forward.heads_kv, 1)
    lines = forward.heads_kv * parts_of(group, members_of_a_part(problem, one_kernel=True))
    few_queries = every_key and forward.seqlen_q <= 512
    long_line = forward.seqlen_k > forward.seqlen_q and not few_queries
    two_ways = lines == 2 and not every_key and forward.seqlen_k >= AT_A_TIME * WgmmaFusedConfig.KEYS
    key_tiles, enough = lines * forward.seqlen_k // WgmmaFusedConfig.KEYS, 2 if widest <= 64 else 1.5
    many_tiles = every_key and key_tiles >= enough * AT_A_TIME and forward.seqlen_q >= forward.seqlen_k
    few = lines < (8 if every_key else 4) and not two_ways and not many_tiles and dq_lines(problem) == 1
    if problem.deterministic and (long_line or few):
        return False
    # Wide heads that see all keys start later: a small batch of them would lose more by the one kernel.
    least = 8192 if widest <= 64 or not every_key else 16384
    return (forward.heads_kv if every_key else forward.heads) * forward.seqlen_k >= least


def key_tiles_of_a_block(problem: BackwardProblem, target: Target) -> int:
    """How many key tiles a block of the one kernel has: all of a head if dQ stays in shared memory; otherwise 0.

    With one tile dQ need not stay there. Without a key no block would write dQ. If every query sees every key, both
    ways have the same order of sums, and so the same bits. Then a block has one tile if the GPU can run all blocks at a
    time: 12 heads of 197 tokens take 20 us instead of 26, 256 heads 64 instead of 53 (H200).
    """
    forward = problem.forward
    key_tiles = -(-forward.seqlen_k // WgmmaFusedConfig.KEYS)
    if key_tiles == 1:
        return 1
    query_tiles = -(-forward.seqlen_q // 128) * forward.heads // max(forward.heads_kv, 1)
    kept = max(forward.head_dim, forward.head_dim_v) <= 64 and query_tiles <= WgmmaFusedConfig.KEPT
    every_key = forward.left is None and forward.right is None
    few = every_key and forward.batch * forward.heads_kv * key_tiles <= target.multiprocessors
    return key_tiles if kept and not few and key_tiles <= WgmmaFusedConfig.MOST_KEY_TILES else 0


def dq_lines(problem: BackwardProblem) -> int:
    """How many sums of dQ the key tiles of a head add to in rotation.

    If few heads have as many key tiles as a GPU runs blocks, all blocks begin with the same query tiles, each one turn
    after the one before (kernels/steps/dq_order.py). More sums shorten this wait and take more of the L2 cache.
    docs/adding_a_tile_row.md has the measurements.
    """
    forward = problem.forward
    every_key = forward.left is None and forward.right is None
    key_tiles = forward.heads_kv * forward.seqlen_k // WgmmaFusedConfig.KEYS
    most_heads = 4 if every_key and forward.seqlen_q >= forward.seqlen_k else 1
    narrow = max(forward.head_dim, forward.head_dim_v) <= 64
    if narrow or not problem.deterministic or forward.heads > most_heads:
        return 1
    if forward.heads <= 2:
        return WgmmaFusedConfig.MOST_LINES if key_tiles >= AT_A_TIME else 1
    return 2 if key_tiles >= 1.5 * AT_A_TIME else 1


def blocks_stay(problem: BackwardProblem, target: Target, members: int, key_tiles: int) -> bool:
    """Whether blocks of the one kernel process several tiles, if there are more tiles than blocks that run at a time.
    It changes no order of sums, and so no bit.

    From head_dim 65 on long loops lose 2 % by it, and short ones gain up to 14 % (docs/adding_a_tile_row.md). A block
    with the only key tile of a head does not stay there: the compiler would serialise its products. Nor does a block
    where weights are dropped: registers are scarce.
    """
    forward = problem.forward
    tiles = all_parts(forward, members) * -(-forward.seqlen_k // WgmmaFusedConfig.KEYS)
    many = key_tiles > 1 or tiles > target.multiprocessors
    every_key = forward.left is None and forward.right is None
    of_a_walk = forward.seqlen_q * (members or forward.heads // max(forward.heads_kv, 1))
    long = every_key and of_a_walk > LONGEST_STAY
    wide = max(forward.head_dim, forward.head_dim_v) > 64
    return many and not (wide and (key_tiles or forward.seeded or long))


def all_parts(forward: Problem, members: int) -> int:
    """The number of parts of `members` query heads in the groups of all batch entries."""
    return forward.batch * forward.heads_kv * parts_of(forward.heads // max(forward.heads_kv, 1), members)


def members_of_a_part(problem: BackwardProblem, one_kernel: bool) -> int:
    """How many query heads of a group a block that owns keys processes; 0: all, so it writes dK and dV itself.

    Under a causal mask the blocks of a head process different query tiles at a time, each of all its members. With two
    members the concurrent tiles and the sums of dQ stay in L2; with eight they do not. The two kernels gain only with
    few blocks. If every query sees every key, nothing is gained. docs/adding_a_tile_row.md has the measurements.
    """
    forward = problem.forward
    every_key, short = forward.left is None and forward.right is None, max(forward.seqlen_q, forward.seqlen_k) <= 512
    if every_key or short or forward.function("mask_mod") is not None or not (one_kernel or forward.heads_kv <= 4):
        return 0
    members = 2 if max(forward.head_dim, forward.head_dim_v) > (64 if one_kernel else 192) else 4
    return members if forward.heads > members * forward.heads_kv else 0


def _add_parts(problem: BackwardProblem, configs: Sequence[BackwardConfig]) -> list[BackwardConfig]:
    """The kernels that add up the sums of dK and dV that these kernels leave; none if they write the gradients
    themselves."""
    made: list[BackwardConfig] = []
    for config in configs:
        if isinstance(config, WgmmaDkdvConfig) and config.members:
            names = ("tile_m", "tile_n", "members", "head_dim_padded", "head_dim_v_padded", "of_dk", "of_dv")
            of_sums = {name: getattr(config, name) for name in names}
            made.append(WgmmaAddPartsConfig(**features_of(problem), **of_sums, kernel="wgmma_add_parts"))
    return made


LONGEST_STAY = 8192  # queries of a walk over all of them
ONLY_FUSED = ("stages_a", "stages_b")  # fields that wgmma_round does not have


def _wgmma_fused(problem: BackwardProblem, target: Target) -> tuple[BackwardConfig, ...]:
    head_dim = max(problem.forward.head_dim, problem.forward.head_dim_v)
    row = next(row for row in tiles.rows_for("wgmma_fused", target) if head_dim <= row.head_dim)
    features = features_of(problem) | columns(row)
    of_round = {name: value for name, value in features.items() if name not in ONLY_FUSED}
    key_tiles = key_tiles_of_a_block(problem, target)
    features |= dict(ordered=problem.deterministic or key_tiles > 0, key_tiles=key_tiles)
    features |= dict(lse_first=problem.forward.number("scale") != 0 and not problem.forward.seeded)
    members = members_of_a_part(problem, one_kernel=True)
    lines = 1 if key_tiles else dq_lines(problem)
    features |= dict(members=members, stays=blocks_stay(problem, target, members, key_tiles), dq_lines=lines)
    fused = WgmmaFusedConfig(**features, kernel="wgmma_fused")
    turns_of = 0 if key_tiles else fused.tile_m
    start = dataclasses.replace(preprocess_config(problem, target), turns_of=turns_of, dq_lines=lines, early=True)
    rounds = WgmmaRoundConfig(**of_round, kernel="wgmma_round", dq_columns=fused.dq_columns, dq_lines=lines)
    return (start, fused, *([] if key_tiles else [rounds]), *_add_parts(problem, [fused]))


def _mma_dkdv(problem: BackwardProblem, row: tiles.MmaDkdv) -> list[MmaBackwardConfig]:
    features = features_of(problem) | bias_pairs_of(problem) | columns(row) | dict(kernel="mma_dkdv")
    return [MmaDkdvConfig(**features, of_dk="dk" in p, of_dv="dv" in p) for p in apart_or_together(problem, row.apart)]


def one_key_tile(problem: BackwardProblem, target: Target) -> list[tiles.MmaDkdv]:
    """The rows of tiles that have all keys of a head, if one kernel of mma computes dQ, dK and dV: its blocks read all
    of a head once, and walk over two tiles of queries at most."""
    forward = problem.forward
    if ITEM_SIZE[forward.dtype] != 2 or not {"dq", "dk", "dv"} <= set(problem.wanted) or not forward.seqlen_k:
        return []
    rows = usable("mma_one_key_tile", problem, target)
    return [row for row in rows if forward.seqlen_k <= row.tile_n and forward.seqlen_q <= 2 * row.tile_n]


def _mma_one_key_tile(problem: BackwardProblem, row: tiles.MmaDkdv, target: Target) -> MmaDkdvConfig:
    tile_m, tile_n = halved(row.tile_m, problem.forward.seqlen_q), halved(row.tile_n, problem.forward.seqlen_k)
    features = features_of(problem) | bias_pairs_of(problem) | columns(row)
    features |= dict(tile_m=tile_m, tile_n=tile_n, blocks_per_sm=row.blocks_per_sm * row.tile_n // tile_n)
    return MmaDkdvConfig(
        **features, kernel="mma_one_key_tile", of_dq=True, preprocess=preprocess_config(problem, target)
    )


def _mma_dq(problem: BackwardProblem, row: tiles.MmaDq) -> list[MmaBackwardConfig]:
    features = features_of(problem) | bias_pairs_of(problem) | columns(row) | dict(kernel="mma_dq")
    return [MmaDqConfig(**features)]


def _mma_dbias(problem: BackwardProblem, row: tiles.MmaScores) -> list[MmaBackwardConfig]:
    *_, rows, keys = problem.dbias_shape
    own = dict(rows_summed=rows == 1, keys_summed=keys == 1, split=problem.dbias_splits > 1)
    bias = problem.forward.array("bias")
    assert bias is not None
    # a row of dbias, which is contiguous, then begins at a multiple of 4 bytes
    pairs = ITEM_SIZE[bias.dtype] == 2 and keys % 2 == 0 and not any(own.values())
    features = features_of(problem) | bias_pairs_of(problem) | columns(row) | own
    return [MmaDbiasConfig(**features, kernel="mma_dbias", pairs=pairs)]


def _mma_daux(problem: BackwardProblem, target: Target) -> MmaDauxConfig:
    """The kernel that adds up the terms of aux: the second of the two loops over all scores (kernels/score/owed.py)."""

    def made(row: tiles.MmaScores) -> list[MmaDauxConfig]:
        features = features_of(problem) | bias_pairs_of(problem) | columns(row) | dict(wanted_aux=problem.wanted_aux)
        return [MmaDauxConfig(**features, kernel="mma_daux_sums")]

    (found,) = first_that_fits([made(row) for row in usable("mma_daux", problem, target)], target)
    return found


def _wgmma_dkdv(problem: BackwardProblem, row: tiles.WgmmaDkdv) -> list[WgmmaBackwardConfig]:
    made: list[WgmmaBackwardConfig] = []
    for part in apart_or_together(problem, row.apart):
        features = features_of(problem) | bias_boxes_of(problem) | columns(row) | dict(kernel="wgmma_dkdv")
        if "dk" not in part:  # dV alone needs less memory than dK
            features |= dict(stages_b=2)
        made.append(WgmmaDkdvConfig(**features, of_dk="dk" in part, of_dv="dv" in part))
    return made


def _wgmma_dq(problem: BackwardProblem, row: tiles.WgmmaDq) -> list[WgmmaBackwardConfig]:
    return [WgmmaDqConfig(**features_of(problem), **bias_boxes_of(problem), **columns(row), kernel="wgmma_dq")]
