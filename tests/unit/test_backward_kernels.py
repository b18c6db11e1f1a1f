"""What select makes of a problem of gradients, without a GPU."""

import dataclasses
import re

import pytest
from helpers.machines import A100, AMPERE, B200, HOPPER, RTX_5090, TURING, empty
from helpers.selected import configs_of, explained, kernels_of
from helpers.simt_kernels import ALL, backward_problem as problem, everything

from numba_flash.abi.arguments import element_type
from numba_flash.arrays import read
from numba_flash.dispatch.launch import workspace
from numba_flash.functions.function import Function
from numba_flash.machine.target import Target
from numba_flash.problem.options import Packed
from numba_flash.select import backward_forms, backward_kernels
from numba_flash.select.backward import select_backward
from numba_flash.select.rungs import RUNGS

HOST = Target(True, why_no_gpu="it is not plugged in")


SIMULATOR = Target(True, True, 0, (9, 0), 227 * 1024, 132, "Numba's CUDA simulator")


def test_what_is_launched_for_what_is_wanted():
    def kernels(*wanted):
        made = everything((300, 500))
        return kernels_of("v2", dataclasses.replace(made, wanted=wanted))

    assert kernels("dq") == ["delta", "v2_dq"]
    assert kernels("dk") == kernels("dv") == kernels("dk", "dv") == ["delta", "v2_dkdv"]
    assert kernels("dbias") == ["delta", "v2_dbias"]
    assert kernels("dalibi_slopes") == ["delta", "v2_dq", "dalibi_slopes"]
    assert kernels(*ALL) == ["delta", "v2_dkdv", "v2_dq", "v2_dbias", "dalibi_slopes"]


@pytest.mark.parametrize("rung", ["mma", "wgmma"])
@pytest.mark.usefixtures("two_kernels")
def test_what_tensor_cores_launch_for_bias_and_mask(rung):
    made = problem(dtype="float16", mask=empty(300, 500, dtype="bool"), bias=empty(300, 500, dtype="float16"),
                   wanted=("dq", "dk", "dv", "dbias"))  # fmt: skip
    names = f"backward_preprocess mask_bits_of_keys {rung}_dkdv mask_bits {rung}_dq mma_dbias".split()
    if rung == "wgmma":  # both go ahead, beside the first kernel; TMA could not load rows of this bias
        names[2:4] = reversed(names[2:4])
        names.insert(0, "bias_rows")
    assert kernels_of(rung, made) == names
    assert explained(made).kernel == "wgmma"
    assert configs_of(rung, made)[rung == "wgmma"].natural
    names = [name for name in names if "bits" not in name]
    without = problem(dtype="float16", bias=empty(300, 500, dtype="float16"), wanted=("dq", "dk", "dv", "dbias"))
    assert kernels_of(rung, without) == names
    alone = dataclasses.replace(made, wanted=("dbias",))
    assert kernels_of(rung, alone) == ["backward_preprocess", "mask_bits", "mma_dbias"]


# Rows of 500 keys, at multiples of 16 bytes. By TMA alone, a bias takes the fewest registers.
@pytest.mark.parametrize(
    ("options", "boxes", "streams"),
    [
        ({}, True, (112, 128)),
        (dict(causal=True, sinks=empty(2, dtype="float16")), True, (112, 128)),
        (dict(softcap=3.0), True, (64, 64)),
        (dict(mask=empty(300, 500, dtype="bool")), True, (80, 64)),
        (dict(bias_aligned=False), True, (112, 128)),
        (dict(bias=empty(500, dtype="float16")), False, (80, 64)),
    ],
)
@pytest.mark.usefixtures("two_kernels")
def test_when_a_bias_comes_by_tma(options, boxes, streams):
    bias = empty(300, 500, dtype="float16", strides=(504, 1))
    made = problem(dtype="float16", **dict(bias=bias, bias_aligned=True) | options)
    configs = configs_of("wgmma", made)
    if configs[0].kernel == "bias_rows":
        made = configs[0].problem_behind(made)
    own = [config for config in configs if config.kernel in ("wgmma_dkdv", "wgmma_dq")]
    assert [config.bias_boxes for config in own] == [boxes] * 2
    assert tuple(config.other_rows for config in own) == streams
    assert all(config.shared_bytes <= HOPPER.shared_bytes for config in own)
    fetched = [config.parameters.arrays[config.operand_maps(made)[-1][0]] for config in own]
    assert fetched == (["bias"] if boxes else ["do"]) * 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("rung", ["v2", "mma", "wgmma"])
def test_kernels_agree_on_what_they_hand_each_other(rung, dtype):
    """The simulator's arrays know their own types."""
    if (rung, dtype) == ("wgmma", "float64"):
        return
    made = problem(dtype=dtype, mask=empty(300, 500, dtype="bool"), bias=empty(300, 500, dtype=dtype),
                   wanted=("dq", "dk", "dv", "dbias"))  # fmt: skip
    configs = configs_of(rung, made)
    shared = workspace(configs, made)
    assert len(shared) > 1
    for config in configs:
        for name in config.parameters.arrays:
            assert name not in shared or element_type(config, name) == shared[name][1], (config.kernel, name)


