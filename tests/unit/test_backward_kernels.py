"""Backward kernels as compiled, without a GPU; what select makes of a problem of gradients; what Configs say."""

import contextlib
import dataclasses
import inspect
import itertools
import re

import compiler
import pytest
from machines import A100, AMPERE, B200, HOPPER, RTX_5090, TURING, empty
from simt_kernels import ALL, BACKWARD, everything, local_bytes
from simt_kernels import backward_problem as problem

from numba_flash.api.explain import BackwardExplanation
from numba_flash.arrays import read
from numba_flash.config.backward import MmaDkdvConfig, MmaDqConfig, PreprocessConfig
from numba_flash.config.mask_bits import MaskBitsConfig
from numba_flash.config.simt_backward import DbiasConfig, DeltaConfig, DkdvConfig, DqConfig, HeadSumsConfig
from numba_flash.config.wgmma_backward import WgmmaAddPartsConfig, WgmmaDkdvConfig, WgmmaDqConfig, WgmmaFusedConfig
from numba_flash.config.wgmma_backward_float32 import (
    WgmmaBackwardFloat32Config,
    WgmmaDkdvFloat32Config,
    WgmmaDqFloat32Config,
)
from numba_flash.config.wgmma_forward import WgmmaConfig, check_registers
from numba_flash.config.wgmma_paired_float32 import WgmmaPairedDkdvConfig, WgmmaPairedDqConfig
from numba_flash.config.wide_backward import WideCarriedConfig, WideDkdvConfig, WideFusedConfig
from numba_flash.dispatch import launch_backward
from numba_flash.dispatch.launch_backward import grid, workspace
from numba_flash.functions.function import Function
from numba_flash.gpu import assembler, compiled
from numba_flash.machine.target import Target
from numba_flash.problem.groups import part_of, parts_of
from numba_flash.problem.options import uses
from numba_flash.select import arguments, backward_arguments, backward_kernels, backward_wide
from numba_flash.select.backward import select_backward
from numba_flash.select.backward_kernels import mma_configs, v2_configs, wgmma_configs
from numba_flash.select.backward_wide import wide_configs
from numba_flash.select.heads_abreast import heads_abreast
from numba_flash.select.rungs import KERNELS, WITH_BACKWARD

HOST = Target(True, why_no_gpu="it is not plugged in")
SIMULATOR = Target(True, True, 0, (9, 0), 227 * 1024, 132, "Numba's CUDA simulator")


def named(config):
    return f"{config.kernel}-{config.dtype}-{getattr(config, 'head_dim', config.threads)}"


@compiler.needed
@pytest.mark.slow
@pytest.mark.parametrize("config", [*filter(local_bytes, BACKWARD)], ids=named)
def test_long_rows_and_nothing_else_lie_in_local_memory(config):
    made = assembler.assemble(compiled.to_ptx(config, (9, 0)), "sm_90a")
    assert made.spill_bytes == 0 and made.stack_bytes <= local_bytes(config) and made.warnings == ()


@compiler.needed
@pytest.mark.parametrize(
    "config",
    [
        *v2_configs(everything((300, 500)), HOPPER), *BACKWARD[1:3],
        *mma_configs(everything((300, 500)), HOPPER)[:5],
        *wgmma_configs(problem(dtype="float16"), HOPPER)[1:],
    ],
    ids=named,
)  # fmt: skip
def test_the_kernel_has_the_parameters_that_it_is_given(config):
    taken = inspect.signature(compiled.source(config).py_func).parameters
    maps = ["tensor_maps"] if config.tensor_maps else []
    assert list(taken) == [*maps, *[made.__name__ for made, _ in arguments.types(config)]]


def test_what_is_launched_for_what_is_wanted():
    def kernels(*wanted):
        made = everything((300, 500))
        return [config.kernel for config in v2_configs(dataclasses.replace(made, wanted=wanted), HOPPER)]

    assert kernels("dq") == ["delta", "v2_dq"]
    assert kernels("dk") == kernels("dv") == kernels("dk", "dv") == ["delta", "v2_dkdv"]
    assert kernels("dbias") == ["delta", "v2_dbias"]
    assert kernels("dalibi_slopes") == ["delta", "v2_dq", "dalibi_slopes"]
    assert kernels(*ALL) == ["delta", "v2_dkdv", "v2_dq", "v2_dbias", "dalibi_slopes"]


@pytest.mark.parametrize(("rung", "made_by"), [("mma", mma_configs), ("wgmma", wgmma_configs)])
def test_what_tensor_cores_launch_for_bias_and_mask(rung, made_by):
    made = problem(dtype="float16", mask=empty(300, 500, dtype="bool"), bias=empty(300, 500, dtype="float16"),
                   wanted=("dq", "dk", "dv", "dbias"))  # fmt: skip
    names = f"backward_preprocess mask_bits_of_keys {rung}_dkdv mask_bits {rung}_dq mma_dbias".split()
    assert [config.kernel for config in made_by(made, HOPPER)] == names
    assert select_backward(made, HOPPER, "auto", "cupy").kernel == "wgmma"
    assert made_by(made, HOPPER)[0].natural
    del names[1:4:2]
    without = problem(dtype="float16", bias=empty(300, 500, dtype="float16"), wanted=("dq", "dk", "dv", "dbias"))
    assert [config.kernel for config in made_by(without, HOPPER)] == names
    alone = dataclasses.replace(made, wanted=("dbias",))
    assert [config.kernel for config in made_by(alone, HOPPER)] == [names[0], "mask_bits", "mma_dbias"]


# Rows of 500 keys, at multiples of 16 bytes. By TMA alone, a bias takes the fewest registers.
@pytest.mark.parametrize(
    ("options", "boxes", "streams"),
    [
        ({}, True, (112, 128)),
        (dict(causal=True, sinks=empty(2, dtype="float16")), True, (112, 128)),
        (dict(softcap=3.0), True, (64, 64)),
        (dict(mask=empty(300, 500, dtype="bool")), True, (80, 64)),
        (dict(bias_aligned=False), False, (80, 64)),
    ],
)
def test_when_a_bias_comes_by_tma(options, boxes, streams):
    bias = empty(300, 500, dtype="float16", strides=(504, 1))
    made = problem(dtype="float16", **dict(bias=bias, bias_aligned=True) | options)
    own = [config for config in wgmma_configs(made, HOPPER) if config.kernel in ("wgmma_dkdv", "wgmma_dq")]
    assert [config.bias_boxes for config in own] == [boxes] * 2
    assert tuple(config.stream_rows for config in own) == streams
    assert all(config.shared_bytes <= HOPPER.shared_bytes for config in own)
    maps = [backward_arguments.backward_tensor_maps(config, made) for config in own]
    fetched = [
        arguments.parameters_of(config).arrays[of_last[-1][0]] for config, of_last in zip(own, maps, strict=True)
    ]
    assert fetched == (["bias"] if boxes else ["do"]) * 2


def test_what_mma_dbias_is_compiled_for():
    def config(*shape, dtype="float16"):
        bias = empty(*shape, dtype=dtype)
        return mma_configs(problem(dtype="float16", bias=bias, wanted=("dbias",)), HOPPER)[-1]

    assert [config(*shape).rows_summed for shape in ((300, 500), (1, 500), ())] == [False, True, True]
    assert [config(*shape).keys_summed for shape in ((300, 500), (300, 1), ())] == [False, True, True]
    assert config(300, 500).pairs and not config(300, 500, dtype="float32").pairs
    assert not config(1, 500).pairs and not config(300, 1).pairs


def reading(dtype, wanted=("daux[0]", "daux[2]"), **options):
    """A score_mod with a table, whole numbers and slopes."""
    aux = (empty(2, 999, dtype="float32"), empty(500, dtype="int32"), empty(2, dtype="bfloat16"))
    return problem(dtype=dtype, wanted=wanted, aux=tuple(read("aux", x).layout for x in aux), **options)


def table_and_slopes(s, b, h, i, j, table, ids, slopes):
    return s * slopes[h] + table[h, i - ids[j] + 499]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_what_is_launched_for_aux(dtype):
    def kernels(kernel, **options):
        choice = select_backward(reading(dtype, **options), HOPPER, kernel, "cupy")
        return [config.kernel for config in choice.configs]

    own, of_mma = (["daux_start", f"{name}_daux_bounds", f"{name}_daux_sums", "daux_round"] for name in ("v2", "mma"))
    given = Function.of("score_mod", table_and_slopes)
    assert kernels("v2", score_mod=given) == ["delta", *own]
    assert kernels("v2", score_mod=given, wanted=("dq", "daux[2]")) == ["delta", "v2_dq", *own]
    hides = Function.of("mask_mod", lambda b, h, i, j, table, ids, slopes: i >= j)
    assert kernels("v2", mask_mod=hides) == ["delta", "daux_start", "daux_round"]  # no score depends on aux
    every = kernels("auto", score_mod=given, wanted=("dq", "dk", "dv", "daux[0]"))
    narrow = dtype == "float16"
    assert every[-4:] == (of_mma if narrow else own) and ("wgmma_dq" in every) == narrow
    assert every.count("delta") == (not narrow) and every.count("backward_preprocess") == narrow
    if narrow:
        mask = empty(300, 500, dtype="bool")
        masked = kernels("auto", score_mod=given, mask=mask, wanted=("daux[0]",))
        assert masked == ["backward_preprocess", "mask_bits", *of_mma]
        assert kernels("auto", score_mod=given, mask=mask, wanted=("dq", "daux[0]")).count("mask_bits") == 1


