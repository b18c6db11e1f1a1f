"""What the CPU rung promises beyond the contract: exact conversions, bits, splits, memory, threads, its cache."""

import io
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import ml_dtypes
import numba
import numpy as np
import pytest
from contracts import forward
from hypothesis import given, settings, strategies as st
from numba import njit

import numba_flash
from numba_flash import testing
from numba_flash.cpu import backward as cpu_backward, cache as cpu_cache, forward as cpu
from numba_flash.cpu.elements import float_to_bfloat, float_to_half
from numba_flash.cpu.plan import LEAF_KEYS, MAX_ROWS_ALONE, MAX_ROWS_SPLIT, NODE_KEYS, tile_keys
from numba_flash.cpu.vectors.build import TILE_KEYS, Shape, lanes, load
from numba_flash.cpu.vectors.panel import softmax_panel
from numba_flash.cpu.vectors.scores import cap_scores
from numba_flash.machine import forked, threads as machine_threads
from numba_flash.machine.announce import announce
from numba_flash.testing import Case

LANES = {np.float32: Shape(numba.float32).lanes, np.float64: Shape(numba.float64).lanes}
TILE_N = tile_keys(8, 8, 4)


def attention(*arrays, **options):
    return numba_flash.attention(*arrays, kernel="cpu", **options)


def arrays(seqlen_q, seqlen_k, *, batch=1, heads=2, heads_kv=None, head_dim=8, dtype="float32", seed=0):
    generator = np.random.default_rng(seed)
    shapes = (heads, seqlen_q), (heads_kv or heads, seqlen_k), (heads_kv or heads, seqlen_k)
    return [generator.standard_normal((batch, *shape, head_dim)).astype(dtype) for shape in shapes]


def check(q, k, v, **options):
    o, lse = attention(q, k, v, return_lse=True, **options)
    testing.check(Case(q, k, v, options), o, lse, "cpu")


# Sizes at which some loop changes: register tiles, panels, key tiles, chunks; one below, at, one above.
ROWS = [n + d for n in (MAX_ROWS_ALONE, LANES[np.float32], 2 * LANES[np.float32], MAX_ROWS_SPLIT, 128) for d in (0, 1)]
CHUNK = NODE_KEYS
KEYS = [n + d for n in (TILE_KEYS, 2 * TILE_KEYS, TILE_N, 2 * TILE_N, LEAF_KEYS, CHUNK) for d in (-1, 0, 1)]


@settings(max_examples=60)
@given(
    st.sampled_from(ROWS), st.sampled_from(KEYS), st.sampled_from([1, 3, 8, 16, 17, 64, 70, 129]),
    st.sampled_from(["float32", "float64"]), st.booleans(), st.sampled_from([None, (5, 40), (250, None)]),
)  # fmt: skip
def test_sizes_at_the_edges_of_tiles(seqlen_q, seqlen_k, head_dim, dtype, causal, window):
    check(*arrays(seqlen_q, seqlen_k, heads=1, head_dim=head_dim, dtype=dtype), causal=causal, window=window)


# Both ways through the rows: one at a time, and panels; with every feature across several tiles.
@pytest.mark.parametrize("dtype", testing.DTYPES)
@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_every_feature_over_several_tiles(seqlen_q, dtype):
    generator = np.random.default_rng(3)
    seqlen_k = 2 * NODE_KEYS + 9
    if seqlen_q > 1:
        seqlen_k = 2 * TILE_N + 9
    shape = (2, 4, seqlen_q, seqlen_k)
    check(
        *arrays(seqlen_q, seqlen_k, batch=2, heads=4, heads_kv=2, dtype=dtype),
        causal=True, seqlens_k=np.array([seqlen_k, seqlen_k - 100], np.int32), softcap=2.5,
        alibi_slopes=np.array([0.5, 0.25, 0.125, 0.0625], np.float32),
        bias=generator.standard_normal(shape).astype(dtype), mask=generator.random(shape) < 0.8,
    )  # fmt: skip


def test_scores_far_apart_in_float64_keep_double_precision():
    q, k, v = arrays(40, 500, head_dim=64, dtype="float64")
    check(10 * q, 10 * k, v)


def test_a_long_row_does_not_lose_digits():
    q, k, v = arrays(1, 50_000, heads=1, head_dim=64)
    check(0 * q, k, np.abs(v))  # all weights alike: the sums are as long as they get


# Elements.


