"""setmaxnreg: registers move between warpgroups."""

from helpers.instructions import launch, misuse
from numba import cuda

from numba_flash.ptx.sim import setmaxnreg


def test_setmaxnreg_waits_for_registers():
    order = []

    def kernel():
        i = cuda.threadIdx.x
        if i < 128:
            setmaxnreg.increase(240)()
            order.append("increased")
        elif i < 256:
            setmaxnreg.decrease(24)()
            order.append("decreased")
        else:
            setmaxnreg.increase(240)()

    launch(kernel, 384)
    assert order[0] == "decreased" and len(order) == 256


def test_setmaxnreg_of_a_part():
    def part():
        if cuda.threadIdx.x < 96:
            setmaxnreg.decrease(24)()

    misuse(part, 128, match="warp 3 of the same warpgroup nothing; all of a warpgroup must execute the same")

    def too_much():
        setmaxnreg.increase(240)()

    misuse(too_much, 384, match="the block has no more registers")
