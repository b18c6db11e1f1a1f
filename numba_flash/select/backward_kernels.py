"""The kernels of each rung's backward for a BackwardProblem, and their Configs, from the row of a table and the
problem."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..arrays.dtypes import ITEM_SIZE
from ..config import (
    backward as mma,
    mma_fused,
    wgmma_backward as wgmma,
    wgmma_backward_ends as wgmma_ends,
    wgmma_backward_float32 as wgmma_float32,
)
from ..config.aux_gradients import AuxRoundConfig, AuxStartConfig, DauxConfig
from ..config.bias_rows import BiasRowsConfig
from ..config.forward import Config, LaunchFacts
from ..config.simt_backward import DbiasConfig, DbiasSumConfig, DeltaConfig, DkdvConfig, DqConfig
from ..functions.reads import reads_by_head
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from ..problem.forward import Problem
from ..problem.options import BY_NAME, HEAD_GRADIENTS
from . import backward_shared as shared
from .around import outside, with_prologues
from .backward_forms import (
    blocks_stay,
    can_be_one_kernel,
    dq_partials,
    gains_by_one_kernel,
    heads_per_block,
    key_tiles_of_a_block,
)
from .backward_tiles import TABLES
from .features import LARGE_FLOAT64, features_of, rows_for
from .forward_kernels import halved
from .tiles import Row

Configs = tuple[LaunchFacts, ...]  # in the order of their launches
KEYS_WITH_AUX = (64, 32)  # keys of a tile, up to head_dim 128 and above, if daux takes registers beside dQ


@functools.lru_cache(maxsize=4096)
def configs_of(rung: str, problem: BackwardProblem, target: Target) -> Configs:
    """A rung's kernels for the wanted gradients, each with its best tile that fits, or the smallest one."""
    narrow = rung != "v2" and ITEM_SIZE[problem.forward.dtype] == 2  # products in 16 bits on tensor cores
    copied = BiasRowsConfig.before(problem, 16 if target.simulated else 256) if rung == "wgmma" and narrow else None
    if copied:
        return (copied, *configs_of(rung, copied.problem_behind(problem), target))
    own = OWN[rung, narrow](problem, target)
    return _with_sums((*own, *shared.head_sums(problem, target, of_blocks=narrow)), problem, target, narrow)


def _with_sums(own: Configs, problem: BackwardProblem, target: Target, narrow: bool) -> Configs:
    """A rung's kernels, the one that adds up split sums of dbias, and those of the gradients of aux."""
    bias, before = problem.forward.array("bias"), (*own, *outside(problem, target, own))
    if "dbias" in problem.wanted and bias is not None and problem.dbias_splits > 1:
        threads, splits = 16 if target.simulated else 256, 1 << (problem.dbias_splits - 1).bit_length()
        before = (*before, DbiasSumConfig(problem.forward.dtype, bias.dtype, threads, splits))
    if not problem.wanted_aux:
        return before
    dtypes = tuple(problem.forward.aux[number].dtype for number in problem.wanted_aux)
    facts = (problem.forward.compute_dtype, dtypes, problem.wanted_aux, 16 if target.simulated else 256)
    start, end = AuxStartConfig(*facts), AuxRoundConfig(*facts)
    if any(config.wanted_aux for config in before):  # the kernel of dQ adds up daux, too
        return (start, *before, end)
    if problem.forward.function("score_mod") is None:
        return (*before, start, end)
    if narrow:
        sums = shared.best(mma.MmaDauxConfig, problem, target, wanted_aux=problem.wanted_aux)
        needed = with_prologues(sums, problem, target)[:-1]
    else:
        sums = shared.best(DauxConfig, problem, target, table="v2_dq", wanted_aux=problem.wanted_aux)
        needed = [shared.first(DeltaConfig, problem, target)]
    there = [config.kernel for config in before]
    return (*before, *(config for config in needed if config.kernel not in there), start, *sums, end)