def as_float32(x):
    with np.errstate(invalid="ignore"):  # signalling NaN
        return x.astype(np.float32)


# float16 and bfloat16: all values there are, through one key, which has the weight 1.
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("contiguous", [True, False])
def test_every_16_bit_value_comes_through_unchanged(dtype, contiguous):
    values = np.arange(65536, dtype=np.uint16).view(dtype).reshape(1, 1, 1, 65536)
    if not contiguous:
        values = np.repeat(values, 2, axis=3)[..., ::2]
    zeros = np.zeros((1, 1, 1, 4), dtype)
    o = as_float32(attention(zeros, zeros, values))
    assert np.array_equal(o, as_float32(values), equal_nan=True)


@pytest.mark.parametrize(("convert", "dtype"), [(float_to_half, np.float16), (float_to_bfloat, ml_dtypes.bfloat16)])
def test_rounding_to_16_bits_is_to_nearest_even(convert, dtype):
    @njit
    def every(values, bits):
        for i in range(len(values)):
            bits[i] = np.uint16(convert(values[i]))

    ends = as_float32(np.arange(65536, dtype=np.uint16).view(dtype))
    ends = np.sort(ends[np.isfinite(ends)])
    middles = ((ends[1:].astype(np.float64) + ends[:-1]) / 2).astype(np.float32)
    special = np.array([np.inf, -np.inf, np.nan, 65519.99, 65520, 1e-40, 3.4e38], np.float32)
    above, below = (np.nextafter(middles, np.float32(end)) for end in (np.inf, -np.inf))
    values = np.concatenate([ends, middles, above, below, special])
    bits = np.empty(len(values), np.uint16)
    every(values, bits)
    with np.errstate(over="ignore"):
        expected = values.astype(dtype)
    known = ~np.isnan(values)
    assert np.array_equal(bits.view(dtype)[known], expected[known])
    assert np.array_equal(np.signbit(bits.view(dtype)[known]), np.signbit(expected[known]))
    assert np.isnan(bits.view(dtype)[~known]).all()


@njit
def weights_of(scores, zero):
    """The panel's exp2 of scores (keys, lanes), whose maximum is 0."""
    m, l, alpha = np.zeros(lanes(zero), scores.dtype), np.zeros(lanes(zero), scores.dtype), scores[0].copy()  # noqa: E741
    softmax_panel(scores.ctypes.data, len(scores), type(zero)(1), m.ctypes.data, l.ctypes.data, alpha.ctypes.data, zero)
    return m, l, alpha


# float32: 2 units in the last place; float64: 2, Taylor's remainder being far below.
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_exp2_is_exact_to_two_units(kind):
    x = -np.random.default_rng(0).exponential(8.0, (4000, LANES[kind])).astype(kind)
    x[0], x[1], x[2] = 0, -np.inf, -(120 if kind == np.float32 else 1000)
    p = x.copy()
    _, sums, _ = weights_of(p, kind(0))
    expected = np.exp2(x.astype(np.longdouble))
    assert (p[0] == 1).all() and (p[1] == 0).all()
    assert (np.abs(p - expected) <= 2 * np.finfo(kind).eps * expected).all()
    assert np.allclose(sums, p.sum(0), rtol=1e-4 if kind == np.float32 else 1e-12)


@njit
def cap_of(values, cap, zero):
    cap_scores(values.ctypes.data, values.size, cap, zero)
    return load(values.ctypes.data, 0, zero)


# Relative everywhere, also near 0, where most scores lie after division by the cap.
@pytest.mark.parametrize(("kind", "units"), [(np.float32, 4), (np.float64, 4)])
def test_softcap_is_exact_to_a_few_units(kind, units):
    x = (np.random.default_rng(0).standard_normal(8192) * np.logspace(-8, 2, 8192)).astype(kind)
    y = x.copy()
    cap_of(y, kind(1), kind(0))
    expected = np.tanh(x.astype(np.longdouble))
    assert (np.abs(y - expected) <= units * np.finfo(kind).eps * np.abs(expected)).all()


# Bits.


def bits(*results):
    return [np.ascontiguousarray(x).tobytes() for x in results]


@pytest.fixture
def threads():
    before = numba.get_num_threads()
    yield numba.set_num_threads
    numba.set_num_threads(before)


