"""griddepcontrol: kernels that overlap."""

import numpy as np
import pytest
from helpers.instructions import BASE, TILE, launch, misuse
from numba import cuda

from numba_flash.arrays.making import aligned_memory
from numba_flash.ptx.sim import fence, griddepcontrol, local, mbarrier, memory, tma
from numba_flash.ptx.sim.errors import InstructionError


def test_who_waits_for_the_kernel_before_sees_what_it_wrote():
    def first(out):
        griddepcontrol.launch_dependents()
        out[cuda.threadIdx.x] = 5

    def second(given, there_before, out):
        x = there_before[cuda.threadIdx.x]
        griddepcontrol.wait()
        out[cuda.threadIdx.x] = x + given[cuda.threadIdx.x]

    made, out = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    launch(first, 32, made)
    launch(second, 32, made, np.arange(32, dtype=np.uint32), out, behind=True)
    assert out.tolist() == list(range(5, 37))
    launch(second, 32, made, np.arange(32, dtype=np.uint32), out)  # and where it runs behind nobody
    assert out.tolist() == list(range(5, 37))


def by_index(array, out):
    if cuda.threadIdx.x != 7:
        griddepcontrol.wait()
    out[cuda.threadIdx.x] = array[cuda.threadIdx.x]  # read


def by_address(array, out):
    if cuda.threadIdx.x != 7:
        griddepcontrol.wait()
    four = local.array(4, np.dtype(np.uint32))
    memory.load_v4(four, 0, memory.address(array, 0))  # read


def by_tma(maps, array, out):
    if cuda.threadIdx.x == 7:
        tma.prefetch(tma.parameter("")())  # of the map, which is a parameter
        mbarrier.init(BASE, 1)
        fence.mbarrier_init()
        tma.load_2d(2 * BASE, tma.parameter("")(), BASE, 0, 0)  # read
    griddepcontrol.wait()


# What the kernel before wrote, or the one before that for which it waited.
@pytest.mark.parametrize("kernels_between", [0, 1])
@pytest.mark.parametrize("second", [by_index, by_address, by_tma])
def test_who_reads_before_it_has_waited(second, kernels_between):
    def first(out):
        out[8 * cuda.threadIdx.x] = 5

    def between():
        griddepcontrol.wait()

    made, out = aligned_memory((64, 64), np.dtype(np.float16)), np.zeros(32, np.uint32)
    of_tma = dict(maps=((0, TILE),), shared_bytes=2**15) if second is by_tma else {}
    launch(first, 32, made)
    for _ in range(kernels_between):
        launch(between, 32, behind=True)
    match = r"shape \(64, 64\) is read before griddepcontrol.wait"
    misuse(second, 32, made, out, match=match, at="# read", thread=7, behind=True, **of_tma)
    if second is by_index:
        launch(second, 32, made, out)  # which is behind nobody: there is nothing to wait for


def test_who_writes_before_it_has_waited():
    def by_index(out):
        out[cuda.threadIdx.x] = 1  # here

    def by_atomics(out):
        memory.add(memory.address(out, 0), 1)  # here

    for kernel in (by_index, by_atomics):
        match = r"shape \(4,\) is written before griddepcontrol.wait"
        misuse(kernel, 4, np.zeros(4, np.uint32), match=match, at="# here", thread=0, behind=True)


def test_a_block_that_never_waits():
    def kernel(out):
        if cuda.blockIdx.x == 0:
            griddepcontrol.wait()

    with pytest.raises(InstructionError, match=r"block 1 has ended without griddepcontrol\.wait"):
        launch(kernel, 4, np.zeros(4, np.uint32), blocks=2, behind=True)
    launch(kernel, 4, np.zeros(4, np.uint32), blocks=2)