def test_the_workspace_of_aux():
    made = reading("float32", score_mod=Function.of("score_mod", table_and_slopes))
    choice = select_backward(made, HOPPER, "auto", "cupy")
    text = str(BackwardExplanation.of(made, HOPPER, choice))
    elements = 2 * 999 + 2
    # an exponent and a sum for each element, how often a score reads, and delta
    assert f"workspace: {elements * 12 + 4 + 4 * 2 * 300} bytes" in text
    assert "gradients: daux[0], daux[2]" in text and f"daux_round: {-(-elements // 256)} blocks" in text


def test_sums_of_aux_have_room_for_every_term():
    made = reading("float32", score_mod=Function.of("score_mod", table_and_slopes))
    sizes = backward_arguments._sizes_of_aux(made)
    scores = 2 * 300 * 500
    assert sizes["aux_begins"] == (0, 1998, 2000)
    assert 2 ** (sizes["term_bits"] - 1) < scores <= 2 ** sizes["term_bits"]
    assert 2 ** (sizes["run_bits"] - 1) < 4 * 500 <= 2 ** sizes["run_bits"]


@pytest.mark.parametrize(("rung", "made_by"), [("mma", mma_configs), ("wgmma", wgmma_configs)])
def test_what_tensor_cores_launch_for_a_mask_mod(rung, made_by):
    given = dict(dtype="float16", mask_mod=Function.of("mask_mod", earlier))
    configs = made_by(problem(256, **given), HOPPER)  # dK and dV apart, which read the same states
    of_dkdv, of_dq = (c for c in configs if c.kernel.startswith("tile_states"))
    of_keys, of_queries = (f"tile_states{side} tile_order{side}" for side in ("_of_keys", ""))
    names = [*of_keys.split(), f"{rung}_dkdv", f"{rung}_dkdv", *of_queries.split(), f"{rung}_dq"]
    assert [config.kernel for config in configs[1:]] == names
    _, _, order_of_dkdv, dk, dv, _, order_of_dq, dq = configs
    assert of_dkdv.tile == order_of_dkdv.tile == dk.states_tile == dv.states_tile and of_dkdv.tile.of_keys
    assert of_dq.tile == order_of_dq.tile == dq.states_tile and not of_dq.tile.of_keys
    assert (of_dkdv.tile.own, of_dkdv.tile.other) == (dk.tile_n, dk.tile_m)
    assert (of_dq.tile.own, of_dq.tile.other) == (dq.tile_m, dq.tile_n)


# The smallest shared memory there is, and the largest rows that must fit into it; tiles shrink with them.
@pytest.mark.parametrize("target", [TURING, AMPERE, A100, HOPPER, B200, RTX_5090], ids=lambda target: target.name)
def test_tiles_fit_every_gpu(target):
    previous = None
    for head_dim in (16, 64, 128, 256, 576):
        choice = select_backward(problem(head_dim), target, "v2", "cupy")
        assert all(config.shared_bytes <= target.shared_bytes for config in choice.configs)
        tiles = [(config.tile_m, config.tile_n) for config in choice.configs if hasattr(config, "tile_m")]
        assert previous is None or all(one <= other for one, other in zip(tiles, previous, strict=True))
        previous = tiles


# Short on either side: a tile is not mostly past the last row, and never of no rows.
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 500), (300, 1), (40, 40), (0, 0)])
def test_few_rows_take_small_tiles(seqlen_q, seqlen_k):
    rows, columns = empty(1, 2, seqlen_q, 64, dtype="float32"), empty(1, 2, seqlen_k, 64, dtype="float32")
    made = problem(do=rows, q=rows, o=rows, k=columns, v=columns, lse=empty(1, 2, seqlen_q, dtype="float32"))
    _, dkdv, dq = v2_configs(made, HOPPER)
    assert dkdv.tile_n <= max(32, 2 * seqlen_k - 1) and dq.tile_m <= max(32, 2 * seqlen_q - 1)


def test_small_tiles_in_the_simulator():
    made = [config for config in v2_configs(problem(16), SIMULATOR) if hasattr(config, "tile_m")]
    assert all((config.tile_m, config.tile_n) == (16, 16) for config in made)


# Each kernel that has no backward, where another has one and would run.
@pytest.mark.parametrize("kernel", [name for name in KERNELS if name not in WITH_BACKWARD])
def test_what_is_not_built_names_what_would_run(kernel):
    with pytest.raises(NotImplementedError, match=f"kernel='{kernel}' .*not built yet.*What would run.*'v2'"):
        select_backward(problem(), HOPPER, kernel, "cupy")
    with pytest.raises(NotImplementedError, match=f"kernel='{kernel}' .*not built yet.*What would run.*'cpu'"):
        select_backward(problem(), HOST, kernel)


def by_pairs(b, h, i, j):
    return i // 2 >= j // 2


@pytest.mark.parametrize(
    ("made", "target", "kernel", "words"),
    [
        (problem(), HOST, "v2", "no GPU is usable .it is not plugged in.*NUMBA_ENABLE_CUDASIM.*'reference' or 'cpu'"),
        (problem(), dataclasses.replace(HOPPER, arrays_on_host=True), "v2", "in host memory; copy them there first"),
        (problem(), HOPPER, "reference", "host memory"),
        (problem(), HOPPER, "cpu", "host memory"),
        (problem(264), HOPPER, "wgmma", "it takes head_dim up to 256, not 264 and 264.*'v2'"),
        (
            problem(score_mod=Function.of("score_mod", lambda s, b, h, i, j: s)),
            HOPPER,
            "wgmma",
            "no score_mod in float32",
        ),
        (problem(dropout_p=0.5), HOPPER, "wgmma", "its gradients take no dropout_p in float32 yet"),
        (problem(dtype="float64"), HOPPER, "wgmma", "it takes float16, bfloat16, float32, not float64"),
        (problem(9000), TURING, "v2", "head_dim 9000 and 9000 in float32 need [0-9]+ bytes of shared memory.*T4"),
    ],
)
def test_refusals(made, target, kernel, words):
    with pytest.raises(NotImplementedError, match=words):
        select_backward(made, target, kernel, "numpy" if target.arrays_on_host else "cupy")


def test_what_auto_takes():
    def kernel(target, **options):
        family = "numpy" if target.arrays_on_host else "cupy"
        return select_backward(problem(**options), target, "auto", family).kernel

    assert kernel(TURING) == kernel(SIMULATOR) == "v2"
    assert kernel(A100) == kernel(HOPPER, dtype="float64") == kernel(A100, dtype="float64") == kernel(B200) == "mma"
    assert kernel(HOPPER) == kernel(HOPPER, mask=empty(500, dtype="bool")) == "wgmma"
    assert kernel(HOPPER, head_dim=256) == "wgmma" and kernel(HOPPER, dropout_p=0.5) == "mma"
    assert kernel(HOPPER, dtype="float16") == "wgmma" and kernel(TURING, dtype="float16") == "v2"
    assert kernel(A100, dtype="float16") == kernel(B200, dtype="bfloat16") == "mma"
    assert kernel(HOST) == "cpu"


def test_the_kernels_of_a_backward_are_explained():
    made = everything((300, 500))
    text = str(BackwardExplanation.of(made, HOPPER, select_backward(made, HOPPER, "auto", "cupy")))
    for fragment in (
        "kernel 'v2' on H200",
        "delta: ",
        "v2_dkdv: ",
        "v2_dbias: ",
        "dalibi_slopes: 2 blocks",
        "not 'wgmma', 'mma': ",
    ):
        assert fragment in text, text


@pytest.mark.parametrize(
    ("kernel", "dtype", "words"),
    [
        ("mma", "float16", "P and dS are rounded"), ("mma", "float32", "3xTF32"),
        ("wgmma", "bfloat16", "P and dS are rounded"), ("wgmma", "float32", "into three of 8 bits"),
    ],
)  # fmt: skip
def test_the_accuracy_of_tensor_cores_is_explained(kernel, dtype, words):
    made = problem(64, dtype=dtype)
    text = str(BackwardExplanation.of(made, HOPPER, select_backward(made, HOPPER, kernel, "cupy")))
    assert re.search(f"sums: .*{words}", text), text


def test_rows_for_plain_scores_serve_no_others():
    def tiles_of(kernel, **options):
        choice = select_backward(problem(64, dtype="float32", **options), HOPPER, "mma", "cupy")
        return next((c.tile_m, c.tile_n) for c in choice.configs if c.kernel == kernel)

    assert tiles_of("mma_dq_wide") == (64, 64) and tiles_of("mma_dq_wide", softcap=3.0) == (64, 32)