# Panels over several tasks; one row over several chunks.
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 700), (1, 9000)])
def test_bits_do_not_depend_on_threads_or_runs(threads, seqlen_q, seqlen_k):
    q, k, v = arrays(seqlen_q, seqlen_k, batch=2, heads=3, head_dim=40)
    results = []
    for count in (1, min(2, numba.config.NUMBA_NUM_THREADS), 1):
        threads(count)
        results += [bits(*attention(q, k, v, causal=True, return_lse=True)) for _ in range(3)]
    assert all(result == results[0] for result in results)


@pytest.fixture
def workers(monkeypatch):
    """The number of threads of each call."""
    counts = []
    for module in (cpu, cpu_backward):
        for name in ("run_serial", "run_parallel"):
            monkeypatch.setattr(
                module, name, lambda first, *rest, name=name: counts.append(1 if name == "run_serial" else first)
            )
    return counts


# Whose limit it is, what the environment has, and the threads that a long call takes of Numba's four.
@pytest.mark.parametrize(
    ("environment", "of_torch", "expected"),
    [
        ({}, None, 4),
        (dict(OMP_NUM_THREADS="3"), None, 3),
        (dict(OMP_NUM_THREADS="1"), None, 1),
        (dict(OMP_NUM_THREADS="2,8"), None, 2),
        (dict(OMP_NUM_THREADS="16"), None, 4),
        (dict(OMP_NUM_THREADS="many"), None, 4),
        (dict(OMP_NUM_THREADS="2", NUMBA_NUM_THREADS="4"), None, 4),
        ({}, 2, 2),
        ({}, 1, 1),
        (dict(OMP_NUM_THREADS="3"), 2, 2),
    ],
)
def test_limits_of_threads(monkeypatch, workers, environment, of_torch, expected):
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    torch = types.SimpleNamespace(**{} if of_torch is None else dict(get_num_threads=lambda: of_torch))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(numba, "get_num_threads", lambda: 4)
    monkeypatch.setattr(forked, "threads_lost", False)
    machine_threads._of_openmp.cache_clear()
    x = np.zeros((1, 2, 1000, 64), np.float32)
    numba_flash.attention(x, x, x, kernel="cpu")
    numba_flash.attention_backward(x, x, x, x, x, x[..., 0].copy(), kernel="cpu")
    machine_threads._of_openmp.cache_clear()
    assert workers == [expected, expected]


def test_a_threading_layer_that_is_not_there(monkeypatch, workers):
    def none():
        raise ValueError("No threading layer could be loaded.\\nHINT: ...")

    monkeypatch.setattr(numba, "get_num_threads", none)
    monkeypatch.setattr(numba.config, "THREADING_LAYER", "tbb")
    monkeypatch.setattr(forked, "threads_lost", False)
    x = np.zeros((1, 2, 1000, 64), np.float32)
    with pytest.raises(NotImplementedError, match="NUMBA_THREADING_LAYER='tbb' .*'workqueue'"):
        numba_flash.attention(x, x, x, kernel="cpu")


# Few rows, whose keys are split; a tile's worth; more, where tasks get smaller without a batch.
@pytest.mark.parametrize("seqlen_q", [1, 3, 20, 200])
def test_bits_do_not_depend_on_batch_neighbours(seqlen_q):
    q, k, v = arrays(seqlen_q, 3000, batch=5, head_dim=16)
    together = attention(q, k, v)
    for b in range(5):
        assert bits(attention(q[b : b + 1], k[b : b + 1], v[b : b + 1])) == bits(together[b : b + 1])


def test_bits_do_not_depend_on_the_padding_of_a_cache():
    q, k, v = arrays(1, 5000)
    expected = bits(attention(q, k[:, :, :1700], v[:, :, :1700]))
    assert bits(attention(q, k, v, seqlens_k=np.array([1700], np.int32))) == expected


def test_nan_in_hidden_values_does_not_change_a_bit():
    q, k, v = arrays(50, 260, head_dim=20)
    mask = np.random.default_rng(1).random((50, 260)) < 0.5
    expected = bits(attention(q, k, v, mask=mask[None, None]))
    mask[:, 100] = False
    expected = bits(attention(q, k, v, mask=mask[None, None]))
    k[:, :, 100], v[:, :, 100] = np.nan, np.inf
    assert bits(attention(q, k, v, mask=mask[None, None])) == expected


# Splits.


