"""Backward kernels as compiled and launched, without a GPU: parameters, blocks, workspace."""

import dataclasses
import inspect
import itertools

import pytest
from helpers import compiler
from helpers.machines import HOPPER, empty
from helpers.selected import configs_of, explained
from helpers.simt_kernels import BACKWARD, backward_problem as problem, everything, local_bytes

from numba_flash.abi import arguments
from numba_flash.arrays import read
from numba_flash.config.blocks import heads_in_flight
from numba_flash.config.mask_bits import MaskBitsConfig
from numba_flash.config.wgmma_backward import WgmmaFusedConfig
from numba_flash.config.wgmma_backward_ends import WgmmaAddPartsConfig
from numba_flash.dispatch.launch import workspace
from numba_flash.dispatch.launch_backward import make_backward_launch
from numba_flash.functions.function import Function
from numba_flash.gpu import assembler, compiled
from numba_flash.problem.groups import part_of, parts_of
from numba_flash.select import backward_kernels


def named(config):
    return f"{config.kernel}-{config.dtype}-{getattr(config, 'head_dim', config.threads)}"


@compiler.needed
@pytest.mark.slow
@pytest.mark.parametrize("config", [*filter(local_bytes, BACKWARD)], ids=named)
def test_long_rows_and_nothing_else_lie_in_local_memory(config):
    made = assembler.assemble(compiled.to_ptx(config, (9, 0)), "sm_90a")
    assert made.spill_bytes == 0 and made.stack_bytes <= local_bytes(config) and made.warnings == ()


# What all kernels on tensor cores take.
OF_SCORES = dict(
    softcap=3.0, mask=empty(300, 500, dtype="bool"), alibi_slopes=empty(2, dtype="float32"),
    seqlens_k=empty(1, dtype="int32"), q_offset=empty(1, dtype="int32"), dlse=empty(1, 2, 300, dtype="float32"),
)  # fmt: skip


@compiler.needed
@pytest.mark.parametrize(
    "config",
    [
        *configs_of("v2", everything((300, 500))), *BACKWARD[1:3],
        *configs_of("mma", problem(dtype="float16", bias=empty(300, 500), **OF_SCORES)),
        *configs_of("wgmma", problem(dtype="float16"))[1:],
    ],
    ids=named,
)  # fmt: skip
def test_the_kernel_has_the_parameters_that_it_is_given(config):
    taken = inspect.signature(compiled.source(config).py_func).parameters
    maps = ["tensor_maps"] if config.tensor_maps else []
    assert list(taken) == [*maps, *[made.__name__ for made, _ in arguments.types(config)]]


def reading(dtype, wanted=("daux[0]", "daux[2]"), **options):
    """A score_mod with a table, whole numbers and slopes."""
    aux = (empty(2, 999, dtype="float32"), empty(500, dtype="int32"), empty(2, dtype="bfloat16"))
    return problem(dtype=dtype, wanted=wanted, aux=tuple(read("aux", x).layout for x in aux), **options)


def table_and_slopes(s, b, h, i, j, table, ids, slopes):
    return s * slopes[h] + table[h, i - ids[j] + 499]


def test_the_workspace_of_aux():
    made = reading("float32", score_mod=Function.of("score_mod", table_and_slopes))
    choice = explained(made)
    text = str(choice)
    elements = 2 * 999 + 2
    # a sum of 13 words for each element, and delta
    assert f"workspace: {elements * 13 * 8 + 4 * 2 * 300} bytes" in text
    assert "gradients: daux[0], daux[2]" in text and f"daux_round: {-(-elements // 256)} blocks" in text


def test_where_the_sums_of_each_array_begin():
    made = reading("float32", score_mod=Function.of("score_mod", table_and_slopes))
    assert arguments.sizes_of_aux(made) == dict(aux_begins=(0, 1998, 2000))


def test_the_workspace_is_explained():
    made = problem(72, dtype="float16", wanted=("dk", "dv"))
    choice = explained(made)
    pieces = 2 * 19  # of 16 queries: 300 of each of two heads
    text = str(choice)
    assert choice.kernel == "wgmma" and f"workspace: {pieces * 2 * 16 * 4} bytes beside the gradients" in text, text


def earlier(b, h, i, j):
    return j <= i


@pytest.mark.parametrize("kernel", ["mma", "wgmma"])
def test_nothing_reads_the_mask_of_an_empty_batch(kernel):
    """A mask of no batch entries has no elements. Broadcast dimensions, as an empty array may have all, repeat none."""
    arrays = {name: empty(0, 2, 300, 64, dtype="float16") for name in ("do", "q", "o")}
    arrays |= {name: empty(0, 2, 500, 64, dtype="float16") for name in ("k", "v")}
    mask = empty(0, 1, 1, 500, dtype="bool", strides=(0, 0, 0, 0))
    made = problem(dtype="float16", **arrays, lse=empty(0, 2, 300, dtype="float32"), mask=mask)
    configs = configs_of(kernel, made)
    assert any(isinstance(config, MaskBitsConfig) for config in configs)
    assert not any(config.grid(made) for config in configs)