def test_masks_and_bias_in_float32_have_kernels_beside_the_tiles():
    given = dict(mask=empty(500, dtype="bool"), bias=empty(500, dtype="float32"))
    made = problem(256, dtype="float32", wanted=("dq", "dk", "dv", "dbias"), **given)
    configs = select_backward(made, HOPPER, "mma", "cupy").configs
    names = [config.kernel for config in configs]
    apart = ["mma_dkdv_wide"] * 2
    assert names == ["delta", "mask_bits_of_keys", *apart, "mask_bits", "mma_dq_wide", "v2_dbias"]
    assert (configs[-2].tile_m, configs[-2].tile_n) == (64, 16), "where nothing is read 64 x 32"


def test_the_workspace_is_explained():
    made = problem(72, dtype="float16", wanted=("dk", "dv"))
    choice = select_backward(made, HOPPER, "auto", "cupy")
    pieces = 2 * 19  # of 16 queries: 300 of each of two heads
    text = str(BackwardExplanation.of(made, HOPPER, choice))
    assert choice.kernel == "wgmma" and f"workspace: {pieces * 2 * 16 * 4} bytes beside the gradients" in text, text


def test_what_wgmma_runs_in_float32():
    def made(head_dim, **options):
        choice = select_backward(problem(head_dim, **options), HOPPER, "wgmma", "cupy")
        return {c.kernel: (c.tile_m, c.tile_n) for c in choice.configs if isinstance(c, WgmmaBackwardFloat32Config)}

    assert made(64) == dict(wgmma_dkdv_float32=(64, 64), wgmma_dq_float32=(64, 64))
    assert made(72, head_dim_v=8) == made(128) == dict(wgmma_dkdv_float32=(48, 64), wgmma_dq_float32=(64, 48))
    read = dict(wgmma_dkdv_float32=(32, 64), wgmma_dq_float32=(64, 48))
    assert made(128, mask=empty(500, dtype="bool")) == read, "what is read takes registers"
    assert list(made(64, wanted=("dq",))) == ["wgmma_dq_float32"]
    (dkdv,) = select_backward(problem(64, wanted=("dv",)), HOPPER, "wgmma", "cupy").configs[1:]
    assert dkdv.of_dv and not dkdv.of_dk and grid(dkdv, problem(64)) == 2 * 8


def test_above_head_dim_128_two_blocks_share_the_columns_in_float32():
    def made(head_dim, **options):
        choice = select_backward(problem(head_dim, **options), HOPPER, "auto", "cupy")
        return {c.kernel: (c.tile_m, c.tile_n) for c in choice.configs if isinstance(c, WgmmaBackwardFloat32Config)}

    plain = dict(wgmma_dkdv_paired=(64, 64), wgmma_dq_paired=(64, 64))
    assert made(132, head_dim_v=8) == made(8, head_dim_v=256) == made(256) == plain
    changed = dict(wgmma_dkdv_paired=(48, 64), wgmma_dq_paired=(64, 64))
    assert made(256, softcap=3.0) == made(256, mask=empty(500, dtype="bool")) == changed, "it takes registers"
    given = problem(256)
    _, dkdv, dq = select_backward(given, HOPPER, "wgmma", "cupy").configs
    assert grid(dkdv, given) == 2 * (2 * 8) and grid(dq, given) == 2 * (2 * 5), "pairs of blocks"


@pytest.mark.parametrize("kind", [WgmmaPairedDkdvConfig, WgmmaPairedDqConfig])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "halves", "panels"),
    [(129, 8, (80, 16), 2), (256, 256, (128, 128), 2), (40, 255, (32, 128), 2), (130, 136, (80, 80), 2)],
)
def test_shared_memory_of_a_pair(kind, head_dim, head_dim_v, halves, panels):
    """Halves are whole steps of a product; two places for tiles, of so many panels; all of it in a block's 227 KB."""
    config = kind("", "float32", head_dim, head_dim_v, 64, 64, stages_a=1, stages_b=1)
    assert (config.head_dim_padded, config.head_dim_v_padded) == halves and config.panels == panels
    own = [3 * 64 * 128 * (1 + (columns > 64)) for columns in halves]
    sizes = [*own, 2 * panels * 3 * 64 * 128, 64 * 64 * 4, 64 * 64 * 4, 12 * 4, 64, (5 * panels + 5) * 8]
    plan, at = config.shared_layout(), config.barriers()
    assert list(plan) == [0, *itertools.accumulate(sizes)] and all(place % 1024 == 0 for place in plan[:3])
    assert at.a_empty - at.a_full == 8 * panels and at.b_full - at.a_empty == 16 * panels and at.end == plan.end
    assert config.shared_bytes == 1024 + plan.end <= HOPPER.shared_bytes


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(stages_a=2), "must be 1, not 2 and 1"), (dict(head_dim=257), "at most 256, not 257 and 64"),
        (dict(tile_m=80), "16 to 64 rows, in steps of 16, not 80"), (dict(uses=uses(dropout_p=True)), "no dropout_p"),
    ],
)  # fmt: skip
def test_what_a_config_of_a_pair_may_say(changed, words):
    given = dict(kernel="", dtype="float32", head_dim=136, head_dim_v=64, tile_m=64, tile_n=64, stages_a=1, stages_b=1)
    WgmmaPairedDkdvConfig(**given)
    with pytest.raises(ValueError, match=words):
        WgmmaPairedDkdvConfig(**given | changed)


@pytest.mark.parametrize("kind", [WgmmaDkdvFloat32Config, WgmmaDqFloat32Config])
@pytest.mark.parametrize(("head_dim", "head_dim_v", "rows"), [(64, 64, 64), (40, 128, 48), (128, 128, 48)])
def test_shared_memory_of_wgmma_in_float32(kind, head_dim, head_dim_v, rows):
    """Parts of whole panels, each place behind the one before, and all of it in a block's 227 KB."""
    tile = (rows, 64) if kind is WgmmaDkdvFloat32Config else (64, rows)
    config = kind("", "float32", head_dim, head_dim_v, *tile)
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
        (dict(dtype="float16"), "take float32, not float16"), (dict(tile_n=128), "own rows must be 64, not 128"),
        (dict(tile_m=80), "16 to 64 rows, in steps of 16, not 80"), (dict(tile_m=24), "in steps of 16, not 24"),
        (dict(stages_b=0), "must be 1 to 4, not 2 and 0"), (dict(head_dim_v=136), "at most 128, not 64 and 136"),
        (dict(uses=uses(dropout_p=True)), "takes no dropout_p"),
        (dict(of_dk=False, of_dv=False), "of_dk or of_dv must be True"),
    ],
)  # fmt: skip
def test_what_a_config_of_wgmma_in_float32_may_say(changed, words):
    given = dict(kernel="wgmma_dkdv_float32", dtype="float32", head_dim=64, head_dim_v=64, tile_m=64, tile_n=64)
    WgmmaDkdvFloat32Config(**given)
    with pytest.raises(ValueError, match=words):
        WgmmaDkdvFloat32Config(**given | changed)


def mma_tiles(head_dim, target=HOPPER, **options):
    """{kernel: tile_m, tile_n, column_groups} of what select makes for mma."""
    configs = select_backward(problem(head_dim, dtype="float16", **options), target, "mma", "cupy").configs
    assert configs[0].kernel == "backward_preprocess" and configs[0].wide
    return [(c.kernel, c.tile_m, c.tile_n, c.column_groups) for c in configs[1:] if c.kernel.startswith("mma")]


def test_warps_share_rows_where_sums_of_whole_rows_do_not_fit():
    assert mma_tiles(64) == [("mma_dkdv", 32, 128, 1), ("mma_dq", 128, 32, 1)]
    assert mma_tiles(128)[0] == ("mma_dkdv", 64, 64, 2)
    assert mma_tiles(128, A100)[0] == ("mma_dkdv", 32, 64, 1), "two blocks of the first row do not fit there"
    assert mma_tiles(256) == [("mma_dkdv", 128, 64, 4), ("mma_dq", 128, 64, 2)]
    assert mma_tiles(256, A100)[-1] == ("mma_dq", 64, 64, 2)
    assert mma_tiles(200) == mma_tiles(256)
    assert mma_tiles(256, wanted=("dk",)) == [("mma_dkdv", 32, 128, 1)], "they sum up both or none"
    assert mma_tiles(256, softcap=2.0)[0] == ("mma_dkdv", 32, 64, 1), "not plain"


def doubled(s, b, h, i, j):
    return s * 2


def earlier(b, h, i, j):
    return j <= i


