"""A barrier that is missing in a kernel that reads shared memory by index is an error that names thread and line."""

import contextlib
import importlib
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.instructions import compiled, launch, misuse
from numba import cuda, float32, float64, int32

import numba_flash
from numba_flash.debug import race_check, stop_at
from numba_flash.machine import toolchain

pytestmark = pytest.mark.skipif(not toolchain.simulated(), reason="set NUMBA_ENABLE_CUDASIM=1")

ROOT = Path(__file__).resolve().parents[2]
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 1, 40, 4), dtype=np.float32) for _ in range(3))
BARRIER = re.compile(r"^( +)cuda\.syncthreads\(\)", re.MULTILINE)


def forward(kernel):
    return numba_flash.attention(q, k, v, causal=True, kernel=kernel)


def softmax(kernel):
    return numba_flash.softmax(q[0, 0].T, kernel=kernel)


def backward(kernel):
    o, lse = numba_flash.attention(q, k, v, causal=True, return_lse=True, kernel="reference")
    return numba_flash.attention_backward(q, q, k, v, o, lse, causal=True, kernel="v2")


# file, the numbers of its barriers, what runs it. Left out are those for dropout and for several query tiles of dK.
FILES = (
    ("simt.v1", range(3), forward),
    ("simt.v2", range(2), forward),
    ("softmax.blocked", range(2), softmax),
    ("simt.v2_backward_dkdv", range(3), backward),
    ("simt.ds_rows", range(1, 3), backward),
)


@contextlib.contextmanager
def without_barrier(module, number):
    """The kernel file with its barrier of this number left out."""
    text, make = inspect.getsource(module), module.make
    gap = list(BARRIER.finditer(text))[number]
    changed = f"{text[: gap.start()]}{gap[1]}pass{text[gap.end() :]}"
    compiled(changed, module.__dict__, module.__file__)
    try:
        yield
    finally:
        module.make = make


@pytest.mark.parametrize(
    "file, number, run", [(file, number, run) for file, numbers, run in FILES for number in numbers]
)
def test_each_barrier_of_our_kernels_is_missed(file, number, run):
    module = importlib.import_module(f"numba_flash.kernels.{file}")
    with without_barrier(module, number), pytest.raises(RuntimeError, match="with no barrier in between") as caught:
        run(file.partition(".")[2])
    assert str(caught.value).startswith("block ("), caught.value
    run(file.partition(".")[2])


