"""The CPU's backward: gradients against the float64 oracle, bits, what never reaches a gradient, memory, threads."""

import os
import subprocess
import sys

import numba
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numba import njit

import numba_flash
from numba_flash import testing
from numba_flash.cpu.backward_plan import ENOUGH_TILES, MAX_TILE_M, TILE_N
from numba_flash.cpu.plan import MAX_ROWS_ALONE
from numba_flash.cpu.vectors.build import TILE_KEYS, Shape, load
from numba_flash.cpu.vectors.scores import cap_scores_slopes
from numba_flash.problem.backward import GRADIENTS
from numba_flash.testing import Case

LANES = {np.float32: Shape(numba.float32).lanes, np.float64: Shape(numba.float64).lanes}
VECTOR = Shape(numba.float32).width
FEW = MAX_ROWS_ALONE, VECTOR  # query rows that are taken one by one, and those that fill one vector of a panel


def attention_backward(case, do, o, lse, dlse=None, **options):
    """Every gradient that the case has."""
    wanted = tuple(name for name in GRADIENTS if name[1:] in case.arguments())
    options = {"wanted": wanted, "kernel": "cpu"} | options
    return numba_flash.attention_backward(do, o=o, lse=lse, dlse=dlse, **case.arguments() | options)


def inputs_of(case, seed=0, with_dlse=True):
    """do, o, lse and dlse, with o and lse of the forward on the CPU."""
    o, lse = numba_flash.attention(**case.arguments(), kernel="cpu", return_lse=True)
    do, dlse = testing.outer_gradients(case, seed, strange_strides=True)
    return do, o, lse, dlse if with_dlse else None


def check(case, seed=0, with_dlse=True):
    inputs = inputs_of(case, seed, with_dlse)
    testing.check_gradients(case, attention_backward(case, *inputs), *inputs, what="cpu")


# Against the oracle.


def problem(
    seqlen_q, seqlen_k, *, batch=1, heads=2, heads_kv=None, head_dim=8, head_dim_v=None, dtype="float32", **options
):
    generator = np.random.default_rng(seqlen_q)
    shapes = (heads, seqlen_q, head_dim), (heads_kv or heads, seqlen_k, head_dim)
    shapes += ((heads_kv or heads, seqlen_k, head_dim_v or head_dim),)
    return Case(*(generator.standard_normal((batch, *shape)).astype(dtype) for shape in shapes), options)


@given(testing.cases(max_seqlen=150), st.integers(0, 100), st.booleans())
def test_random_problems_agree_with_the_oracle(case, seed, with_dlse):
    check(case, seed, with_dlse)


# Sizes at which some loop changes: register tiles, vectors, panels, key tiles, query tiles; one below, at, one above.
ROWS = [n + d for n in (LANES[np.float32], ENOUGH_TILES * 2 * LANES[np.float32], 2 * MAX_TILE_M) for d in (-1, 0, 1)]
KEYS = [n + d for n in (TILE_KEYS, TILE_N, 3 * TILE_N) for d in (-1, 0, 1)]
WIDTHS = [n + d for n in (VECTOR, LANES[np.float32], 2 * LANES[np.float32]) for d in (-1, 0, 1)]


@settings(max_examples=40)
@given(
    st.sampled_from([1, 5, *ROWS]), st.sampled_from([1, 5, *KEYS]), st.sampled_from([1, *WIDTHS]),
    st.sampled_from(WIDTHS), st.sampled_from(["float32", "float64"]), st.booleans(),
    st.sampled_from([None, (5, 40), (130, None)]),
)  # fmt: skip
def test_sizes_at_the_edges_of_tiles(seqlen_q, seqlen_k, head_dim, head_dim_v, dtype, causal, window):
    check(
        problem(
            seqlen_q,
            seqlen_k,
            heads=1,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
            causal=causal,
            window=window,
        )
    )


