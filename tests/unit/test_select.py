"""Which kernel runs where, for machines that are not here, and what a Config accepts."""

import dataclasses

import numpy as np
import pytest

from numba_flash.arrays import read
from numba_flash.config import SeedConfig
from numba_flash.problem import Problem
from numba_flash.select import KERNELS, SEED_TILES, refusal, select
from numba_flash.target import Target

KB = 1024
TURING = Target(False, cc=(7, 5), shared_bytes=64 * KB, multiprocessors=40, name="T4")
AMPERE = Target(False, cc=(8, 6), shared_bytes=99 * KB, multiprocessors=82, name="RTX 3090")
HOPPER = Target(False, cc=(9, 0), shared_bytes=227 * KB, multiprocessors=132, name="H200")
HOST = Target(True, why_no_gpu="no driver")
HOST_BESIDE_GPU = dataclasses.replace(HOPPER, arrays_on_host=True)
SIMULATOR = Target(True, True, 0, (9, 0), 227 * KB, 132, "simulator")


def problem(head_dim=64, head_dim_v=None, dtype="float16", seqlen=4096, **options):
    zero = np.zeros((), dtype)
    shapes = ((1, 2, seqlen, d) for d in (head_dim, head_dim, head_dim_v or head_dim))
    q, k, v = (read("q", np.broadcast_to(zero, shape)).layout for shape in shapes)
    arguments = dict.fromkeys(
        "out out_lse bias mask alibi_slopes seqlens_k q_offsets q_offset window scale softcap".split()
    )
    return Problem.of(q, k, v, **arguments | dict(causal=False, layout="bhsd", return_lse=False) | options)


# Each kind of machine; arrays on the host stay there unless a GPU kernel is named.
@pytest.mark.parametrize(
    ("target", "kernel", "expected", "copies"),
    [
        (TURING, "auto", "v2", False),
        (AMPERE, "auto", "v2", False),
        (HOPPER, "auto", "v2", False),
        (HOPPER, "v1", "v1", False),
        (HOST, "auto", "cpu", False),
        (HOST, "reference", "reference", False),
        (HOST_BESIDE_GPU, "auto", "cpu", False),
        (HOST_BESIDE_GPU, "v2", "v2", True),
        (SIMULATOR, "auto", "v2", False),
        (SIMULATOR, "cpu", "cpu", False),
        (SIMULATOR, "v1", "v1", False),
    ],
)
def test_the_choice(target, kernel, expected, copies):
    choice = select(problem(), target, kernel)
    assert (choice.kernel, choice.copies) == (expected, copies)
    assert (choice.config is not None) == (expected in ("v1", "v2"))
    assert sorted([expected, *(name for name, _ in choice.refused)]) == sorted(KERNELS)
    assert all(reason for _, reason in choice.refused)


def test_tiles_are_the_largest_that_fit():
    for target in (TURING, AMPERE, HOPPER):
        for head_dim in (1, 64, 128, 256, 576):
            for dtype in ("float16", "float64"):
                config = select(problem(head_dim, dtype=dtype), target, "v2").config
                assert config.shared_bytes <= target.shared_bytes
                for tile_m, tile_n in SEED_TILES:
                    if (tile_m, tile_n) == (config.tile_m, config.tile_n):
                        break
                    larger = dataclasses.replace(config, tile_m=tile_m, tile_n=tile_n)
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
    with pytest.raises(ValueError, match="auto, reference, v1, v2, mma, cpu, not 'v3'"):
        select(problem(), HOST, "v3")
    with pytest.raises(ValueError, match="host memory"):
        select(problem(), HOST, "cpu", stream=True)
    assert select(problem(), HOPPER, "auto", "cupy", stream=True).kernel == "v2"


# All that the simulator cannot index; the rungs on the host can still take them.
@pytest.mark.parametrize("family", ["torch", "jax", "cupy", "foreign"])
def test_the_simulator_takes_numpy_arrays_only(family):
    with pytest.raises(NotImplementedError, match=f"NumPy arrays only, and {family}.*NUMBA_ENABLE_CUDASIM"):
        select(problem(), SIMULATOR, "auto", family)
    assert select(problem(), SIMULATOR, "cpu", family).kernel == "cpu"


def test_the_config_knows_what_the_problem_uses():
    options = dict(softcap=3.0, return_lse=True, causal=True, window=(3, None))
    config = select(problem(48, 40, "float64", **options), HOPPER, "v2").config
    assert config.softcap and config.write_lse and not config.mask and config.bias_dtype is None
    assert (config.head_dim, config.head_dim_v, config.dtype) == (48, 40, "float64")
    plain = select(problem(48, 40, "float64", softcap=3.0, return_lse=True), HOPPER, "v2").config
    assert plain == config, "causal and window are values, not code: they must not compile another kernel"


def test_refusal_is_none_where_a_kernel_runs():
    assert refusal("v2", problem(), HOPPER) is None and refusal("cpu", problem(), HOST) is None


# Outside of what a block may have, and what the kernels' loops divide by.
@pytest.mark.parametrize("wrong", [dict(tile_m=0), dict(tile_m=1025), dict(tile_n=0), dict(tile_n=6), dict(pad=-1)])
def test_a_config_checks_itself(wrong):
    right = dict(kernel="v2", dtype="float32", head_dim=64, head_dim_v=64, tile_m=64, tile_n=32)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SeedConfig(**right | wrong)


# The fewest bytes, float64, a head_dim that is padded, and both kernels.
@pytest.mark.parametrize("kernel", ["v1", "v2"])
@pytest.mark.parametrize(("dtype", "size", "head_dim"), [("float16", 4, 64), ("float64", 8, 64), ("bfloat16", 4, 59)])
def test_shared_tiles_do_not_overlap(kernel, dtype, size, head_dim):
    config = SeedConfig(kernel, dtype, head_dim, head_dim + 1, tile_m=64, tile_n=32)
    offsets = config.shared_offsets()
    need = [64 * head_dim, 32 * head_dim, 32 * (head_dim + 1), 64 * 32]
    assert all(offset % 4 == 0 for offset in offsets)
    assert all(b - a >= n for a, b, n in zip(offsets, offsets[1:], need, strict=False))
    assert config.shared_bytes == offsets[-1] * size
