"""The part of gradients' contract that wgmma's kernels are run through in the simulator, in tiles of 32 and 64.

All of it takes minutes, and runs on a GPU.
"""

import dataclasses

import numpy as np
import pytest
from contracts.backward import (  # noqa: F401
    Rung,
    incoming,
    same,
    test_a_key_of_weight_0_gets_no_gradient_from_a_nonfinite_row,
    test_all_options_at_once,
    test_head_dim_v_may_differ,
    test_lse_beyond_the_range_of_exp,
    test_many_tiles,
    test_nothing_is_defined,
    test_scale,
    test_what_is_not_wanted_changes_nothing,
    test_whole_numbers_come_out_exactly,
)
from helpers.tile_rows import row as tile_row

from numba_flash import arrays, testing
from numba_flash.arrays import making
from numba_flash.config import wgmma_backward
from numba_flash.config.wgmma_backward import WgmmaFusedConfig
from numba_flash.dispatch import backward as dispatch, launch
from numba_flash.kernels.recompute import keys as recompute_keys, queries as recompute_queries
from numba_flash.kernels.steps import dq_order
from numba_flash.kernels.wgmma import backward_block_tiles, backward_dq_sums
from numba_flash.ptx import griddepcontrol
from numba_flash.ptx.sim import now, special, wgmma
from numba_flash.ptx.sim.errors import InstructionError
from numba_flash.ptx.sim.thread import driven
from numba_flash.select import backward_kernels as select_backward, backward_tiles


@pytest.fixture(scope="module")
def rung():
    return Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True)


def of_wgmma(tile_m, tile_n, stages_a, stages_b, apart=False):
    sizes = dict(tile_m=tile_m, tile_n=tile_n, stages_a=stages_a, stages_b=stages_b)
    return tile_row(256, apart, **sizes, per_score="several kinds")


