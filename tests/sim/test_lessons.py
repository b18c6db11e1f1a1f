"""The lessons in the simulator: each computes attention, keeps the contract's promises, and can be stopped in."""

import importlib
import re

import numpy as np
import pytest
from helpers.instructions import compiled

from lessons import NAMES
from numba_flash import testing
from numba_flash.debug import stop_at, watch
from numba_flash.ptx.sim.errors import InstructionError

LIMITS = dict(layouts=("bhsd",), features=(), grouped=False, strange_strides=False, head_dims=(64,))


def lesson(name):
    return importlib.import_module(f"lessons.{name}").attention


@pytest.mark.parametrize("shape", ["one", "whole tiles", "a tile and one", "few queries"])
@pytest.mark.parametrize("name", NAMES)
def test_it_computes_attention(name, shape):
    """Over several tiles, in which the maximum grows in one head, and falls in the other, whose scores are large. Both
    heads in one shape; in the others, one or the other."""
    tile_m, tile_n = lesson(name).tile_m, importlib.import_module(f"lessons.{name}").TILE_N
    queries, keys, heads = {
        "one": (1, 1, [0]),
        "whole tiles": (tile_m, tile_n, [1]),
        "a tile and one": (tile_m + 1, tile_n + 1, [0]),
        "few queries": (5, 2 * tile_n + 8, [0, 1]),
    }[shape]
    rng = np.random.default_rng(queries + keys)
    q, k, v = (rng.standard_normal((1, 2, n, 64)).astype(lesson(name).dtype) for n in (queries, keys, keys))
    grows = np.linspace(0.5, 3, keys, dtype=k.dtype)[:, None]
    k[0, 0] *= grows
    k[0, 1] *= 10 * grows[::-1]
    q, k, v = (np.ascontiguousarray(x[:, heads]) for x in (q, k, v))
    testing.check(testing.Case(q, k, v, dict(layout="bhsd")), lesson(name)(q, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hopper_1_tma"])
def test_it_keeps_the_contract(name):
    """What it claims of it: one dtype, one head_dim, contiguous arrays, no options. One lesson does: the others are
    launched by the same lines, and what their kernels can break the test above sees."""
    report = testing.check_kernel(lesson(name), dtypes=(lesson(name).dtype,), **LIMITS, max_seqlen=20, count=1)
    assert report, report


def test_other_arrays_are_refused():
    x = np.zeros((1, 1, 4, 64), np.float32)
    with pytest.raises(ValueError, match="k must be"):
        lesson("flash")(x, x.astype(np.float16), x)
    with pytest.raises(ValueError, match="q must be"):
        lesson("flash")(x[..., :32], x, x)
    with pytest.raises(ValueError, match="v must be contiguous"):
        lesson("flash")(x, x, x[:, :, ::-1])


@pytest.mark.parametrize(("text", "where"), [("cuda.syncthreads()  # V", "flash_mma_4"), ("alpha[r] = ", "softmax")])
def test_stop_at_stops_in_a_kernel_and_in_its_device_functions(text, where, capsys):
    made = importlib.import_module("lessons.mma_4_registers")
    x = np.ones((1, 1, 16, 64), np.float16)
    with stop_at(made.attention.kernel, text, thread=3, commands=["p lane"]):
        made.attention(x, x, x)
    assert f"{where}()\n-> {text}" in (seen := capsys.readouterr().out) and "\n3\n" in seen


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_watch_shows_the_running_maximum(name):
    """Of the first query, in the first thread: the largest score of all tiles so far, in the lesson's unit."""
    made = lesson(name)
    rng = np.random.default_rng(0)
    tile_n = importlib.import_module(f"lessons.{name}").TILE_N
    keys = tile_n + 6
    q, k = (rng.standard_normal((1, 1, n, 64)).astype(made.dtype) for n in (3, keys))
    with watch(made.kernel) as seen:
        made(q, k, k)
    mine = [x.values for x in seen if x.thread == (0, 0, 0) and x.values.get("r", 0) == 0]
    scale = 0.125 if made.dtype == "float32" else 0.125 / np.log(2)
    scores = scale * (q[0, 0, 0].astype(float) @ k[0, 0].astype(float).T)
    running = [scores[: end + tile_n].max() for end in range(0, keys, tile_n)]
    np.testing.assert_allclose([float(x["m_new"]) for x in mine], running, rtol=1e-5)


def with_a_line_less(name, number):
    """The lesson without one line of its file."""
    module = importlib.import_module(f"lessons.{name}")
    with open(module.__file__) as file:
        lines = file.read().splitlines()
    lines[number] = ""
    names = dict(__name__=f"lessons.{name}_changed")
    compiled("\n".join(lines), names, module.__file__)
    return names["attention"]


def waits(name):
    """The numbers of the lines that wait."""
    module = importlib.import_module(f"lessons.{name}")
    with open(module.__file__) as file:
        lines = list(file)
    pattern = r"\s+(wait_all\(\)|cuda\.syncthreads\(\)|bar\.warp_sync\(\)|mbarrier\.wait\(.*\)|wait_for_products\(\))"
    return [number for number, line in enumerate(lines) if re.match(pattern, line)]


# Without mma_1_fragments: its tiles are 16-bit numbers that are read by index, which the simulator does not check.
REMOVED = [(name, number) for name in (NAMES[0], *NAMES[2:]) for number in waits(name)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), REMOVED, ids=lambda x: str(x))
def test_every_wait_is_needed_and_the_simulator_says_why(name, number):
    changed = with_a_line_less(name, number)
    q, k = (np.ones((1, 1, n, 64), changed.dtype) for n in (128, 600 if changed.boxes else 200))
    with pytest.raises(InstructionError):
        changed(q, k, k)