def _with_delta(own: Sequence[Config], problem: BackwardProblem, target: Target) -> Configs:
    """Kernels that read each row's lse and delta, with the kernels before and after them. All of them use v2's kernel
    of dbias."""
    in_order = problem.forward.packed is not None and any(config.in_order for config in own)
    delta = shared.first(DeltaConfig, problem, target, in_order=in_order)
    made = [delta, *with_prologues(own, problem, target)]
    if "dbias" in problem.wanted:
        more = dict(table="v2_dq", wanted=("dbias",), **shared.of_bias(problem))
        made += shared.best(DbiasConfig, problem, target, **more)
    return tuple(made)


def _v2(problem: BackwardProblem, target: Target) -> Configs:
    in_rows = tuple(name for name, option in HEAD_GRADIENTS.items() if option.acts_on == "score")
    own: list[Config] = []
    for kind, gradients in ((DkdvConfig, ("dk", "dv")), (DqConfig, ("dq", *in_rows))):
        wanted = tuple(name for name in gradients if name in problem.wanted)
        if wanted:
            own += shared.best(kind, problem, target, wanted=wanted)
    return _with_delta(own, problem, target)


def _mma(problem: BackwardProblem, target: Target) -> Configs:
    only, with_dbias = [], False
    if rows := shared.one_key_tile(problem, target):
        with_dbias = _own_dbias(problem)
        only = [] if with_dbias else shared.one_key_tile(problem, target, only=True)
        delta = None  # the block's own, so most_rows does not depend on the number of heads
        if only:
            delta = dataclasses.replace(shared.first(mma.PreprocessConfig, problem, target), most_rows=1)
        pairs = with_dbias and problem.forward.seqlen_k % 2 == 0
        more: dict[str, Any] = dict(delta=delta, with_dbias=with_dbias, pairs=pairs)
        own = shared.best(mma.MmaOneKeyTileConfig, problem, target, only or rows, **more)
    else:
        rows = rows_for(TABLES, "mma_dkdv", problem, target)
        if not {"dk", "dv"} <= set(problem.wanted):
            rows = [row for row in rows if row.tile["column_groups"] == 1]  # warps that exchange scores add up both
        own = shared.best(mma.MmaDkdvConfig, problem, target, rows)
        if "dq" in problem.wanted:
            own += shared.best(mma.MmaDqConfig, problem, target)
    in_order = own[0].in_order if own else False
    start = [] if only else [shared.first(mma.PreprocessConfig, problem, target, in_order=in_order)]
    of_bias: Sequence[Config] = () if with_dbias else _dbias(problem, target)
    return (*start, *with_prologues([*own, *of_bias], problem, target))


def _own_dbias(problem: BackwardProblem) -> bool:
    """Whether a kernel that has a whole head's dS in 16 bits also has its dbias: each element belongs to one score, and
    no option has a derivative, so dS is the gradient of that score."""
    forward, bias = problem.forward, problem.forward.array("bias")
    alone = problem.dbias_shape == (forward.batch, forward.heads, forward.seqlen_q, forward.seqlen_k)
    same = bias is not None and bias.dtype == forward.dtype and not forward.seeded
    return (
        same and alone and "dbias" in problem.wanted and not any(BY_NAME[name].derivative for name, _ in forward.uses)
    )


def _mma_fp32_fp64(problem: BackwardProblem, target: Target) -> Configs:
    if fused := _mma_fused(problem, target):
        return fused
    own: list[Config] = []
    kinds: list[Any] = [mma.MmaDkdvConfig, *[mma.MmaDqConfig] * ("dq" in problem.wanted)]
    for kind in kinds:
        rows = rows_for(TABLES, kind.kernel, problem, target)
        own += shared.best(kind, problem, target, [_shrunk(row, kind.of_keys, problem.forward) for row in rows])
    return _with_delta(own, problem, target)


def _shrunk(row: Row, of_keys: bool, problem: Problem) -> Row:
    """The row with tiles as small as the lengths, so that more blocks run at a time. Packed sequences keep the row: the
    longest one must not change the bits of another."""
    if problem.packed is not None:
        return row
    queries, keys = row.tile["tile_m"], row.tile["tile_n"]
    sizes = halved(queries, problem.seqlen_q), halved(keys, problem.seqlen_k)
    fewer = keys // sizes[1] if of_keys else queries // sizes[0]
    return row.changed(tile_m=sizes[0], tile_n=sizes[1], blocks_per_sm=row.tile["blocks_per_sm"] * fewer)


