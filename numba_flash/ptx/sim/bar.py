"""Stand-ins for ptx.bar."""

from .errors import InstructionError, name
from .now import current
from .warp import together


class Barrier:
    def __init__(self):
        self.threads, self.clock = None, None
        self.came, self.waiting = {}, []  # came: threads, in order


def sync(barrier, threads):
    thread = current()
    if not _come(thread, barrier, threads):
        state = thread.block.barriers[int(barrier)]
        state.waiting.append(thread)
        return thread.block.wait(thread, f"bar.sync({int(barrier)}, {int(threads)})")
    return None


def arrive(barrier, threads):
    _come(current(), barrier, threads)


def warp_sync():
    return together(("bar.warp_sync",), _meet, None)


def _meet(warp, given):
    warp.members[0].block.order.meet(warp.numbers)


def _come(thread, barrier, threads):
    """Whether the barrier opens with this thread."""
    barrier, threads, block = int(barrier), int(threads), thread.block
    if not 0 <= barrier < 16 or threads % 32 or not 0 < threads <= len(block.threads):
        raise InstructionError(
            f"barrier {barrier} for {threads} threads: barriers are 0 to 15, threads whole warps of the block's"
        )
    state = block.barriers.setdefault(barrier, Barrier())
    if state.came and state.threads != threads:
        raise InstructionError(
            f"barrier {barrier} for {threads} threads, but {name(next(iter(state.came)))} came for {state.threads}"
        )
    if thread in state.came:
        raise InstructionError(f"came a second time to barrier {barrier} before it opened")
    state.threads = threads
    state.came[thread] = True
    state.clock = block.order.release(thread.number, state.clock)
    if len(state.came) < threads:
        return False
    for other in [*state.waiting, thread]:
        block.order.acquire(other.number, state.clock)
    for other in state.waiting:
        block.wake(other)
    block.barriers[barrier] = Barrier()
    return True