# A chunk less one, one chunk, one more; lengths that leave whole chunks empty.
@pytest.mark.parametrize("seqlen_k", [CHUNK + d for d in (-1, 0, 1)] + [7001])
@pytest.mark.parametrize(("seqlen_q", "heads_kv"), [(1, 8), (1, 1), (5, 4)])
def test_keys_in_chunks_are_joined_exactly(seqlen_q, heads_kv, seqlen_k):
    q, k, v = arrays(seqlen_q, seqlen_k, batch=3, heads=8, heads_kv=heads_kv, head_dim=24)
    check(q, 40 * k, v, causal=True, seqlens_k=np.array([seqlen_k, 0, seqlen_k // 5], np.int32))


# Memory.


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no resource module")
def test_memory_does_not_grow_with_the_square_of_the_length():
    result = run(
        "import resource, sys, numpy as np, numba_flash\n"
        "unit = 1 if sys.platform == 'darwin' else 1024\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit\n"
        "def run(n, **o):\n"
        "    x = np.random.default_rng(0).standard_normal((1, 1, n, 64)).astype(np.float32)\n"
        "    return numba_flash.attention(x, x, x, kernel='cpu', **o)\n"
        "run(700); before = peak()\n"
        "run(65536, window=(4096, 0)); print(peak() - before)\n"
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 200e6  # the scores alone would be 17 GB


# Threads.


# Numba's own thread pool aborts the process when it is launched twice at once.
@pytest.mark.slow
@pytest.mark.parametrize("layer", ["workqueue", "default"])
def test_python_threads_may_call_at_once(layer):
    result = run(
        "import threading, numpy as np, numba_flash\n"
        "x = np.random.default_rng(0).standard_normal((1, 4, 300, 64)).astype(np.float32)\n"
        "def call(): return numba_flash.attention(x, x, x, kernel='cpu')\n"
        "want, wrong = call(), []\n"
        "def work():\n"
        "    for _ in range(30):\n"
        "        if not np.array_equal(call(), want): wrong.append(1)\n"
        "all = [threading.Thread(target=work) for _ in range(4)]\n"
        "[t.start() for t in all]; [t.join() for t in all]\n"
        "print(len(wrong))\n",
        NUMBA_THREADING_LAYER=layer,
    )
    assert result.returncode == 0 and result.stdout.strip() == "0", result.stderr


def test_the_interpreter_is_free_while_it_computes():
    q, k, v = arrays(2000, 2000, heads=8, head_dim=64)
    attention(q, k, v)
    ticks, done = [], threading.Event()
    thread = threading.Thread(target=lambda: (attention(q, k, v), done.set()))
    thread.start()
    while not done.wait(0.001):
        ticks.append(1)
    thread.join()
    assert len(ticks) > 2


# The cache.


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(tmp_path))
    return tmp_path / "cpu"


def compiled_anew():
    """A function of its own each time, as a new process has it; and whether the cache had its code."""

    def add_one(x):
        return x + 1

    function = cpu_cache.cached(njit(add_one))
    assert function(2) == 3
    return sum(function.stats.cache_hits.values()) == 0


def test_a_second_process_finds_the_code(folder):
    assert compiled_anew()
    assert len(list(folder.iterdir())) == 1
    assert not compiled_anew()


# Cut off, emptied, one bit changed, and something else altogether.
@pytest.mark.parametrize(
    "damage", [lambda x: x[:100], lambda x: b"", lambda x: x[:-1] + bytes([x[-1] ^ 1]), lambda x: x[::-1]]
)
def test_a_damaged_entry_is_compiled_anew(folder, damage):
    compiled_anew()
    (entry,) = folder.iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    assert compiled_anew()
    assert not compiled_anew()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(RuntimeWarning, match="cannot use its cache folder .*Set NUMBA_FLASH_CACHE_DIR"):
        assert compiled_anew()
    assert compiled_anew(), "and said once: a second warning would be an error here"


def test_all_that_is_compiled_is_in_the_key():
    package = Path(cpu_cache.__file__).parents[1]
    known = {file for pattern in cpu_cache.SOURCES for file in package.glob(pattern)}
    assert {file for folder in ("cpu", "functions") for file in (package / folder).rglob("*.py")} <= known
    assert package / "problem" / "options.py" in known, "it decides where a call's arrays stand among the addresses"


def test_other_sources_are_another_entry(folder, monkeypatch):
    compiled_anew()
    monkeypatch.setattr(cpu_cache, "source_stamp", lambda: "other")
    assert compiled_anew()
    assert len(list(folder.iterdir())) == 2


# A person waiting is told; a log is not.
@pytest.mark.parametrize("terminal", [True, False])
def test_compiling_is_announced_on_a_terminal(folder, monkeypatch, terminal):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)

    def add(x, y):
        return x + y

    for _ in range(2):
        cpu_cache.c_function(add, "int64(int64, int64)", "compiling")
    assert stream.getvalue() == ("compiling\n" if terminal else "")


@pytest.mark.parametrize(("quiet", "text"), [("1", ""), ("0", "compiling\n"), ("", "compiling\n")])
def test_announcements_can_be_silenced(monkeypatch, quiet, text):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("NUMBA_FLASH_QUIET", quiet)
    announce("compiling")
    assert stream.getvalue() == text


def test_without_numbas_compiler_it_says_so():
    code = (
        "import numpy as np, numba_flash; x = np.ones((1, 1, 2, 4))\n"
        "print(numba_flash.attention(x, x, x, kernel='reference').shape)\n"
        "try: numba_flash.attention(x, x, x)\n"
        "except NotImplementedError as error: print(error)"
    )
    environment = os.environ | dict(NUMBA_DISABLE_JIT="1")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "(1, 1, 2, 4)" in done.stdout and "NUMBA_DISABLE_JIT is set: unset it, or take kernel='ref" in done.stdout


def test_the_kernels_are_cached(folder):
    assert isinstance(cpu.run_serial._cache, cpu_cache.Cache) and isinstance(cpu.run_parallel._cache, cpu_cache.Cache)


# Rows by themselves and in panels, in one chunk of keys and in several, each of more than one tile.
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("level", forward.LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("seqlen_k", [600, 2100])
def test_scores_of_any_size_over_tiles_and_chunks(dtype, level, sign, heads, seqlen_k):
    assert tile_keys(7, 7, 4) < 300 and NODE_KEYS < 2100 and 6 <= MAX_ROWS_ALONE < 12 <= MAX_ROWS_SPLIT
    forward.check_at_a_level(forward.Rung("cpu"), dtype, level, sign, seqlen_k=seqlen_k, heads=heads, heads_kv=1)


FORKS = """
import os, sys, numpy as np, numba, numba_flash
forked = sys.modules["numba_flash.machine.forked"]  # came with the package
x = np.random.default_rng(0).standard_normal((2, 4, 256, 64)).astype("float32")
def work():
    o, lse = numba_flash.attention(x, x, x, return_lse=True)
    return o, *numba_flash.attention_backward(x, x, x, x, o, lse)[:3]
work() if sys.argv[1] == "ours" else numba.set_num_threads(2)
assert not forked.threads_lost
forked.launch_lock.acquire()  # another thread is at work while this one forks
child = os.fork()
if child == 0:
    work()
    os._exit(0 if forked.threads_lost == (numba.threading_layer() == "omp") else 3)
forked.launch_lock.release()
print(numba.threading_layer(), os.waitpid(child, 0)[1])
"""


# After a call of ours, and where the parent's own program had started Numba's threads.
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("whose", ["ours", "its own"])
def test_a_forked_process_computes_too(whose):
    """As torch's data loaders are: the threads are not in it, and GNU's OpenMP would end it."""
    command, threads = [sys.executable, "-c", FORKS, whose], dict(os.environ, NUMBA_NUM_THREADS="2")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=threads)
    assert ended.returncode == 0 and ended.stdout.split()[-1] == "0", (ended.stdout, ended.stderr)


@pytest.mark.parametrize("seqlen_q", [1, 8])
@pytest.mark.parametrize("at", [slice(0, 256), slice(256, 512), slice(1024, 1280), slice(1280, 1281)], ids=str)
def test_a_leaf_of_nothing_but_nan_reaches_its_rows(seqlen_q, at):
    """The maximum of such a leaf is -inf, as that of a leaf without keys."""
    q, k, v = np.ones((1, 1, seqlen_q, 8)), np.zeros((1, 1, 1281, 8)), np.zeros((1, 1, 1281, 8))
    k[:, :, at] = np.nan
    o, lse = numba_flash.attention(q, k, v, return_lse=True, kernel="cpu")
    assert np.isnan(o).all() and np.isnan(lse).all()
    before = numba_flash.attention(q, k, v, window=(None, 0), q_offset=at.start - seqlen_q, kernel="cpu")
    assert np.isfinite(before).all()