def test_a_read_of_what_another_thread_wrote():
    def kernel(out):
        i = cuda.threadIdx.x
        tile = cuda.shared.array((4, 8), float32)
        tile[i // 8, i % 8] = i
        out[i] = tile[3 - i // 8, i % 8]

    out = np.zeros(32, np.float32)
    match = "read by thread 8, is written over with no barrier in between"
    misuse(kernel, 32, out, match=match, at="tile[i // 8, i % 8] = i", thread=16)

    def with_barrier(out):
        i = cuda.threadIdx.x
        tile = cuda.shared.array((4, 8), float32)
        tile[i // 8, i % 8] = i
        cuda.syncthreads()
        row = tile[-1 - i // 8]
        out[i] = row[i % 8]

    launch(with_barrier, 32, out)
    np.testing.assert_array_equal(out.reshape(4, 8), np.arange(32).reshape(4, 8)[::-1])

    def a_pair(out):
        i = cuda.threadIdx.x
        tile = cuda.shared.array(32, float64)
        tile[i] = i
        if i == 8:
            out[0] = tile[-25]

    match = "written by thread 7, is read with no barrier in between"
    misuse(a_pair, 32, out, match=match, at="out[0] = tile", thread=8)


def test_a_write_over_what_another_thread_reads_or_writes():
    def reads(out):
        i = cuda.threadIdx.x
        tile = cuda.shared.array(0, int32)
        if i == 0:
            out[0] = tile[5]
        if i == 5:
            tile[i] = 1

    out = np.zeros(32, np.int32)
    misuse(reads, 32, out, match="read by thread 0, is written over", at="tile[i] = 1", thread=5, shared_bytes=128)

    def writes():
        tile = cuda.shared.array(0, int32)
        tile[0] = cuda.threadIdx.x // 16

    misuse(writes, 32, match="written by thread 0, is written over", at="tile[0] =", thread=16, shared_bytes=128)

    def the_same():
        tile = cuda.shared.array(0, int32)
        tile[0:2] = 7

    launch(the_same, 32, shared_bytes=128)


def test_atomic_operations_are_in_order_with_each_other_and_not_with_a_read():
    def kernel(out, with_barrier):
        i = cuda.threadIdx.x
        total = cuda.shared.array(1, int32)
        if i == 0:
            total[0] = 0
        cuda.syncthreads()
        cuda.atomic.add(total, 0, i)
        if with_barrier:
            cuda.syncthreads()
        if i == 0:
            out[0] = total[0]

    out = np.zeros(1, np.int32)
    launch(kernel, 32, out, scalars=(1,))
    assert out[0] == 31 * 16

    def late(out):
        total = cuda.shared.array(1, int32)
        cuda.atomic.add(total, 0, 1)
        if cuda.threadIdx.x == 31:
            out[0] = total[0]

    misuse(late, 32, out, match="written by thread 0, is read with no barrier", thread=31)


def test_an_index_past_the_end_raises():
    def kernel():
        tile = cuda.shared.array(8, float32)
        tile[cuda.threadIdx.x] = 0

    with pytest.raises(IndexError, match="index 8 is out of bounds for axis 0 with size 8") as caught:
        launch(kernel, 32)
    assert "tid=[8, 0, 0]" in str(caught.value)


@cuda.jit
def reversed_by_blocks(x, out):
    tile = cuda.shared.array(16, float32)
    i, first = cuda.threadIdx.x, cuda.blockIdx.x * cuda.blockDim.x
    tile[i] = x[first + i]
    cuda.syncthreads()
    out[first + i] = tile[15 - i]


@cuda.jit
def reversed_too_early(x, out):
    tile = cuda.shared.array(16, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    out[i] = tile[15 - i]


def test_a_kernel_of_the_callers():
    x, out = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    with race_check():
        for blocks in (2, 1):
            reversed_by_blocks[blocks, 16](x, out)
            np.testing.assert_array_equal(out[:16], x[:16][::-1])
        with pytest.raises(
            RuntimeError, match=r"test_races.py:\d+: tile\[i\] = x\[i\]\nshared address .* read by thread"
        ):
            reversed_too_early[1, 16](x, out)
        with pytest.raises(IndexError, match=r"tid=\[16, 0, 0\]"):
            reversed_by_blocks[1, 32](x, out)
        np.testing.assert_array_equal(forward("v2"), forward("v2"))
        with stop_at(reversed_by_blocks, "out[first + i]", thread=3, commands=["p tile[12]"]):
            reversed_by_blocks[2, 16](x, out)
    np.testing.assert_array_equal(out, x.reshape(2, 16)[:, ::-1].ravel())
    reversed_too_early[1, 16](x, out)  # Numba's own simulator sees nothing


def changed(tmp_path, old, new):
    """scripts/step v2 in a copy of the package in which a piece of v2 is another."""
    shutil.copytree(ROOT / "numba_flash", tmp_path / "numba_flash", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("results"))
    path = tmp_path / "numba_flash" / "kernels" / "simt" / "v2.py"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    script = [sys.executable, str(tmp_path / "scripts" / "step"), "v2"]
    return subprocess.run(script, capture_output=True, text=True, cwd=tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "heading"),
    [
        ("cuda.syncthreads()\n            if q_index", "pass\n            if q_index", "Races"),
        ("alpha = math.exp(m - m_new)", "alpha = compute(1)", "Change a kernel"),
    ],
)
def test_the_page_on_stepping_shows_what_a_change_gives(tmp_path, old, new, heading):
    done = changed(tmp_path, old, new)
    page = (ROOT / "docs" / "stepping.md").read_text().partition(f"\n## {heading}\n")[2]
    shown = re.search(r"^```text\n\$ .*\n((?:.*\n)*?)```$", page, re.MULTILINE)[1]
    assert done.returncode == 1 and done.stdout.replace(f"{tmp_path}/", "") == shown, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (
            "alpha = math.exp(m_neu - m)",
            r"simt/v2.py:\d+: alpha = math.exp\(m_neu - m\)\nNameError: tid=\[\d+, 0, 0\] .*'m_neu'",
        ),
        ("alpha = math.log(-1.0)", r"simt/v2.py:\d+: alpha = math.log\(-1.0\)\nValueError: tid=\[\d+, 0, 0\] .*domain"),
    ],
)
def test_an_error_in_a_kernel_is_shown_with_its_line(tmp_path, new, said):
    done = changed(tmp_path, "alpha = math.exp(m - m_new)", new)
    assert done.returncode == 1 and re.search(said, done.stdout), done.stdout + done.stderr
