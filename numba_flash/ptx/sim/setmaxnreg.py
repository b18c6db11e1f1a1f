"""Stand-ins for ptx.setmaxnreg: who has how many registers is kept; nothing depends on it."""

import functools

from .errors import InstructionError
from .now import current
from .thread import driven
from .warp import together


@functools.cache
def increase(registers):
    def setmaxnreg():
        _check(registers)
        yield from driven(together(("setmaxnreg.increase", registers), _nothing, None))
        thread = current()
        block, warp = thread.block, thread.thread_id // 32
        while not block.registers.fit(warp, registers, -(-len(block.threads) // 32)):
            block.registers.waiting.append(thread)
            yield from block.wait(thread, f"setmaxnreg.increase({registers}): the block has no more registers")
        block.registers.set(thread.thread_id, registers, "increase")

    return setmaxnreg


@functools.cache
def decrease(registers):
    def setmaxnreg():
        _check(registers)
        yield from driven(together(("setmaxnreg.decrease", registers), _nothing, None))
        thread = current()
        block = thread.block
        block.registers.set(thread.thread_id, registers, "decrease")
        waiting, block.registers.waiting = block.registers.waiting, []
        for other in waiting:
            block.wake(other)

    return setmaxnreg


def _check(registers):
    if registers % 8 or not 24 <= registers <= 256:
        raise InstructionError(f"setmaxnreg takes a multiple of 8 from 24 to 256, not {registers}")


def _nothing(warp, given):
    return None