def test_splits_of_a_group_are_all_of_its_heads():
    for group, members in itertools.product(range(1, 10), (0, 1, 2, 3, 4, 10)):
        parts = parts_of(group, members)
        taken = [part_of(number, parts, group, members) for number in range(3 * parts)]
        heads = [(h_kv, first + n) for h_kv, first, count in taken for n in range(count)]
        assert heads == [(h // group, h) for h in range(3 * group)]
        assert all(0 < count <= (members or group) for *_, count in taken)


def test_the_workspace_has_room_for_all_partial_sums():
    """2 entries of 2 KV heads with groups of 5, in parts of 2, 2 and 1; 300 keys are 3 tiles of 128."""
    arrays = {name: empty(2, 10, 600, 100, dtype="float16") for name in ("do", "q", "o")}
    arrays |= {name: empty(2, 2, 300, 100, dtype="float16") for name in ("k", "v")}
    made = problem(100, dtype="float16", causal=True, **arrays, lse=empty(2, 10, 600, dtype="float32"))
    fused = WgmmaFusedConfig("float16", 100, 100, 64, 128, members=2)
    add = WgmmaAddPartsConfig("float16", 100, 100, 64, 128, members=2)
    assert fused.grid(made) == 2 * 2 * 3 * 3 and add.grid(made) == 2 * 2 * 5
    sizes = workspace([fused, add], made)
    assert sizes["dk_sums"] == ((36 * 128 * 112,), "float32") and sizes["dv_sums"] == ((36 * 128 * 112,), "float32")
    assert not {"dk_sums", "dv_sums"} & set(workspace([dataclasses.replace(fused, members=0)], made))


def test_a_block_with_all_keys_of_a_head_takes_no_workspace_for_dq():
    """A key is there, or no block would write that dQ is 0."""
    for seqlen_k, key_tiles in ((0, 0), (1, 1), (128, 1), (129, 2), (512, 4)):
        stays = key_tiles > 1  # 100 blocks, each with one tile
        arrays = {name: empty(50, 2, seqlen_k, 64, dtype="float16") for name in ("k", "v")}
        arrays |= {name: empty(50, 2, 100, 64, dtype="float16") for name in ("do", "q", "o")}
        made = problem(64, dtype="float16", **arrays, lse=empty(50, 2, 100, dtype="float32"))
        choice = explained(made, HOPPER, "wgmma")
        start, fused = choice.configs[:2]
        assert fused.key_tiles == key_tiles and start.turns_of == (0 if key_tiles else 128)
        assert ({"turns", "dq_sums"} & set(workspace(choice.configs, made)) == set()) == (key_tiles > 0)
        plan = fused.shared_layout()
        assert plan.lse_delta - plan.dq == 2 * 64 * 64 * (2 if key_tiles == 1 else 2 * 4)
        assert plan.barriers - plan.state == 64 * (1 + stays) and fused.stays == stays
        rings = 1 + 5 * stays + 4 + 4 + 1 + (0 if key_tiles else 8)
        assert fused.barriers().end - plan.barriers == 8 * rings
        assert fused.grid(made) == (100 if key_tiles else 0)
    wide = WgmmaFusedConfig("float16", 128, 128, 64, 128)
    plan = wide.shared_layout()
    assert plan.barriers - plan.state == 64 and wide.barriers().end - plan.barriers == 8 * (1 + 4 + 4 + 1 + 8)


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        # (batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim), full and causal, where most queries may see most keys
        ((2, 8, 8, 512, 8192, 128), (16, 16)),
        ((4, 8, 8, 512, 8192, 128), (32, 32)),
        ((4, 8, 8, 513, 8192, 128), (2, 2)),  # more than 1024 key tiles, and more than 512 queries
        ((4, 20, 20, 448, 1500, 64), (80, 80)),
        ((5, 17, 17, 448, 1500, 64), (85, 85)),
        ((2, 10, 10, 4096, 4096, 64), (20, 4)),
        ((1, 64, 8, 4096, 4096, 128), (8, 4)),  # no more than there are
        ((2, 16, 16, 4096, 4096, 128), (16, 4)),  # two equal groups
        ((4, 16, 16, 4096, 4096, 128), (4, 4)),
        ((16, 16, 16, 129, 129, 64), (128, 64)),
        ((0, 2, 2, 300, 300, 64), (1, 42)),
        ((1, 2, 2, 0, 300, 64), (2, 2)),
        ((1, 2, 2, 300, 0, 64), (2, 128)),
        ((1, 1, 1, 10**5, 10**5, 128), (1, 1)),
    ],
)
def test_the_number_of_heads_in_flight(shape, found):
    batch, heads, heads_kv, seqlen_q, seqlen_k, dim = shape
    arrays = {name: empty(batch, heads, seqlen_q, dim, dtype="float16") for name in ("do", "q", "o")}
    arrays |= {name: empty(batch, heads_kv, seqlen_k, dim, dtype="float16") for name in ("k", "v")}
    made = [
        problem(dim, dtype="float16", causal=causal, **arrays, lse=empty(batch, heads, seqlen_q, dtype="float32"))
        for causal in (False, True)
    ]
    assert tuple(heads_in_flight(x.forward, 128) for x in made) == found
    sizes = arguments.values_of(WgmmaFusedConfig("float16", 64, 64, 128, 128), made[0]).tuples[1]
    assert sizes.heads_in_flight == found[0]


