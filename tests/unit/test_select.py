"""Which kernel runs where, for machines that are not here, and what a Config accepts."""

import dataclasses

import pytest
from helpers.machines import A100, ADA, AMPERE, B200, HOPPER, KB, RTX_5090, TENSOR_MACHINES, TURING, empty, problem

from numba_flash.api import estimates
from numba_flash.api.explain import Explanation
from numba_flash.config.forward import TensorConfig
from numba_flash.config.mma_forward import MmaConfig
from numba_flash.config.simt_forward import V1Config, V2Config
from numba_flash.config.wgmma_float32 import WgmmaFloat32Config
from numba_flash.config.wgmma_forward import WgmmaConfig
from numba_flash.functions.function import Function
from numba_flash.machine.target import Target
from numba_flash.problem.options import uses
from numba_flash.select import backward_tiles, tiles
from numba_flash.select.forward import CANDIDATES, refusal, select
from numba_flash.select.refusals import FLOAT64_CORES
from numba_flash.select.rungs import RUNGS
from numba_flash.select.tiles import MEASURED, TABLES, rows_of

MMA = TABLES["mma"]

HOST = Target(True, why_no_gpu="no driver")
HOST_BESIDE_GPU = dataclasses.replace(HOPPER, arrays_on_host=True)
SIMULATOR = Target(True, True, 0, (9, 0), 227 * KB, 132, "simulator")
BEST_ON_HOPPER = "wgmma"


def strided(*strides, dim=64):
    """q, k, v or out of the problem that `problem` makes, lying otherwise."""
    return empty(1, 2, 4096, dim, strides=strides)


# Each kind of machine; arrays on the host stay there unless a GPU kernel is named.
@pytest.mark.parametrize(
    ("target", "kernel", "expected", "copies"),
    [
        (TURING, "auto", "v2", False),
        (A100, "auto", "mma", False),
        (AMPERE, "auto", "mma", False),
        (ADA, "auto", "mma", False),
        (HOPPER, "auto", BEST_ON_HOPPER, False),
        (B200, "auto", "mma", False),
        (RTX_5090, "auto", "mma", False),
        (HOPPER, "v1", "v1", False),
        (HOPPER, "mma", "mma", False),
        (HOPPER, "wgmma", "wgmma", False),
        (HOST, "auto", "cpu", False),
        (HOST, "reference", "reference", False),
        (HOST_BESIDE_GPU, "auto", "cpu", False),
        (HOST_BESIDE_GPU, "v2", "v2", True),
        (HOST_BESIDE_GPU, "mma", "mma", True),
        (SIMULATOR, "auto", "v2", False),
        (SIMULATOR, "cpu", "cpu", False),
        (SIMULATOR, "v1", "v1", False),
        (SIMULATOR, "mma", "mma", False),
        (SIMULATOR, "wgmma", "wgmma", False),
    ],
)
def test_the_choice(target, kernel, expected, copies):
    choice = select(problem(), target, kernel)
    assert (choice.kernel, choice.copies) == (expected, copies)
    assert (choice.config is not None) == (expected not in ("cpu", "reference"))
    assert isinstance(choice.config, TensorConfig) == RUNGS[expected].tensor_cores
    assert sorted([expected, *(name for name, _ in choice.refused)]) == sorted(RUNGS)
    assert all(reason for _, reason in choice.refused)