@pytest.mark.parametrize("dtype", testing.DTYPES)
@pytest.mark.parametrize("rows", [*FEW, 4 * MAX_TILE_M + 10])
def test_every_feature_over_several_tiles(rows, dtype):
    generator = np.random.default_rng(3)
    seqlen_q, seqlen_k = rows // 2, 2 * TILE_N + 9
    check(
        problem(
            seqlen_q, seqlen_k, batch=2, heads=4, heads_kv=2, dtype=dtype,
            causal=True, seqlens_k=np.array([seqlen_k, seqlen_k - 100], np.int32), softcap=2.5,
            alibi_slopes=np.array([0.5, 0.25, 0.125, 0.0625], np.float32),
            bias=generator.standard_normal((4, 1, seqlen_k)).astype(dtype),
            mask=generator.random((2, 1, seqlen_q, seqlen_k)) < 0.8,
        )
    )  # fmt: skip


# Every way to be broadcast, with query heads that share a KV head; also more of them than a panel has rows.
@pytest.mark.parametrize("heads", [6, 2 * LANES[np.float32] + 6])
@pytest.mark.parametrize("own", range(16))
def test_bias_is_summed_over_what_it_is_broadcast_over(own, heads):
    shape = tuple(n if own >> axis & 1 else 1 for axis, n in enumerate((2, heads, 40, 110)))
    bias = np.random.default_rng(own).standard_normal(shape).astype(np.float32)
    check(problem(40, 110, batch=2, heads=heads, heads_kv=2, window=(70, 30), bias=bias))


# e^-lse and e^lse are beyond float32; p is not.
@pytest.mark.parametrize("level", [-1000.0, -100.0, 100.0, 1000.0])
def test_scores_far_from_0(level):
    check(problem(40, 130, bias=np.full((1, 1, 40, 130), level, np.float32)))


# Few keys take all of the weight: most of p underflows.
def test_scores_far_from_each_other():
    case = problem(70, 200, head_dim=64)
    case.q, case.k = 8 * case.q, 8 * case.k
    check(case)


@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0])
def test_scale(scale):
    check(problem(40, 130, scale=scale))
    check(problem(40, 130, scale=scale, softcap=2.0))


@pytest.mark.parametrize("shape", [(0, 2, 5, 7), (2, 0, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0)])
def test_nothing_at_all(shape):
    batch, heads, seqlen_q, seqlen_k = shape
    case = problem(seqlen_q, seqlen_k, batch=batch, heads=heads, heads_kv=heads)
    slopes, sinks = np.ones((2, heads), np.float32)
    case.options = dict(bias=np.ones((1, 1, 1, 1), np.float32), alibi_slopes=slopes, sinks=sinks, layout="bshd")
    case.q, case.k, case.v = (x.swapaxes(1, 2) for x in (case.q, case.k, case.v))
    inputs = inputs_of(case)
    *gradients, dsinks, _ = attention_backward(case, *inputs)
    assert not any(gradient.any() for gradient in gradients)
    assert np.allclose(dsinks, inputs[-1].sum((0, 2)), atol=0)  # without keys the sink is all of lse
    whole = np.zeros(shape, np.float32)
    case.options["bias"] = whole
    assert attention_backward(case, *inputs_of(case)).dbias.shape == whole.shape


@njit
def slopes_of(values, slopes, cap, zero):
    cap_scores_slopes(values.ctypes.data, slopes.ctypes.data, values.size, cap, zero)
    return load(values.ctypes.data, 0, zero)


# 1 - tanh^2 by (1 - tanh)(1 + tanh): as exact as tanh, also where that is near 1.
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_slopes_of_the_softcap(kind):
    x = (np.random.default_rng(0).standard_normal(8192) * np.logspace(-8, 1, 8192)).astype(kind)
    y, slopes = x.copy(), np.empty_like(x)
    slopes_of(y, slopes, kind(1), kind(0))
    expected = 1 - np.tanh(x.astype(np.longdouble)) ** 2
    assert (np.abs(slopes - expected) <= 4 * np.finfo(kind).eps).all()


# Bits.


def bits(gradients):
    return [None if x is None else np.ascontiguousarray(x).tobytes() for x in gradients]


@pytest.fixture
def threads():
    before = numba.get_num_threads()
    yield numba.set_num_threads
    numba.set_num_threads(before)


