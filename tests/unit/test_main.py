"""python -m numba_flash: what is printed, and the exit status."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import numba_flash
from numba_flash import __main__ as command
from numba_flash.__main__ import main
from numba_flash.api import described
from numba_flash.machine import gpus, toolchain
from numba_flash.machine.target import Target

ROOT = Path(__file__).resolve().parents[2]


def run(capsys, *arguments):
    status = main(arguments)
    return status, capsys.readouterr()


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip() == numba_flash.__version__


@pytest.mark.parametrize("arguments", [[], ["fly"], ["explain", "--window", "1", "x"], ["explain", "--cc", "new"]])
def test_bad_usage(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: python -m numba_flash" in capsys.readouterr().err


def test_demo_says_where_the_demo_is(capsys):
    status, printed = run(capsys, "demo", "--ask", "why?")
    assert status == 2 and printed.out == ""
    for place in ("examples/demo", "scripts/demo"):
        assert place in printed.err and (ROOT / place).exists()


def test_as_a_module_and_without_frameworks():
    code = (
        "import runpy, sys; sys.argv = ['numba_flash', 'info']\n"
        "try: runpy.run_module('numba_flash', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "print('imported:', sorted({'torch', 'jax', 'cupy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("imported: []\n")


@pytest.mark.skipif(sys.platform == "win32", reason="a shell's pipe")
def test_a_reader_that_has_enough_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "numba_flash", "explain"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


# explain


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_explain_describes_the_problem_as_given(capsys, dtype, layout):
    def array(*shape):
        x = np.zeros(shape, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        return x if layout == "bhsd" else x.swapaxes(1, 2)

    status, printed = run(
        capsys, "explain", "--batch", "2", "--heads", "6", "--heads-kv", "3", "--seqlen-q", "5", "--seqlen-k", "70",
        "--head-dim", "9", "--head-dim-v", "8", "--dtype", dtype, "--layout", layout, "--window", "4", "none",
    )  # fmt: skip
    q, k, v = array(2, 6, 5, 9), array(2, 3, 70, 9), array(2, 3, 70, 8)
    expected = str(numba_flash.explain(q, k, v, layout=layout, window=(4, None)))
    assert status == 0 and printed.out.splitlines()[1:3] == expected.splitlines()[1:3]


def test_explain_causal_and_defaults(capsys):
    status, printed = run(capsys, "explain", "--causal", "--seqlen-q", "7", "--heads", "2", "--head-dim", "16")
    expected = str(numba_flash.explain(*[np.zeros((1, 2, 7, 16), np.float16)] * 3, causal=True))
    assert status == 0 and printed.out.splitlines()[1:3] == expected.splitlines()[1:3]


def test_explain_for_another_machine_and_a_problem_larger_than_memory(capsys):
    options = ("--cc", "8.6", "--seqlen-q", "1000000000", "--heads", "128")
    status, printed = run(capsys, "explain", *options)
    assert status == 0
    assert printed.out.startswith("kernel 'mma' on a GPU of compute capability 8.6\n")
    assert f"of {99 * 1024} bytes of shared memory" in printed.out
    _, printed = run(capsys, "explain", *options, "--shared-kb", "64")
    assert f"of {64 * 1024} bytes of shared memory" in printed.out


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        (("--cc", "9.0"), "wgmma"), (("--cc", "9.0", "--layout", "bshd", "--heads-kv", "2"), "wgmma"),
        (("--cc", "8.0"), "mma"), (("--cc", "12.0", "--dtype", "bfloat16"), "mma"), (("--cc", "7.5"), "v2"),
        (("--cc", "9.0", "--dtype", "float32"), "wgmma"), (("--cc", "9.0", "--head-dim", "512"), "mma"),
    ],
)  # fmt: skip
def test_explain_names_what_contiguous_arrays_get(capsys, options, kernel):
    status, printed = run(capsys, "explain", *options)
    assert status == 0 and printed.out.startswith(f"kernel {kernel!r} on a GPU")


def test_explain_with_the_multiprocessors_of_another_machine(capsys):
    _, printed = run(capsys, "explain", "--cc", "9.0", "--batch", "64")
    assert "grid: 132 blocks" in printed.out
    _, printed = run(capsys, "explain", "--cc", "9.0", "--batch", "64", "--multiprocessors", "78")
    assert "grid: 78 blocks" in printed.out


def test_explain_takes_the_options_of_attention(capsys):
    x, rng = np.zeros((2, 4, 30, 8), np.float16), np.random.default_rng(0)
    given = dict(
        mask=np.ones((1, 1, 30, 30), bool), bias=np.zeros((1, 1, 30, 30), np.float16), softcap=3.0, scale=0.5,
        alibi_slopes=rng.random(4).astype(np.float32), sinks=np.ones(4, np.float32), seqlens_k=np.full(2, 30, np.int32),
        q_offset=4, return_lse=True,
    )  # fmt: skip
    flags = ["--mask", "--bias", "--softcap", "3", "--scale", "0.5", "--alibi-slopes", "--seqlens-k", "--q-offset", "4"]
    flags += ["--sinks"]
    sizes = ["--batch", "2", "--heads", "4", "--seqlen-q", "30", "--head-dim", "8"]
    asked = command._parser().parse_args(["explain", *sizes, *flags, "--return-lse"])
    assert described.problem_of(asked, "numpy") == numba_flash.explain(x, x, x, **given).problem
    assert run(capsys, "explain", *sizes, *flags)[0] == 0


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("H200", "kernel 'wgmma' on H200"),
        ("nvidia a100", "kernel 'mma' on A100"),
        ("RTX-4090", "kernel 'mma' on RTX 4090"),
        ("GeForce RTX 4090", "kernel 'mma' on RTX 4090"),
        ("t4", "kernel 'v2' on T4"),
    ],
)
def test_explain_for_a_gpu_by_name(capsys, name, first):
    status, printed = run(capsys, "explain", "--gpu", name)
    assert status == 0 and printed.out.startswith(first + "\n")


def test_every_known_gpu_has_shared_memory():
    for name in gpus.GPUS:
        assert gpus.gpu(name).shared_bytes >= 64 * 1024 and gpus.gpu(name).name == name


def test_explain_says_what_a_mask_costs(capsys):
    sizes = ["explain", "--gpu", "H200", "--seqlen-q", "8192", "--mask"]
    _, printed = run(capsys, *sizes)
    assert "kernel 'wgmma'" in printed.out and "before it: mask_bits, 512 blocks" in printed.out
    _, printed = run(capsys, *sizes, "--dtype", "float64")
    assert "kernel 'mma'" in printed.out and "before it: mask_bits, 512 blocks" in printed.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpu", "H2"), "GPU 'H2' is not known here; known are V100, T4"),
        (("--gpu", "H200", "--cc", "9.0"), "--gpu names a GPU and --cc describes one"),
        (("--gpu", "H200", "--multiprocessors", "3"), "--cc"),
        (("--heads", "3", "--heads-kv", "2"), "must be a multiple"),
        (("--kernel", "v7"), "kernel must be one of auto"),
        (("--batch", "-1"), "--batch must not be negative, and is -1"),
        (("--seqlen-q", "-5"), "--seqlen-q must not be negative"),
        (("--shared-kb", "64"), "--cc"),
        (("--window", "-5", "none"), "window"),
        (("--cc", "6.1"), "--shared-kb"),
        (("--cc", "9.0", "--kernel", "cpu"), "it computes in host memory"),
        (("--cc", "8.6", "--head-dim", "5000"), "shared memory"),
    ],
)
def test_explain_errors(capsys, options, message):
    status, printed = run(capsys, "explain", *options)
    assert status == 2 and not printed.out
    assert printed.err.startswith("explain: ") and message in printed.err


# info


def test_info_names_everything(capsys):
    status, printed = run(capsys, "info")
    assert status == 0
    names = {line.split("  ")[1] for line in printed.out.splitlines() if line.startswith("  ")}
    assert names >= {"numba_flash", "Python", "NumPy", "Numba", "numba-cuda", "cuda-core", "CuPy", "torch", "jax"}
    assert names >= {"simulator", "threads", "folder", "holds", "can be written", "reference", "v1", "v2", "cpu"}
    assert np.__version__ in printed.out and numba_flash.__version__ in printed.out


def test_versions_come_from_the_packages_metadata(monkeypatch):
    def version(name):
        if name != "cupy-cuda12x":
            raise metadata.PackageNotFoundError
        return "14.2"

    monkeypatch.setattr(metadata, "version", version)
    rows = dict(command._versions())
    assert rows["CuPy"] == "14.2" and rows["torch"] == rows["NumPy"] == "not installed"


def test_gpus(monkeypatch):
    driver = pytest.importorskip("cuda.bindings.driver")
    monkeypatch.setattr(toolchain, "simulated", lambda: False)
    monkeypatch.setattr(toolchain, "unusable", lambda: None)
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, 12090))
    monkeypatch.setattr(driver, "cuDeviceGetCount", lambda: (0, 2))
    monkeypatch.setattr(
        Target, "of", lambda device: Target(False, False, device, (9, 0), 232448, 132, f"NVIDIA H{device}")
    )
    rows = dict(command._gpus())
    assert rows["driver"] == "CUDA 12.9"
    assert rows["device 1"] == (
        "NVIDIA H1, compute capability 9.0, 132 multiprocessors, 227 KB of shared memory for a block"
    )


def test_no_gpu_says_why(monkeypatch):
    monkeypatch.setattr(toolchain, "simulated", lambda: False)
    monkeypatch.setattr(toolchain, "unusable", lambda: "no driver")
    assert dict(command._gpus())["devices"] == "none: no driver"


def test_an_error_of_the_driver_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(toolchain, "simulated", lambda: False)
    monkeypatch.setattr(toolchain, "unusable", lambda: "CudaError: 999")
    monkeypatch.setattr(Target, "of", lambda device: Target(True, why_no_gpu="CudaError: 999"))
    _, printed = run(capsys, "info")
    assert printed.out.count("CudaError: 999") == 1
    assert printed.out.count("no GPU is usable (see above)") == 4


def test_cache(monkeypatch, tmp_path):
    folder = tmp_path / "a" / "cache"
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(folder))
    assert dict(command._cache())["can be written"] == "yes, and will be made"
    assert not folder.exists()
    (folder / "cubin").mkdir(parents=True)
    for name in ("one", "cubin/two"):
        (folder / name).write_bytes(bytes(1_500_000))
    rows = dict(command._cache())
    assert rows["holds"] == "2 files, 3.0 MB" and rows["can be written"] == "yes" and str(folder) in rows["folder"]
    (folder / "cpu").write_text("in the way of a folder")
    assert re.match("no: .*cpu.*; kernels are compiled anew", dict(command._cache())["can be written"])
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(folder / "one"))  # a file
    assert dict(command._cache())["can be written"].startswith("no: ")


@pytest.mark.parametrize("with_rich", [True, False])
def test_a_terminal_gets_the_same_words(monkeypatch, capsys, with_rich):
    if with_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    command._print("A title", iter([("name", "a value [of] " + "many words " * 10), ("other", "[/x]")]))
    words = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).split()
    assert words == ["A", "title", "name", "a", "value", "[of]", *["many", "words"] * 10, "other", "[/x]"]