@pytest.mark.parametrize("given", [dict(score_mod=doubled), dict(mask_mod=earlier)], ids=lambda given: min(given))
def test_which_backwards_take_functions(given):
    given = {name: Function.of(name, function) for name, function in given.items()}
    (option,) = given

    def chosen(target, **options):
        return select_backward(problem(128, **dict(dtype="float16") | given | options), target, "auto", "cupy")

    on_hopper, on_ampere = chosen(HOPPER), chosen(A100)
    assert on_hopper.kernel == "wgmma" and on_ampere.kernel == "mma"
    assert [chosen(HOPPER, dtype=dtype).kernel for dtype in ("float32", "float64")] == ["mma"] * 2
    assert mma_tiles(128, **given) == [("mma_dkdv", 32, 64, 1), ("mma_dq", 64, 32, 1)]
    with_softcap = mma_tiles(128, softcap=2.0, **given)
    assert [name for name, *_ in with_softcap] == ["mma_dkdv", "mma_dkdv", "mma_dq"], "other options take registers"
    assert mma_tiles(64, **given) == mma_tiles(64, softcap=2.0)
    text = str(BackwardExplanation.of(problem(128, dtype="float16", **given), HOPPER, on_hopper))
    assert "kernel 'wgmma'" in text and "not 'wgmma'" not in text, text


@pytest.mark.parametrize("head_dim", [8, 72, 128, 200, 256])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", [MmaDkdvConfig, MmaDqConfig])
def test_the_parts_of_shared_memory_do_not_overlap(kind, stages, groups, head_dim):
    config = kind("mma_dkdv", "float16", head_dim, head_dim, 64, 64, warp_rows=32, column_groups=groups, stages=stages)
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
        number = {MmaDkdvConfig: 6, MmaDqConfig: 4}[kind]
        assert offsets[number + 1] - offsets[number] == own, "64 columns of P or dS"
        assert offsets[number] % config.ALIGNMENT == 0


