"""The threads of a block, or of a cluster's blocks, take turns: one runs until it has to wait, and then hands on.

Numba's own simulator starts a thread of Python for each, and asks them in a loop whether they wait. Here all run in the
thread that launches (resumable.py). One that waits goes on only when there is something for it; the order is the same
in every run; and when nobody can go on, that is known at once and without a time limit, however long a debugger stops.
Copies under way arrive as late as they can: when nobody can go on without them.
"""

import sys
from collections import deque

from numba.cuda.simulator import kernel as numba_kernel

from . import now
from .block import Block
from .errors import Abandoned, InstructionError, name, place, place_of_error
from .indexed import Atomic
from .now import current
from .order import Order
from .thread import pause

ENDED = object()
POLLS = 300_000  # how often a thread may look at memory in which nothing can change any more


class SharedOfBlock:
    """Numba's `cuda.shared` in a launch: that of the block of the thread that asks."""

    def __init__(self, dynamic_bytes):
        self._dynshared_size = dynamic_bytes  # Numba's name for it

    def array(self, shape, dtype, alignment=None):
        return current().block.shared.array(shape, dtype)


class Cooperative:
    """Numba's `cuda.cg`: a grid of one block."""

    @staticmethod
    def this_grid():
        return Cooperative

    @staticmethod
    def sync():
        return current().syncthreads()


def _of_thread(name):
    return lambda *arguments: getattr(current(), name)(*arguments)