# Each thing that tensor cores do not take, alone; "auto" goes on to v2, and says why.
@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (dict(head_dim=520), "head_dim up to 512, not 520 and 520"),
        (dict(head_dim_v=520), "head_dim up to 512, not 64 and 520"),
        (dict(q=strided(2**20, 2**19, 128, 2)), "q is not contiguous along dim"),
        (dict(v=strided(2**20, 2**19, 64, -1)), "v is not contiguous along dim"),
        (dict(k=strided(2**20, 2**19, 64, 0)), "k is not contiguous along dim"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_tensor_cores_do_not_take_goes_to_v2(made, reason):
    choice = select(problem(**made), A100, "auto")
    assert choice.kernel == "v2" and reason in dict(choice.refused)["mma"]
    with pytest.raises(NotImplementedError, match="What would run: kernel='v1' or 'v2'") as caught:
        select(problem(**made), A100, "mma")
    assert reason in str(caught.value)


# Rows and heads apart, backwards and repeated; one row and one column, whose strides nobody steps along; an output
# that lies anyhow.
@pytest.mark.parametrize(
    "made",
    [
        dict(q=strided(2**20, 2**19 + 8, 72, 1), k=strided(2**20, 64, 128, 1), v=strided(2**20, 2**19, -64, 1)),
        dict(k=strided(0, 0, 64, 1), v=strided(0, 2**19, 0, 1)),
        dict(seqlen=1, heads=1, head_dim=59),
        dict(head_dim=1, q=empty(1, 2, 4096, 1, strides=(2**20, 2**19, 8, 5)), seqlen_k=1, heads_kv=1),
        dict(out=empty(1, 2, 4096, 64, strides=(1, 3, 7 * 4096, 7 * 4096**2))),
    ],
    ids=range(5),
)
def test_what_tensor_cores_do_take(made):
    assert select(problem(**made), A100, "auto").kernel == "mma"
    assert select(problem(dtype="bfloat16"), A100, "auto").kernel == "mma"


# How many bytes of a row one copy of mma has: rows, heads and batch entries of q, k and v begin at multiples of them,
# and so do the arrays. wgmma takes what begins at multiples of 16 bytes.
@pytest.mark.parametrize(
    ("made", "copied", "reason"),
    [
        ({}, 16, ""),
        (dict(alignment=8), 8, "address that is not a multiple of 16 bytes"),
        (dict(alignment=2), 2, "address that is not a multiple of 16 bytes"),
        (dict(head_dim=60), 8, "q has rows"),
        (dict(head_dim=50), 4, "q has rows"),
        (dict(head_dim=25), 2, "q has rows"),
        (dict(head_dim=62, dtype="float32"), 8, "q has rows"),
        (dict(head_dim=3, dtype="float32"), 4, "q has rows"),
        (dict(head_dim=61, dtype="float64"), 8, "not float64"),
        (dict(head_dim_v=60), 8, "v has rows"),
        (dict(k=strided(2**20, 2**19, 65, 1)), 2, "k has rows"),
        (dict(k=strided(2**20, 2**19 + 4, 64, 1)), 8, "k has rows, heads"),
        (dict(v=strided(2**20, 2**19 + 2, 64, 1)), 4, "v has rows, heads or batch entries"),
    ],
)
def test_copies_of_mma_are_as_large_as_rows_allow(made, copied, reason):
    assert select(problem(**made), A100, "auto").config.copy_bytes == copied
    choice = select(problem(**made), HOPPER, "auto")
    assert choice.kernel == ("mma" if reason else "wgmma") and reason in dict(choice.refused).get("wgmma", "")


def test_an_output_at_an_odd_address_is_written_in_small_pieces():
    assert not select(problem(alignment=8), A100, "mma").config.o_vectorized


# Rows that begin at multiples of 16 bytes are other multiples of elements in each dtype.
@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 60), ("float64", 62)])
def test_larger_elements_go_to_tensor_cores_too(dtype, head_dim):
    for target in (A100, HOPPER, B200):
        choice = select(problem(head_dim, dtype=dtype), target, "auto")
        on_wgmma = dtype == "float32" and target is HOPPER
        assert choice.kernel == ("wgmma" if on_wgmma else "mma")
        assert getattr(choice.config, "large_f64", False) == (dtype == "float64" and target is HOPPER)
        out = empty(1, 2, 4096, head_dim, dtype=dtype, strides=(2**20, 2**19, head_dim + 1, 1))
        assert (
            choice.config.o_vectorized
            and not select(problem(head_dim, dtype=dtype, out=out), target, "auto").config.o_vectorized
        )
        words = {"float64": "in float64", "float32": "three of 8 bits" if on_wgmma else "3xTF32"}[dtype]
        assert words in dict(Explanation.of(problem(head_dim, dtype=dtype), target, choice).facts())["sums"]


def test_float64_goes_where_tensor_cores_have_it_at_full_speed():
    for target in (AMPERE, ADA, RTX_5090):
        choice = select(problem(dtype="float64"), target, "auto")
        assert choice.kernel == "v2" and "8.0, 9.0 and 10.0" in dict(choice.refused)["mma"]
        assert select(problem(dtype="float32"), target, "auto").kernel == "mma"


def test_wgmma_takes_no_float64():
    assert "float16, bfloat16, float32, not float64" in refusal("wgmma", problem(dtype="float64"), HOPPER)


