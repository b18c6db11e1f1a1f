"""A stale kernel is never loaded: the disk cache's key knows every source and every compiler."""

import shutil
import sys
from pathlib import Path

import pytest

from numba_flash.gpu import compiled

PACKAGE = Path(compiled.__file__).parents[1]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the package's sources, which the fingerprint looks at."""
    copy = tmp_path / "numba_flash"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(compiled, "__file__", str(copy / "gpu" / "compiled.py"))
    yield copy
    forget()


def forget():
    compiled.fingerprint.cache_clear()
    compiled.compilers.cache_clear()


def fingerprint(room="simt"):
    forget()
    return compiled.fingerprint(room)


def compilers():
    forget()
    return compiled.compilers()


# A kernel, a step of several kernels, an instruction, what they share, what they are compiled with.
@pytest.mark.parametrize(
    "name",
    ["kernels/simt/v2.py", "kernels/score/softcap.py", "kernels/steps/tiles.py", "ptx/shared.py", "problem/ranges.py",
     "config/forward.py", "config/backward.py", "functions/rules.py", "functions/compiled/code.py",
     "abi/arguments.py", "abi/parameters.py", "arrays/dtypes.py", "problem/options.py", "gpu/assembler.py",
     "gpu/compiled.py"],
)  # fmt: skip
def test_a_changed_source_is_another_kernel(package, name):
    before = fingerprint()
    assert before == fingerprint()
    file = package / name
    content = file.read_bytes()
    file.write_bytes(content.replace(b"e", b"E", 1))  # as long as before, whatever its time says
    assert fingerprint() != before
    file.write_bytes(content)
    assert fingerprint() == before


def test_a_new_file_of_kernels_is_another_kernel(package):
    before = fingerprint()
    (package / "kernels" / "steps" / "new.py").write_text("")
    assert fingerprint() != before


def test_a_kernel_of_another_room_may_change(package):
    """Rooms of kernels import none beside them (test_imports.py)."""
    before, of_mma = fingerprint(), fingerprint("mma")
    (package / "kernels" / "mma" / "new.py").write_text("")
    assert fingerprint() == before and fingerprint("mma") != of_mma


# Each compiler, by the names that pip and conda give: CUDA 13, CUDA 12, an egg.
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("numba-0.68.1.dist-info", "numba-0.68.2.dist-info"),
        ("numba_cuda-0.30.4.dist-info", "numba_cuda-0.30.5.dist-info"),
        ("llvmlite-0.50.0.dist-info", "llvmlite-0.51.0.dist-info"),
        ("cuda_core-1.2.2.dist-info", "cuda_core-1.3.0.dist-info"),
        ("nvidia_nvvm-13.0.88.dist-info", "nvidia_nvvm-13.1.0.dist-info"),
        ("nvidia_nvjitlink-13.0.88.dist-info", "nvidia_nvjitlink-13.1.0.dist-info"),
        ("nvidia_nvjitlink_cu12-12.9.0.dist-info", "nvidia_nvjitlink_cu12-12.9.1.dist-info"),
        ("nvidia_cuda_nvcc_cu12-12.9.0.dist-info", "nvidia_cuda_nvcc_cu12-12.9.1.dist-info"),
        ("numba-0.60.0-py3.11.egg-info", "numba-0.61.0-py3.11.egg-info"),
    ],
)
def test_another_version_of_a_compiler_is_another_compiler(tmp_path, monkeypatch, one, other):
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "gone.zip")])
    (tmp_path / one).mkdir()
    assert compilers() == (one,)
    (tmp_path / one).rename(tmp_path / other)
    assert compilers() == (other,)
    monkeypatch.undo()
    forget()


def test_another_package_is_not_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    before = compilers()
    for name in ("numba_scipy-0.4.dist-info", "numpy-2.4.dist-info", "nvidia_cudnn-9.dist-info", "numba"):
        (tmp_path / name).mkdir()
    assert compilers() == before
    monkeypatch.undo()
    forget()


def test_the_compilers_here_are_found():
    """What Python itself says is installed."""
    from importlib import metadata

    for name in ("numba", "llvmlite", "numba-cuda", "cuda-core"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        folder = f"{name.replace('-', '_')}-{version}"
        assert any(found.startswith(folder) for found in compiled.compilers()), folder