class Turns(numba_kernel.BlockManager):
    """Takes the place of Numba's BlockManager, which there is one of for each block: that of a cluster's first block
    runs all of them. memory: GlobalMemory; cluster: how many blocks run together.
    """

    def __init__(self, memory, cluster, function, grid_dim, block_dim, debug):
        super().__init__(function, grid_dim, block_dim, debug)
        self.memory, self.cluster, self.dimensions, self.grid = memory, cluster, block_dim, grid_dim
        self.over, self.error = False, None
        self.ready, self.transfers = deque(), deque()
        self._polls = 0
        self._at_barrier = []

    def run(self, block_index, *arguments):
        if block_index[0] % self.cluster:
            return  # ran with the first of its cluster

        def body():
            return self._f(*arguments)

        self.first_block = block_index[0]
        x, y, z = self.dimensions
        self.size = x * y * z
        module = numba_kernel._get_kernel_context()
        shared_bytes = module._shared._dynshared_size
        module._shared = SharedOfBlock(shared_bytes)
        module._atomic = Atomic(module._atomic)
        for barrier in ("syncthreads", "syncthreads_count", "syncthreads_and", "syncthreads_or"):
            setattr(module, barrier, _of_thread(barrier))
        module._cg = Cooperative
        self.order = Order(self.cluster * self.size)
        self.blocks = [Block(self, rank, shared_bytes) for rank in range(self.cluster)]
        for block in self.blocks:
            block.make_threads(body, (block_index[0] + block.rank, *block_index[1:]))
        self.threads = [thread for block in self.blocks for thread in block.threads]
        self.alive = len(self.threads)
        self.ready.extend(self.threads)
        self._run_all()
        if self.error is not None:
            raise self.error
        for block in self.blocks:
            block.registers.check(self.size // 32)
            if not any(thread.waited for thread in block.threads):
                raise InstructionError(
                    f"block {block_index[0] + block.rank} has ended without griddepcontrol.wait, so the kernel behind "
                    "may run beside the one before"
                )

    def _run_all(self):
        """Until all have ended. An exception here, which no kernel raised (Ctrl-C), leaves them as they are."""
        tracing, before = sys.gettrace(), now.follow
        sys.settrace(None)
        now.outer = tracing
        now.follow = before or tracing
        try:
            while self.alive:
                now.thread = thread = self.ready.popleft() if self.ready else self._next()
                if next(thread.steps, ENDED) is ENDED:
                    self.leave(thread)
        finally:
            now.thread, now.follow = None, before
            sys.settrace(tracing)

    # Waiting. The running thread calls these, and its stand-in must return their result.

    def wait(self, thread, what, then=None):
        """-> a Pause, until somebody calls wake(thread). what: for the message if nobody does; then: see pause."""
        if self.over:
            raise Abandoned
        pausing = pause(thread, then)
        thread.waits_for = what
        return pausing

    def wake(self, thread):
        self._polls = 0
        self.ready.append(thread)

    def wake_all(self, threads):
        self._polls = 0
        self.ready.extend(threads)

    def let_others_run(self, thread, value):
        """After something that a loop may do until another thread has done something. -> value, or a Pause for it."""
        self._polls += 1
        if self._polls > POLLS:
            raise InstructionError(
                f"looks at memory for the {POLLS}th time without anything else done:\n{self._standing()}"
            )
        if self.ready or self._arrive():
            self.ready.append(thread)
            return self.wait(thread, None, lambda: value)
        return value

    def _next(self):
        try:
            while not self.ready and self._arrive():
                pass
        except InstructionError as error:  # of a copy, while no thread runs
            self.fail(error)
        if not self.ready:
            self.fail(self._stuck())
        return self.ready.popleft()

    def _arrive(self):
        """The oldest of the copies under way arrives, if there is one."""
        if not self.transfers or self.over:
            return False
        self._polls = 0
        self.transfers.popleft()()
        return True

    # Barriers: cuda.syncthreads of one block, cluster.sync of all.

    def sync(self, thread):
        if self.over:
            raise Abandoned
        self._at_barrier.append(thread)
        if len(self._at_barrier) < self.alive:
            return self.wait(thread, "cluster.sync")
        self._at_barrier = self.open_barrier(self._at_barrier, thread)
        return None

    def open_barrier(self, came, last=None):
        """Opens a barrier: all have come, `last` right now. -> who has come for the next time: nobody."""
        self.order.meet(slice(None) if len(came) == len(self.threads) else [thread.number for thread in came])
        for thread in came:
            if thread is not last:
                self.wake(thread)
        return []

    # Ends.

    def leave(self, thread):
        """A thread has ended."""
        thread.ended = True
        thread.block.alive -= 1
        self.alive -= 1
        self._polls = 0
        if self.alive and not self.over:
            error = thread.block.left(thread)
            if error:
                self.fail(error, thread)
            elif self._at_barrier and len(self._at_barrier) == self.alive:
                self._at_barrier = self.open_barrier(self._at_barrier)

    def fail(self, error, thread=None):
        """The first error is the launch's; all threads that are left end, `thread` by itself."""
        if self.error is None:
            self.error = _named(error, thread)
        self.over = True
        self.ready = deque(other for other in self.threads if not other.ended and other is not thread)

    def _stuck(self):
        waiting = [thread for thread in self.threads if not thread.ended]
        groups = [group for thread in waiting for group in (thread.warp, thread.warpgroup) if group.came]
        if groups:
            group = groups[0]
            here, missing = group.came[0], next(x for x in group.members if x not in group.came)
            return InstructionError(
                f"{name(here)} waits in {group.instruction[0]} at {place(here)}, but {name(missing)} waits in "
                f"{missing.waits_for} at {place(missing)}; all of a {group.kind} must come to one instruction. "
                f"Nobody can go on:\n{self._standing()}"
            )
        thread = waiting[0]
        return InstructionError(
            f"{name(thread)} waits for ever at {place(thread)}. Nobody can go on:\n{self._standing()}"
        )

    def _standing(self):
        """Who stands where, the threads of one place together."""
        places = {}
        for thread in self.threads:
            if thread.ended:
                key = "have left the kernel"
            elif thread.waits_for is None:
                key = f"could run at {place(thread)}"
            else:
                key = f"in {thread.waits_for} at {place(thread)}"
            block = f"block {tuple(thread.blockIdx)}, " if self.cluster > 1 else ""
            places.setdefault((block, key), []).append(thread.thread_id)
        return "\n".join(f"  {block}{_ranges(numbers)}: {what}" for (block, what), numbers in places.items())


def _named(error, thread):
    """An exception of one thread as the launch raises it."""
    if thread is None:
        return error
    if isinstance(error, InstructionError):
        other = error.thread
        if other is None or other is thread:
            who, where = thread, "its end" if thread.ended else place_of_error(error)
        else:
            who, where = other, place(other)
        return InstructionError(f"{name(who)} at {where}\n{error}").with_traceback(error.__traceback__)
    # In Numba's words.
    text = f"tid={list(thread.threadIdx)} ctaid={list(thread.blockIdx)}" + (f": {error}" if str(error) else "")
    try:
        renamed = type(error)(text)
    except TypeError:  # one that wants other arguments
        renamed = RuntimeError(f"{text} ({type(error).__name__})")
    return renamed.with_traceback(error.__traceback__)


def _ranges(numbers):
    """[0, 1, 2, 5] -> threads 0 to 2, 5."""
    parts = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return "threads " + ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in parts)