def _mma_fused(problem: BackwardProblem, target: Target) -> Configs:
    """One kernel of dK, dV and parts of dQ, with those before and after it, if it is the faster form; otherwise none.
    It computes five products instead of seven. It needs a GPU with float64 products in one instruction (m16n8k16). It
    needs a query: without one no previous kernel would set its ticket to 0."""
    forward = problem.forward
    taken = forward.dtype == "float64" and target.cc == LARGE_FLOAT64 and {"dq", "dk", "dv"} <= set(problem.wanted)
    rows_of_16_bytes = forward.head_dim * ITEM_SIZE[forward.dtype] % 16 == 0  # rows of dq, which is contiguous
    every = taken and rows_of_16_bytes and forward.seqlen_q > 0 and forward.packed is None
    if not every or not gains_by_mma_fused(problem):
        return ()
    for row in rows_for(TABLES, "mma_fused", problem, target):
        fused = mma_fused.MmaFusedConfig(**features_of(mma_fused.MmaFusedConfig, problem, target), **row.tile)
        if shared.fits(fused, target):
            start = shared.first(DeltaConfig, problem, target, turns_of=fused.tile_m)
            return start, fused, mma_fused.MmaDqFinishConfig.behind(fused)
    return ()


def gains_by_mma_fused(problem: BackwardProblem) -> bool:
    """Whether the one kernel is the faster form, if a row is for the problem. Its parts of dQ wait in a line, so a
    batch entry needs enough work, as in gains_by_one_kernel. docs/adding_a_tile_row.md has the measurements."""
    return problem.forward.seqlen_k <= problem.forward.seqlen_q and problem.forward.heads_kv >= 8


def _wgmma(problem: BackwardProblem, target: Target) -> Configs:
    one = can_be_one_kernel(problem) and gains_by_one_kernel(problem, target)
    return (_wgmma_fused if one else _wgmma_two)(problem, target)


def _wgmma_two(problem: BackwardProblem, target: Target) -> Configs:
    """A kernel of dK and dV, or one for each, and a kernel of dQ."""
    members, packed = heads_per_block(problem, one_kernel=False), problem.forward.packed is not None
    dkdv = shared.best(wgmma.WgmmaDkdvConfig, problem, target, members=members)
    dkdv = [config if config.of_dk else dataclasses.replace(config, stages_b=2) for config in dkdv]  # it loads no V
    own = [_halved(config, problem, target) for config in dkdv]
    if "dq" in problem.wanted:
        of_heads = aux_of_heads(problem)
        (dq,) = shared.best(wgmma.WgmmaDqConfig, problem, target, wanted_aux=of_heads)
        if of_heads:
            dq = dataclasses.replace(dq, tile_n=min(dq.tile_n, KEYS_WITH_AUX[problem.forward.widest > 128]))
        own.append(_halved(dq, problem, target))
    before = with_prologues([*own, *_dbias(problem, target)], problem, target)
    start = shared.first(mma.PreprocessConfig, problem, target, early=True, in_order=packed)
    return (start, *before, *_add_parts(own[: len(dkdv)]))


def aux_of_heads(problem: BackwardProblem) -> tuple[int, ...]:
    """wanted_aux, if all scores of a head read one element of one array: the kernel of dQ then adds up daux."""
    forward = problem.forward
    function = forward.function("score_mod")
    if function is None or not problem.wanted_aux or forward.packed is not None:
        return ()
    reads = reads_by_head(function, tuple(len(x.shape) for x in forward.aux), problem.wanted_aux)
    return problem.wanted_aux if reads == [True] and len(problem.wanted_aux) == 1 else ()


