"""Which caches decode takes on which GPU, and with which tiles: without a GPU."""

import dataclasses

import pytest
from helpers.machines import A100, ADA, HOPPER, TURING, empty, problem

from numba_flash.functions.function import Function
from numba_flash.problem.pages import Pages
from numba_flash.select import decode, forward


def cache(head_dim=128, queries=1, group=4, dtype="bfloat16", **options):
    made = problem(
        head_dim, dtype=dtype, heads=2 * group, heads_kv=2, seqlen=queries, seqlen_k=2**17,
        seqlens_k=empty(1, dtype="int32"), **options,
    )  # fmt: skip
    return dataclasses.replace(made, pages=Pages(16, 2**13, 2**17))


@pytest.mark.parametrize("target", [A100, ADA, HOPPER], ids=lambda target: target.name)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (64, 128), (64, 256), (80, 59)], ids=str)
@pytest.mark.parametrize("queries", [1, 4, 16, 300])
def test_every_width_and_number_of_rows_has_a_tile(target, dims, queries):
    made = cache(dims[0], queries, head_dim_v=dims[1])
    if target is ADA and dims == (256, 256):
        assert "shared memory" in decode.refusal(made, target, contiguous=False)
        return
    assert decode.refusal(made, target, contiguous=False) is None
    config = decode.config_of(made, "table", target)
    assert config.tile_m <= max(2 * decode.rows_of(made), 16)
    assert config.blocks_per_sm * (config.shared_bytes + 1024) <= target.shared_bytes + 1024
    assert config.blocks == config.blocks_per_sm * target.multiprocessors
    assert target is not HOPPER or queries > 1 or config.stack_levels >= 3  # most nodes wait in shared memory
    on_the_way = config.blocks_per_sm * (config.stages - 1) * config.keys * sum(dims) * 2
    assert target is not HOPPER or min(dims) < 64 or on_the_way >= 40 * 1024


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (cache(136, dtype="float64"), "it takes head_dim up to 128, not 136"),
        (cache(queries=17), "up to 64 queries of the heads of a KV head, not 68"),
        (cache(queries=5, dtype="float32"), "up to 16 queries of the heads of a KV head, not 20"),
        (cache(136, dtype="float32"), "it takes head_dim up to 128, not 136"),
        (cache(264), "it takes head_dim up to 256, not 264"),
        (dataclasses.replace(cache(), k_strides=(2**20, 2**18, 128, 2)), "k is not contiguous along dim"),
    ],
)
def test_what_decode_does_not_take_is_said(made, reason):
    assert reason in decode.refusal(made, HOPPER, contiguous=True)


def test_only_contiguous_caches_have_a_bound_of_rows():
    assert decode.refusal(cache(queries=17), HOPPER, contiguous=False) is None
    assert decode.refusal(cache(queries=16), HOPPER, contiguous=True) is None
    assert decode.refusal(cache(256, queries=17, dtype="float32"), HOPPER, contiguous=False) is None
    assert "compute capability" in decode.refusal(cache(), TURING, contiguous=False)


@pytest.mark.parametrize(
    ("queries", "head_dim", "batch", "tile_m", "members"),
    [(1, 128, 64, 16, 4), (2, 128, 64, 16, 2), (3, 128, 64, 32, 2), (8, 128, 64, 64, 2), (1, 256, 64, 16, 4)],
)
def test_rows_of_sequences_that_share_a_prefix_fill_a_tile(queries, head_dim, batch, tile_m, members):
    made = dataclasses.replace(cache(head_dim, queries), batch=batch)
    assert decode.not_shared(made, HOPPER) is None
    config = decode.config_of(made, "table", HOPPER, shares=True)
    assert (config.tile_m, config.members) == (tile_m, members)
    assert config.members * decode.rows_of(made) <= tile_m
    assert decode.config_of(made, "table", HOPPER).members == 1


def apart(b, h, q_pos, k_pos):
    return k_pos != q_pos


def few(dtype="float32", queries=1, keys=16384, heads=32, **options):
    return problem(128, dtype=dtype, heads=heads, heads_kv=heads // 4, seqlen=queries, seqlen_k=keys, **options)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("options", [dict(queries=4, causal=True), dict(heads=4), dict(softcap=5.0)], ids=str)
def test_few_queries_of_many_keys_are_shared_out_by_attention_too(dtype, options):
    chosen = forward.select(few(dtype, **options), HOPPER, "auto", "cupy")
    assert (chosen.kernel, chosen.config.kernel) == ("mma", "decode")


@pytest.mark.parametrize(
    "made",
    [few("bfloat16"), few(queries=5), few(keys=1023), few(mask_mod=Function.of("mask_mod", apart))],
    ids=["16 bits", "many queries", "few keys", "mask_mod"],
)
def test_others_are_not(made):
    assert forward.few_queries(made, HOPPER) is None


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (cache(window=(300, 0)), "window: scores"),
        (cache(alibi_slopes=empty(8, dtype="float32"), dropout_p=0.1), "alibi_slopes, dropout_p: scores"),
        (cache(queries=9), "rows of two sequences with 36 queries of the heads of a KV head do not fit into a tile"),
        (cache(dtype="float32"), "shared in float16 and bfloat16, not in float32"),
    ],
    ids=["window", "options", "rows", "float32"],
)
def test_why_a_prefix_is_not_shared_is_said(made, reason):
    assert reason in decode.not_shared(dataclasses.replace(made, batch=64), HOPPER)
