"""What the compilers make of each lesson, without a GPU: the instructions that it is about, and no spilled register."""

import importlib
import struct
import types
from pathlib import Path

import numpy as np
import pytest
from helpers import compiler

from lessons import NAMES, launch
from numba_flash.abi.tensor_maps import fits
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


@compiler.needed
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
@pytest.mark.skipif(compiler.missing() is None and assembler.tool("ptxas") is None, reason="needs nvidia-cuda-nvcc")
def test_it_compiles_and_spills_nothing(name):
    """Assembled as the driver does it, by ptxas: nvJitLink serialises wgmma."""
    made = importlib.import_module(f"lessons.{name}").attention
    for cc in (x for x in SINCE_AMPERE if not made.boxes or x == (9, 0)):
        ptx = made.ptx(cc)
        assert [words for words in OF_LESSON[name] if words not in ptx] == []
        code = assembler.assemble_whole(ptx, compiled.architecture(cc))
        assert (code.spill_bytes, code.stack_bytes, code.warnings) == (0, 0, ()), cc
        assert code.registers * made.threads <= 65536


@pytest.mark.parametrize("name", NAMES)
def test_it_is_as_short_as_a_lesson(name):
    assert 60 <= len((ROOT / "lessons" / f"{name}.py").read_text().splitlines()) <= 150


@compiler.needed
def test_arrays_in_host_memory_need_the_simulator():
    x = np.zeros((1, 1, 4, 64), np.float32)
    with pytest.raises(RuntimeError, match="NUMBA_ENABLE_CUDASIM=1"):
        importlib.import_module("lessons.flash").attention(x, x, x)


@compiler.needed
@pytest.mark.parametrize("name", ["mma_4_registers", "hopper_1_tma"])
def test_a_launch_on_a_gpu_gets_its_parameters(name, monkeypatch):
    """There is no GPU here: what would be launched is looked at."""
    launched = []

    class Launcher:
        def __init__(self, kernel, name, device, threads, shared_bytes, pointers, maps, constants):
            assert (pointers, constants) == (4, 8 + 8 + 4) and maps == len(lesson.boxes)

        def parameters(self, addresses, maps, scalars):
            return addresses, maps, scalars

        def launch(self, parameters, stream, blocks):
            launched.append((parameters, blocks))

    lesson = importlib.import_module(f"lessons.{name}").attention
    x = np.zeros((1, 2, 100, 64), np.float16)
    read = launch.arrays.read

    def on_gpu(argument, array):
        found = read(argument, array)
        return types.SimpleNamespace(pointer=found.pointer, layout=types.SimpleNamespace(device=0))

    monkeypatch.setattr(launch.arrays, "read", on_gpu)
    monkeypatch.setattr(
        type(lesson),
        "_launcher",
        lambda self, device, constants: Launcher(
            None, self.entry, device, self.threads, self.shared_bytes, 4, len(self.boxes), constants
        ),
    )
    o = lesson(x, x, x)
    (((addresses, maps, scalars), blocks),) = launched
    assert blocks == 2 * -(-100 // lesson.tile_m) and addresses[3] == o.ctypes.data
    assert struct.unpack("<qqf", scalars)[:2] == (100, 100) and [n for n, _ in maps] == [*range(len(lesson.boxes))]
    assert [fits(tensor_map) for _, tensor_map in maps] == [None] * len(maps)