# What is read for each score takes registers, of which a tile of this size has as many as there are.
@pytest.mark.parametrize("kernel", ["mma", "wgmma"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_bias_and_mask_have_tiles_of_their_own(kernel, head_dim):
    plain = select(problem(head_dim), HOPPER, kernel).config
    rows = {}
    for name, given in dict(
        mask=dict(mask=empty(4096, dtype="bool")), bias=dict(bias=empty(4096)),
        float32=dict(bias=empty(4096, dtype="float32")),
        both=dict(bias=empty(4096, dtype="float32"), mask=empty(4096, dtype="bool")),
    ).items():  # fmt: skip
        config = select(problem(head_dim, **given), HOPPER, "auto" if kernel == "wgmma" else kernel).config
        assert config.kernel == kernel and config.scores_finished == ("bias" in given) and not config.bias_pairs
        rows[name] = config.tile_n
    assert plain.tile_n >= rows["bias"] >= rows["float32"] >= rows["both"]


@pytest.mark.parametrize(
    ("seqlen_k", "options", "keys"),
    [(77, {}, 80), (112, dict(causal=True), 112), (113, {}, 128), (5, {}, 32), (77, dict(mask=True), 112)],
)
def test_key_tiles_have_no_more_keys_than_there_are(seqlen_k, options, keys):
    options = dict(mask=empty(4000, seqlen_k, dtype="bool")) if "mask" in options else options
    config = select(problem(seqlen=4000, heads=20, seqlen_k=seqlen_k, **options), HOPPER, "wgmma", "cupy").config
    assert config.tile_n == keys and (config.tile_m == 192) == ("mask" in options)


# A mask leaves registers for 192 rows, of fewer keys than without it; what else is read does not.
@pytest.mark.parametrize(
    ("given", "rows", "keys"),
    [
        ({}, 192, 128),
        (dict(mask=empty(4096, dtype="bool")), 192, 112),
        (dict(mask=empty(4096, dtype="bool"), softcap=2.0, causal=True), 192, 112),
        (dict(mask=empty(4096, dtype="bool"), bias=empty(4096)), 128, 96),
        (dict(mask=empty(4096, dtype="bool"), dropout_p=0.1, seed=3), 128, 128),
        (dict(mask=empty(4096, dtype="bool"), mask_mod=Function.of("mask_mod", lambda b, h, i, j: j < i)), 128, 128),
    ],
    ids=range(6),
)
def test_a_mask_alone_has_tiles_of_more_rows(given, rows, keys):
    config = next(CANDIDATES["wgmma"](problem(64, **given), HOPPER))
    assert (config.tile_m, config.tile_n) == (rows, keys)


# In float32 and float64 too, by rows that spill nothing then.
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_read_for_each_score_has_rows_of_its_own(dtype):
    bias, mask = empty(4096, dtype=dtype), empty(4096, dtype="bool")
    for given in (dict(bias=bias), dict(mask=mask), dict(mask_mod=Function.of("mask_mod", lambda b, h, i, j: j < i))):
        configs = [select(problem(n, dtype=dtype, **given), HOPPER, "mma").config for n in (64, 128, 256)]
        assert [config.kernel for config in configs] == ["mma"] * 3
        plain = select(problem(256, dtype=dtype, softcap=2.0), HOPPER, "mma").config
        tiles = ((128, 32), (64, 32)) if dtype == "float32" else ((64, 16), (64, 16))
        assert tuple((x.tile_m, x.tile_n) for x in (plain, configs[2])) == tiles


# What changes scores, is read or dropped has fewer keys or rows a tile at head_dim 65 to 192, where plain scores leave
# no registers for it.
@pytest.mark.parametrize(
    "given",
    [
        dict(softcap=2.0), dict(alibi_slopes=empty(2, dtype="float32")), dict(bias=empty(4096, dtype="float32")),
        dict(mask=empty(4096, dtype="bool")), dict(mask_mod=Function.of("mask_mod", lambda b, h, i, j: j < i)),
        dict(score_mod=Function.of("score_mod", lambda s, b, h, i, j: s + j)), dict(dropout_p=0.1, seed=3),
    ],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_wgmma_in_float32_has_rows_for_other_scores(given):
    def tiles(**options):
        configs = [select(problem(n, dtype="float32", **options), HOPPER, "auto").config for n in (64, 128, 192, 256)]
        assert {config.kernel for config in configs} == {"wgmma_float32"}
        return [(config.tile_m, config.tile_n, config.stages) for config in configs]

    assert tiles() == tiles(causal=True) == [(128, 64, 2), (128, 64, 1), (128, 32, 1), (64, 32, 1)]
    assert tiles(**given) == [(128, 64, 2), (128, 32, 2), (64, 32, 1), (64, 32, 1)]


# Two keys of a bias are one read where they lie side by side at a multiple of their size, in all rows that there are.
@pytest.mark.parametrize(
    ("bias", "aligned", "seqlen", "pairs"),
    [
        (empty(1, 2, 64, 64), True, 64, True),
        (empty(64), True, 64, True),
        (empty(64, dtype="float32"), True, 64, True),
        (empty(64), False, 64, False),
        (empty(63), True, 63, False),
        (empty(64, 64, strides=(65, 1)), True, 64, False),
        (empty(64, 64, strides=(1, 64)), True, 64, False),
        (empty(1, 1, 64, 1), True, 64, False),
        (empty(2, 1, 64, strides=(33, 0, 1)), True, 64, False),
    ],
)
def test_when_a_bias_is_read_in_pairs(bias, aligned, seqlen, pairs):
    made = problem(seqlen=seqlen, bias=bias, bias_aligned=aligned)
    assert made.array("bias").pairs == pairs
    assert select(made, HOPPER, "wgmma").config.bias_pairs == pairs


def test_tensor_cores_begin_at_ampere_and_wgmma_is_hoppers_alone():
    assert "compute capability 8.0, and T4 has 7.5" in refusal("mma", problem(), TURING)
    for target in (TURING, A100, ADA, B200, RTX_5090):
        assert "compute capability 9.0 only" in refusal("wgmma", problem(), target)


# What TMA cannot fetch and what no wgmma tile is wide enough for goes to mma.
@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (dict(head_dim=264), "head_dim up to 256"),
        (dict(k=strided(2**20, 0, 64, 1)), "k cannot be fetched by TMA"),
        (dict(v=strided(2**20, 2**19, -64, 1)), "v cannot be fetched by TMA"),
        (dict(k=strided(0, 2**19, 0, 1)), "k cannot be fetched by TMA"),
    ],
    ids=range(4),
)
def test_what_wgmma_does_not_take_goes_to_mma(made, reason):
    choice = select(problem(**made), HOPPER, "auto")
    assert choice.kernel == "mma" and reason in dict(choice.refused)["wgmma"]


# For every GPU, up to the largest head_dim: the first row whose tiles fit.
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("target", TENSOR_MACHINES, ids=lambda target: target.name)
def test_mma_has_a_tile_for_every_head_dim_on_every_gpu(target, dtype):
    if dtype == "float64" and target.cc not in FLOAT64_CORES:
        pytest.skip("v2 serves")
    for head_dim in (1, 8, 64, 65, 128, 129, 256, 257, 512):
        made = problem(
            head_dim, dtype=dtype, q=empty(1, 2, 4096, head_dim, dtype=dtype, strides=(2**22, 2**21, 512, 1))
        )
        made = dataclasses.replace(made, k_strides=made.q_strides, v_strides=made.q_strides)
        assert refusal("mma", made, target) is None
        config = select(made, target, "mma").config
        rows = [row for row in table_of(dtype) if row.when.head_dim >= head_dim > row.when.above]
        candidates = list(CANDIDATES["mma"](made, target))
        fitting = [c for c in candidates if c.shared_bytes <= target.shared_bytes]
        assert len(candidates) == len(rows) and config == fitting[0]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_tables_rows_are_in_the_order_in_which_they_are_tried(dtype):
    table = table_of(dtype)
    widest = [row.when.head_dim for row in table]
    assert widest == sorted(widest) and widest[-1] == 512
    for before, row in zip(table, table[1:], strict=False):
        if before.when == row.when:  # for GPUs with less shared memory
            one, other = (mma(row=x, dtype=dtype).shared_bytes for x in (before, row))
            assert other < one, "a row behind one that needs less is never taken"


def table_of(dtype):
    return rows_of(TABLES, "mma", dtype, HOPPER)


def mma(row=None, **others):
    row = row or table_of(others.get("dtype", "float16"))[0]
    head_dims = dict(head_dim=row.when.head_dim, head_dim_v=row.when.head_dim)
    return MmaConfig(**dict(dtype="float16") | head_dims | row.tile | others)


def test_a_gpu_with_rows_of_its_own_uses_them(monkeypatch):
    own = MMA[1].changed(tile_n=32)
    own = own._replace(when=own.when._replace(gpu="A100"))
    monkeypatch.setitem(TABLES, "mma", (own, *MMA))
    assert rows_of(TABLES, "mma", "float16", A100) == (own,)
    assert table_of("float16") == rows_of(TABLES, "mma", "float16", AMPERE) == MMA
    assert select(problem(64), A100, "mma").config.tile_n == 32


def test_rungs_take_the_dtypes_of_their_configs():
    of_wgmma = WgmmaConfig.DTYPES + WgmmaFloat32Config.DTYPES
    assert (RUNGS["mma"].dtypes, RUNGS["wgmma"].dtypes) == (MmaConfig.DTYPES, of_wgmma)


def test_the_simulator_has_rows_of_its_own():
    for module in (tiles, backward_tiles):
        for kernel, table in module.TABLES.items():
            gpus = {row.when.gpu for row in table}
            assert MEASURED in gpus
            expected = "simulator" if "simulator" in gpus else MEASURED
            assert {row.when.gpu for row in rows_of(module.TABLES, kernel, "", SIMULATOR)} == {expected}


# (seqlen_q, heads, heads_kv) -> (group, tile_m) of the row 128 x 64, warps of 32: a whole tile or more, half a tile,
# one query; a group that fits, one that fits no tile, none.
@pytest.mark.parametrize(
    ("seqlen", "heads", "heads_kv", "group", "tile_m"),
    [
        (4096, 2, 2, 1, 128), (128, 2, 2, 1, 128), (65, 2, 2, 1, 128), (64, 2, 2, 1, 64), (33, 2, 2, 1, 64),
        (32, 2, 2, 1, 32), (1, 2, 2, 1, 32), (128, 8, 2, 1, 128), (127, 8, 2, 4, 128),
        (16, 8, 2, 4, 64), (8, 8, 2, 4, 32), (9, 8, 2, 4, 64), (1, 64, 1, 64, 64), (1, 32, 1, 32, 32),
        (20, 6, 2, 1, 32), (1, 256, 1, 1, 32), (1, 128, 1, 128, 128),
    ],
)  # fmt: skip
def test_few_queries_share_a_small_tile(seqlen, heads, heads_kv, group, tile_m):
    config = select(problem(seqlen=seqlen, seqlen_k=500, heads=heads, heads_kv=heads_kv), A100, "mma").config
    assert (config.group_size, config.tile_m) == (group, tile_m)
    assert config.queries * config.group_size == config.tile_m and config.threads == 32 * tile_m // config.warp_rows


# As many keys as there is room for.
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "tile_n"),
    [
        (64, 64, 128), (128, 128, 128), (129, 128, 128), (192, 128, 128), (128, 192, 128), (192, 129, 96),
        (136, 136, 96), (192, 192, 96), (193, 193, 64), (256, 256, 64), (256, 8, 64),
    ],
)  # fmt: skip
def test_room_goes_to_keys(head_dim, head_dim_v, tile_n):
    q, k, v = (strided(2**24, 2**22, 256, 1, dim=columns) for columns in (head_dim, head_dim, head_dim_v))
    config = select(problem(q=q, k=k, v=v), HOPPER, "wgmma").config
    assert config.tile_n == tile_n