def test_what_mma_dbias_is_compiled_for():
    def config(*shape, dtype="float16"):
        bias = empty(*shape, dtype=dtype)
        found = configs_of("mma", problem(dtype="float16", bias=bias, wanted=("dbias",)))
        return next(config for config in found if config.kernel == "mma_dbias")

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
        choice = explained(reading(dtype, **options), HOPPER, kernel)
        return [config.kernel for config in choice.configs]

    own, of_mma = (["daux_start", f"{name}_daux", "daux_round"] for name in ("v2", "mma"))
    given = Function.of("score_mod", table_and_slopes)
    assert kernels("v2", score_mod=given) == ["delta", *own]
    assert kernels("v2", score_mod=given, wanted=("dq", "daux[2]")) == ["delta", "v2_dq", *own]
    hides = Function.of("mask_mod", lambda b, h, i, j, table, ids, slopes: i >= j)
    assert kernels("v2", mask_mod=hides) == ["delta", "daux_start", "daux_round"]  # no score depends on aux
    every = kernels("auto", score_mod=given, wanted=("dq", "dk", "dv", "daux[0]"))
    narrow = dtype == "float16"
    assert every[-3:] == (of_mma if narrow else own) and ("wgmma_dq" in every) == narrow
    assert every.count("delta") == (not narrow) and every.count("backward_preprocess") == narrow
    if narrow:
        mask = empty(300, 500, dtype="bool")
        masked = kernels("auto", score_mod=given, mask=mask, wanted=("daux[0]",))
        assert masked == ["backward_preprocess", "mask_bits", *of_mma]
        assert kernels("auto", score_mod=given, mask=mask, wanted=("dq", "daux[0]")).count("mask_bits") == 1


@pytest.mark.parametrize("rung", ["mma", "wgmma"])
def test_what_tensor_cores_launch_for_a_mask_mod(rung):
    given = dict(dtype="float16", mask_mod=Function.of("mask_mod", earlier))
    configs = configs_of(rung, problem(256, **given))  # dK and dV apart, which read the same states
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
        choice = explained(problem(head_dim), target, "v2")
        assert all(config.shared_bytes <= target.shared_bytes for config in choice.configs)
        tiles = [(config.tile_m, config.tile_n) for config in choice.configs if hasattr(config, "tile_m")]
        assert previous is None or all(one <= other for one, other in zip(tiles, previous, strict=True))
        previous = tiles


@pytest.mark.parametrize("target", [TURING, AMPERE, A100, HOPPER, B200, RTX_5090], ids=lambda target: target.name)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_kernels_overlap_on_gpus_that_have_the_instruction(target, dtype):
    """griddepcontrol, since sm_90. Of packed sequences without bounds each tile has a number."""
    rows, ends = empty(4096, 2, 64, dtype=dtype), empty(65, dtype="int32")
    lse = empty(2, 4096, dtype="float64" if dtype == "float64" else "float32")
    given = dict.fromkeys(("do", "q", "k", "v", "o"), rows) | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ends)
    configs = configs_of("auto", problem(**given, lse=lse, dtype=dtype, layout=Packed(None, None)), target)
    assert configs[-1].kernel == "outside" and configs[-1].in_order == any(config.in_order for config in configs[:-1])
    assert any(config.waits for config in configs) == (target.cc >= (9, 0) and configs[-1].in_order)


# Short on either side: a tile is not mostly past the last row, and never of no rows.
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 500), (300, 1), (40, 40), (0, 0)])
def test_few_rows_take_small_tiles(seqlen_q, seqlen_k):
    rows, columns = empty(1, 2, seqlen_q, 64, dtype="float32"), empty(1, 2, seqlen_k, 64, dtype="float32")
    made = problem(do=rows, q=rows, o=rows, k=columns, v=columns, lse=empty(1, 2, seqlen_q, dtype="float32"))
    _, dkdv, dq = configs_of("v2", made)
    assert dkdv.tile_n <= max(32, 2 * seqlen_k - 1) and dq.tile_m <= max(32, 2 * seqlen_q - 1)


# Sums of a row of gradients must fit into a warp's registers there, too.
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_simulator_has_tiles_for_every_head_dim(dtype):
    for head_dim, head_dim_v in ((8, 256), (72, 72), (136, 136), (256, 256)):
        made = problem(head_dim, head_dim_v, dtype=dtype)
        assert select_backward(made, SIMULATOR, "mma").configs[0].kernel in ("delta", "backward_preprocess")


def test_small_tiles_in_the_simulator():
    made = [config for config in configs_of("v2", problem(16), SIMULATOR) if hasattr(config, "tile_m")]
    assert all((config.tile_m, config.tile_n) == (16, 16) for config in made)


# Each kernel that has no backward, where another has one and would run.
@pytest.mark.parametrize("kernel", [name for name, rung in RUNGS.items() if not rung.has_backward])
def test_what_is_not_built_names_what_would_run(kernel):
    with pytest.raises(NotImplementedError, match=f"kernel='{kernel}' .*not built yet.*What would run.*'v2'"):
        explained(problem(), HOPPER, kernel)
    with pytest.raises(NotImplementedError, match=f"kernel='{kernel}' .*not built yet.*What would run.*'cpu'"):
        explained(problem(), HOST, kernel)


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
        explained(made, target, kernel)


