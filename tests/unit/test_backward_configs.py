"""Configs of backward kernels: what they check, and where their shared memory is."""

import contextlib
import dataclasses
import itertools

import pytest
from helpers.machines import HOPPER

from numba_flash.config.backward import (
    MmaBackwardConfig,
    MmaDauxConfig,
    MmaDkdvConfig,
    MmaDqConfig,
    MmaOneKeyTileConfig,
    PreprocessConfig,
)
from numba_flash.config.mma_fused import MmaFusedConfig
from numba_flash.config.simt_backward import DbiasConfig, DeltaConfig, DkdvConfig, DqConfig, HeadSumsConfig
from numba_flash.config.wgmma_backward import WgmmaDkdvConfig, WgmmaDqConfig, WgmmaFusedConfig
from numba_flash.config.wgmma_backward_float32 import (
    WgmmaDkdvFloat32Config,
    WgmmaDqFloat32Config,
    WgmmaPairedDkdvConfig,
    WgmmaPairedDqConfig,
)
from numba_flash.config.wgmma_forward import WgmmaConfig, check_registers
from numba_flash.problem.options import uses


@pytest.mark.parametrize("kind", [WgmmaPairedDkdvConfig, WgmmaPairedDqConfig])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "halves", "panels"),
    [(129, 8, (80, 16), 2), (256, 256, (128, 128), 2), (40, 255, (32, 128), 2), (130, 136, (80, 80), 2)],
)
def test_shared_memory_of_a_pair(kind, head_dim, head_dim_v, halves, panels):
    """Halves are whole steps of a product; two places for tiles, of so many panels; all of it in a block's 227 KB."""
    config = kind("float32", head_dim, head_dim_v, 64, 64, stages_a=1, stages_b=1)
    assert (config.head_dim_padded, config.head_dim_v_padded) == halves and config.panels == panels
    own = [3 * 64 * 128 * (1 + (columns > 64)) for columns in halves]
    sizes = [*own, 2 * panels * 3 * 64 * 128, 64 * 64 * 4, 64 * 64 * 4, 12 * 4, 64, (6 * panels + 5) * 8]
    plan, at = config.shared_layout(), config.barriers()
    assert list(plan) == [0, *itertools.accumulate(sizes)] and all(place % 1024 == 0 for place in plan[:3])
    assert at.a_empty - at.a_full == 16 * panels and at.b_full - at.a_empty == 16 * panels and at.end == plan.end
    assert config.shared_bytes == 1024 + plan.end <= HOPPER.shared_bytes


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(stages_a=2), "must be 1, not 2 and 1"), (dict(head_dim=257), "at most 256, not 257 and 64"),
        (dict(tile_m=80), "16 to 64 rows, in steps of 16, not 80"), (dict(uses=uses(dropout_p=True)), "no dropout_p"),
    ],
)  # fmt: skip
def test_what_a_config_of_a_pair_may_say(changed, words):
    given = dict(dtype="float32", head_dim=136, head_dim_v=64, tile_m=64, tile_n=64, stages_a=1, stages_b=1)
    WgmmaPairedDkdvConfig(**given)
    with pytest.raises(ValueError, match=words):
        WgmmaPairedDkdvConfig(**given | changed)


@pytest.mark.parametrize("kind", [WgmmaDkdvFloat32Config, WgmmaDqFloat32Config])
@pytest.mark.parametrize(("head_dim", "head_dim_v", "rows"), [(64, 64, 64), (40, 128, 48), (128, 128, 48)])
def test_shared_memory_of_wgmma_in_float32(kind, head_dim, head_dim_v, rows):
    """Parts of whole panels, each place behind the one before, and all of it in a block's 227 KB."""
    tile = (rows, 64) if kind is WgmmaDkdvFloat32Config else (64, rows)
    config = kind("float32", head_dim, head_dim_v, *tile)
    plan, panels = config.shared_layout(), (1 + (head_dim > 64), 1 + (head_dim_v > 64))
    own_a, own_b = (3 * 64 * 128 * n for n in panels)
    stream_a, stream_b = (3 * rows * 128 * n for n in panels)
    sizes = [own_a, own_b, 2 * stream_a, stream_b, 64 * rows * 4, 64, 8 * 8]
    assert list(plan) == [0, *itertools.accumulate(sizes)]
    assert all(place % 1024 == 0 for place in plan[:4]) and config.barriers().end == plan.end
    assert config.shared_bytes == 1024 + plan.end <= HOPPER.shared_bytes


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(dtype="float16"), "takes float32, not float16"), (dict(tile_n=128), "own rows must be 64, not 128"),
        (dict(tile_m=80), "16 to 64 rows, in steps of 16, not 80"), (dict(tile_m=24), "in steps of 16, not 24"),
        (dict(stages_b=0), "stages_b 1 to 4, not 2 and 0"), (dict(head_dim_v=136), "at most 128, not 64 and 136"),
        (dict(uses=uses(dropout_p=True)), "takes no dropout_p"),
        (dict(of_dk=False, of_dv=False), "of_dk or of_dv must be True"),
    ],
)  # fmt: skip
def test_what_a_config_of_wgmma_in_float32_may_say(changed, words):
    given = dict(dtype="float32", head_dim=64, head_dim_v=64, tile_m=64, tile_n=64)
    WgmmaDkdvFloat32Config(**given)
    with pytest.raises(ValueError, match=words):
        WgmmaDkdvFloat32Config(**given | changed)