# Why scores cannot wait for the exponent: each alone, and neither.
@pytest.mark.parametrize(
    ("options", "scores_finished"),
    [({}, False), (dict(scale=2.0), False), (dict(scale=0), True), (dict(scale=-1.0), True), (dict(softcap=3.0), True),
     (dict(alibi_slopes=empty(2, dtype="float32")), True)],
)  # fmt: skip
def test_scores_are_finished_first_where_they_must_be(options, scores_finished):
    config = select(problem(**options), A100, "mma").config
    assert config.scores_finished == scores_finished
    assert all(config.has(name) == (name in options) for name in ("softcap", "alibi_slopes"))


# 16 bytes of o at a time: whole chunks, rows at multiples of 16 bytes; and each that is not so.
@pytest.mark.parametrize(
    ("made", "wide"),
    [
        ({}, True),
        (dict(out=strided(2**20, 64, 128, 1)), True),
        (dict(out=strided(2**20, 64, 129, 1)), False),
        (dict(out=strided(2**20, 2**19, 128, 2)), False),
        (dict(v=strided(2**20, 2**19, 64, 1, dim=60)), False),
    ],
    ids=range(5),
)
def test_o_is_written_in_vector_stores_where_it_can_be(made, wide):
    assert select(problem(**made), A100, "mma").config.o_vectorized == wide