@pytest.mark.parametrize("head_dim", [8, 72, 256])
@pytest.mark.parametrize("kind", [WgmmaDkdvConfig, WgmmaDqConfig])
def test_the_parts_of_a_wgmma_blocks_shared_memory_do_not_overlap(kind, head_dim):
    config = kind("wgmma", "float16", head_dim, 64, 64, 64, stages_a=3, stages_b=1)
    plan, panels = config.shared_layout(), -(-head_dim // 64)
    assert list(plan) == sorted(plan) and plan.end + config.ALIGNMENT == config.shared_bytes
    assert all(place % config.ALIGNMENT == 0 for place in plan[:4]), "panels"
    assert plan.own_b - plan.own_a == 64 * 128 * panels and plan.stream_a - plan.own_b == 64 * 128
    assert plan.stream_b - plan.stream_a == 3 * 64 * 128 * panels and plan.lse_delta - plan.stream_b == 64 * 128
    assert plan.ds == plan.dq == plan.lse_delta, "these are wgmma_fused's"
    assert plan.state - plan.lse_delta == (3 * 8 * 64 if kind is WgmmaDkdvConfig else 0)
    assert config.barriers().end - plan.barriers == 8 * (1 + 2 * 3 + 2 * 1) <= plan.end - plan.barriers


ONE_MULTIPROCESSOR = dataclasses.replace(HOPPER, multiprocessors=1)


def wgmma_tiles(head_dim, multiprocessors=1, **options):
    """[(kernel, tile_m, tile_n, which gradients)] of what select makes for wgmma; on one multiprocessor there are never
    few blocks."""
    target = dataclasses.replace(HOPPER, multiprocessors=multiprocessors)
    configs = select_backward(problem(head_dim, dtype="float16", **options), target, "wgmma", "cupy").configs
    assert configs[0].kernel == "backward_preprocess"
    of = {(True, True): "dk dv", (True, False): "dk", (False, True): "dv", (None, None): "dq"}
    which = [of[getattr(c, "of_dk", None), getattr(c, "of_dv", None)] for c in configs[1:]]
    return [(c.kernel, c.tile_m, c.tile_n, words) for c, words in zip(configs[1:], which, strict=True)]


@pytest.fixture
def two_kernels(monkeypatch):
    """wgmma's two kernels also where one is faster."""
    monkeypatch.setattr(backward_kernels, "gains_by_one_kernel", lambda *_: False)
    wgmma_configs.cache_clear()
    yield
    wgmma_configs.cache_clear()


@pytest.mark.usefixtures("two_kernels")
def test_the_kernels_of_the_hopper_backward():
    both = [("wgmma_dkdv", 64, 128, "dk dv"), ("wgmma_dq", 128, 112, "dq")]
    assert wgmma_tiles(128) == both
    assert wgmma_tiles(128, wanted=("dq",)) == both[1:]
    assert wgmma_tiles(128, wanted=("dv",)) == [("wgmma_dkdv", 64, 128, "dv")]
    assert [words for *_, words in wgmma_tiles(256)] == ["dk", "dv", "dq"], "both sums do not fit into registers"
    assert wgmma_tiles(200) == wgmma_tiles(256)


# By how many registers take what decides about each score: (which of them, tile_m of dK and dV, tile_n of dQ).
BY_ELEMENT = [
    (dict(mask_mod=earlier), 64, 128),
    (dict(mask="bool"), 64, 112),
    (dict(dropout_p=0.1), 64, 112),
    (dict(mask="bool", softcap=2.0), 48, 80),
    (dict(mask="bool", mask_mod=earlier), 32, 64),
    (dict(score_mod=doubled), 48, 80),
    (dict(score_mod=doubled, mask_mod=earlier, softcap=2.0), 48, 80),
    (dict(bias="float32", mask="bool"), 48, 80),
    (dict(bias="float32", softcap=2.0), 32, 64),
    (dict(bias="float16", dropout_p=0.1), 32, 64),
    (dict(score_mod=doubled, bias="float16"), 32, 64),
]


@pytest.mark.usefixtures("two_kernels")
@pytest.mark.parametrize(
    ("options", "tile_m", "tile_n"), BY_ELEMENT, ids=lambda x: "-".join(x) if isinstance(x, dict) else str(x)
)
def test_what_decides_about_each_score_has_tiles_of_its_own(options, tile_m, tile_n):
    made = {}
    for name, value in options.items():
        of_array, of_function = name in ("bias", "mask"), name in ("score_mod", "mask_mod")
        made[name] = empty(300, 500, dtype=value) if of_array else Function.of(name, value) if of_function else value
    found = {c.kernel: c for c in wgmma_configs(problem(128, dtype="float16", **made), ONE_MULTIPROCESSOR)}
    dkdv, dq = found["wgmma_dkdv"], found["wgmma_dq"]
    assert (dkdv.tile_m, dkdv.tile_n, dq.tile_m, dq.tile_n) == (tile_m, 128, 128, tile_n)
    assert dkdv.by_element and dq.by_element


@pytest.mark.parametrize(
    ("options", "tile_m"),
    [(dict(mask_mod=earlier), 128), (dict(mask="bool"), 112), (dict(dropout_p=0.1, seed=3), 112),
     (dict(bias="float32", mask="bool"), 80), (dict(score_mod=doubled), 80), (dict(mask="bool", softcap=2.0), 80),
     (dict(bias="float32", softcap=2.0), 64)],
    ids=["mask_mod", "mask", "dropout", "bias and mask", "score_mod", "mask and softcap", "bias and softcap"],
)  # fmt: skip
def test_at_head_dim_64_what_is_read_has_larger_tiles_than_what_is_computed(options, tile_m):
    arrays = {name: empty(300, 500, dtype=x) for name, x in options.items() if name in ("bias", "mask")}
    functions = {name: Function.of(name, x) for name, x in options.items() if name.endswith("_mod")}
    given = options | arrays | functions
    (found,) = (x for x in wgmma_configs(problem(64, dtype="float16", **given), HOPPER) if x.kernel == "wgmma_dkdv")
    assert found.tile_m == tile_m


def tiles_with(head_dim, options):
    """Of wgmma's kernels, (tile_m, tile_n) each."""
    made = wgmma_configs(problem(head_dim, dtype="bfloat16", **options), ONE_MULTIPROCESSOR)
    return [(x.tile_m, x.tile_n) for x in made if x.kernel in ("wgmma_dkdv", "wgmma_dq")]


def test_scores_of_which_no_derivative_is_kept_have_larger_tiles():
    slopes = dict(alibi_slopes=empty(2, dtype="float32"))
    assert tiles_with(64, slopes) == [(128, 128), (128, 128)]
    assert tiles_with(64, slopes | dict(softcap=2.0)) == [(64, 128), (128, 64)]
    assert tiles_with(128, slopes) == [(64, 128), (128, 112)]
    assert tiles_with(128, dict(softcap=2.0)) == [(48, 128), (128, 64)]


@pytest.mark.usefixtures("two_kernels")
def test_blocks_are_halved_where_they_are_few():
    """2 heads of 500 keys and 300 queries: 8 and 6 blocks of 128 rows."""
    tiles = {n: [row[:3] for row in wgmma_tiles(128, n)] for n in (11, 12, 15, 16)}
    whole, halved = [("wgmma_dkdv", 64, 128), ("wgmma_dq", 128, 112)], [("wgmma_dkdv", 64, 64), ("wgmma_dq", 64, 112)]
    assert tiles == {11: whole, 12: [whole[0], halved[1]], 15: [whole[0], halved[1]], 16: halved}


def test_the_parts_of_the_one_kernels_shared_memory_do_not_overlap():
    for tile_m, head_dim, stages in ((64, 100, 3), (128, 60, 2)):
        config = WgmmaFusedConfig("wgmma_fused", "float16", head_dim, 40, tile_m, 128, stages_a=stages, stages_b=2)
        plan = config.shared_layout()
        # It begins at a multiple of ALIGNMENT, as the assembler is told. Nothing is left for a gap in front.
        assert list(plan) == sorted(plan) and plan.end == config.shared_bytes <= HOPPER.shared_bytes
        assert config.shared_alignment == config.ALIGNMENT
        assert all(place % config.ALIGNMENT == 0 for place in plan[:5]), "panels"
        assert plan.dq - plan.ds == 2 * tile_m * 128 * 2 and plan.lse_delta - plan.dq == 2 * 2 * 64 * 64 * 4
    assert config.barriers().end <= plan.end


def test_when_one_kernel_takes_all_gradients_in_float32_and_float64():
    def kernels(head_dim=128, seqlen_q=2048, seqlen_k=2048, heads=8, batch=1, dtype="float32", target=HOPPER, **more):
        of_q, of_k = ((batch, heads, seqlen, head_dim) for seqlen in (seqlen_q, seqlen_k))
        given = {name: empty(*of_q, dtype=dtype) for name in ("do", "q", "o")}
        given |= {name: empty(*of_k, dtype=dtype) for name in ("k", "v")} | dict(lse=empty(*of_q[:3], dtype=dtype))
        return [config.kernel for config in wide_configs(problem(head_dim, dtype=dtype, **given, **more), target)]

    one, two = ["delta", "mma_wide_fused", "mma_dq_finish"], ["delta", "mma_dkdv_wide", "mma_dq_wide"]
    assert all(kernels(head_dim, heads=32) == one for head_dim in (36, 64, 68, 128, 132, 256))
    assert kernels(32, heads=32) == kernels(64, heads=16) == two
    assert kernels(256, 1024, 1024) == one
    assert kernels() == kernels(causal=True) == kernels(window=(9, 9)) == one
    assert kernels(batch=1) == kernels(batch=50), "a row's bits must not depend on its batch"
    assert kernels(seqlen_k=2049) == kernels(heads=4) == kernels(seqlen_k=2047) == two
    assert kernels(wanted=("dk", "dv")) == two[:2]
    for changed in (dict(softcap=5.0), dict(dropout_p=0.1), dict(mask_mod=Function.of("mask_mod", earlier))):
        assert "mma_wide_fused" not in kernels(**changed)
    assert kernels(head_dim=126) == two, "rows of dq have to begin at multiples of 16 bytes"
    assert kernels(target=RTX_5090)[1] == "mma_dkdv_wide", "where its tiles do not fit"


def test_who_takes_all_gradients_in_float64():
    """Where the products have an instruction of their own parts of dQ are carried; elsewhere it gains above 160."""

    def kernels(target, head_dim=128, heads=32, **options):
        of_all = dict.fromkeys(("do", "q", "k", "v", "o"), empty(1, heads, 2048, head_dim, dtype="float64"))
        given = of_all | dict(lse=empty(1, heads, 2048, dtype="float64"))
        made = wide_configs(problem(head_dim, dtype="float64", **given, **options), target)
        return [config.kernel for config in made], [config.cluster for config in made]

    carried = ["delta", "mma_wide_carried", "mma_dq_finish"]
    for head_dim in (34, 64, 66, 128):
        assert kernels(HOPPER, head_dim) == (carried, [1, 1, 1])
    assert kernels(HOPPER, 130) == kernels(HOPPER, 256) == (carried, [1, 2, 1])
    assert kernels(HOPPER, 32)[0] == kernels(HOPPER, softcap=5.0)[0] == ["delta", "mma_dkdv_wide", "mma_dq_wide"]
    assert kernels(A100, 128)[0] == ["delta", "mma_dkdv_wide", "mma_dq_wide"]
    assert kernels(B200, 256)[0] == ["delta", "mma_wide_fused", "mma_dq_finish"]
    assert kernels(B200, 160)[0][1] == "mma_dkdv_wide"


def test_when_one_kernel_takes_all_gradients():
    def kernels(head_dim=128, seqlen_q=2048, seqlen_k=2048, heads=8, batch=1, heads_kv=None, **options):
        of_q, of_k = (batch, heads, seqlen_q, head_dim), (batch, heads_kv or heads, seqlen_k, head_dim)
        given = {name: empty(*of_q, dtype="float16") for name in ("do", "q", "o")}
        given |= {name: empty(*of_k, dtype="float16") for name in ("k", "v")} | dict(
            lse=empty(*of_q[:3], dtype="float32")
        )
        choice = select_backward(problem(head_dim, dtype="float16", **given, **options), HOPPER, "wgmma", "cupy")
        return [config.kernel for config in choice.configs]

    one, two = ["backward_preprocess", "wgmma_fused", "wgmma_round"], ["backward_preprocess", "wgmma_dkdv", "wgmma_dq"]
    in_parts = [*one, "wgmma_add_parts"]
    assert kernels() == kernels(causal=True) == kernels(window=(99, 99)) == one
    assert kernels(batch=1) == kernels(batch=50), "a row's bits must not depend on its batch"
    assert all(kernels(head_dim) == one for head_dim in (16, 40, 64, 72, 80, 88, 96, 112))
    assert "wgmma_fused" not in kernels(136)
    # Few blocks, or a long line of them, unless its queries are few.
    assert kernels(seqlen_q=512, seqlen_k=8192) == kernels(64, 448, 2048) == one
    assert kernels(seqlen_q=512, seqlen_k=8192, causal=True) == kernels(seqlen_q=512, seqlen_k=2047) == two
    assert kernels(seqlen_q=512, seqlen_k=8192, heads=7) == kernels(seqlen_q=513, seqlen_k=8192) == two
    assert kernels(seqlen_k=2049) == kernels(seqlen_k=2049, causal=True) == kernels(seqlen_k=129) == two
    # Fewer keys: of narrow heads, or under a mask.
    assert kernels(64, seqlen_q=1024, seqlen_k=1024) == kernels(64, 1024, 1024, causal=True) == one
    assert kernels(88, 1024, 1024, causal=True) == one
    assert kernels(64, 1023, 1023) == kernels(88, 1024, 1024) == kernels(88, 1023, 1023, causal=True) == two
    # One tile of keys, whose block writes dQ itself.
    assert kernels(64, 900, 77) == kernels(64, 40, 128, heads=1) == one[:2]
    assert kernels(64, 0, 77) == kernels(64, 0, 140) == kernels(88, 0, 140) == two, "it takes a first query for granted"
    # More of them, where dQ stays in shared memory: of two tiles of 128 queries, up to head_dim 64.
    of_group, many = dict(heads=16, heads_kv=8, batch=50), dict(batch=50)
    assert kernels(64, 40, 129, **many) == kernels(64, 256, 512, **many) == kernels(64, 128, 129, **of_group) == one[:2]
    assert kernels(64, 257, 257, **many) == kernels(88, 40, 129, **many) == kernels(64, 129, 129, **of_group) == one
    assert kernels(64, 128, 129, heads=24, heads_kv=8, batch=50) == one
    # Where blocks of one tile all fit on the GPU: only where their sums have the same order.
    assert kernels(64, 40, 129, batch=8) == one and kernels(64, 40, 129, batch=9) == one[:2], "128 and 144 blocks"
    assert kernels(64, 40, 129, causal=True) == kernels(64, 40, 129, causal=True, **many) == one[:2]
    of_group = dict(heads=32, heads_kv=4, seqlen_q=900, seqlen_k=77, causal=True)
    assert kernels(**of_group) == [*one[:2], "wgmma_add_parts"]
    assert "wgmma_fused" not in kernels(seqlen_k=77, softcap=5.0) + kernels(80, seqlen_k=77)
    assert kernels(heads=5, seqlen_q=4096, seqlen_k=4096) == kernels(seqlen_q=2047, seqlen_k=2047) == two
    assert kernels(heads=7, seqlen_q=4096, seqlen_k=4096) == one
    assert kernels(heads=4, seqlen_q=4096, seqlen_k=4096, causal=True) == one
    assert kernels(heads=3, seqlen_q=8192, seqlen_k=8192, causal=True) == two
    # Long heads: two of them under a mask, or one with sums of dQ in lines.
    long = dict(causal=True, seqlen_q=16384, seqlen_k=16384)
    assert kernels(heads=2, **long) == kernels(64, heads=2, **long) == kernels(heads=1, **long) == one
    assert kernels(heads=3, **long) == kernels(64, heads=1, **long) == two
    assert kernels(heads=2, causal=True, seqlen_q=16383, seqlen_k=16383) == two
    # If every query sees every key: few heads with 1.5 times as many key tiles as run at a time, narrow ones with 2.
    assert kernels(heads=4, seqlen_q=6144, seqlen_k=6144) == kernels(64, heads=4, seqlen_q=8192, seqlen_k=8192) == one
    assert kernels(heads=4, seqlen_q=6016, seqlen_k=6016) == kernels(64, heads=4, seqlen_q=8064, seqlen_k=8064) == two
    assert kernels(heads=4, seqlen_q=512, seqlen_k=8192) == two
    assert kernels(72, causal=True) == kernels(80, causal=True) == kernels(80, 512, 512, causal=True) == one
    assert kernels(heads=32, heads_kv=8) == one and kernels(heads=32, heads_kv=4) == two
    # Parts of a group are heads of their own under a mask.
    assert kernels(heads=16, heads_kv=1, causal=True) == kernels(heads=32, heads_kv=8, causal=True) == in_parts
    assert kernels(64, heads=14, heads_kv=2, causal=True) == in_parts
    # Without an order there is no line.
    assert kernels(heads=2, seqlen_q=512, seqlen_k=8192, deterministic=False) == one
    # Short sequences, of which there are many.
    assert kernels(heads=1, seqlen_q=512, seqlen_k=200) == one and kernels(heads=1, seqlen_q=513) == two
    assert kernels(softcap=5.0) == two and kernels(wanted=("dk", "dv")) == two[:2]
    # Random bits take registers.
    assert kernels(dropout_p=0.1) == kernels(88, dropout_p=0.1) == one and kernels(64, dropout_p=0.1) == two
    assert "wgmma_fused" not in kernels(mask=empty(2048, 2048, dtype="bool"))
    assert "wgmma_fused" not in kernels(mask_mod=Function.of("mask_mod", earlier))


@pytest.mark.parametrize("kernel", ["mma", "wgmma"])
def test_nothing_reads_the_mask_of_an_empty_batch(kernel):
    """A mask of no batch entries has no elements. Broadcast dimensions, as an empty array may have all, repeat none."""
    arrays = {name: empty(0, 2, 300, 64, dtype="float16") for name in ("do", "q", "o")}
    arrays |= {name: empty(0, 2, 500, 64, dtype="float16") for name in ("k", "v")}
    mask = empty(0, 1, 1, 500, dtype="bool", strides=(0, 0, 0, 0))
    made = problem(dtype="float16", **arrays, lse=empty(0, 2, 300, dtype="float32"), mask=mask)
    configs = select_backward(made, HOPPER, kernel, "cupy").configs
    assert any(isinstance(config, MaskBitsConfig) for config in configs)
    assert not any(grid(config, made) for config in configs)


def test_how_many_heads_of_a_group_a_block_takes():
    def members(heads, heads_kv, head_dim=128, seqlen=2048, causal=True, one_kernel=True, batch=1, **options):
        of_q, of_k = (batch, heads, seqlen, head_dim), (batch, heads_kv, seqlen, head_dim)
        given = {name: empty(*of_q, dtype="float16") for name in ("do", "q", "o")}
        given |= {name: empty(*of_k, dtype="float16") for name in ("k", "v")} | dict(
            lse=empty(*of_q[:3], dtype="float32")
        )
        made = problem(head_dim, dtype="float16", causal=causal, **given, **options)
        return backward_kernels.members_of_a_part(made, one_kernel)

    assert members(32, 8) == members(6, 2) == members(32, 8, batch=50) == 2 and members(4, 2) == members(8, 8) == 0
    assert members(32, 4, 64) == 4 and members(32, 8, 64) == 0, "tiles of 64 columns are half as large"
    assert members(32, 4, causal=False) == members(32, 4, seqlen=512) == 0
    assert members(32, 4, causal=False, window=(300, 0)) == 2
    assert members(32, 4, 256, one_kernel=False) == 2 and members(64, 8, 256, one_kernel=False) == 0
    assert members(32, 4, 192, one_kernel=False) == 4
    assert members(32, 4, mask_mod=Function.of("mask_mod", earlier)) == 0, "blocks take what is left of tiles in turns"


def test_parts_of_a_group_are_all_of_its_heads():
    for group, members in itertools.product(range(1, 10), (0, 1, 2, 3, 4, 10)):
        parts = parts_of(group, members)
        taken = [part_of(number, parts, group, members) for number in range(3 * parts)]
        heads = [(h_kv, first + n) for h_kv, first, count in taken for n in range(count)]
        assert heads == [(h // group, h) for h in range(3 * group)]
        assert all(0 < count <= (members or group) for *_, count in taken)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_wide_kernel_needs_a_query(dtype, monkeypatch):
    """Without one no previous kernel would set its ticket to 0."""
    monkeypatch.setattr(backward_wide, "gains_by_one_wide_kernel", lambda *_: True)
    for seqlen_q, one in ((1, True), (0, False)):
        of_q, of_k = (1, 2, seqlen_q, 64), (1, 2, 300, 64)
        given = {name: empty(*of_q, dtype=dtype) for name in ("do", "q", "o")}
        given |= {name: empty(*of_k, dtype=dtype) for name in ("k", "v")}
        made = problem(64, dtype=dtype, **given, lse=empty(*of_q[:3], dtype=dtype))
        kernels = [config.kernel for config in wide_configs.__wrapped__(made, HOPPER)]
        assert (kernels[1] in ("mma_wide_fused", "mma_wide_carried")) == one


def test_a_long_head_alone_has_sums_of_dq_in_lines():
    """With as many key tiles as a GPU runs blocks: 128 of 128 keys."""

    def kernels(seqlen_k=16384, seqlen_q=16384, head_dim=128, heads=1, batch=1, **options):
        of_q, of_k = (batch, heads, seqlen_q, head_dim), (batch, 1, seqlen_k, head_dim)
        given = {name: empty(*of_q, dtype="float16") for name in ("do", "q", "o")}
        given |= {name: empty(*of_k, dtype="float16") for name in ("k", "v")}
        made = problem(head_dim, dtype="float16", **given, lse=empty(*of_q[:3], dtype="float32"), **options)
        return made, wgmma_configs(made, HOPPER)

    for batch in (1, 3):
        made, (start, fused, rounds) = kernels(causal=True, batch=batch)
        assert start.dq_lines == fused.dq_lines == rounds.dq_lines == 4 and rounds.kernel == "wgmma_round"
        sizes, tiles = workspace([start, fused, rounds], made), batch * 256
        assert sizes["dq_sums"] == ((tiles * 4 * 64 * 128,), "float32")
        assert sizes["turns"] == ((32 + tiles * 4 * 2,), "uint32")
    assert kernels(window=(500, 0), head_dim=88)[1][1].dq_lines == kernels()[1][1].dq_lines == 4
    others = (dict(seqlen_k=16383), dict(seqlen_q=16383), dict(head_dim=64), dict(heads=2))
    for other in others:
        assert all(getattr(config, "dq_lines", 1) == 1 for config in kernels(**dict(causal=True) | other)[1])
    assert kernels(causal=True, deterministic=False)[1][1].dq_lines == 1
    assert kernels(causal=True, seqlen_q=16383)[1][1].kernel == "wgmma_dkdv"


@pytest.mark.parametrize(
    ("heads", "seqlen", "head_dim", "lines"),
    [
        (2, 8192, 128, 4),  # 128 key tiles, as many as run at a time
        (2, 8064, 128, 0),
        (3, 8192, 96, 2),  # 192 key tiles
        (4, 6144, 128, 2),
        (4, 6016, 128, 0),
        (6, 4096, 128, 1),
        (5, 16384, 128, 1),
        (4, 8192, 64, 1),  # 256 key tiles
        (4, 8064, 64, 0),
    ],
)
def test_a_few_long_heads_that_see_all_keys_have_sums_of_dq_in_lines(heads, seqlen, head_dim, lines):
    """0: two kernels. The batch size does not matter."""
    for batch in (1, 4):
        of_q = (batch, heads, seqlen, head_dim)
        given = {name: empty(*of_q, dtype="float16") for name in ("do", "q", "o", "k", "v")}
        made = problem(head_dim, dtype="float16", **given, lse=empty(*of_q[:3], dtype="float32"))
        start, *others = wgmma_configs(made, HOPPER)
        assert [config.kernel for config in others] == (
            ["wgmma_fused", "wgmma_round"] if lines else ["wgmma_dkdv", "wgmma_dq"]
        )
        if lines:
            assert {config.dq_lines for config in (start, *others)} == {lines}
    any_order = problem(head_dim, dtype="float16", **given, lse=empty(*of_q[:3], dtype="float32"), deterministic=False)
    assert {getattr(config, "dq_lines", 1) for config in wgmma_configs(any_order, HOPPER)} == {1}


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
    made = WgmmaFusedConfig("wgmma_fused", "float16", head_dim, head_dim_v, tile_m, 128)
    assert (made.head_dim_padded, made.dq_columns) == (columns, dq_columns)
    assert made.own_a_bytes == 128 * 2 * dq_columns and made.stream_a_bytes == tile_m * 2 * dq_columns


def test_the_workspace_has_room_for_the_sums_of_all_parts():
    """2 entries of 2 KV heads with groups of 5, in parts of 2, 2 and 1; 300 keys are 3 tiles of 128."""
    arrays = {name: empty(2, 10, 600, 100, dtype="float16") for name in ("do", "q", "o")}
    arrays |= {name: empty(2, 2, 300, 100, dtype="float16") for name in ("k", "v")}
    made = problem(100, dtype="float16", causal=True, **arrays, lse=empty(2, 10, 600, dtype="float32"))
    fused = WgmmaFusedConfig("wgmma_fused", "float16", 100, 100, 64, 128, members=2)
    add = WgmmaAddPartsConfig("wgmma_add_parts", "float16", 100, 100, 64, 128, members=2)
    assert grid(fused, made) == 2 * 2 * 3 * 3 and grid(add, made) == 2 * 2 * 5
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
        choice = select_backward(made, HOPPER, "wgmma", "cupy")
        start, fused = choice.configs[:2]
        assert fused.key_tiles == key_tiles and fused.ordered and start.turns_of == (0 if key_tiles else 128)
        assert ({"turns", "dq_sums"} & set(workspace(choice.configs, made)) == set()) == (key_tiles > 0)
        plan = fused.shared_layout()
        assert plan.lse_delta - plan.dq == 2 * 64 * 64 * (2 if key_tiles == 1 else 2 * 4)
        assert plan.barriers - plan.state == 64 * (1 + stays) and fused.stays == stays
        rings = 1 + 5 * stays + 4 + 4 + 1 + (0 if key_tiles else 8)
        assert fused.barriers().end - plan.barriers == 8 * rings
        assert grid(fused, made) == (100 if key_tiles else 0)
    wide = WgmmaFusedConfig("wgmma_fused", "float16", 128, 128, 64, 128)
    plan = wide.shared_layout()
    assert plan.barriers - plan.state == 64 and wide.barriers().end - plan.barriers == 8 * (1 + 4 + 4 + 1 + 8)


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        # (batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim), full and causal
        ((2, 8, 8, 512, 8192, 128), (16, 2)),
        ((4, 8, 8, 512, 8192, 128), (32, 2)),
        ((4, 8, 8, 513, 8192, 128), (2, 2)),  # more than 1024 key tiles, and more than 512 queries
        ((4, 20, 20, 448, 1500, 64), (80, 10)),
        ((5, 17, 17, 448, 1500, 64), (85, 10)),
        ((2, 10, 10, 4096, 4096, 64), (20, 4)),
        ((1, 64, 8, 4096, 4096, 128), (8, 4)),  # no more than there are
        ((2, 16, 16, 4096, 4096, 128), (16, 4)),  # two equal groups
        ((4, 16, 16, 4096, 4096, 128), (4, 4)),
        ((16, 16, 16, 129, 129, 64), (128, 64)),
        ((0, 2, 2, 300, 300, 64), (1, 42)),
        ((1, 2, 2, 0, 300, 64), (2, 42)),
        ((1, 2, 2, 300, 0, 64), (2, 128)),
        ((1, 1, 1, 10**5, 10**5, 128), (1, 1)),
    ],
)
def test_how_many_heads_are_abreast(shape, found):
    batch, heads, heads_kv, seqlen_q, seqlen_k, dim = shape
    arrays = {name: empty(batch, heads, seqlen_q, dim, dtype="float16") for name in ("do", "q", "o")}
    arrays |= {name: empty(batch, heads_kv, seqlen_k, dim, dtype="float16") for name in ("k", "v")}
    made = [
        problem(dim, dtype="float16", causal=causal, **arrays, lse=empty(batch, heads, seqlen_q, dtype="float32"))
        for causal in (False, True)
    ]
    assert tuple(heads_abreast(x.forward) for x in made) == found
    sizes = backward_arguments.backward_values("wgmma_fused", made[0]).tuples[1]
    assert sizes.heads_abreast == found[0]


def test_only_sums_of_equal_calls_have_an_order():
    made = {}
    for deterministic in (True, False):
        given = problem(128, dtype="float16", deterministic=deterministic)
        made[deterministic] = wgmma_configs(given, HOPPER)[1].ordered
    assert made == {True: True, False: False}


def test_products_begin_with_lse_where_it_can_be_divided_by_the_scale(monkeypatch):
    monkeypatch.setattr(backward_kernels, "gains_by_one_kernel", lambda *_: True)
    wgmma_configs.cache_clear()
    for scale in (0.3, 0.0):
        _, fused, _ = wgmma_configs(problem(64, dtype="float16", scale=scale), HOPPER)
        assert fused.lse_first == (scale != 0)
    wgmma_configs.cache_clear()


def test_where_shared_memory_begins_is_said_to_the_assembler(monkeypatch):
    """Of kernels that say it (`shared_alignment`, the one for all gradients among them); this one compiles faster."""
    small = WgmmaAddPartsConfig("wgmma_add_parts", "float16", 8, 8, 64, 64)
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
def test_blocks_stay_where_there_are_more_tiles_than_multiprocessors(head_dim, batch, seqlen_k, blocks):
    seqlen_q = seqlen_k if seqlen_k > 500 else 200
    arrays = {name: empty(batch, 4, seqlen_q, head_dim, dtype="float16") for name in ("do", "q", "o")}
    arrays |= {name: empty(batch, 4, seqlen_k, head_dim, dtype="float16") for name in ("k", "v")}
    lse = empty(batch, 4, seqlen_q, dtype="float32")
    made = problem(head_dim, dtype="float16", deterministic=False, **arrays, lse=lse)
    choice = select_backward(made, HOPPER, "wgmma", "cupy")
    _, fused = launch_backward.make_backward_launch(choice, made, HOPPER)._steps[:2]
    assert fused.launch._config.kernel == "wgmma_fused"
    many = seqlen_k == 500 or 4 * batch * -(-seqlen_k // 128) > 132
    assert fused.launch._config.stays == many
    assert fused.launch._blocks == blocks


@pytest.mark.parametrize(
    ("seqlen", "heads_kv", "head_dim", "options", "stays"),
    [
        (8192, 8, 128, {}, True), (8256, 8, 128, {}, False), (4160, 4, 128, {}, False), (8256, 8, 64, {}, True),
        (8256, 8, 128, dict(causal=True), True), (8192, 8, 128, dict(dropout_p=0.5, seed=1), False),
    ],
    ids=["short", "long", "long of two members", "long, 64", "long, causal", "dropout"],
)  # fmt: skip
def test_blocks_do_not_stay_for_long_walks_of_wide_heads(seqlen, heads_kv, head_dim, options, stays):
    arrays = {name: empty(1, 8, seqlen, head_dim, dtype="float16") for name in ("do", "q", "o")}
    arrays |= {name: empty(1, heads_kv, seqlen, head_dim, dtype="float16") for name in ("k", "v")}
    lse = empty(1, 8, seqlen, dtype="float32")
    made = problem(head_dim, dtype="float16", deterministic=False, **arrays, lse=lse, **options)
    fused = wgmma_configs(made, HOPPER)[1]
    assert (fused.kernel, fused.stays) == ("wgmma_fused", stays)


def test_parts_of_groups_are_tiles_of_their_own_for_blocks_that_stay():
    """4 groups of 8 heads in parts of 4, causal: 128 tiles of 16 key tiles, 136 of 17."""
    for seqlen, stays in ((2048, False), (2049, True)):
        arrays = {name: empty(1, 32, seqlen, 64, dtype="float16") for name in ("do", "q", "o")}
        arrays |= {name: empty(1, 4, seqlen, 64, dtype="float16") for name in ("k", "v")}
        lse = empty(1, 32, seqlen, dtype="float32")
        fused = wgmma_configs(problem(64, dtype="float16", causal=True, **arrays, lse=lse), HOPPER)[1]
        assert (fused.kernel, fused.members, fused.stays) == ("wgmma_fused", 4, stays)


def may_start_early(made):
    """[(kernel, whether it may start before the one before it has ended)] of what select makes for wgmma."""
    choice = select_backward(made, HOPPER, "wgmma", "cupy")
    sequence = launch_backward.make_backward_launch(choice, made, HOPPER)
    return [(step.launch._config.kernel, step.launch._behind) for step in sequence._steps]


def test_kernels_that_wait_may_start_early_behind_one_that_is_always_launched():
    of, start = may_start_early, [("backward_preprocess", False)]
    assert of(problem(dtype="float16")) == [*start, ("wgmma_fused", True), ("wgmma_round", True)]
    mask = empty(300, 500, dtype="bool")
    both = [("mask_bits_of_keys", False), ("wgmma_dkdv", True), ("mask_bits", False), ("wgmma_dq", True)]
    assert of(problem(dtype="float16", mask=mask)) == [*start, *both]
    sinks = dict(sinks=empty(2, dtype="float16"), wanted=("dk", "dsinks"))
    assert of(problem(dtype="float16", **sinks)) == [*start, ("wgmma_dkdv", True), ("dsinks_of_blocks", False)]
    states = of(problem(dtype="float16", mask_mod=Function.of("mask_mod", earlier)))
    assert states[0] == start[0] and [x for x in states if x[1]] == [("wgmma_dkdv", True), ("wgmma_dq", True)]


# One each of what TMA and the table do not take.
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(head_dim=257), "head_dim up to 256, not 257"),
        (dict(alibi_slopes=empty(2, dtype="float32"), wanted=("dalibi_slopes",)), "no gradient of alibi_slopes"),
        (dict(do=empty(1, 2, 300, 64, dtype="float16", strides=(0, 64, 129, 1))), "do has rows, heads or batch"),
        (dict(q=empty(1, 2, 300, 64, dtype="float16", strides=(0, 0, 64, 1))), "q cannot be fetched by TMA"),
        (dict(do=empty(1, 2, 300, 64, dtype="float16", strides=(0, 0, 64, 1))), "do cannot be fetched by TMA"),
    ],
)
def test_what_the_hopper_backward_refuses(options, words):
    with pytest.raises(NotImplementedError, match=words):
        select_backward(problem(**dict(dtype="float16") | options), HOPPER, "wgmma", "cupy")


