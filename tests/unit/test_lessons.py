"""What the compilers make of each lesson, without a GPU: the instructions that it is about, and no spilled register."""

import importlib
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import compiler

from lessons import NAMES
from numba_flash.gpu import assembler, compiled

ROOT = Path(__file__).resolve().parents[2]
SINCE_AMPERE = ((8, 0), (8, 9), (9, 0))
OF_LESSON = {  # what it adds
    "flash": (),
    "mma_1_fragments": ("mma.sync.aligned.m16n8k16",),
    "mma_2_ldmatrix": ("ldmatrix.sync.aligned.m8n8.x4.", "ldmatrix.sync.aligned.m8n8.x4.trans"),
    "mma_3_cp_async": ("cp.async.cg.shared.global", "cp.async.wait_group"),
    "mma_4_registers": ("shfl.sync.bfly",),
    "hopper_1_tma": ("cp.async.bulk.tensor.3d", "wgmma.mma_async.sync.aligned.m64n128k16", "mbarrier.try_wait.parity"),
    "hopper_2_stages": ("mbarrier.arrive.expect_tx",),
    "hopper_3_turns": ("bar.arrive",),
}


def machine_code(ptx, arch, folder):
    """As the driver assembles it, by ptxas: nvJitLink serialises wgmma."""
    try:
        from cuda.pathfinder import find_nvidia_binary_utility

        ptxas = find_nvidia_binary_utility("ptxas") or shutil.which("ptxas")
    except ImportError:
        ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("needs ptxas: pip install nvidia-cuda-nvcc")
    source, made = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(ptx)
    command = [ptxas, "-v", f"-arch={arch}", "-o", str(made), str(source)]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return assembler.Assembled(made.read_bytes(), log)


@compiler.needed
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def test_it_compiles_and_spills_nothing(name, tmp_path):
    made = importlib.import_module(f"lessons.{name}").attention
    for cc in (x for x in SINCE_AMPERE if not made.boxes or x == (9, 0)):
        ptx = made.ptx(cc)
        assert [words for words in OF_LESSON[name] if words not in ptx] == []
        code = machine_code(ptx, compiled.architecture(cc), tmp_path)
        assert (code.spill_bytes, code.stack_bytes, code.warnings) == (0, 0, ()), cc
        assert code.registers * made.threads <= 65536


@pytest.mark.parametrize("name", NAMES)
def test_it_is_as_short_as_a_lesson(name):
    assert 60 <= len((ROOT / "lessons" / f"{name}.py").read_text().splitlines()) <= 150