def test_tiles_are_the_largest_that_fit():
    for target in (TURING, AMPERE, HOPPER):
        for head_dim in (1, 64, 128, 256, 576):
            for dtype in ("float16", "float64"):
                config = select(problem(head_dim, dtype=dtype), target, "v2").config
                assert config.shared_bytes <= target.shared_bytes
                for row in rows_of(TABLES, "simt", dtype, target):
                    if row.values == (config.tile_m, config.tile_n):
                        break
                    larger = dataclasses.replace(config, **row.tile)
                    assert larger.shared_bytes > target.shared_bytes


# One query as in decoding, and around the smallest and the largest tile.
@pytest.mark.parametrize("seqlen", [1, 32, 33, 200, 256, 257])
def test_few_queries_get_a_tile_that_is_not_mostly_empty(seqlen):
    tile_m = select(problem(seqlen=seqlen), HOPPER, "v2").config.tile_m
    assert tile_m <= 32 or tile_m < 2 * seqlen
    assert tile_m == 256 or seqlen < 256


def test_tiles_shrink_with_head_dim():
    tiles = [select(problem(d), AMPERE, "v2").config for d in (16, 64, 128, 256, 576, 1024)]
    areas = [config.tile_m * config.tile_n for config in tiles]
    assert areas == sorted(areas, reverse=True) and areas[0] > areas[-1]