# What a row of the tables may say: several consumers, rings of other lengths, tiles that are no power of two, dK and dV
# apart. (tile_m, tile_n, stages_a, stages_b, apart), (tile_m, tile_n, stages_a, stages_b)
ROWS = {
    "two consumers": ((32, 128, 2, 2, False), (128, 32, 2, 2)),
    "three stages": ((16, 64, 3, 3, False), (64, 16, 3, 3)),
    "one stage of b": ((48, 64, 2, 1, False), (64, 48, 2, 1)),
    "apart": ((32, 64, 2, 1, True), (64, 32, 2, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ROWS)
def test_every_kind_of_row(rung, how, monkeypatch, nothing_remembered):
    dkdv, dq = ROWS[how]
    monkeypatch.setitem(backward_tiles.TABLES, "wgmma_dkdv", (of_wgmma(*dkdv),))
    monkeypatch.setitem(backward_tiles.TABLES, "wgmma_dq", (of_wgmma(*dq),))
    # Rings go round, and every kind of tile is walked: masked, free and ragged ones. head_dim is more than a panel.
    case = rung.problem(50, 130, batch=1, heads=1, head_dim=69, head_dim_v=40, dtype="bfloat16")
    rung.check(case, causal=True, softcap=2.0, alibi_slopes=np.array([0.5], np.float32))


# Masks: some scores of two heads, and no key of the first tile, or of the second, which still have turns.
SOME = np.random.default_rng(8).random((1, 2, 135, 140)) < 0.7
SOME[:, :, 5], SOME[:, :, :, 9] = False, False
BIAS = (2 * np.random.default_rng(9).standard_normal((1, 2, 135, 144))).astype(np.float16)[..., :140]
BIAS[..., 7], BIAS[:, :, 3] = -np.inf, -65504  # a key, and a row, as models hide them
FIRST_QUERIES = (np.arange(135) < 60)[None, None, :, None]
LAST_KEYS, FIRST_KEYS = (np.arange(140) >= 130)[None, None, None], (np.arange(140) < 50)[None, None, None]


# Two tiles of keys, and two of queries: of 64, or up to head_dim 64 of 128. A group, once.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "seqlen_q", "heads", "heads_kv", "head_dim"),
    [
        ({}, 135, 1, 1, 40), ({}, 70, 2, 2, 69), (dict(causal=True), 70, 2, 1, 69), (dict(causal=True), 135, 2, 2, 40),
        (dict(window=(30, 10), q_offset=50), 70, 1, 1, 69), (dict(scale=0.0), 70, 1, 1, 69),
        (dict(scale=0.0), 8, 1, 1, 69), (dict(dropout_p=0.3, seed=5, causal=True, q_offset=67), 70, 1, 1, 69),
        (dict(mask=SOME[:, :, :70]), 70, 2, 1, 69), (dict(mask=SOME[:, :1], causal=True), 135, 1, 1, 40),
        (dict(mask=LAST_KEYS), 135, 1, 1, 40), (dict(mask=FIRST_KEYS), 70, 1, 1, 69),
        (dict(mask=SOME[:, :1, :8]), 8, 1, 1, 69),
        (dict(bias=BIAS[:, :, :70]), 70, 2, 1, 69), (dict(bias=BIAS[:, :1], causal=True), 135, 1, 1, 40),
        (dict(bias=BIAS[:, :1], mask=SOME[:, :1]), 135, 1, 1, 40),
    ],
    ids=["full", "full, both ways", "causal", "causal, both ways", "window", "scale 0", "scale 0, NaN", "dropout",
         "mask", "causal mask", "padding before the keys", "padding behind the keys", "mask, NaN",
         "bias", "causal bias", "bias and mask"],
)  # fmt: skip
def test_one_kernel_for_all_gradients(
    rung, options, seqlen_q, heads, heads_kv, head_dim, monkeypatch, nothing_remembered
):
    monkeypatch.setattr(select_backward, "gains_by_one_kernel", lambda *_: True)
    monkeypatch.setattr(select_backward, "key_tiles_of_a_block", lambda *_: 0)
    # Rows of dQ that meet NaN are computed again, which takes minutes where it is all of many.
    all_rows = options.keys() <= {"dropout_p", "seed", "scale", "mask", "bias"} and seqlen_q > 8
    case = rung.problem(seqlen_q, 140, batch=1, heads=heads, heads_kv=heads_kv, head_dim=head_dim, head_dim_v=23)
    case.k[:, :, 132:], case.v[:, :, 132:] = (1e3, -1e3) if all_rows else (np.nan, np.inf)
    if "mask" in options and seqlen_q == 8:
        case.k[:, :, 9], case.v[:, :, 9] = np.nan, np.nan  # which the mask hides; every row meets it
    gradients = rung.check(case, seqlens_k=np.array([132], np.int32), **options)
    assert all(np.isfinite(x).all() for x in gradients[:3])


@pytest.mark.slow
def test_bits_do_not_depend_on_the_number_of_heads_in_flight(rung, monkeypatch, nothing_remembered):
    """Two heads in_flight may be of two entries, and the last is alone. Three parts are added: two in another order
    would give the same."""
    monkeypatch.setattr(select_backward, "gains_by_one_kernel", lambda *_: True)
    monkeypatch.setattr(select_backward, "key_tiles_of_a_block", lambda *_: 0)
    case = rung.problem(20, 270, batch=3, heads=1, head_dim=8)
    given, found = incoming(case), []
    for in_flight in (2, 1):
        monkeypatch.setattr(wgmma_backward, "heads_in_flight", lambda *_, in_flight=in_flight: in_flight)
        dispatch._plans.clear()
        found.append(rung.check(case, given, causal=True))
    assert same(*found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "options"),
    [(69, {}), (69, dict(causal=True, q_offset=0)), (69, dict(window=(30, 10), q_offset=50))]
    + [(69, dict(mask=FIRST_QUERIES)), (24, {})],
    ids=["full", "causal", "window", "no part of the last queries", "tiles of 128 queries"],
)
def test_several_partial_sums_of_dq(rung, head_dim, options, one_kernel, monkeypatch):
    """Of three key tiles two add to the first of two sums. Under a mask some query tiles have one part, or none. Up to
    head_dim 64 a query tile has 128 queries, and each warpgroup half of them."""
    made, scratch = [], arrays.scratch

    def filled(*of):
        made.append(scratch(*of))
        made[-1].owner[...] = 7
        return made[-1]

    monkeypatch.setattr(arrays, "scratch", filled)
    monkeypatch.setattr(select_backward, "dq_partials", lambda *_: 2)
    heads = 2 if "causal" in options else 1
    monkeypatch.setattr(select_backward, "key_tiles_of_a_block", lambda *_: 0)
    rung.check(rung.problem(135, 270, batch=1, heads=heads, head_dim=head_dim, head_dim_v=23), **options)
    tiles = heads * (3 if head_dim > 64 else 2)
    size = WgmmaFusedConfig.TURNS_AT + tiles * 2 * 2
    (turns,) = (x.owner for x in made if x.owner.dtype == np.uint32 and x.owner.size == size)
    counts = turns[WgmmaFusedConfig.TURNS_AT :].reshape(tiles, 2, 2)
    counts = counts & (backward_dq_sums.TURN - 1)  # turns, also those without a part
    most = 2 if options.keys() <= {"mask"} else 1  # of those who see the keys of two tiles at most
    assert counts[:, 0].max() == most and counts[:, 1].max() == 1, "each count began with 0"
    assert (counts[..., 0] == counts[..., 1]).all(), "both warpgroups have as many parts"


