"""The part of the contract that wgmma is run through in the simulator: all of it takes minutes, and runs on a GPU."""

import dataclasses

import numpy as np
import pytest
from contracts import forward
from contracts.forward import (  # noqa: F401
    test_any_strides,
    test_head_dim_v_may_differ,
    test_many_tiles,
    test_maxima_that_move,
    test_nothing_hidden_reaches_rows_whose_scores_are_all_minus_infinity,
    test_nothing_is_defined,
    test_rows_of_any_stride,
    test_rows_whose_scores_are_all_far_from_zero,
    test_scores_of_minus_infinity_in_whole_tiles,
)
from helpers.tile_rows import row as tile_row

from numba_flash import testing
from numba_flash.api import forward as api
from numba_flash.dispatch import forward as dispatch
from numba_flash.machine.target import Target
from numba_flash.select import forward_kernels as select_forward, tiles


@pytest.fixture(scope="session")
def rung():
    return forward.Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True)


# Blocks stay and take tile after tile, which takes more tiles than multiprocessors: rings of stages go round, phases
# turn, notices follow each other, and every consumer has its turn. In causal order tiles differ in their tiles of keys.
# One block does it alone; where there are two, what they share is the counter.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("multiprocessors", "shape", "options"),
    [
        (1, dict(seqlen_q=200, seqlen_k=140, batch=1, heads=2, heads_kv=1), dict(causal=True)),
        (2, dict(seqlen_q=200, seqlen_k=140, batch=1, heads=2, heads_kv=1), dict(causal=True)),
        (1, dict(seqlen_q=130, seqlen_k=100, batch=2, heads=1, heads_kv=1), dict(seqlens=(100, 37))),
        (2, dict(seqlen_q=300, seqlen_k=60, batch=1, heads=2, heads_kv=2), dict(causal=True)),  # some see no key at all
    ],
    ids=["causal", "causal, two", "lengths", "empty tiles"],
)
def test_blocks_take_several_tiles(rung, multiprocessors, shape, options, monkeypatch, nothing_remembered):
    machine = dataclasses.replace(Target.of(None), multiprocessors=multiprocessors)
    monkeypatch.setattr(dispatch.Target, "of", lambda device: machine)
    options = dict(options)
    if "seqlens" in options:
        options["seqlens_k"] = np.array(options.pop("seqlens"), np.int32)
    case = rung.problem(**shape, head_dim=64)
    asked = dict(options, kernel="wgmma")
    assert api.prepare_call(case.q, case.k, case.v, asked)[1].choice.config.consumers > 1
    rung.check(case, **options)


# Two or three tiles of keys for each of as many consumers as the table has: one tile of queries, which is whole.
@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "tile"), [(64, (192, 128)), (72, (128, 128))])
def test_tiles_of_the_table(rung, head_dim, tile, monkeypatch, tiles_of_gpus):
    machine = dataclasses.replace(Target.of(None), multiprocessors=1)
    monkeypatch.setattr(dispatch.Target, "of", lambda device: machine)
    case = rung.problem(tile[0], 270, batch=1, heads=1, heads_kv=1, head_dim=head_dim, causal=True)
    config = api.prepare_call(case.q, case.k, case.v, dict(case.options, kernel="wgmma"))[1].choice.config
    assert (config.tile_m, config.tile_n) == tile
    rung.check(case)


# Parts of two key tiles, of one, and of none; of a query tile that sees nothing, and of one with NaN in hidden keys.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (dict(seqlen_q=70, seqlen_k=270, batch=2, heads=1), dict(hidden=True)),
        (dict(seqlen_q=140, seqlen_k=140, heads=4, heads_kv=2), dict(causal=True)),
        (dict(seqlen_q=300, seqlen_k=60, heads=1), dict(causal=True)),
        (dict(seqlen_q=9, seqlen_k=140, heads=6, heads_kv=2), dict(sinks=(0.5, -1, 2, 0, 1, 3), softcap=2.0)),
        (dict(seqlen_q=40, seqlen_k=140, heads=2), dict(mask=True, bias=True, window=(90, 10))),
        (dict(seqlen_q=40, seqlen_k=140, heads=1, head_dim=72), dict(dropout_p=0.2, seed=3, alibi_slopes=(0.25,))),
    ],
    ids=["hidden", "causal", "nothing seen", "sinks of a group", "mask and bias", "dropout"],
)
@pytest.mark.parametrize("parts", [2, 4])
def test_blocks_share_the_keys_of_a_query_tile(rung, parts, shape, options, monkeypatch, nothing_remembered):
    monkeypatch.setattr(select_forward, "_parts", lambda *_: parts)
    case = rung.problem(**dict(batch=1, head_dim=16) | shape)
    options, generator = dict(options), np.random.default_rng(0)
    if options.pop("hidden", False):
        options["seqlens_k"] = np.array([232, 20], np.int32)
        case.k[:, :, 232:] = case.v[:, :, 232:] = np.nan
    for name in ("sinks", "alibi_slopes"):
        if name in options:
            options[name] = np.array(options[name], np.float32)
    scores = (1, case.q.shape[1], case.q.shape[2], case.k.shape[2])
    if "mask" in options:
        options["mask"] = generator.random(scores) < 0.5
        options["bias"] = generator.standard_normal(scores).astype(rung.dtype)
    config = api.prepare_call(case.q, case.k, case.v, dict(options, kernel="wgmma"))[1].choice.config
    assert config.parts == parts
    rung.check(case, **options)


# Q has one buffer, or two.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "head_dim_v", "kilobytes"),
    [
        (tile_row(256, tile_m=64, tile_n=112, q_buffers=2, rescale_threshold=8), 72, 227),
        (tile_row(256, tile_m=128, tile_n=64, q_buffers=1, rescale_threshold=8), 136, 227),
        (tile_row(256, tile_m=64, tile_n=32, q_buffers=1, rescale_threshold=0), 40, 48),
    ],
)
def test_the_next_q_waits_for_room(rung, row, head_dim_v, kilobytes, monkeypatch, nothing_remembered):
    machine = dataclasses.replace(Target.of(None), multiprocessors=1, shared_bytes=kilobytes * 1024)
    monkeypatch.setattr(dispatch.Target, "of", lambda device: machine)
    monkeypatch.setitem(tiles.TABLES, "wgmma", (row,))
    case = rung.problem(200, 300, batch=1, heads=1, heads_kv=1, head_dim=72, head_dim_v=head_dim_v)
    config = api.prepare_call(case.q, case.k, case.v, dict(kernel="wgmma"))[1].choice.config
    assert config.q_buffers == row.tile["q_buffers"]
    rung.check(case, causal=True)


# 40 of the 64 rows of a query tile exist; of the tiles of keys all but one are seen whole.
@pytest.mark.parametrize("by", ["mask_mod", "score_mod"])
def test_functions_are_not_called_for_rows_past_the_end(rung, by):
    of_queries, of_keys = (np.linspace(0.25, 0.5, n).astype(np.float32) for n in (40, 72))

    def visible(b, h, q_pos, k_pos, of_queries, of_keys):
        return of_queries[q_pos] + of_keys[k_pos] > 0.8

    def score(s, b, h, q_pos, k_pos, of_queries, of_keys):
        return s * of_queries[q_pos] + of_keys[k_pos]

    case = rung.problem(40, 72, batch=1, heads=1, head_dim=8, q_offset=0)
    rung.check(case, aux=(of_queries, of_keys), **{by: visible if by == "mask_mod" else score})
