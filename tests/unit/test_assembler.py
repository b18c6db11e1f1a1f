"""The assembler's report, and what compiled.py adds to PTX for configs that ask for it."""

import math
import types

import pytest
from helpers import compiler

from numba_flash.abi import tensor_maps
from numba_flash.abi.parameters import Parameters
from numba_flash.config.forward import LaunchFacts
from numba_flash.gpu import assembler, compiled
from numba_flash.gpu.assembler import Assembled, assemble, assemble_whole

REPORT = """
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 152 registers, used 1 barriers
ptxas info    : Function properties for two
ptxas         .     48 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem, 8 bytes lmem
"""


def test_the_report_is_that_of_the_worst_function():
    found = Assembled(b"", REPORT)
    assert (found.registers, found.spill_bytes, found.stack_bytes, found.shared_bytes) == (152, 24, 48, 1024)
    assert found.warnings == ()


def test_a_report_without_numbers_is_no_report_of_zero():
    with pytest.raises(ValueError, match="nothing like.*registers"):
        Assembled(b"", "all is well").registers  # noqa: B018


# As ptxas words them: wgmma serialised, a limit that is not kept, registers.
@pytest.mark.parametrize(
    "line",
    [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized",
        "ptxas warning : Too big maxrregcount value specified 256, will be ignored",
        "ptxas fatal advisory: 'setmaxnreg' ignored",
    ],
)
def test_warnings_are_found(line):
    assert Assembled(b"", REPORT + line).warnings == (line,)


@compiler.needed
@pytest.mark.parametrize("cc", compiled.PTX_VERSIONS, ids=compiled.architecture)
def test_the_version_of_ptx_has_the_architecture(cc):
    arch = compiled.architecture(cc)
    text = (
        f".version {compiled.PTX_VERSIONS[cc]}\n.target {arch}\n.address_size 64\n.visible .entry empty() {{ ret; }}\n"
    )
    assert assemble(text, arch).cubin[:4] == b"\x7fELF"


class Asking(LaunchFacts):
    """A config of a kernel that is written here."""

    kernel, dtype, threads = "asking", "float32", 64
    takes = Parameters(("x", "y"), ("x", "y"))
    tensor_maps, blocks_per_sm, whole_program, cluster = 3, 2, True, 2


class Plain(Asking):
    tensor_maps, blocks_per_sm, whole_program, cluster = 0, 0, False, 1


def kernel(tensor_maps, arrays, strides):
    arrays.y[0] = math.sqrt(arrays.x[0]) + strides.y[1]


def kernel_without_maps(arrays, strides):
    arrays.y[0] = math.sqrt(arrays.x[0]) + strides.y[1]


@compiler.needed
@pytest.mark.parametrize(("config", "function"), [(Asking, kernel), (Plain, kernel_without_maps)])
def test_what_a_config_asks_for_is_in_the_ptx(config, function, monkeypatch):
    monkeypatch.setattr(compiled, "source", lambda config: types.SimpleNamespace(py_func=function))
    ptx = compiled.to_ptx(config(), (9, 0))
    asked = config is Asking
    size = 3 * tensor_maps.SIZE
    assert (f".param .align 64 .b8 numba_flash_asking_param_0[{size}]" in ptx) == asked
    assert (".maxntid 64" in ptx and ".minnctapersm 2" in ptx) == asked
    assert (".version 8.0" in ptx) == asked
    assert (".explicitcluster\n.reqnctapercluster 2, 1, 1\n" in ptx) == asked
    assert ".param .u64 numba_flash_asking_param_1" in ptx
    found = assemble(ptx, "sm_90a")
    assert found.cubin[:4] == b"\x7fELF" and found.registers > 0 and found.spill_bytes == 0


def test_a_whole_program_needs_ptxas(monkeypatch):
    monkeypatch.setattr(assembler, "tool", lambda name: None)
    with pytest.raises(NotImplementedError, match="needs ptxas, .*: pip install nvidia-cuda-nvcc"):
        assemble_whole("", "sm_90a")


@pytest.mark.skipif(compiler.missing() is not None or assembler.tool("ptxas") is None, reason="needs ptxas")
def test_what_ptxas_refuses_is_said_in_its_words():
    with pytest.raises(RuntimeError, match="ptxas refused the kernel: (.|\n)*[Ff]atal"):
        assemble_whole("no PTX", "sm_90a")