def test_bits_do_not_depend_on_threads_or_runs(threads):
    case = problem(300, 700, batch=2, heads=3, head_dim=40, causal=True)
    case.options["bias"] = np.random.default_rng(0).standard_normal((1, 3, 1, 700)).astype(np.float32)
    inputs = inputs_of(case)
    results = []
    for count in (1, min(2, numba.config.NUMBA_NUM_THREADS), 1):
        threads(count)
        results += [bits(attention_backward(case, *inputs)) for _ in range(3)]
    assert all(result == results[0] for result in results)


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=300
    )


# One head alone: every task adds to the sums of the one before it, and more threads than cores make them wait.
@pytest.mark.slow
@pytest.mark.parametrize("layer", ["workqueue", "default"])
def test_tasks_take_turns_on_many_threads(layer):
    result = run(
        "import numba, numpy as np, numba_flash\n"
        "x = np.random.default_rng(0).standard_normal((1, 1, 1500, 64)).astype(np.float32)\n"
        "o, lse = numba_flash.attention(x, x, x, return_lse=True)\n"
        "def call(): return numba_flash.attention_backward(x, x, x, x, o, lse, kernel='cpu')[:3]\n"
        "numba.set_num_threads(1); want = call()\n"
        "numba.set_num_threads(16)\n"
        "print(all(np.array_equal(a, b) for _ in range(10) for a, b in zip(call(), want)))\n",
        NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="16",
    )  # fmt: skip
    assert result.returncode == 0 and result.stdout.strip() == "True", result.stderr


@pytest.mark.parametrize("seqlen_q", [*FEW, 200])
def test_bits_do_not_depend_on_batch_neighbours(seqlen_q):
    case = problem(seqlen_q, 500, batch=4, head_dim=16)
    do, o, lse, dlse = inputs_of(case)
    together = attention_backward(case, do, o, lse, dlse)
    for b in range(4):
        one = slice(b, b + 1)
        alone = attention_backward(Case(case.q[one], case.k[one], case.v[one]), do[one], o[one], lse[one], dlse[one])
        assert bits(alone) == bits(None if x is None else x[one] for x in together)


# What is left out changes nothing of the rest, and is None.
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("seqlen_q", [*FEW, 70])
def test_wanted(seqlen_q, softcap):
    slopes, sinks = np.ones((2, 2), np.float32)
    bias = np.ones((seqlen_q, 200), np.float32)
    case = problem(seqlen_q, 200, softcap=softcap, bias=bias, alibi_slopes=slopes, sinks=sinks)
    inputs = inputs_of(case)
    everything = attention_backward(case, *inputs)
    for wanted in (*((name,) for name in GRADIENTS), ("dq", "dk"), ("dq", "dv"), ("dk", "dv"), ("dv", "dbias")):
        some = attention_backward(case, *inputs, wanted=wanted)
        expected = everything._replace(**{name: None for name in everything._fields if name not in wanted})
        assert bits(some) == bits(expected)


# What never reaches a gradient.


# Keys behind the end, keys that the mask removes for all, keys that it removes for some.
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("seqlen_q", [*FEW, 150])
def test_nan_in_removed_keys_does_not_change_a_bit(seqlen_q, softcap):
    mask = np.random.default_rng(1).random((1, 1, seqlen_q, 260)) < 0.5
    mask[..., 100] = False
    case = problem(seqlen_q, 260, head_dim=20, mask=mask, seqlens_k=np.array([250], np.int32), softcap=softcap)
    inputs = inputs_of(case)
    clean = attention_backward(case, *inputs)
    for rows in (slice(100, 101), slice(250, 260)):
        case.k[:, :, rows], case.v[:, :, rows] = np.nan, np.inf
    strange = attention_backward(case, *inputs)
    assert bits(strange) == bits(clean)
    assert not clean.dk[:, :, 100].any() and not clean.dv[:, :, 250:].any()


@pytest.mark.parametrize(("seqlen", "row"), [(FEW[0], 2), (FEW[1], 3), (150, 60)])
def test_nan_in_a_row_reaches_only_the_keys_it_sees(seqlen, row):
    case = problem(seqlen, seqlen, causal=True)
    do, o, lse, dlse = inputs_of(case)
    clean = attention_backward(case, do, o, lse, dlse)
    case.q[:, :, row], do[:, :, row] = np.nan, np.inf
    strange = attention_backward(case, do, o, lse, dlse)
    behind = slice(row + 1, None)
    assert np.isnan(strange.dk[:, :, : row + 1]).all() and np.isnan(strange.dv[:, :, : row + 1]).all()
    assert np.isnan(strange.dq[:, :, row]).all()
    for name, rows in (("dk", behind), ("dv", behind), ("dq", behind), ("dq", slice(row))):
        # the sums over rows go key by key where something is strange, each in the same order
        assert bits([getattr(strange, name)[:, :, rows]]) == bits([getattr(clean, name)[:, :, rows]])


