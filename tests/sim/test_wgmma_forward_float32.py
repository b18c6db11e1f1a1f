"""The part of the contract that wgmma is run through in the simulator in float32; all of it runs on a GPU."""

import dataclasses

import numpy as np
import pytest
from contracts import forward
from contracts.forward import (  # noqa: F401
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
from contracts.fp32_fp64 import (  # noqa: F401
    float32,
    test_a_large_bias_is_exact,
    test_all_options_and_a_group_in_one_tile,
    test_long_sums_do_not_drift,
    test_nan_behind_a_mask,
    test_numbers_of_any_size,
    test_terms_that_cancel,
    test_values_near_the_largest_number,
    test_what_has_no_small_part,
    test_what_is_read_or_asked_for_each_score,
)
from helpers.tile_rows import row as tile_row

from numba_flash import testing
from numba_flash.api import forward as api
from numba_flash.dispatch import forward as dispatch
from numba_flash.gpu import compiled
from numba_flash.kernels.recompute import rows as recompute_rows
from numba_flash.machine.target import Target
from numba_flash.select import tiles


@pytest.fixture(scope="session")
def rung():
    return forward.Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True, usual="float32")


def config_of(case, **options):
    arrays = (testing.rows_padded(x) for x in (case.q, case.k, case.v))
    return api.prepare_call(*arrays, dict(options, kernel="wgmma"))[1].choice.config


@pytest.fixture
def no_repair(monkeypatch):
    """Rows that are not finite are computed again and come out right, whatever tensor cores made of them. None is."""

    def repair(*_):
        raise AssertionError("a row is computed again")

    monkeypatch.setattr(recompute_rows, "make", lambda *_: repair)
    monkeypatch.setattr(compiled, "_kernels", {})


# Each row of the table with all of its columns and with fewer, over several tiles, some of which no query sees whole;
# two panels of V of as many columns; heads that share a tile; one consumer, and two in turns.
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "seqlens", "heads", "options"),
    [
        (64, 64, (100, 170), (1, 1), dict(causal=True)),
        (16, 40, (130, 70), (1, 1), dict(window=(40, 3))),
        (128, 128, (140, 140), (1, 1), dict(causal=True)),
        (128, 128, (70, 110), (1, 1), dict(causal=True, softcap=2.0)),
        (72, 100, (30, 150), (4, 1), dict(seqlens_k=np.array([97], np.int32))),
        (192, 192, (90, 100), (1, 1), dict(causal=True)),
        (192, 192, (70, 75), (1, 1), dict(window=(30, 2), softcap=2.0)),
        (256, 256, (70, 75), (1, 1), dict(causal=True)),
        (37, 250, (60, 75), (2, 1), dict(window=(20, 4))),
    ],
)
def test_tiles_of_the_table(rung, head_dim, head_dim_v, seqlens, heads, options, tiles_of_gpus, no_repair):
    case = rung.problem(*seqlens, batch=1, heads=heads[0], heads_kv=heads[1], head_dim=head_dim, head_dim_v=head_dim_v)
    assert config_of(case, **options).kernel == "wgmma_float32"
    rung.check(case, **options)


# Blocks stay and take tile after tile, which takes more tiles than multiprocessors: places of K and V are filled again
# and again, and every consumer has its turn.
@pytest.mark.parametrize("stages", [1, 2])
def test_blocks_take_several_tiles(rung, stages, monkeypatch, nothing_remembered, no_repair):
    machine = dataclasses.replace(Target.of(None), multiprocessors=1)
    monkeypatch.setattr(dispatch.Target, "of", lambda device: machine)
    row = tile_row(64, tile_m=128, tile_n=32, stages=stages, rescale_threshold=8)
    monkeypatch.setitem(tiles.TABLES, "wgmma_float32", (row,))
    case = rung.problem(200, 80, batch=1, heads=2, heads_kv=1, head_dim=16)
    assert (config_of(case).consumers, config_of(case).stages) == (2, stages)
    rung.check(case, causal=True)