@pytest.mark.slow
@pytest.mark.parametrize(("seqlen_k", "with_keys"), [(64, 1), (65, 2), (192, 3), (193, 4)])
def test_a_warpgroup_without_keys_computes_dq_alone(rung, seqlen_k, with_keys, monkeypatch, nothing_remembered):
    """Of two tiles of queries: five products, or one; and S of no tile behind them."""
    products = []

    class Counted(wgmma.Product):
        def __init__(self, *of):
            super().__init__(*of)
            products.append(self)

    monkeypatch.setattr(select_backward, "gains_by_one_kernel", lambda *_: True)
    monkeypatch.setattr(wgmma, "Product", Counted)
    rung.check(rung.problem(70, seqlen_k, batch=1, heads=1, head_dim=69, head_dim_v=23))
    warpgroups = 2 * -(-seqlen_k // 128)
    assert len(products) == 2 * (5 * with_keys + warpgroups - with_keys) + warpgroups


@pytest.mark.slow
def test_one_head_with_more_key_tiles_than_run_at_a_time(rung, monkeypatch, nothing_remembered):
    """Its first key tile comes first, and blocks walk down from the last query."""
    monkeypatch.setattr(select_backward, "gains_by_one_kernel", lambda *_: True)
    monkeypatch.setattr(dq_order, "AT_A_TIME", 2)
    steps, key_tile_of = [], dq_order.key_tile_of
    monkeypatch.setattr(backward_block_tiles, "key_tile_of", lambda *of: steps.append(key_tile_of(*of)) or steps[-1])
    rung.check(rung.problem(270, 270, batch=1, heads=1, head_dim=69, head_dim_v=23), causal=True)
    assert steps == [(0, 0, 0, -1), (0, 0, 1, -1), (0, 0, 2, -1)]


@pytest.fixture
def one_kernel(monkeypatch, nothing_remembered):
    """It is taken, and what nobody writes of a gradient is 7."""

    def filled(like, layout):
        made = making._empty_numpy(like, layout)
        made.owner[...] = 7
        return made

    monkeypatch.setitem(making._MAKERS, "numpy", filled)
    monkeypatch.setattr(select_backward, "gains_by_one_kernel", lambda *_: True)


@pytest.fixture
def key_tiles_of_blocks(monkeypatch):
    """-> the key tiles that blocks are given, on a GPU that has not room for all blocks at a time."""
    chosen, choose, stay = [], select_backward.key_tiles_of_a_block, select_backward.blocks_stay

    def chosen_for_a_small_gpu(problem, target):
        chosen.append(choose(problem, dataclasses.replace(target, multiprocessors=0)))
        return chosen[-1]

    def stay_on_a_small_gpu(problem, target, *more):
        return stay(problem, dataclasses.replace(target, multiprocessors=0), *more)

    monkeypatch.setattr(select_backward, "key_tiles_of_a_block", chosen_for_a_small_gpu)
    monkeypatch.setattr(select_backward, "blocks_stay", stay_on_a_small_gpu)
    return chosen


# Tiles of 128 queries, or from head_dim 65 on of 64, whose dQ two warpgroups write, each a panel. Rows of 16 bytes and
# others, heads of a group, queries that see nothing: some, a whole tile of them, or all of an entry.
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "heads", "heads_kv", "head_dim", "options"),
    [
        (135, 100, 2, 1, 40, {}), (70, 128, 1, 1, 69, {}), (40, 128, 2, 2, 64, dict(causal=True)),
        (70, 33, 3, 1, 72, dict(causal=True)), (70, 33, 1, 1, 72, dict(dropout_p=0.2, seed=9)),
        (200, 33, 2, 1, 128, dict(causal=True, q_offset=-110)),
        (150, 60, 1, 1, 8, dict(window=(20, 5), q_offset=-130)), (70, 60, 1, 1, 8, dict(scale=0.0)),
        (20, 60, 2, 2, 24, dict(scale=-1.5, seqlens_k=np.array([60, 0], np.int32))),
        (135, 128, 2, 1, 40, dict(mask=SOME[..., :128])), (70, 50, 1, 1, 69, dict(mask=SOME[:, :1, :70, :50])),
    ],
    ids=[
        "128 queries", "64 queries", "causal", "causal group", "dropout", "tiles without keys", "window", "scale 0",
        "no keys", "mask of 128 queries", "mask of 64 queries",
    ],
)  # fmt: skip
def test_one_tile_of_keys(rung, seqlen_q, seqlen_k, heads, heads_kv, head_dim, options, one_kernel):
    batch = 2 if "seqlens_k" in options else 1
    case = rung.problem(seqlen_q, seqlen_k, batch=batch, heads=heads, heads_kv=heads_kv, head_dim=head_dim)
    assert all(np.isfinite(x).all() for x in rung.check(case, **options)[:3])