# Each field that a Config checks.
@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: DeltaConfig("float32", 64, False, 100, 16), "lanes"),
        (lambda: DkdvConfig("v2_dkdv", "float32", 64, 64, 16, 6), "tile_m and tile_n"),
        (lambda: DqConfig("v2_dq", "float32", 64, 64, 2, 16), "tile_m and tile_n"),
        (lambda: DqConfig("v2_dq", "float32", 64, 64, 16, 16, pad=-1), "pad"),
        (lambda: DkdvConfig("v2_dkdv", "float32", 64, 64, 16, 1024), "threads"),
        (lambda: DbiasConfig("v2_dbias", "float32", 64, 64, 2048, 16), "threads"),
        (lambda: HeadSumsConfig("float32", "dalibi_slopes", "float32", True, threads=100), "power of two"),
        (lambda: PreprocessConfig("float16", 64, False, True, lanes=3), "lanes"),
        (lambda: PreprocessConfig("float16", 64, False, True, threads=48), "threads"),
        (lambda: MmaDkdvConfig("mma_dkdv", "float32", 64, 64, 32, 64), "float16 and bfloat16"),
        (lambda: MmaDkdvConfig("mma_dkdv", "float16", 64, 64, 32, 64, warp_rows=8), "warp_rows"),
        (lambda: MmaDkdvConfig("mma_dkdv", "float16", 64, 64, 32, 40, warp_rows=16), "multiple of 16, not 40"),
        (lambda: MmaDkdvConfig("mma_dkdv", "float16", 64, 64, 24, 64), "multiple of 16, not 24"),
        (lambda: MmaDkdvConfig("mma_dkdv", "float16", 288, 64, 32, 64), "at most 256"),
        (lambda: MmaDkdvConfig("mma_dkdv", "float16", 64, 64, 96, 64, column_groups=3), "1, 2 or 4"),
        (lambda: MmaDkdvConfig("mma_dkdv", "float16", 64, 64, 32, 64, column_groups=4), "16 rows for each"),
        (
            lambda: MmaDkdvConfig("mma_dkdv", "float16", 192, 192, 64, 64, column_groups=2),
            "than are left of head_dim 192",
        ),
        (lambda: MmaDkdvConfig("mma_dkdv", "float16", 256, 64, 64, 64, column_groups=2), "than are left of .* and 64"),
        (lambda: MmaDkdvConfig("mma_dkdv", "float16", 64, 64, 160, 64), "at most 128 rows, not 160"),
        (lambda: MmaDqConfig("mma_dq", "float16", 64, 64, 64, 64, stages=3), "stages must be 1 or 2, not 3"),
        (lambda: MmaDkdvConfig("mma_dkdv", "float16", 64, 64, 32, 64, column_groups=2, of_dk=False), "of_dk and of_dv"),
        (lambda: MmaDkdvConfig("mma_dkdv", "float16", 64, 64, 32, 64, of_dk=False, of_dv=False), "of_dk or of_dv"),
        (lambda: WgmmaDkdvConfig("wgmma_dkdv", "float32", 64, 64, 64, 128), "float16 and bfloat16"),
        (lambda: WgmmaDkdvConfig("wgmma_dkdv", "float16", 64, 64, 64, 96), "64, 128 or 192, not 96"),
        (lambda: WgmmaDqConfig("wgmma_dq", "float16", 64, 64, 256, 64), "64, 128 or 192, not 256"),
        (lambda: WgmmaDkdvConfig("wgmma_dkdv", "float16", 64, 64, 40, 128), "in steps of 16, not 40"),
        (lambda: WgmmaDqConfig("wgmma_dq", "float16", 64, 64, 128, 144), "16 to 128 rows, in steps of 16, not 144"),
        (lambda: WgmmaDqConfig("wgmma_dq", "float16", 64, 64, 128, 64, stages_a=1), "stages_a must be 2 to 4"),
        (lambda: WgmmaDqConfig("wgmma_dq", "float16", 64, 64, 128, 64, stages_b=0), "stages_b 1 to 4"),
        (lambda: WgmmaDqConfig("wgmma_dq", "float16", 64, 272, 128, 64), "at most 256"),
        (lambda: WgmmaDkdvConfig("wgmma_dkdv", "float16", 64, 64, 64, 64, of_dk=False, of_dv=False), "of_dk or of_dv"),
        (lambda: WgmmaFusedConfig("wgmma_fused", "float16", 64, 64, 96, 128), "64 or 128 queries and 128 keys, not 96"),
        (lambda: WgmmaFusedConfig("wgmma_fused", "float16", 128, 136, 64, 128), "at most 128 with tiles of 64 queries"),
        (lambda: WgmmaFusedConfig("wgmma_fused", "float16", 64, 72, 128, 128), "at most 64 with tiles of 128 queries"),
        (lambda: WgmmaFusedConfig("wgmma_fused", "float16", 64, 64, 64, 128, dq_lines=5), "1 to 4 with .*, not 5"),
        (lambda: WgmmaFusedConfig("wgmma_fused", "float16", 64, 64, 64, 128, dq_lines=0), "1 to 4 with .*, not 0"),
        (lambda: WgmmaFusedConfig("wgmma_fused", "float16", 64, 64, 128, 128, dq_lines=2), "1 to 1 with .*, not 2"),
        (
            lambda: WgmmaFusedConfig("wgmma_fused", "float16", 64, 64, 64, 128, uses=uses(mask="bool")),
            "it takes dropout_p alone",
        ),
        (
            lambda: WgmmaFusedConfig("wgmma_fused", "float16", 64, 64, 64, 128, uses=uses(dropout_p=True)),
            "registers are few",
        ),
        (
            lambda: WideDkdvConfig("mma_dkdv_wide", "float32", 64, 64, 32, 64, column_groups=4),
            r"one of \(1, 2\), not 4",
        ),
        (lambda: WideFusedConfig("mma_wide_fused", "float32", 64, 64, 32, 64, column_groups=1), r"\(2, 4\), not 1"),
        (
            lambda: WideFusedConfig("mma_wide_fused", "float32", 64, 64, 64, 48),
            "strips of 16 .* divide 6 warps",
        ),
        (lambda: WideFusedConfig("mma_wide_fused", "float32", 256, 256, 16, 64, warp_rows=32), "need 512 sums"),
        (
            lambda: WideCarriedConfig("mma_wide_carried", "float32", 64, 64, 16, 64),
            "carried in float64, not in float32",
        ),
        (
            lambda: WideCarriedConfig("mma_wide_carried", "float64", 64, 64, 16, 64, blocks=3),
            "blocks must be 1 or 2, not 3",
        ),
        (
            lambda: WideCarriedConfig("mma_wide_carried", "float64", 64, 64, 16, 64, blocks=2),
            "blocks=2 needs one_staging_buffer",
        ),
        (
            lambda: WideCarriedConfig(
                "mma_wide_carried", "float64", 64, 64, 32, 64, warp_rows=32, column_groups=4, one_staging_buffer=True
            ),
            "column_groups=2, not 4",
        ),
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
        lambda: WgmmaDkdvConfig("wgmma_dkdv", "float16", 64, 64, 64, 128),
        lambda: WgmmaFusedConfig("wgmma_fused", "float16", 128, 128, 64, 128),
        lambda: WgmmaConfig("wgmma", "float16", 64, 64, 128, 128),
    ):
        with pytest.raises(ValueError, match="more than the 168"):
            make()


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "kernel"),
    [(1024, 77, "wgmma_fused"), (1025, 77, "wgmma_dkdv"), (1024, 128, "wgmma_fused"), (1024, 129, "wgmma_dkdv")],
)
def test_long_queries_of_one_key_tile_take_two_kernels(seqlen_q, seqlen_k, kernel):
    """In the one kernel a head would be one block. H200: 2 x 10 heads of 4096 x 77 take 78 us so, else 107."""
    arrays = {name: empty(2, 10, seqlen_q, 64, dtype="float16") for name in ("do", "q", "o")}
    arrays |= {name: empty(2, 10, seqlen_k, 64, dtype="float16") for name in ("k", "v")}
    made = problem(64, dtype="float16", **arrays, lse=empty(2, 10, seqlen_q, dtype="float32"))
    assert kernel in [config.kernel for config in wgmma_configs(made, HOPPER)]