# Behind the keys that count anything may lie: it is not even read.
def test_nan_behind_the_last_key(rung):
    case = rung.problem(20, 70, batch=1, heads=1, head_dim=8)
    case.k[:, :, 50:], case.v[:, :, 50:] = np.nan, np.inf
    rung.check(case, seqlens_k=np.array([50], np.int32))


# Four lanes have a row of O. Head h has a NaN in column h, behind a mask, and all four must hear of it.
def test_a_nan_in_any_column_is_noticed(rung):
    case = rung.problem(3, 6, batch=1, heads=8, heads_kv=8, head_dim=4, head_dim_v=8)
    case.v[0, np.arange(8), 5, np.arange(8)] = np.nan
    rung.check(case, mask=(np.arange(6) < 5)[None, None, None])


def one_key(rung, v):
    """O of one key, whose weight is 1: V as its three parts have it."""
    case = rung.problem(3, 1, batch=1, heads=1, head_dim=8, head_dim_v=v.size)
    case.v[...] = v
    o, _ = rung(case)
    assert forward.same_bits(o, np.broadcast_to(o[:, :, :1], o.shape))
    return o[0, 0, 0]


# Three parts of 8 bits are all of a float32, up to the largest that bfloat16 does not round up to Inf, and down to
# those whose last bit is bfloat16's smallest number, 2^-133.
@pytest.mark.parametrize("size", [1.0, 2.0**127, 2.0**100, 2.0**-100, 2.0**-110])
def test_one_key_gives_its_value(rung, size, no_repair):
    v = (1 + np.random.default_rng(3).integers(0, 2**23, 64) / 2**23).astype(np.float32) * np.float32(size)
    v[:3] = np.float32(2**24 - 1) / 2**23 * size, size, -size
    v = np.where(np.abs(v) < np.float32(float.fromhex("0x1.ffp127")), v, np.float32(size))
    assert forward.same_bits(one_key(rung, v), v)


# What lies below 2^-133 of a number is rounded away.
@pytest.mark.parametrize("size", [2.0**-118, 2.0**-126, 2.0**-133, 2.0**-140])
def test_tiny_numbers_are_rounded_to_multiples_of_the_smallest_part(rung, size, no_repair):
    v = (np.random.default_rng(3).uniform(-2, 2, 64) * size).astype(np.float32)
    o = one_key(rung, v).astype(np.float64)
    assert (np.abs(o - v) <= 2.0**-134).all() and (o == np.round(o * 2.0**133) / 2.0**133).all()


# Sums of parts of either sign, and numbers so large and so small that only together they make scores: on tensor cores.
@pytest.mark.parametrize(("of_q", "of_k"), [(1e18, 1e-18), (1e-30, 1e30), (3e33, 1e-33)], ids=lambda x: f"{x:g}")
def test_scores_of_large_and_small_numbers(rung, of_q, of_k, no_repair):
    case = rung.problem(9, 40, batch=1, heads=1, head_dim=16, scale=0.25)
    case.q[...] = (case.q.astype(np.float64) * of_q).astype(np.float32)
    case.k[...] = (case.k.astype(np.float64) * of_k).astype(np.float32)
    rung.check(case)


def test_terms_that_cancel_on_tensor_cores(rung, no_repair):
    case = rung.problem(9, 40, batch=1, heads=1, head_dim=160, scale=1.0)
    case.q[..., 80:], case.k[..., 80:] = 300 * case.q[..., :80], case.k[..., :80]
    case.q[..., :80] *= -299
    rung.check(case)


# A sum of weights times values is divided at the end. Beyond about 1e37 it is Inf with 40 keys, and is computed again.
@pytest.mark.parametrize("size", [3e38, 1e37, 1e35])
def test_large_values(rung, size):
    case = rung.problem(9, 40, batch=1, heads=1, head_dim=16)
    case.v[...] = (np.clip(np.abs(case.v), 0.5, 1) * size).astype(np.float32)
    rung.check(case)