def test_one_tile_of_keys_and_split_groups_of_heads(rung, one_kernel, monkeypatch):
    monkeypatch.setattr(select_backward, "heads_per_block", lambda *_, **__: 2)
    rung.check(rung.problem(20, 70, batch=2, heads=3, heads_kv=1, head_dim=24), causal=True)


# Blocks that stay: one has all tiles, and a second one finds none left, or has every other head. Some tiles no query
# sees, also the last one. From head_dim 65 on dK and dV are put together one after the other.
@pytest.mark.parametrize(
    ("batch", "heads", "seqlen_q", "seqlen_k", "head_dim", "options", "together", "blocks"),
    [
        (1, 2, 20, 270, 8, {}, True, 1), (1, 3, 20, 140, 8, {}, True, 2),
        (2, 1, 20, 270, 8, {}, False, 1), (2, 1, 20, 270, 8, {}, False, 2),
        (1, 2, 150, 140, 8, dict(causal=True), False, 2),
        (1, 3, 70, 60, 8, {}, True, 1), (2, 2, 70, 60, 8, {}, True, 2),
        (1, 1, 20, 400, 8, dict(window=(10, 5), q_offset=150), False, 1),
        (2, 1, 20, 140, 8, dict(seqlens_k=np.array([133, 60], np.int32)), False, 1),
        (1, 2, 135, 140, 8, dict(mask=SOME), True, 1), (1, 2, 135, 140, 8, dict(mask=FIRST_KEYS), True, 2),
        (3, 1, 135, 140, 8, dict(bias=BIAS[:, :1]), True, 1), (2, 2, 20, 140, 24, dict(bias=BIAS[:, :, :20]), True, 1),
        (2, 1, 70, 150, 72, {}, False, 1), (1, 1, 140, 200, 100, dict(causal=True), False, 2),
        (1, 2, 20, 400, 72, dict(window=(10, 5), q_offset=150), False, 1),
        (2, 1, 20, 140, 128, dict(seqlens_k=np.array([133, 60], np.int32)), False, 1),
    ],
    ids=[
        "together, one", "together, two", "full, one", "full, two", "causal, two", "one tile, one", "one tile, two",
        "tiles without queries, one", "tails, one", "mask, one", "padding, two", "bias", "bias, one tile", "72, one",
        "100, causal, two", "72, tiles without queries, one", "128, tails, one",
    ],
)  # fmt: skip
def test_persistent_blocks(
    rung, batch, heads, seqlen_q, seqlen_k, head_dim, options, together, blocks,
    one_kernel, monkeypatch, key_tiles_of_blocks,
):  # fmt: skip
    monkeypatch.setattr(launch, "blocks_at_a_time", lambda _: blocks)
    if not together:
        monkeypatch.setattr(select_backward, "key_tiles_of_a_block", lambda *_: 0)
    rung.check(rung.problem(seqlen_q, seqlen_k, batch=batch, heads=heads, head_dim=head_dim), **options)