def test_rows_without_keys_give_and_get_nothing():
    case = problem(70, 40, causal=True, q_offset=-30)  # rows 0 to 29 see nothing
    do, o, lse, dlse = inputs_of(case)
    assert (lse[:, :, :30] == -np.inf).all()
    clean = attention_backward(case, do, o, lse, dlse)
    case.q[:, :, :30], do[:, :, :30], dlse[:, :, :30] = np.nan, np.nan, np.inf
    assert bits(attention_backward(case, do, o, lse, dlse)) == bits(clean)
    assert not clean.dq[:, :, :30].any() and clean.dq[:, :, 30:].any()


@pytest.mark.parametrize("seqlen_q", FEW)
def test_keys_outside_the_window_of_few_queries_get_nothing(seqlen_q):
    case = problem(seqlen_q, 5 * TILE_N, window=(20, 0), q_offset=2 * TILE_N + 30)
    got = attention_backward(case, *inputs_of(case))
    first, end = 2 * TILE_N + 10, 2 * TILE_N + 30 + seqlen_q
    for gradient in got[1:3]:
        assert not gradient[:, :, :first].any() and not gradient[:, :, end:].any() and gradient[:, :, first:end].all()


def test_infinite_bias_removes_a_key():
    bias = np.zeros((1, 1, 40, 130), np.float32)
    bias[..., 50:90] = -np.inf
    case = problem(40, 130, bias=bias)
    inputs = inputs_of(case)
    got = attention_backward(case, *inputs)
    case.options = dict(mask=np.isfinite(bias))
    expected = attention_backward(case, *inputs)
    assert bits(got[:3]) == bits(expected[:3])
    assert np.isfinite(got.dbias).all() and not got.dbias[..., 50:90].any()


# Memory.


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no resource module")
def test_memory_does_not_grow_with_the_square_of_the_length():
    result = run(
        "import resource, sys, numpy as np, numba_flash\n"
        "unit = 1 if sys.platform == 'darwin' else 1024\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit\n"
        "def run(n, **o):\n"
        "    x = np.random.default_rng(0).standard_normal((1, 1, n, 64)).astype(np.float32)\n"
        "    out, lse = numba_flash.attention(x, x, x, kernel='cpu', return_lse=True, **o)\n"
        "    before = peak()\n"
        "    numba_flash.attention_backward(x, x, x, x, out, lse, kernel='cpu', **o)\n"
        "    return peak() - before\n"
        "run(700); print(run(65536, window=(2048, 0)))\n"
    )
    assert result.returncode == 0, result.stderr
    # dq, dk and dv, the sums of dk and dv, and two threads' tiles; the scores alone would be 17 GB
    assert int(result.stdout) < 5 * 65536 * 64 * 4 + 20e6


# Threads.


@pytest.mark.slow
def test_python_threads_may_call_at_once():
    result = run(
        "import threading, numpy as np, numba_flash\n"
        "x = np.random.default_rng(0).standard_normal((1, 4, 300, 64)).astype(np.float32)\n"
        "o, lse = numba_flash.attention(x, x, x, return_lse=True)\n"
        "def call(): return numba_flash.attention_backward(x, x, x, x, o, lse, kernel='cpu').dk\n"
        "want, wrong = call(), []\n"
        "def work():\n"
        "    for _ in range(30):\n"
        "        if not np.array_equal(call(), want): wrong.append(1)\n"
        "all = [threading.Thread(target=work) for _ in range(4)]\n"
        "[t.start() for t in all]; [t.join() for t in all]\n"
        "print(len(wrong))\n",
        NUMBA_THREADING_LAYER="workqueue",
    )
    assert result.returncode == 0 and result.stdout.strip() == "0", result.stderr