def test_with_more_sums_of_dq_fewer_heads_are_in_flight():
    """What they add to takes more of the L2 cache, and their lines are shorter."""
    arrays = {name: empty(2, 16, 4096, 128, dtype="float16") for name in ("do", "q", "o", "k", "v")}
    made = problem(128, dtype="float16", **arrays, lse=empty(2, 16, 4096, dtype="float32"))
    assert [heads_in_flight(made.forward, 128, sums) for sums in (1, 2, 4)] == [16, 11, 6]
    config = WgmmaFusedConfig("float16", 128, 128, 64, 128, dq_partials=4)
    assert arguments.values_of(config, made).tuples[1].heads_in_flight == 6


def test_where_shared_memory_begins_is_said_to_the_assembler(monkeypatch):
    """Of kernels that say it (`shared_alignment`, the one for all gradients among them); this one compiles faster."""
    small = WgmmaAddPartsConfig("float16", 8, 8, 64, 64)
    monkeypatch.setattr(WgmmaAddPartsConfig, "shared_alignment", 1024)
    assert ".extern .shared .align 1024 .b8" in compiled.to_ptx(small, (9, 0))


@pytest.mark.parametrize(
    ("head_dim", "batch", "seqlen_k", "blocks"),
    [
        (64, 1, 2048, 64), (64, 3, 2048, 132), (64, 33, 100, 132), (64, 66, 100, 132), (64, 33, 500, 132),
        (64, 34, 500, 132), (88, 3, 4096, 132),
    ],
    ids=["few", "many", "one tile each", "two tiles each", "all tiles of a head each", "of two heads", "head_dim 88"],
)  # fmt: skip
def test_blocks_are_persistent_if_there_are_more_tiles_than_multiprocessors(
    head_dim, batch, seqlen_k, blocks, monkeypatch
):
    monkeypatch.setattr(backward_kernels, "gains_by_one_kernel", lambda *_: True)
    backward_kernels.configs_of.cache_clear()
    seqlen_q = seqlen_k if seqlen_k > 500 else 200
    arrays = {name: empty(batch, 4, seqlen_q, head_dim, dtype="float16") for name in ("do", "q", "o")}
    arrays |= {name: empty(batch, 4, seqlen_k, head_dim, dtype="float16") for name in ("k", "v")}
    lse = empty(batch, 4, seqlen_q, dtype="float32")
    made = problem(head_dim, dtype="float16", **arrays, lse=lse)
    choice = explained(made, HOPPER, "wgmma")
    _, fused = make_backward_launch(choice, made, HOPPER)._steps[:2]
    assert fused.launch._config.kernel == "wgmma_fused"
    many = seqlen_k == 500 or 4 * batch * -(-seqlen_k // 128) > 132
    assert fused.launch._config.stays == many
    assert fused.launch._blocks == blocks
    backward_kernels.configs_of.cache_clear()


def may_start_early(made):
    """[(kernel, whether it may start before the one before it has ended)] of what select makes for wgmma."""
    choice = explained(made, HOPPER, "wgmma")
    sequence = make_backward_launch(choice, made, HOPPER)
    return [(step.launch._config.kernel, step.launch._behind) for step in sequence._steps]


def test_programmatic_launches_follow_a_kernel_that_is_always_launched():
    of, start = may_start_early, [("backward_preprocess", False)]
    assert of(problem(dtype="float16", causal=True)) == [*start, ("wgmma_fused", True), ("wgmma_round", True)]
    mask = empty(300, 500, dtype="bool")
    bits = [("mask_bits_of_keys", True), ("mask_bits", True)]
    one = of(problem(dtype="float16", mask=mask, causal=True))
    assert one == [*start, bits[0], ("wgmma_fused", True), ("wgmma_round", True)]
    two = of(problem(dtype="float16", mask=mask, softcap=3.0))
    assert two == [*start, *bits, ("wgmma_dkdv", True), ("wgmma_dq", True)]
    sinks = dict(sinks=empty(2, dtype="float16"), wanted=("dk", "dsinks"))
    assert of(problem(dtype="float16", **sinks)) == [*start, ("wgmma_dkdv", True), ("dsinks_of_blocks", False)]
    states = of(problem(dtype="float16", mask_mod=Function.of("mask_mod", earlier)))
    assert states[0] == start[0] and [x for x in states if x[1]] == [("wgmma_dkdv", True), ("wgmma_dq", True)]