def test_what_auto_takes():
    def kernel(target, **options):
        return explained(problem(**options), target).kernel

    assert kernel(TURING) == kernel(SIMULATOR) == "v2"
    assert kernel(A100) == kernel(HOPPER, dtype="float64") == kernel(A100, dtype="float64") == kernel(B200) == "mma"
    assert kernel(HOPPER) == kernel(HOPPER, mask=empty(500, dtype="bool")) == "wgmma"
    assert kernel(HOPPER, head_dim=256) == "wgmma" and kernel(HOPPER, dropout_p=0.5) == "mma"
    assert kernel(HOPPER, dtype="float16") == "wgmma" and kernel(TURING, dtype="float16") == "v2"
    assert kernel(A100, dtype="float16") == kernel(B200, dtype="bfloat16") == "mma"
    assert kernel(HOST) == "cpu"


def test_the_kernels_of_a_backward_are_explained():
    made = everything((300, 500))
    text = str(explained(made))
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
    text = str(explained(made, HOPPER, kernel))
    assert re.search(f"sums: .*{words}", text), text


def test_rows_for_plain_scores_serve_no_others():
    def tiles_of(kernel, **options):
        choice = explained(problem(64, dtype="float32", **options), HOPPER, "mma")
        return next((c.tile_m, c.tile_n) for c in choice.configs if c.kernel == kernel)

    assert tiles_of("mma_dq") == (64, 64) and tiles_of("mma_dq", softcap=3.0) == (64, 32)


def test_masks_and_bias_in_float32_have_kernels_beside_the_tiles():
    given = dict(mask=empty(500, dtype="bool"), bias=empty(500, dtype="float32"))
    made = problem(256, dtype="float32", wanted=("dq", "dk", "dv", "dbias"), **given)
    configs = configs_of("mma", made)
    names = [config.kernel for config in configs]
    apart = ["mma_dkdv"] * 2
    assert names == ["delta", "mask_bits_of_keys", *apart, "mask_bits", "mma_dq", "v2_dbias", "dbias_sum"]
    assert (configs[-3].tile_m, configs[-3].tile_n) == (64, 16), "where nothing is read 64 x 32"


def test_what_wgmma_runs_in_float32():
    def made(head_dim, **options):
        choice = explained(problem(head_dim, **options), HOPPER, "wgmma")
        return {c.kernel: (c.tile_m, c.tile_n) for c in choice.configs if c.kernel.startswith("wgmma")}

    assert made(64) == dict(wgmma_dkdv_float32=(64, 64), wgmma_dq_float32=(64, 64))
    assert made(72, head_dim_v=8) == made(128) == dict(wgmma_dkdv_float32=(48, 64), wgmma_dq_float32=(64, 48))
    read = dict(wgmma_dkdv_float32=(32, 64), wgmma_dq_float32=(64, 48))
    assert made(128, mask=empty(500, dtype="bool")) == read, "what is read takes registers"
    assert list(made(64, wanted=("dq",))) == ["wgmma_dq_float32"]
    alone = explained(problem(64, wanted=("dv",)), HOPPER, "wgmma")
    assert alone.configs[1].of_dv and not alone.configs[1].of_dk and alone.blocks[1:] == (2 * 8,)


@pytest.mark.parametrize(
    ("queries", "keys", "head_dim", "kernel"),
    [(20, 20, 24, "mma"), (64, 64, 64, "mma"), (16, 500, 64, "mma"), (500, 16, 64, "mma"), (300, 500, 64, "wgmma")],
)
def test_the_rung_in_float32_is_done_sooner(queries, keys, head_dim, kernel):
    of_queries, of_keys = (empty(1, 2, n, head_dim, dtype="float32") for n in (queries, keys))
    given = dict.fromkeys(("do", "q", "o"), of_queries) | dict.fromkeys(("k", "v"), of_keys)
    made = problem(head_dim, lse=empty(1, 2, queries, dtype="float32"), **given)
    for batch in (1, 4096):  # a row's bits must not depend on it
        many = dataclasses.replace(made, forward=dataclasses.replace(made.forward, batch=batch))
        assert explained(many).kernel == kernel
    assert explained(made, HOPPER, "wgmma").kernel == "wgmma"  # by name
    assert explained(made, A100).kernel == "mma"


def test_above_head_dim_128_two_blocks_share_the_columns_in_float32():
    def made(head_dim, **options):
        choice = explained(problem(head_dim, **options))
        return {c.kernel: (c.tile_m, c.tile_n) for c in choice.configs if c.kernel.startswith("wgmma")}

    plain = dict(wgmma_dkdv_paired=(64, 64), wgmma_dq_paired=(64, 64))
    assert made(132, head_dim_v=8) == made(8, head_dim_v=256) == made(256) == plain
    changed = dict(wgmma_dkdv_paired=(48, 64), wgmma_dq_paired=(64, 64))
    assert made(256, softcap=3.0) == made(256, mask=empty(500, dtype="bool")) == changed, "it takes registers"
    assert explained(problem(256), HOPPER, "wgmma").blocks[1:] == (2 * (2 * 8), 2 * (2 * 5)), "pairs of blocks"