@pytest.mark.parametrize("head_dim", [8, 72, 128, 200, 256])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", [MmaDkdvConfig, MmaDqConfig])
def test_the_parts_of_shared_memory_do_not_overlap(kind, stages, groups, head_dim):
    config = kind("float16", head_dim, head_dim, 64, 64, warp_rows=32, column_groups=groups, stages=stages)
    offsets = config.shared_layout()
    assert list(offsets) == sorted(offsets) and offsets[-1] + config.ALIGNMENT == config.shared_bytes
    columns = config.group_columns * groups
    assert columns % 64 == 0 and columns >= max(config.head_dim_padded, config.head_dim_v_padded)
    assert config.threads == 64 * groups
    own, other = 128 * config.own_rows, 128 * config.other_rows
    assert offsets[1] >= own * -(-head_dim // 64), "K or Q"
    panels = -(-head_dim // 64)
    assert offsets[3] - offsets[2] == stages * other * panels, "the stages of Q or K"
    if groups > 1:
        behind = min(place for place in offsets if place > offsets.ds)
        assert behind - offsets.ds == own, "64 columns of P or dS"
        assert offsets.ds % config.ALIGNMENT == 0 and getattr(offsets, "p", offsets.ds) == offsets.ds


@pytest.mark.parametrize("head_dim", [8, 72, 256])
@pytest.mark.parametrize("kind", [WgmmaDkdvConfig, WgmmaDqConfig])
def test_the_parts_of_a_wgmma_blocks_shared_memory_do_not_overlap(kind, head_dim):
    config = kind("float16", head_dim, 64, 64, 64, stages_a=3, stages_b=1)
    plan, panels = config.shared_layout(), -(-head_dim // 64)
    assert list(plan) == sorted(plan) and plan.end + config.ALIGNMENT == config.shared_bytes
    assert all(place % config.ALIGNMENT == 0 for place in plan[:4]), "panels"
    assert plan.own_b - plan.own_a == 64 * 128 * panels and plan.stream_a - plan.own_b == 64 * 128
    assert plan.stream_b - plan.stream_a == 3 * 64 * 128 * panels and plan.lse_delta - plan.stream_b == 64 * 128
    assert plan.ds == plan.dq == plan.lse_delta, "these are wgmma_fused's"
    assert plan.state - plan.lse_delta == (3 * 8 * 64 if kind is WgmmaDkdvConfig else 0)
    assert config.barriers().end - plan.barriers == 8 * (1 + 2 * 3 + 2 * 1) <= plan.end - plan.barriers


def test_the_parts_of_the_one_kernels_shared_memory_do_not_overlap():
    for tile_m, head_dim, stages in ((64, 100, 3), (128, 60, 2)):
        config = WgmmaFusedConfig("float16", head_dim, 40, tile_m, 128, stages_a=stages, stages_b=2)
        plan = config.shared_layout()
        # It begins at a multiple of ALIGNMENT, as the assembler is told. Nothing is left for a gap in front.
        assert list(plan) == sorted(plan) and plan.end == config.shared_bytes <= HOPPER.shared_bytes
        assert config.shared_alignment == config.ALIGNMENT
        assert all(place % config.ALIGNMENT == 0 for place in plan[:5]), "panels"
        assert plan.dq - plan.ds == 2 * tile_m * 128 * 2 and plan.lse_delta - plan.dq == 2 * 2 * 64 * 64 * 4
    assert config.barriers().end <= plan.end


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "tile_m", "columns", "dq_columns"),
    [
        (88, 80, 64, 96, 128),
        (112, 112, 64, 112, 128),
        (40, 100, 64, 80, 128),
        (40, 40, 128, 48, 64),
        (8, 8, 128, 16, 64),
    ],
)
def test_the_one_kernels_columns(head_dim, head_dim_v, tile_m, columns, dq_columns):
    """Two warpgroups with 64 columns of dQ each need two panels of K."""
    made = WgmmaFusedConfig("float16", head_dim, head_dim_v, tile_m, 128)
    assert (made.head_dim_padded, made.dq_columns) == (columns, dq_columns)
    assert made.shared_layout().own_b == 128 * 2 * dq_columns and made.stream_a_bytes == tile_m * 2 * dq_columns


def test_the_head_of_a_class_says_whether_it_is_a_kernels():
    """Only then are the methods of a dataclass generated; a class takes the file of its base if it names none."""
    assert (MmaDqConfig.kernel, MmaDqConfig.module) == ("mma_dq", "mma.backward")
    assert (MmaOneKeyTileConfig.kernel, MmaOneKeyTileConfig.module) == ("mma_one_key_tile", MmaDkdvConfig.module)
    generated = {"__init__", "__repr__", "__eq__"}
    assert generated <= vars(MmaDqConfig).keys() and not generated & vars(MmaBackwardConfig).keys()
    config = MmaDqConfig("float16", 64, 64, 64, 64)
    assert config == MmaDqConfig("float16", 64, 64, 64, 64) != dataclasses.replace(config, stages=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.stages = 2


# Each field that a Config checks.
@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: DeltaConfig("float32", 64, False, 100), "multiple of 32"),
        (lambda: DkdvConfig("float32", 64, 64, 16, 6), "tile_n must be"),
        (lambda: DqConfig("float32", 64, 64, 2, 16), "tile_m must be"),
        (lambda: DqConfig("float32", 64, 64, 16, 16, pad=-1), "pad"),
        (lambda: DkdvConfig("float32", 64, 64, 16, 1024), "threads"),
        (lambda: DbiasConfig("float32", 64, 64, 2048, 16), "threads"),
        (lambda: HeadSumsConfig("float32", "dalibi_slopes", "float32", True, threads=100), "power of two"),
        (lambda: PreprocessConfig("float16", 60, False), "loads of 16 bytes"),
        (lambda: PreprocessConfig("float16", 64, False, threads=48), "threads"),
        (lambda: MmaOneKeyTileConfig("float32", 64, 64, 32, 64), "float16 and bfloat16"),
        (lambda: MmaDkdvConfig("float32", 64, 64, 32, 64, stages=2), "stages for float32 must be 1, not 2"),
        (lambda: MmaDqConfig("float64", 64, 64, 32, 32, in_registers=True), "in_registers is for 16-bit"),
        (lambda: MmaDkdvConfig("float16", 64, 64, 32, 64, warp_rows=8), "warp_rows"),
        (lambda: MmaDkdvConfig("float16", 64, 64, 32, 40, warp_rows=16), "multiple of 16, not 40"),
        (lambda: MmaDkdvConfig("float16", 64, 64, 24, 64), "multiple of 16, not 24"),
        (lambda: MmaDkdvConfig("float16", 288, 64, 32, 64), "at most 256"),
        (lambda: MmaDkdvConfig("float16", 64, 64, 96, 64, column_groups=3), "1, 2 or 4"),
        (lambda: MmaDkdvConfig("float16", 64, 64, 32, 64, column_groups=4), "16 rows for each"),
        (
            lambda: MmaDkdvConfig("float16", 192, 192, 64, 64, column_groups=2),
            "than are left of head_dim 192",
        ),
        (lambda: MmaDkdvConfig("float16", 256, 64, 64, 64, column_groups=2), "than are left of .* and 64"),
        (lambda: MmaDkdvConfig("float16", 64, 64, 160, 64), "at most 128 rows, not 160"),
        (lambda: MmaDqConfig("float16", 64, 64, 64, 64, stages=3), "stages must be 1 or 2, not 3"),
        (lambda: MmaDauxConfig("float16", 64, 64, 64, 32, stages=2), "stages must be 1, not 2"),
        (lambda: MmaDkdvConfig("float16", 64, 64, 32, 64, column_groups=2, of_dk=False), "of_dk and of_dv"),
        (lambda: MmaDkdvConfig("float16", 64, 64, 32, 64, of_dk=False, of_dv=False), "of_dk or of_dv"),
        (lambda: WgmmaDkdvConfig("float32", 64, 64, 64, 128), "float16 and bfloat16"),
        (lambda: WgmmaDkdvConfig("float16", 64, 64, 64, 96), "64, 128 or 192, not 96"),
        (lambda: WgmmaDqConfig("float16", 64, 64, 256, 64), "64, 128 or 192, not 256"),
        (lambda: WgmmaDkdvConfig("float16", 64, 64, 40, 128), "in steps of 16, not 40"),
        (lambda: WgmmaDqConfig("float16", 64, 64, 128, 144), "16 to 128 rows, in steps of 16, not 144"),
        (lambda: WgmmaDqConfig("float16", 64, 64, 128, 64, stages_a=1), "stages_a must be 2 to 4"),
        (lambda: WgmmaDqConfig("float16", 64, 64, 128, 64, stages_b=0), "stages_b 1 to 4"),
        (lambda: WgmmaDqConfig("float16", 64, 272, 128, 64), "at most 256"),
        (lambda: WgmmaDkdvConfig("float16", 64, 64, 64, 64, of_dk=False, of_dv=False), "of_dk or of_dv"),
        (lambda: WgmmaFusedConfig("float16", 64, 64, 96, 128), "64 or 128 queries and 128 keys, not 96"),
        (lambda: WgmmaFusedConfig("float16", 128, 136, 64, 128), "at most 128 with tiles of 64 queries"),
        (lambda: WgmmaFusedConfig("float16", 64, 72, 128, 128), "at most 64 with tiles of 128 queries"),
        (lambda: WgmmaFusedConfig("float16", 64, 64, 64, 128, dq_partials=9), "1 to 8 with .*, not 9"),
        (lambda: WgmmaFusedConfig("float16", 64, 64, 64, 128, dq_partials=0), "1 to 8 with .*, not 0"),
        (
            lambda: WgmmaFusedConfig("float16", 64, 64, 128, 128, key_tiles=2, stays=True, dq_partials=2),
            "1 to 1 with key_tiles 2, not 2",
        ),
        (
            lambda: WgmmaFusedConfig(
                "float16", 64, 64, 128, 128, uses=uses(bias="float16"), bias_boxes=True, stays=True
            ),
            "it needs bias_boxes and no lse_first",
        ),
        (
            lambda: WgmmaFusedConfig(
                "float16", 128, 128, 64, 128, uses=(("mask", "bool"), ("dropout_p", "float")), lse_first=False
            ),
            "it takes no mask and no bias",
        ),
        (
            lambda: WgmmaFusedConfig("float16", 64, 64, 64, 128, uses=uses(alibi_slopes="float32")),
            "it takes no option that changes scores",
        ),
        (
            lambda: WgmmaFusedConfig("float16", 64, 64, 64, 128, uses=uses(dropout_p=True)),
            "registers are few",
        ),
        (
            lambda: MmaDkdvConfig("float32", 64, 64, 32, 64, column_groups=4),
            "column_groups must be 1 or 2, not 4",
        ),
        (lambda: MmaFusedConfig("float64", 64, 64, 32, 64, column_groups=4), "column_groups must be 2, not 4"),
        (lambda: MmaFusedConfig("float64", 64, 64, 48, 64), "rows that a block walks over must be 16 or 32, not 48"),
        (lambda: MmaFusedConfig("float64", 64, 64, 32, 48), "whole warpgroups, not 192"),
        (lambda: MmaFusedConfig("float64", 64, 64, 32, 128), "128 keys are more than 4 times 16"),
        (lambda: MmaFusedConfig("float64", 256, 256, 32, 64), "need 512 sums"),
        (lambda: MmaFusedConfig("float32", 64, 64, 16, 64), "takes float64, not float32"),
        (lambda: MmaFusedConfig("float64", 64, 64, 16, 64, blocks=3), "blocks must be 1 or 2, not 3"),
    ],
)
def test_a_config_checks_itself(make, word):
    with pytest.raises(ValueError, match=word):
        make()