# Each refusal, with what a person needs to go on.
@pytest.mark.parametrize(
    ("target", "kernel", "made", "fragments"),
    [
        (HOST, "v2", {}, ["kernel='v2'", "no driver", "NUMBA_ENABLE_CUDASIM", "'cpu'"]),
        (HOPPER, "cpu", {}, ["host memory", "'v2'"]),
        (HOPPER, "reference", {}, ["host memory"]),
        (TURING, "auto", dict(head_dim=20_000), ["head_dim 20000", "shared memory", "T4", str(64 * KB)]),
        (HOPPER, "v1", dict(head_dim=8, head_dim_v=30_000), ["30000", "shared memory"]),
        (Target(False, why_no_gpu="lost"), "auto", {}, ["lost"]),
    ],
)
def test_refusals_say_why(target, kernel, made, fragments):
    with pytest.raises(NotImplementedError) as caught:
        select(problem(**made), target, kernel)
    assert all(fragment in str(caught.value) for fragment in fragments), caught.value


def test_unknown_names_and_needless_streams_are_refused():
    with pytest.raises(ValueError, match="auto, reference, v1, v2, mma, wgmma, cpu, not 'v3'"):
        select(problem(), HOST, "v3")
    with pytest.raises(ValueError, match="host memory"):
        select(problem(), HOST, "cpu", stream=True)
    assert select(problem(), HOPPER, "auto", "cupy", stream=True).kernel == BEST_ON_HOPPER


# All that the simulator cannot index; the rungs on the host can still take them.
@pytest.mark.parametrize("family", ["torch", "jax", "cupy", "foreign"])
def test_the_simulator_takes_numpy_arrays_only(family):
    with pytest.raises(NotImplementedError, match=f"NumPy arrays only, and {family}.*NUMBA_ENABLE_CUDASIM"):
        select(problem(), SIMULATOR, "auto", family)
    assert select(problem(), SIMULATOR, "cpu", family).kernel == "cpu"


def test_the_config_knows_what_the_problem_uses():
    options = dict(softcap=3.0, return_lse=True, causal=True, window=(3, None))
    config = select(problem(48, 40, "float64", **options), HOPPER, "v2").config
    assert config.uses == uses(softcap=True) and config.write_lse
    assert (config.head_dim, config.head_dim_v, config.dtype) == (48, 40, "float64")
    plain = select(problem(48, 40, "float64", softcap=3.0, return_lse=True), HOPPER, "v2").config
    assert plain == config, "causal and window are values, not code: they must not compile another kernel"


def test_refusal_is_none_where_a_kernel_runs():
    assert refusal("v2", problem(), HOPPER) is None and refusal("cpu", problem(), HOST) is None


# Outside of what a block may have, and what the kernels' loops divide by.
@pytest.mark.parametrize("wrong", [dict(tile_m=0), dict(tile_m=1025), dict(tile_n=0), dict(tile_n=6), dict(pad=-1)])
def test_a_config_checks_itself(wrong):
    right = dict(dtype="float32", head_dim=64, head_dim_v=64, tile_m=64, tile_n=32)
    with pytest.raises(ValueError, match="1 to 1024 threads" if "tile_m" in wrong else next(iter(wrong))):
        V2Config(**right | wrong)