def mma_tiles(head_dim, target=HOPPER, **options):
    """{kernel: tile_m, tile_n, column_groups} of what select makes for mma."""
    configs = configs_of("mma", problem(head_dim, dtype="float16", **options), target)
    assert configs[0].kernel == "backward_preprocess" and configs[0].load_bytes == 16
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
        return explained(problem(128, **dict(dtype="float16") | given | options), target)

    on_hopper, on_ampere = chosen(HOPPER), chosen(A100)
    assert on_hopper.kernel == "wgmma" and on_ampere.kernel == "mma"
    assert [chosen(HOPPER, dtype=dtype).kernel for dtype in ("float32", "float64")] == ["mma"] * 2
    assert mma_tiles(128, **given) == [("mma_dkdv", 32, 64, 1), ("mma_dq", 64, 32, 1)]
    with_softcap = mma_tiles(128, softcap=2.0, **given)
    assert [name for name, *_ in with_softcap] == ["mma_dkdv", "mma_dkdv", "mma_dq"], "other options take registers"
    assert mma_tiles(64, **given) == mma_tiles(64, softcap=2.0)
    text = str(on_hopper)
    assert "kernel 'wgmma'" in text and "not 'wgmma'" not in text, text


ONE_MULTIPROCESSOR = dataclasses.replace(HOPPER, multiprocessors=1)


def wgmma_tiles(head_dim, multiprocessors=1, **options):
    """[(kernel, tile_m, tile_n, which gradients)] of what select makes for wgmma; on one multiprocessor there are never
    few blocks."""
    target = dataclasses.replace(HOPPER, multiprocessors=multiprocessors)
    configs = configs_of("wgmma", problem(head_dim, dtype="float16", **options), target)
    assert configs[0].kernel == "backward_preprocess"
    of = {(True, True): "dk dv", (True, False): "dk", (False, True): "dv", (None, None): "dq"}
    which = [of[getattr(c, "of_dk", None), getattr(c, "of_dv", None)] for c in configs[1:]]
    return [(c.kernel, c.tile_m, c.tile_n, words) for c, words in zip(configs[1:], which, strict=True)]


@pytest.fixture
def two_kernels(monkeypatch):
    """wgmma's two kernels also where one is faster."""
    monkeypatch.setattr(backward_kernels, "gains_by_one_kernel", lambda *_: False)
    backward_kernels.configs_of.cache_clear()
    yield
    backward_kernels.configs_of.cache_clear()


@pytest.mark.usefixtures("two_kernels")
def test_the_kernels_of_the_hopper_backward():
    both = [("wgmma_dkdv", 64, 128, "dk dv"), ("wgmma_dq", 128, 112, "dq")]
    assert wgmma_tiles(128) == both
    assert wgmma_tiles(128, wanted=("dq",)) == both[1:]
    assert wgmma_tiles(128, wanted=("dv",)) == [("wgmma_dkdv", 64, 128, "dv")]
    assert [words for *_, words in wgmma_tiles(256)] == ["dk", "dv", "dq"], "both sums do not fit into registers"
    assert wgmma_tiles(200) == wgmma_tiles(256)


# By how many registers take what decides about each score: (which of them, tile_m of dK and dV, tile_n of dQ).
PER_SCORE = [
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
    ("options", "tile_m", "tile_n"), PER_SCORE, ids=lambda x: "-".join(x) if isinstance(x, dict) else str(x)
)
def test_what_decides_about_each_score_has_tiles_of_its_own(options, tile_m, tile_n):
    made = {}
    for name, value in options.items():
        of_array, of_function = name in ("bias", "mask"), name in ("score_mod", "mask_mod")
        made[name] = empty(300, 500, dtype=value) if of_array else Function.of(name, value) if of_function else value
    found = {c.kernel: c for c in configs_of("wgmma", problem(128, dtype="float16", **made), ONE_MULTIPROCESSOR)}
    dkdv, dq = found["wgmma_dkdv"], found["wgmma_dq"]
    assert (dkdv.tile_m, dkdv.tile_n, dq.tile_m, dq.tile_n) == (tile_m, 128, 128, tile_n)


@pytest.mark.parametrize(
    ("options", "tile_m"),
    [(dict(mask_mod=earlier), 128), (dict(mask="bool"), 112), (dict(dropout_p=0.1, seed=3), 112),
     (dict(bias="float32", mask="bool"), 80), (dict(score_mod=doubled), 80), (dict(mask="bool", softcap=2.0), 80),
     (dict(bias="float32", softcap=2.0), 64)],
    ids=["mask_mod", "mask", "dropout", "bias and mask", "score_mod", "mask and softcap", "bias and softcap"],
)  # fmt: skip
@pytest.mark.usefixtures("two_kernels")
def test_at_head_dim_64_what_is_read_has_larger_tiles_than_what_is_computed(options, tile_m):
    arrays = {name: empty(300, 500, dtype=x) for name, x in options.items() if name in ("bias", "mask")}
    functions = {name: Function.of(name, x) for name, x in options.items() if name.endswith("_mod")}
    given = options | arrays | functions
    (found,) = (x for x in configs_of("wgmma", problem(64, dtype="float16", **given)) if x.kernel == "wgmma_dkdv")
    assert found.tile_m == tile_m