@pytest.mark.parametrize(("head_dim", "options"), [(8, {}), (72, {}), (8, dict(bias=BIAS[:, :, :20]))])
def test_persistent_blocks_do_not_overwrite_operands_of_products(
    rung, head_dim, options, one_kernel, slow_products, monkeypatch, key_tiles_of_blocks
):
    """The next K and V come as soon as their place is given back, which is behind the last dQ. From head_dim 65 on dK
    takes the place of a dS from which the other warpgroup makes its dQ, and so it does with a bias."""
    monkeypatch.setattr(launch, "blocks_at_a_time", lambda _: 1)
    rung.check(rung.problem(20, 140, batch=1, heads=2, head_dim=head_dim), **options)


@pytest.mark.parametrize(("head_dim", "options"), [(72, {}), (8, dict(bias=BIAS[:, :1, :20]))])
def test_dk_waits_for_the_other_warpgroup(rung, head_dim, options, one_kernel, monkeypatch, key_tiles_of_blocks):
    """From head_dim 65 on, and with a bias, it takes the place of a dS of which the other warpgroup, here a slow one,
    makes its dQ."""
    together = wgmma.together

    def late(instruction, *given):
        me = now.current()
        if instruction == ("wgmma.wait_group", 0) and special.thread_index() >= 256:
            for _ in range(200):
                yield from driven(me.turns.let_others_run(me, None))
        return (yield from driven(together(instruction, *given)))

    monkeypatch.setattr(wgmma, "together", late)
    monkeypatch.setattr(launch, "blocks_at_a_time", lambda _: 1)
    rung.check(rung.problem(20, 140, batch=1, heads=1, head_dim=head_dim), **options)


# A block has all heads, whose states take turns: the third one's is where the first one's was.
@pytest.mark.parametrize("seqlen_k", [40, 140])
def test_only_nonfinite_heads_are_recomputed(rung, seqlen_k, one_kernel, key_tiles_of_blocks, monkeypatch):
    make, seen = recompute_queries.make, set()

    def made(config, **form):
        repair = make(config, **form)

        def recorded(nonfinite, first_row, lane, tile, *more):
            seen.add((int(tile.b), int(tile.h)))
            repair(nonfinite, first_row, lane, tile, *more)

        return recorded

    monkeypatch.setattr(recompute_queries, "make", made)
    monkeypatch.setattr(launch, "blocks_at_a_time", lambda _: 1)
    case = rung.problem(8, seqlen_k, batch=3, heads=1, head_dim=8)
    case.q[0, 0, 3, 2], case.k[1, 0, 35, 0] = np.nan, np.inf
    rung.check(case, causal=True)
    assert seen == {(0, 0), (1, 0)}


