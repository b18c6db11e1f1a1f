"""A block's threads take turns: one runs until it has to wait, and then hands on to the next that can go on.

Numba's own simulator starts all threads, lets Python switch between them and asks them in a loop whether
they wait. Here a thread that waits wakes up only when there is something for it (12 us a switch); the
order is the same in every run; and when nobody can go on, that is known at once and without a time limit,
however long a debugger stops. Copies under way arrive as late as they can: when nobody can go on without them.

Block and Thread take the place of Numba's BlockManager and BlockThread while sim.launch.run runs.
"""

import threading
from collections import deque

from numba.cuda.simulator import kernel as numba_kernel

from .errors import Abandoned, Misuse, name, place, place_of_error
from .order import Order
from .register_limits import Registers
from .shared_memory import SharedMemory
from .warp import Group

POLLS = 300_000  # how often a thread may look at memory in which nothing can change any more


class Thread(numba_kernel.BlockThread):
    """A GPU thread. Its twins' state: what it waits for, copies under way, values to come."""

    def __init__(self, body, block, block_index, index):
        super().__init__(body, block, block_index, index, False)
        self.block, self.number = block, self.thread_id
        self.turn = threading.Lock()
        self.turn.acquire()
        self.ended = False
        self.waits_for = self.result = None
        self.copies, self.copy_groups = [], deque()  # cp.async
        self.stores, self.store_groups = [], deque()  # TMA
        self.unfenced = []  # shared memory that it wrote and the asynchronous proxy may not see

    def run(self):
        self.turn.acquire()
        try:
            if not self.block.over:
                threading.Thread.run(self)
                self.block.check_end(self)
        except Abandoned:
            pass
        except BaseException as error:  # pytest's are no Exceptions
            self.block.fail(error, self)
        finally:
            self.block.leave(self)

    def syncthreads(self):
        self.block.syncthreads(self)


class Block(numba_kernel.BlockManager):
    def __init__(self, memory, function, grid_dim, block_dim, debug):
        super().__init__(function, grid_dim, block_dim, debug)
        self.memory, self.dimensions, self.grid = memory, block_dim, grid_dim  # memory: GlobalMemory
        self.over, self.error = False, None
        self.ready, self.transfers = deque(), deque()
        self._done = threading.Lock()
        self._done.acquire()
        self._at_barrier = []
        self._polls = 0
        self.mbarriers, self.barriers = {}, {}  # by address; by number
        self.registers = Registers()

    def run(self, block_index, *arguments):
        def body():
            self._f(*arguments)

        x, y, z = self.dimensions
        indices = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        self.threads = threads = [Thread(body, self, block_index, index) for index in indices]
        for kind, size in (("warp", 32), ("warpgroup", 128)):
            for first in range(0, len(threads), size):
                group = Group(kind, size, threads[first : first + size])
                for thread in group.members:
                    setattr(thread, kind, group)
        self.order = Order(len(threads))
        module = numba_kernel._get_kernel_context()
        self.shared = module._shared = SharedMemory(module._shared._dynshared_size, self.order)
        self.alive = len(threads)
        self.ready.extend(threads)
        for thread in threads:
            thread.start()
        try:
            self.ready.popleft().turn.release()
            self._done.acquire()
        except BaseException:  # Ctrl-C
            self.over = True
            raise
        finally:
            for thread in threads:
                thread.join(timeout=None if self.error is None and not self.over else 10)
        if self.error is not None:
            raise self.error
        self.registers.check(len(threads) // 32)

    # Waiting. Called by the thread that is running.

    def wait(self, thread, what):
        """Stand still until somebody calls wake(thread). what: for the message if nobody does."""
        if self.over:
            raise Abandoned
        thread.waits_for = what
        following = self._next()
        if following is not thread:
            following.turn.release()
            thread.turn.acquire()
        thread.waits_for = None
        if self.over:
            raise Abandoned

    def wake(self, thread):
        self._polls = 0
        self.ready.append(thread)

    def let_others_run(self, thread):
        """After something that a loop may do until another thread has done something."""
        self._polls += 1
        if self._polls > POLLS:
            raise Misuse(f"looks at memory for the {POLLS}th time without anything else done:\n{self._standing()}")
        if self.ready or self._arrive():
            self.ready.append(thread)
            self.wait(thread, None)

    def _next(self):
        try:
            while not self.ready and self._arrive():
                pass
        except Misuse as error:  # of a copy, while no thread runs
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

    # Ends.

    def leave(self, thread):
        thread.ended = True
        self.alive -= 1
        if not self.alive:
            self._done.release()
            return
        self._polls = 0
        if not self.over:
            error = thread.warp.left(thread) or thread.warpgroup.left(thread)
            if error:
                self.fail(error, thread)
            else:
                self._open_barrier()
        self._next().turn.release()

    def check_end(self, thread):
        if thread.stores or thread.store_groups:
            raise Misuse("leaves the kernel without tma.wait_group_read for what it stores", thread)
        if thread.warpgroup.products or thread.warpgroup.product_groups:
            raise Misuse("leaves the kernel without wgmma.wait_group for all products", thread)

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
            return Misuse(
                f"{name(here)} waits in {group.instruction[0]} at {place(here)}, but {name(missing)} waits in "
                f"{missing.waits_for} at {place(missing)}; all of a {group.kind} must come to one instruction. "
                f"Nobody can go on:\n{self._standing()}"
            )
        thread = waiting[0]
        return Misuse(f"{name(thread)} waits for ever at {place(thread)}. Nobody can go on:\n{self._standing()}")

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
            places.setdefault(key, []).append(thread.number)
        return "\n".join(f"  {_ranges(numbers)}: {what}" for what, numbers in places.items())

    # Barrier 0 as cuda.syncthreads() knows it: threads that have ended are not waited for.

    def syncthreads(self, thread):
        if self.over:
            raise Abandoned
        self._at_barrier.append(thread)
        if len(self._at_barrier) < self.alive:
            self.wait(thread, "cuda.syncthreads")
        else:
            self._open_barrier(thread)

    def _open_barrier(self, last=None):
        if self._at_barrier and len(self._at_barrier) == self.alive:
            came, self._at_barrier = self._at_barrier, []
            self.order.meet([thread.number for thread in came])
            for thread in came:
                if thread is not last:
                    self.wake(thread)


def _named(error, thread):
    """An exception of one thread as the launch raises it."""
    if thread is None:
        return error
    if isinstance(error, Misuse):
        other = error.thread
        if other is None or other is thread:
            who, where = thread, "its end" if thread.ended else place_of_error(error)
        else:
            who, where = other, place(other)
        return Misuse(f"{name(who)} at {where}\n{error}").with_traceback(error.__traceback__)
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