def tiles_with(head_dim, options):
    """Of wgmma's kernels, (tile_m, tile_n) each."""
    made = configs_of("wgmma", problem(head_dim, dtype="bfloat16", **options), ONE_MULTIPROCESSOR)
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


def test_when_one_kernel_takes_all_gradients_in_float64():
    def configs(head_dim=128, seqlen_q=2048, seqlen_k=2048, heads=8, batch=1, target=HOPPER, dtype="float64", **more):
        pitch = -(-head_dim // 4) * 4  # rows begin at multiples of 16 bytes

        def rows(seqlen):
            strides = (heads * seqlen * pitch, seqlen * pitch, pitch, 1)
            return empty(batch, heads, seqlen, head_dim, dtype=dtype, strides=strides)

        given = {name: rows(seqlen_q) for name in ("do", "q", "o")} | {name: rows(seqlen_k) for name in ("k", "v")}
        given |= dict(lse=empty(batch, heads, seqlen_q, dtype=dtype))
        return configs_of("mma", problem(head_dim, dtype=dtype, **given, **more), target)

    def kernels(*given, **more):
        return [config.kernel for config in configs(*given, **more)]

    one, two = ["delta", "mma_fused", "mma_dq_finish"], ["delta", "mma_dkdv", "mma_dq"]
    assert all(kernels(head_dim, heads=16) == one for head_dim in (34, 64, 66, 128, 130, 256))
    assert [config.cluster for config in configs(130)] == [config.cluster for config in configs(256)] == [1, 2, 1]
    assert kernels(32, heads=32) == kernels(64, heads=8) == two
    assert kernels(256, 1024, 1024) == one
    assert kernels() == kernels(causal=True) == kernels(window=(9, 9)) == one
    assert kernels(batch=1) == kernels(batch=50), "a row's bits must not depend on its batch"
    assert kernels(seqlen_k=2049) == kernels(heads=4) == kernels(seqlen_k=2047) == two
    assert kernels(wanted=("dk", "dv")) == two[:2]
    for changed in (dict(softcap=5.0), dict(dropout_p=0.1), dict(mask_mod=Function.of("mask_mod", earlier))):
        assert "mma_fused" not in kernels(**changed)
    assert kernels(head_dim=127) == two, "rows of dq have to begin at multiples of 16 bytes"
    assert kernels(target=A100) == kernels(target=B200) == two, "where products have no instruction of their own"
    assert kernels(dtype="float32") == two


def test_when_one_kernel_takes_all_gradients():
    def kernels(head_dim=128, seqlen_q=2048, seqlen_k=2048, heads=8, batch=1, heads_kv=None, **options):
        of_q, of_k = (batch, heads, seqlen_q, head_dim), (batch, heads_kv or heads, seqlen_k, head_dim)
        given = {name: empty(*of_q, dtype="float16") for name in ("do", "q", "o")}
        given |= {name: empty(*of_k, dtype="float16") for name in ("k", "v")} | dict(
            lse=empty(*of_q[:3], dtype="float32")
        )
        choice = explained(problem(head_dim, dtype="float16", **given, **options), HOPPER, "wgmma")
        return [config.kernel for config in choice.configs]

    one, two = ["backward_preprocess", "wgmma_fused", "wgmma_round"], ["backward_preprocess", "wgmma_dkdv", "wgmma_dq"]
    in_parts = [*one, "wgmma_add_parts"]
    assert kernels() == kernels(causal=True) == kernels(window=(99, 99)) == one
    assert kernels(batch=1) == kernels(batch=50), "a row's bits must not depend on its batch"
    assert all(kernels(head_dim) == one for head_dim in (16, 40, 64, 72, 80, 88, 96, 112))
    assert "wgmma_fused" not in kernels(136)
    # Few blocks, or under a mask a long line of them.
    assert kernels(seqlen_q=512, seqlen_k=8192) == kernels(64, 448, 2048) == one
    assert kernels(seqlen_q=512, seqlen_k=8192, causal=True) == kernels(heads=1, seqlen_q=512, seqlen_k=200) == two
    assert kernels(seqlen_q=512, seqlen_k=8192, heads=7) == kernels(seqlen_q=513, seqlen_k=8192) == one
    assert kernels(seqlen_k=2049) == kernels(seqlen_k=2049, causal=True) == kernels(seqlen_k=129) == one
    # A chunk of queries behind others' keys: as the whole, if there is enough work to wait for.
    chunk = dict(heads=32, heads_kv=8, seqlen_q=1024, seqlen_k=4096, q_offset=3072)
    assert kernels(**chunk, causal=True) == kernels(**chunk, window=(700, 0)) == in_parts
    assert kernels(**chunk | dict(heads=8, heads_kv=2), causal=True) == two
    # Fewer keys: of many heads, or under a mask.
    assert kernels(64, 1024, 1024, heads=16) == kernels(64, 1024, 1024, causal=True) == one
    assert kernels(88, 1024, 1024, causal=True) == one
    assert kernels(88, 1024, 1024, heads=2) == two
    assert kernels(64, 1023, 1023, causal=True) == kernels(88, 1023, 1023, causal=True) == two
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
    assert "wgmma_fused" not in kernels(seqlen_k=77, softcap=5.0)
    assert kernels(heads=3, seqlen_q=4096, seqlen_k=4096) == kernels(heads=7, seqlen_q=4096, seqlen_k=4096) == one
    assert kernels(heads=4, seqlen_q=4096, seqlen_k=4096, causal=True) == one
    assert kernels(heads=3, seqlen_q=8192, seqlen_k=8192, causal=True) == two
    # Long heads: two of them under a mask, or one with sums of dQ in lines.
    long = dict(causal=True, seqlen_q=16384, seqlen_k=16384)
    assert kernels(heads=2, **long) == kernels(64, heads=2, **long) == kernels(heads=1, **long) == one
    assert kernels(heads=3, **long) == kernels(64, heads=1, **long) == two
    assert kernels(heads=2, causal=True, seqlen_q=16383, seqlen_k=16383) == two
    assert kernels(72, causal=True) == kernels(80, causal=True) == kernels(80, 512, 512, causal=True) == one
    assert kernels(heads=32, heads_kv=8) == one and kernels(heads=32, heads_kv=4) == in_parts
    # Parts of a group are heads of their own under a mask.
    assert kernels(heads=16, heads_kv=1, causal=True) == kernels(heads=32, heads_kv=8, causal=True) == in_parts
    assert kernels(64, heads=14, heads_kv=2, causal=True) == in_parts
    # Short sequences, of which there are many.
    assert kernels(heads=1, seqlen_q=512, seqlen_k=200, causal=True) == one
    # Few queries of many keys, where a kernel of dQ alone would have few blocks, each with a long walk.
    assert kernels(heads=1, seqlen_q=21, seqlen_k=9626) == kernels(heads=3, seqlen_q=22, seqlen_k=2993) == one
    assert kernels(24, heads=1, seqlen_q=223, seqlen_k=3829) == kernels(heads=1, seqlen_q=64) == one
    assert kernels(heads=4, heads_kv=2, seqlen_q=404, seqlen_k=7905) == one
    assert kernels(softcap=5.0) == two and kernels(wanted=("dk", "dv")) == two[:2]
    # Random bits take registers.
    assert kernels(dropout_p=0.1) == kernels(88, dropout_p=0.1) == one and kernels(64, dropout_p=0.1) == two
    # A mask, and a bias that TMA loads; where weights drop, too, registers do not suffice for them.
    mask = dict(mask=empty(2048, 2048, dtype="bool"))
    bias = dict(bias=empty(2048, 2048, dtype="float16"), bias_aligned=True)
    with_bits = [one[0], "mask_bits_of_keys", *one[1:]]
    assert kernels(**mask) == kernels(**mask, **bias) == with_bits and kernels(64, **bias) == kernels(**bias) == one
    assert kernels(**bias, wanted=("dq", "dk", "dv", "dbias")) == [*one, "mma_dbias"]
    for more in (mask, bias):
        assert "wgmma_fused" not in kernels(dropout_p=0.1, **more)
    # Half of a counter holds the turns of a mask's key tiles: with more of them a block would wait forever.
    for tiles, found in ((2**16 - 1, True), (2**16, False)):
        keys = empty(1, 8, 128 * tiles, 128, dtype="float16", strides=(0, 0, 0, 1))
        padded = problem(
            128, dtype="float16", k=keys, v=keys, mask=empty(1, 1, 1, 128 * tiles, dtype="bool"),
            **{name: empty(1, 8, 2048, 128, dtype="float16") for name in ("do", "q", "o")},
            lse=empty(1, 8, 2048, dtype="float32"),
        )  # fmt: skip
        assert backward_forms.can_be_one_kernel(padded) == found
    assert "wgmma_fused" not in kernels(bias=empty(2048, 2048, dtype="float32"))
    assert "wgmma_fused" not in kernels(mask_mod=Function.of("mask_mod", earlier))


def test_how_many_heads_of_a_group_a_block_takes():
    def members(heads, heads_kv, head_dim=128, seqlen=2048, causal=True, one_kernel=True, batch=1, **options):
        of_q, of_k = (batch, heads, seqlen, head_dim), (batch, heads_kv, seqlen, head_dim)
        given = {name: empty(*of_q, dtype="float16") for name in ("do", "q", "o")}
        given |= {name: empty(*of_k, dtype="float16") for name in ("k", "v")} | dict(
            lse=empty(*of_q[:3], dtype="float32")
        )
        made = problem(head_dim, dtype="float16", causal=causal, **given, **options)
        return backward_forms.heads_per_block(made, one_kernel)

    assert members(32, 8) == members(6, 2) == members(32, 8, batch=50) == 2 and members(4, 2) == members(8, 8) == 0
    assert members(32, 4, 64) == 4 and members(32, 8, 64) == 0, "tiles of 64 columns are half as large"
    assert members(32, 4, seqlen=512) == members(32, 8, causal=False) == members(8, 8, causal=False) == 0
    assert members(32, 4, causal=False) == 4, "half of the multiprocessors would be idle"
    assert members(16, 2, 64, 200, causal=False) == 2 and members(16, 2, 64, 200, causal=False, batch=50) == 2
    assert members(32, 4, causal=False, window=(300, 0)) == 2
    assert members(32, 4, 256, one_kernel=False) == 2 and members(64, 8, 256, one_kernel=False) == 0
    assert members(32, 4, 192, one_kernel=False) == 4
    assert members(32, 4, mask_mod=Function.of("mask_mod", earlier)) == 0, "blocks take what is left of tiles in turns"


def test_one_kernel_in_float64_needs_a_query(monkeypatch):
    """Without one no previous kernel would set its ticket to 0."""
    monkeypatch.setattr(backward_kernels, "gains_by_mma_fused", lambda *_: True)
    for seqlen_q, one in ((1, True), (0, False)):
        of_q, of_k = (1, 2, seqlen_q, 64), (1, 2, 2**15, 64)
        given = {name: empty(*of_q, dtype="float64") for name in ("do", "q", "o")}
        given |= {name: empty(*of_k, dtype="float64") for name in ("k", "v")}
        made = problem(64, dtype="float64", **given, lse=empty(*of_q[:3], dtype="float64"))
        kernels = [config.kernel for config in backward_kernels.configs_of.__wrapped__("mma", made, HOPPER)]
        assert (kernels[1] == "mma_fused") == one


def test_one_long_head_has_several_partial_sums_of_dq():
    """With as many key tiles as a GPU runs blocks: 128 of 128 keys."""

    def kernels(seqlen_k=16384, seqlen_q=16384, head_dim=128, heads=1, batch=1, **options):
        of_q, of_k = (batch, heads, seqlen_q, head_dim), (batch, 1, seqlen_k, head_dim)
        given = {name: empty(*of_q, dtype="float16") for name in ("do", "q", "o")}
        given |= {name: empty(*of_k, dtype="float16") for name in ("k", "v")}
        made = problem(head_dim, dtype="float16", **given, lse=empty(*of_q[:3], dtype="float32"), **options)
        return made, configs_of("wgmma", made)

    for batch in (1, 3):
        made, (start, fused, rounds) = kernels(causal=True, batch=batch)
        assert start.dq_partials == fused.dq_partials == rounds.dq_partials == 4 and rounds.kernel == "wgmma_round"
        sizes, tiles = workspace([start, fused, rounds], made), batch * 256
        assert sizes["dq_sums"] == ((tiles * 4 * 64 * 128,), "float32")
        assert sizes["turns"] == ((32 + tiles * 4 * 2,), "uint32")
    assert kernels(window=(500, 0), head_dim=88)[1][1].dq_partials == 4 and kernels()[1][1].dq_partials == 4
    others = (dict(seqlen_k=16383), dict(head_dim=64), dict(heads=2))
    for other in others:
        assert all(getattr(config, "dq_partials", 1) == 1 for config in kernels(**dict(causal=True) | other)[1])
    assert kernels(causal=True, seqlen_q=16383)[1][1].dq_partials == 4
    assert kernels(causal=True, seqlen_q=4096)[1][1].kernel == "wgmma_dkdv", "a chunk with too little to wait for"


@pytest.mark.parametrize(
    ("heads", "seqlen", "head_dim", "lines"),
    [
        (2, 8192, 128, 4),  # 128 key tiles, as many as run at a time
        (2, 8064, 128, 4),
        (3, 8192, 96, 2),  # 192 key tiles
        (4, 6144, 128, 2),
        (6, 4096, 128, 1),
        (5, 16384, 128, 2),
        (16, 4096, 128, 1),
        (32, 4096, 64, 1),
        (4, 8192, 64, 2),
        (1, 8192, 64, 4),
        (1, 1024, 64, 0),  # few keys in all
    ],
)
def test_a_few_long_heads_that_see_all_keys_have_several_partial_sums_of_dq(heads, seqlen, head_dim, lines):
    """0: two kernels. The batch size does not matter."""
    for batch in (1, 4):
        of_q = (batch, heads, seqlen, head_dim)
        given = {name: empty(*of_q, dtype="float16") for name in ("do", "q", "o", "k", "v")}
        made = problem(head_dim, dtype="float16", **given, lse=empty(*of_q[:3], dtype="float32"))
        start, *others = configs_of("wgmma", made)
        assert [config.kernel for config in others] == (
            ["wgmma_fused", "wgmma_round"] if lines else ["wgmma_dkdv", "wgmma_dq"]
        )
        if lines:
            assert {config.dq_partials for config in (start, *others)} == {lines}


@pytest.fixture
def always_one_kernel(monkeypatch):
    monkeypatch.setattr(backward_kernels, "gains_by_one_kernel", lambda *_: True)
    backward_kernels.configs_of.cache_clear()
    yield
    backward_kernels.configs_of.cache_clear()


def test_products_begin_with_lse_where_it_can_be_divided_by_the_scale(always_one_kernel):
    for scale in (0.3, 0.0):
        _, fused, _ = configs_of("wgmma", problem(64, dtype="float16", scale=scale))
        assert fused.lse_first == (scale != 0)


@pytest.mark.parametrize(
    ("seqlen", "heads_kv", "head_dim", "options", "stays"),
    [
        (8192, 8, 128, {}, True), (8256, 8, 128, {}, False), (8192, 4, 128, {}, False), (8256, 8, 64, {}, True),
        (8256, 8, 128, dict(causal=True), True), (8192, 8, 128, dict(dropout_p=0.5, seed=1), False),
    ],
    ids=["short", "long", "long of two members", "long, 64", "long, causal", "dropout"],
)  # fmt: skip
def test_blocks_are_not_persistent_for_many_queries_of_large_head_dim(
    seqlen, heads_kv, head_dim, options, stays, always_one_kernel
):
    arrays = {name: empty(1, 8, seqlen, head_dim, dtype="float16") for name in ("do", "q", "o")}
    arrays |= {name: empty(1, heads_kv, seqlen, head_dim, dtype="float16") for name in ("k", "v")}
    lse = empty(1, 8, seqlen, dtype="float32")
    made = problem(head_dim, dtype="float16", **arrays, lse=lse, **options)
    fused = configs_of("wgmma", made)[1]
    assert (fused.kernel, fused.stays) == ("wgmma_fused", stays)


def test_splits_of_groups_count_as_tiles_of_persistent_blocks():
    """4 groups of 8 heads in parts of 4, causal: 128 tiles of 16 key tiles, 136 of 17."""
    for seqlen, stays in ((2048, False), (2049, True)):
        arrays = {name: empty(1, 32, seqlen, 64, dtype="float16") for name in ("do", "q", "o")}
        arrays |= {name: empty(1, 4, seqlen, 64, dtype="float16") for name in ("k", "v")}
        lse = empty(1, 32, seqlen, dtype="float32")
        fused = configs_of("wgmma", problem(64, dtype="float16", causal=True, **arrays, lse=lse))[1]
        assert (fused.kernel, fused.members, fused.stays) == ("wgmma_fused", 4, stays)


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
        explained(problem(**dict(dtype="float16") | options), HOPPER, "wgmma")


@pytest.mark.parametrize("heads", [10, 1])
def test_few_heads_of_one_key_tile_and_many_queries_take_two_kernels(heads):
    """In the one kernel a head is one block. H200: 2 x 10 heads of 4096 x 77 take 106 us so, else 79; 16 x 10 heads of
    1024 x 77 take 78, else 106."""
    arrays = {name: empty(2, heads, 4096, 64, dtype="float16") for name in ("do", "q", "o")}
    arrays |= {name: empty(2, heads, 77, 64, dtype="float16") for name in ("k", "v")}
    made = problem(64, dtype="float16", **arrays, lse=empty(2, heads, 4096, dtype="float32"))
    assert "wgmma_dkdv" in kernels_of("wgmma", made)


@pytest.mark.parametrize(
    ("seqlen_q", "heads_kv", "dtype", "alone"),
    [(64, 8, "float16", True), (65, 8, "float16", False), (64, 4, "bfloat16", False), (1, 8, "bfloat16", True)],
)
def test_a_block_with_a_whole_head_needs_no_kernel_before(seqlen_q, heads_kv, dtype, alone):
    arrays = {name: empty(2, 8, seqlen_q, 64, dtype=dtype) for name in ("do", "q", "o")}
    arrays |= {name: empty(2, heads_kv, 64, 64, dtype=dtype) for name in ("k", "v")}
    made = problem(64, dtype=dtype, **arrays, lse=empty(2, 8, seqlen_q, dtype="float32"))
    for target in (HOPPER, A100, RTX_5090):
        *before, own = configs_of("auto", made, target)
        assert own.kernel == "mma_one_key_tile" and [x.kernel for x in before] == ["backward_preprocess"] * (not alone)
        assert own.shared_bytes * own.blocks_per_sm <= target.shared_bytes


def test_the_kernel_of_a_whole_head_is_the_same_for_any_number_of_heads():
    """backward_preprocess is not: lanes share rows where there are few blocks."""
    few, many = (
        problem(64, dtype="float16", lse=empty(batch, 2, 50, dtype="float32"),
                **dict.fromkeys(("do", "q", "k", "v", "o"), empty(batch, 2, 50, 64)))
        for batch in (1, 500)
    )  # fmt: skip
    assert configs_of("auto", few) == configs_of("auto", many)


# The bias' batch and heads, of 128 entries and 4 heads of 256 tokens: how many blocks share a sum.
@pytest.mark.parametrize(
    ("batch", "heads", "rows", "keys", "splits"),
    [(1, 4, 256, 256, 6), (1, 1, 256, 256, 24), (128, 4, 256, 256, 1), (1, 4, 1, 256, 24), (128, 4, 256, 1, 1)],
)
def test_the_sum_of_a_broadcast_bias_is_split_by_the_shapes_alone(batch, heads, rows, keys, splits):
    q, lse = empty(128, 4, 256, 32), empty(128, 4, 256, dtype="float32")
    bias = empty(batch, heads, rows, keys)
    made = problem(dtype="float16", do=q, q=q, k=q, v=q, o=q, lse=lse, bias=bias, wanted=("dbias",))
    assert made.dbias_splits == splits
    for target in (HOPPER, A100):
        assert ("dbias_sum" in kernels_of("mma", made, target)) == (splits > 1)