# Two and three tiles of keys, which a block has one after the other; one and two of queries, or one of each of two
# heads. Keys that do not exist: of the last tile, or all of it.
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "heads", "heads_kv", "head_dim", "options"),
    [
        (135, 140, 1, 1, 40, {}), (20, 270, 2, 2, 8, {}), (70, 130, 4, 2, 64, dict(causal=True)),
        (150, 200, 1, 1, 8, dict(window=(20, 5), q_offset=30)), (40, 150, 1, 1, 24, dict(scale=0.0)),
        (20, 140, 1, 1, 24, dict(scale=-1.5, seqlens_k=np.array([133, 60, 0], np.int32))),
        (135, 140, 2, 2, 40, dict(bias=BIAS)), (70, 140, 2, 1, 8, dict(bias=BIAS[:, :, :70], causal=True)),
        (20, 140, 1, 1, 24, dict(bias=BIAS[:, :1, :20], seqlens_k=np.array([133, 60, 0], np.int32))),
    ],
    ids=[
        "two query tiles", "three key tiles", "causal group", "window", "scale 0", "no keys", "bias",
        "causal bias", "bias, no keys",
    ],
)  # fmt: skip
def test_a_block_with_more_key_tiles(
    rung, seqlen_q, seqlen_k, heads, heads_kv, head_dim, options, one_kernel, key_tiles_of_blocks
):
    batch = 3 if "seqlens_k" in options else 1
    case = rung.problem(seqlen_q, seqlen_k, batch=batch, heads=heads, heads_kv=heads_kv, head_dim=head_dim)
    assert all(np.isfinite(x).all() for x in rung.check(case, **options)[:3])
    assert set(key_tiles_of_blocks) == {-(-seqlen_k // 128)}


def test_more_key_tiles_of_a_block_give_the_same_bits(rung, one_kernel, key_tiles_of_blocks, monkeypatch):
    """As of blocks with one each, whose parts of dQ are added in global memory. Three: two would be, in any order."""
    case = rung.problem(20, 270, batch=1, heads=1, head_dim=8)
    given = incoming(case)
    together = rung.check(case, given)
    assert set(key_tiles_of_blocks) == {3}
    monkeypatch.setattr(select_backward, "key_tiles_of_a_block", lambda *_: 0)
    for stay in (True, False):
        monkeypatch.setattr(select_backward, "blocks_stay", lambda *_, stay=stay: stay)
        dispatch._plans.clear()
        select_backward.configs_of.cache_clear()
        assert same(together, rung.check(case, given))


# Keys that only the last queries see, in the second tile. Their rows are computed again, in either panel of columns.
@pytest.mark.parametrize(("seqlen_q", "head_dim", "column"), [(135, 40, 3), (70, 100, 3), (70, 100, 90)])
def test_one_tile_of_keys_with_nan(rung, seqlen_q, head_dim, column, one_kernel):
    case = rung.problem(seqlen_q, 24, batch=1, heads=2, heads_kv=1, head_dim=head_dim)
    case.k[0, 0, 20, column], case.v[0, 0, 22, 0] = np.inf, np.nan
    dq = rung.check(case, causal=True, q_offset=24 - seqlen_q)[0]
    assert np.isfinite(dq[:, :, :-4]).all() and np.isnan(dq[:, :, -2:]).any(-1).all()


def test_plain_scores_of_groups(rung):
    rung.check(rung.problem(20, 70, batch=1, heads=4, heads_kv=2, head_dim=68), causal=True)


# Groups of 3 heads: parts of 2 and of 1, or of 1 each. Keys of two tiles, or one; the last do not exist, and are
# finite, or all rows would be computed again. A NaN that some queries do not see makes rows that are, behind the sums.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "members", "batch", "heads_kv", "seqlen_k"),
    [
        ("one kernel", 1, 1, 2, 60), ("one kernel", 2, 1, 1, 140), ("two kernels", 1, 2, 1, 60),
        ("dk and dv apart", 2, 1, 2, 60),
    ],
)  # fmt: skip
def test_blocks_that_share_a_group(rung, form, members, batch, heads_kv, seqlen_k, monkeypatch, nothing_remembered):
    monkeypatch.setattr(select_backward, "gains_by_one_kernel", lambda *_: form == "one kernel")
    monkeypatch.setattr(select_backward, "heads_per_block", lambda *_, **__: members)
    if form != "one kernel":
        apart = form == "dk and dv apart"
        monkeypatch.setitem(backward_tiles.TABLES, "wgmma_dkdv", (of_wgmma(32, 128, 2, 2, apart),))
    case = rung.problem(12, seqlen_k, batch=batch, heads=3 * heads_kv, heads_kv=heads_kv, head_dim=8, head_dim_v=24)
    case.k[:, :, -5:], case.v[:, :, -5:] = 1e3, -1e3
    case.v[-1, -1, -10] = np.nan
    case.options |= dict(causal=True, seqlens_k=np.array([seqlen_k - 5, seqlen_k - 9][:batch], np.int32))
    made = rung.check(case)
    others = np.ones((batch, heads_kv), bool)
    others[-1, -1] = False
    assert np.isnan(made[1][-1, -1]).any() and np.isfinite(made[1][others]).all() and np.isfinite(made[2]).all()


@pytest.mark.parametrize("form", ["one kernel", "one tile", "one block", "two kernels", "parts"])
def test_kernels_wait_for_those_before_them(rung, form, key_tiles_of_blocks, monkeypatch, nothing_remembered):
    """Else the simulator says so: they are launched to start before these have ended."""
    monkeypatch.setattr(griddepcontrol, "wait", lambda: None)
    monkeypatch.setattr(select_backward, "gains_by_one_kernel", lambda *_: form.startswith("one"))
    monkeypatch.setattr(select_backward, "heads_per_block", lambda *_, **__: int(form == "parts"))
    if form == "one kernel":
        monkeypatch.setattr(select_backward, "key_tiles_of_a_block", lambda *_: 0)
    with pytest.raises(InstructionError, match=r"before griddepcontrol\.wait: the kernel before may still run"):
        rung.check(rung.problem(20, 90 if form == "one tile" else 140, batch=1, heads=2, heads_kv=1, head_dim=8))


def test_keys_past_the_end_may_be_anything(rung, monkeypatch):
    def repair(*_):
        raise AssertionError("a row of dQ was not finite: K past the end was multiplied by 0")

    monkeypatch.setattr(recompute_queries, "make", lambda *_: repair)  # rows would come out right by it, and slowly
    case = rung.problem(24, 90, batch=2, heads=1, head_dim=8)
    case.k[1, :, 70:], case.v[1, :, 70:] = np.nan, np.inf
    case.k[0, :, 37:], case.v[0, :, 37:] = np.inf, np.nan
    gradients = rung.check(case, seqlens_k=np.array([37, 70], np.int32), q_offset=0)
    assert all(np.isfinite(x).all() for x in gradients[:3])


# dP is not finite for keys that no query sees. Nor does any row have to be computed again. Four queries see no key.
@pytest.mark.parametrize("dropout_p", [0, 0.3])
@pytest.mark.parametrize(("head_dim", "hidden"), [(40, np.nan), (88, np.nan), (128, np.inf)])
def test_what_a_mask_hides_from_one_kernel_may_be_anything(rung, head_dim, hidden, dropout_p, one_kernel, monkeypatch):
    def repair(*_):
        raise AssertionError("a row was not finite")

    for module in (recompute_keys, recompute_queries):
        monkeypatch.setattr(module, "make", lambda *_, **__: repair)
    case = rung.problem(20, 40, batch=1, heads=1, head_dim=head_dim)
    case.options |= dict(causal=True, q_offset=-4) | (dict(dropout_p=dropout_p, seed=5) if dropout_p else {})
    case.v[:, :, 16:] = hidden
    assert all(np.isfinite(x).all() for x in rung.check(case)[:3])


# A key that some queries do not see and a query that does not see some keys, whole tiles of them and parts of tiles.
@pytest.mark.slow
@pytest.mark.parametrize("where", ["k", "v", "q", "do"])
def test_nonfinite_rows_are_recomputed(rung, where):
    case = rung.problem(8, 24, batch=1, heads=1, head_dim=8)
    do, o, lse, dlse = incoming(case)
    array = do if where == "do" else getattr(case, where)
    array[:, :, 5 if where in ("q", "do") else 20] = np.nan
    case.options |= dict(causal=True)
    _, o, lse, _ = incoming(case)
    gradients = rung.check(case, (do, o, lse, dlse))
    nonfinite = [np.isnan(x).any((0, 1, 3)) for x in gradients[:3]]
    assert any(rows.any() for rows in nonfinite) and not nonfinite[0].all()