def _wgmma_float32(problem: BackwardProblem, target: Target) -> Configs:
    kinds: list[type[Any]] = [wgmma_float32.WgmmaDkdvFloat32Config, wgmma_float32.WgmmaDqFloat32Config]
    if problem.forward.widest > wgmma_float32.WgmmaBackwardFloat32Config.WIDEST:
        kinds = [wgmma_float32.WgmmaPairedDkdvConfig, wgmma_float32.WgmmaPairedDqConfig]
    own = shared.best(kinds[0], problem, target, table="wgmma_dkdv")
    if "dq" in problem.wanted:
        own += shared.best(kinds[1], problem, target, table="wgmma_dq")
    return _with_delta(own, problem, target)


def _wgmma_fused(problem: BackwardProblem, target: Target) -> Configs:
    """One kernel of all gradients."""
    tile = rows_for(TABLES, "wgmma_fused", problem, target)[0].tile
    key_tiles, members = key_tiles_of_a_block(problem, target), heads_per_block(problem, one_kernel=True)
    packed, bias = problem.forward.packed is not None, problem.forward.array("bias")
    lines = 1 if key_tiles else dq_partials(problem)
    fused = wgmma.WgmmaFusedConfig(
        **features_of(wgmma.WgmmaFusedConfig, problem, target) | dict(bias_pairs=False),
        **tile,
        key_tiles=key_tiles,
        lse_first=problem.forward.number("scale") != 0 and not problem.forward.seeded and bias is None,
        members=members,
        stays=blocks_stay(problem, target, members, key_tiles),
        dq_partials=lines,
    )
    turns_of = 0 if key_tiles else fused.tile_m
    more = dict(turns_of=turns_of, dq_partials=lines, early=True, in_order=packed and fused.in_order)
    start = shared.first(mma.PreprocessConfig, problem, target, **more)
    made: list[LaunchFacts] = [start, *with_prologues([fused], problem, target)]
    if not key_tiles:
        made.append(wgmma_ends.WgmmaRoundConfig.behind(fused))
    return (*made, *with_prologues(_dbias(problem, target), problem, target), *_add_parts([fused]))


def _dbias(problem: BackwardProblem, target: Target) -> Sequence[Config]:
    """mma's dbias kernel, if dbias is wanted."""
    bias = problem.forward.array("bias")
    if "dbias" not in problem.wanted or bias is None:
        return []
    own = shared.of_bias(problem)
    # dbias is contiguous, so its rows then begin at multiples of 4 bytes.
    pairs = ITEM_SIZE[bias.dtype] == 2 and problem.dbias_shape[-1] % 2 == 0 and not any(own.values())
    return shared.best(mma.MmaDbiasConfig, problem, target, pairs=pairs, **own)


def _halved(config: Any, problem: BackwardProblem, target: Target) -> Any:
    """Blocks own 64 rows instead of 128 if with 128 half of the multiprocessors, or half of the rows, would be idle.

    The order of sums stays, and so do a row's bits. With head_dim 256 and one KV head of 4096 keys it is 1.65 times as
    fast, with head_dim 160 and 256 keys of 32 heads 1.2 times, with head_dim 256 and 41 tokens 1.3 times (H200).
    """
    packed = problem.forward.packed is not None  # only a bound of the number of blocks is known then
    rows = problem.forward.seqlen_k if config.of_keys else problem.forward.seqlen_q
    many = rows > 64 and 2 * config.grid(problem) > target.multiprocessors
    if packed or config.own_rows != 128 or many:
        return config
    return dataclasses.replace(config, **{"tile_n" if config.of_keys else "tile_m": 64}, stages_b=2)


def _add_parts(configs: Sequence[wgmma.WgmmaDkdvConfig]) -> list[LaunchFacts]:
    """The kernels that add up the partial sums of dK and dV of these kernels; none if they write the gradients
    themselves."""
    return [wgmma_ends.WgmmaAddPartsConfig.behind(config) for config in configs if config.members]


# (rung, whether products are in 16 bits on tensor cores) -> its own kernels, and those around them.
OWN: dict[tuple[str, bool], Callable[[BackwardProblem, Target], Configs]] = {
    ("v2", False): _v2,
    ("mma", True): _mma,
    ("mma", False): _mma_fp32_fp64,
    ("wgmma", True): _wgmma,
    ("wgmma", False): _wgmma_float32,
}