@pytest.mark.parametrize(
    ("registers", "consumers", "enough"),
    [((24, 240), 2, True), ((40, 232), 2, True), ((32, 240), 2, False), ((32, 160), 3, True), ((40, 160), 3, False)],
)
def test_warpgroups_share_the_registers_that_a_block_is_launched_with(registers, consumers, enough):
    # 32 and twice 240 are the 65536 of a multiprocessor, but a launch gives 384 threads 168 each: it waits forever.
    with contextlib.nullcontext() if enough else pytest.raises(ValueError, match="more than the 1[26]8 that each"):
        check_registers(registers, consumers)


def test_wgmma_configs_check_their_registers(monkeypatch):
    monkeypatch.setattr(WgmmaDkdvConfig, "REGISTERS", {2: (32, 240)})
    monkeypatch.setattr(WgmmaConfig, "REGISTERS", {2: (32, 240)})
    monkeypatch.setattr(WgmmaFusedConfig, "registers", (32, 240))
    for make in (
        lambda: WgmmaDkdvConfig("float16", 64, 64, 64, 128),
        lambda: WgmmaFusedConfig("float16", 128, 128, 64, 128),
        lambda: WgmmaConfig("float16", 64, 64, 128, 128),
    ):
        with pytest.raises(ValueError, match="more than the 168"):
            make()