# What the warps and the products divide by, and what a Config must not say at once.
@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (dict(dtype="int32"), "float32 and float64, not int32"), (dict(column_groups=2), "column_groups must be 1"),
        (dict(dtype="float32", q_registers=True, tile_n=64), "q_registers is for 16-bit"),
        (dict(dtype="float32", column_groups=3), "column_groups must be 1"),
        (dict(dtype="float32", column_groups=1, tile_n=48), "tile_n must be one of .*64. for float32"),
        (dict(dtype="float64", column_groups=1, tile_n=64), "tile_n must be one of .*32. for float64"),
        (dict(warp_rows=8), "warp_rows"), (dict(tile_m=0), "tile_m"), (dict(tile_m=48), "tile_m .* 32, not 48"),
        (dict(tile_n=8), "tile_n"), (dict(tile_n=24), "tile_n"), (dict(group_size=0), "group_size"),
        (dict(group_size=3), "must divide tile_m = 128"),
        *((dict(uses=uses(**one)), "scores_finished") for one in (
            dict(softcap=True), dict(alibi_slopes="float32"), dict(bias="float32"))),
        (dict(rescale_threshold=-1), "rescale_threshold must be 0 to 12"), (dict(rescale_threshold=13.0), "not 13.0"),
    ],
    ids=str,
)  # fmt: skip
def test_a_tensor_config_checks_itself(wrong, word):
    with pytest.raises(ValueError, match=word):
        mma(**wrong)
    assert mma(uses=uses(softcap=True, alibi_slopes="float32"), scores_finished=True, group_size=128).queries == 1


# Consumers, the width of one product, the registers of a consumer.
@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (dict(tile_m=256), "tile_m must be 64, 128 or 192"), (dict(tile_m=96), "tile_m"), (dict(tile_n=264), "tile_n"),
        (dict(tile_n=272), "at most 128"), (dict(head_dim=257), "at most 256, not 257"),
        (dict(head_dim_v=257), "at most 256"), (dict(dtype="float32"), "wgmma takes float16 and bfloat16"),
    ],
    ids=str,
)  # fmt: skip
def test_a_wgmma_config_checks_itself(wrong, word):
    right = dict(dtype="float16", head_dim=64, head_dim_v=64, tile_m=128, tile_n=128)
    with pytest.raises(ValueError, match=word):
        WgmmaConfig(**right | wrong)
    for tile_m in (64, 128, 192):
        config = WgmmaConfig(**right | dict(tile_m=tile_m))
        producer, consumer = config.registers
        assert 128 * (producer + tile_m // 64 * consumer) <= 65536 and producer % 8 == consumer % 8 == 0
        assert config.threads == 128 + 2 * tile_m


# Whole, with tails, wider than registers allow, head_dim_v apart.
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "depth", "width", "parts", "dtype"),
    [(*found, "float16") for found in (
        (64, 64, 64, 64, 1), (1, 1, 16, 16, 1), (17, 31, 32, 32, 1), (512, 256, 512, 256, 1), (8, 257, 16, 144, 2),
        (512, 512, 512, 256, 2), (64, 500, 64, 256, 2))]
    + [(40, 40, 48, 64, 1, "float32"), (8, 300, 16, 160, 2, "float32"),
     (40, 40, 48, 48, 1, "float64"), (256, 256, 256, 128, 2, "float64"), (64, 264, 64, 96, 3, "float64")],
)  # fmt: skip
def test_products_are_in_whole_steps(head_dim, head_dim_v, depth, width, parts, dtype):
    config = mma(
        head_dim=head_dim, head_dim_v=head_dim_v, tile_m=64, tile_n=32, warp_rows=16, dtype=dtype
    )  # fmt: skip
    assert (config.head_dim_padded, config.head_dim_v_padded, config.v_parts) == (depth, width, parts)
    assert config.head_dim_v_padded * config.v_parts >= head_dim_v > config.head_dim_v_padded * (config.v_parts - 1)


