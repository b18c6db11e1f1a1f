"""The part of the contract that wgmma is run through in the simulator in float32; all of it runs on a GPU."""

import dataclasses

import contract
import numpy as np
import pytest
from contract import (  # noqa: F401
    test_any_strides,
    test_head_dim_v_may_differ,
    test_maxima_that_move,
    test_nan_in_q_stays_in_its_row,
    test_nothing_hidden_reaches_rows_whose_scores_are_all_minus_infinity,
    test_nothing_is_defined,
    test_nothing_is_written_around_out,
    test_query_head_h_reads_kv_head_h_over_group,
    test_scale,
    test_scores_of_minus_infinity_in_whole_tiles,
)
from contract_wide import (  # noqa: F401
    float32,
    test_a_large_bias_is_exact,
    test_all_options_and_a_group_in_one_tile,
    test_long_sums_do_not_drift,
    test_nan_behind_a_mask,
    test_numbers_of_any_size,
    test_terms_that_cancel,
    test_what_has_no_small_part,
    test_what_is_read_or_asked_for_each_score,
)

from numba_flash import testing
from numba_flash.api import forward as api
from numba_flash.dispatch import forward as dispatch
from numba_flash.machine.target import Target
from numba_flash.select import tiles


@pytest.fixture(scope="session")
def rung():
    return contract.Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True, usual="float32")


def config_of(case, **options):
    arrays = (testing.rows_padded(x) for x in (case.q, case.k, case.v))
    return api.prepare_call(*arrays, dict(options, kernel="wgmma"))[1].choice.config


# Each row of the table with all of its columns and with fewer, over several tiles, some of which no query sees whole;
# two panels of V of as many columns; heads that share a tile; one consumer, and two in turns.
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "seqlens", "heads", "options"),
    [
        (64, 64, (100, 170), (1, 1), dict(causal=True)),
        (16, 40, (130, 70), (1, 1), dict(window=(40, 3))),
        (128, 128, (140, 200), (1, 1), dict(causal=True)),
        (128, 128, (70, 110), (1, 1), dict(causal=True, softcap=2.0)),
        (72, 100, (30, 150), (4, 1), dict(seqlens_k=np.array([97], np.int32))),
        (192, 192, (90, 100), (1, 1), dict(causal=True)),
        (192, 192, (70, 75), (1, 1), dict(window=(30, 2), softcap=2.0)),
        (256, 256, (70, 75), (1, 1), dict(causal=True)),
        (37, 250, (60, 75), (2, 1), dict(window=(20, 4))),
    ],
)
def test_tiles_of_the_table(rung, head_dim, head_dim_v, seqlens, heads, options, tiles_of_gpus):
    case = rung.problem(*seqlens, batch=1, heads=heads[0], heads_kv=heads[1], head_dim=head_dim, head_dim_v=head_dim_v)
    assert config_of(case, **options).kernel == "wgmma_float32"
    rung.check(case, **options)


# Blocks stay and take tile after tile, which takes more tiles than multiprocessors: places of K and V are filled again
# and again, and every consumer has its turn.
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("ping_pong", [True, False])
def test_blocks_take_several_tiles(rung, stages, ping_pong, monkeypatch, nothing_remembered):
    machine = dataclasses.replace(Target.of(None), multiprocessors=1)
    monkeypatch.setattr(dispatch.Target, "of", lambda device: machine)
    row = tiles.WgmmaFloat32(64, 128, 32, ping_pong=ping_pong, stages=stages, rescale_threshold=8)
    monkeypatch.setitem(tiles.TABLES, "wgmma_float32", (row,))
    case = rung.problem(200, 140, batch=1, heads=2, heads_kv=1, head_dim=16)
    assert (config_of(case).consumers, config_of(case).stages) == (2, stages)
    rung.check(case, causal=True)


# Behind the keys that count anything may lie: it is not even read.
def test_nan_behind_the_last_key(rung):
    case = rung.problem(20, 70, batch=1, heads=1, head_dim=8)
    case.k[:, :, 50:], case.v[:, :, 50:] = np.nan, np.inf
    rung.check(case, seqlens_k=np.array([50], np.int32))


# Three parts of 8 bits are all of a float32: one key's row of V comes out as it is.
def test_one_key_gives_its_value(rung):
    case = rung.problem(3, 1, batch=1, heads=1, head_dim=8, head_dim_v=64)
    o, _ = rung(case)
    assert contract.same_bits(o, np.broadcast_to(case.v, o.shape))