# head_dims over one and over several panels of 64 columns, alike and not; tiles of one warp and of several.
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (16, 200), (200, 16), (512, 512)])
@pytest.mark.parametrize(("tile_m", "tile_n"), [(16, 16), (128, 64)])
def test_tiles_in_panels_do_not_overlap(head_dim, head_dim_v, tile_m, tile_n):
    config = mma(head_dim=head_dim, head_dim_v=head_dim_v, tile_m=tile_m, tile_n=tile_n, warp_rows=16)
    q_at, k_at, v_at, row_states_at, tile_at, exchange_at, end = config.shared_layout()

    def size(rows, columns):
        return rows * -(-columns // 64) * 128

    assert (
        q_at == 0
        and k_at - q_at == size(tile_m, config.head_dim_padded)
        and v_at - k_at == size(tile_n, config.head_dim_padded)
    )
    assert tile_at - v_at >= size(tile_n, config.head_dim_v_padded)
    assert row_states_at >= size(tile_m, config.head_dim_v_padded)
    assert tile_at - row_states_at >= config.ROW_STATE_BYTES * tile_m
    assert tile_at % 16 == 0 and exchange_at - tile_at == 2 * 16 and end == exchange_at
    assert config.shared_bytes >= end + 1024 - 16, (
        "the first panel begins at a multiple of 1024, and memory at one of 16"
    )


# The fewest bytes, float64, a head_dim that is padded, and both kernels.
@pytest.mark.parametrize("kind", [V1Config, V2Config])
@pytest.mark.parametrize(("dtype", "size", "head_dim"), [("float16", 4, 64), ("float64", 8, 64), ("bfloat16", 4, 59)])
def test_shared_tiles_do_not_overlap(kind, dtype, size, head_dim):
    config = kind(dtype, head_dim, head_dim + 1, tile_m=64, tile_n=32)
    offsets = config.shared_layout()
    need = [64 * head_dim, 32 * head_dim, 32 * (head_dim + 1), 64 * 32]
    assert all(offset % 4 == 0 for offset in offsets)
    assert all(b - a >= n for a, b, n in zip(offsets, offsets[1:], need, strict=False))
    assert config.shared_bytes == offsets[-1] * size


@pytest.mark.parametrize(
    ("seqlen", "seqlen_k", "head_dim", "tile"),
    [
        (16, 16, 32, (16, 16, 16)),
        (20, 33, 64, (32, 64, 8)),
        (49, 49, 32, (64, 64, 4)),
        (1, 64, 64, (16, 64, 16)),
        (64, 60, 128, (64, 64, 2)),
    ],
)
def test_short_heads_are_one_tile_of_mma(seqlen, seqlen_k, head_dim, tile):
    made = problem(head_dim, seqlen=seqlen, seqlen_k=seqlen_k)
    choice = select(made, HOPPER, "auto", "cupy")
    assert (choice.kernel, dict(choice.refused)["wgmma"]) == ("mma", "mma comes first")
    assert (choice.config.tile_m, choice.config.tile_n, choice.config.blocks_per_sm) == tile
    assert select(made, HOPPER, "wgmma", "cupy").kernel == "wgmma"  # by name
    assert estimates.lost(choice, made, HOPPER) is None, "nothing is lost, and nobody asked for it"
    assert "asked for" in estimates.lost(select(made, HOPPER, "mma", "cupy"), made, HOPPER)


# Of mma in float32 and float64: (queries, keys) of a tile, and how many blocks run at a time.
@pytest.mark.parametrize(
    ("dtype", "seqlen", "seqlen_k", "tile"),
    [
        ("float32", 20, 20, (32, 32, 4)),
        ("float32", 16, 500, (16, 64, 8)),
        ("float32", 500, 5, (64, 16, 2)),
        ("float64", 20, 20, (32, 16, 6)),
        ("float32", 33, 33, (64, 64, 2)),
    ],
)
def test_tiles_of_float32_and_float64_shrink_to_the_lengths(dtype, seqlen, seqlen_k, tile):
    config = select(problem(dtype=dtype, seqlen=seqlen, seqlen_k=seqlen_k), A100, "auto", "cupy").config
    assert (config.kernel, config.tile_m, config.tile_n, config.blocks_per_sm) == ("mma", *tile)


@pytest.mark.parametrize(("seqlen", "seqlen_k", "head_dim"), [(65, 64, 64), (64, 65, 64), (64, 64, 136)])
def test_longer_and_wider_heads_are_not(seqlen, seqlen_k, head_dim):
    assert select(problem(head_dim, seqlen=seqlen, seqlen_k=seqlen_k), HOPPER, "auto", "cupy").kernel == "wgmma"


# In float32 tiles of mma shrink to the lengths, its blocks begin sooner, and they share out the keys of few queries.
# (queries, keys, head_dim) and the rung.
@pytest.mark.parametrize(
    ("seqlen", "seqlen_k", "head_dim", "kernel"),
    [
        (20, 20, 24, "mma"),
        (64, 64, 64, "mma"),
        (16, 500, 64, "wgmma"),
        (500, 16, 64, "mma"),
        (1, 16384, 128, "mma"),
        (256, 256, 64, "wgmma"),
        (1024, 1024, 24, "wgmma"),
        (128, 1024, 128, "wgmma"),
    ],
)
def test_the_rung_in_float32_is_done_sooner(seqlen, seqlen_k, head_dim, kernel):
    made = problem(head_dim, dtype="float32", seqlen=seqlen, seqlen_k=seqlen_k)
    for batch in (1, 4096):  # a row's bits must not depend on it
        many = dataclasses.replace(made, batch=batch)
        assert select(many, HOPPER, "auto", "cupy").kernel == kernel
    assert select(made, HOPPER, "wgmma", "cupy").kernel == "wgmma"  # by name
    assert select(dataclasses.replace(made, packed=(4000, 4000)), HOPPER, "auto", "cupy").kernel == "wgmma"
