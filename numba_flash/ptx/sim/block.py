"""A thread and a block of the simulator: what its twins keep there, and cuda.syncthreads.

Thread takes the place of Numba's BlockThread while sim.launch.run runs.
"""

import threading
from collections import deque

from numba.cuda.simulator import kernel as numba_kernel

from .errors import Abandoned, InstructionError
from .register_limits import Registers
from .shared_memory import SharedMemory
from .warp import Group


class Thread(numba_kernel.BlockThread):
    """A GPU thread. Its twins' state: what it waits for, copies under way, values to come."""

    def __init__(self, body, turns, block, block_index, index):
        super().__init__(body, turns, block_index, index, False)
        self.turns, self.block = turns, block
        self.number = block.rank * block.size + self.thread_id  # in the cluster
        self.turn = threading.Lock()
        self.turn.acquire()
        self.ended = False
        self.waits_for = self.result = None
        self.copies, self.copy_groups = [], deque()  # cp.async
        self.stores, self.store_groups, self.landing = [], deque(), deque()  # TMA
        self.unfenced = []  # shared memory that it wrote and the asynchronous proxy may not see

    def run(self):
        self.turn.acquire()
        try:
            if not self.turns.over:
                threading.Thread.run(self)
                self._check_end()
        except Abandoned:
            pass
        except BaseException as error:  # pytest's are no Exceptions
            self.turns.fail(error, self)
        finally:
            self.turns.leave(self)

    def syncthreads(self):
        self.block.syncthreads(self)

    def _check_end(self):
        if self.stores or self.store_groups:
            raise InstructionError("leaves the kernel without tma.wait_group_read for what it stores", self)
        if any(self.landing):
            raise InstructionError("leaves the kernel without tma.wait_group for bytes that it stores", self)
        if self.warpgroup.products or self.warpgroup.product_groups:
            raise InstructionError("leaves the kernel without wgmma.wait_group for all products", self)


class Block:
    """What the threads of a block share. rank: its number in the cluster, which is `turns.blocks`."""

    def __init__(self, turns, rank, shared_bytes):
        self.turns, self.rank, self.order = turns, rank, turns.order
        self.memory, self.dimensions, self.grid = turns.memory, turns.dimensions, turns.grid  # memory: GlobalMemory
        self.wait, self.wake, self.transfers = turns.wait, turns.wake, turns.transfers
        self.size = turns.size
        self.shared = SharedMemory(shared_bytes, self.order, rank * self.size)
        self.mbarriers, self.barriers = {}, {}  # by address; by number
        self.registers = Registers()
        self.alive = self.size
        self._at_barrier = []

    def start(self, body, block_index):
        x, y, z = self.dimensions
        indices = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        self.threads = [Thread(body, self.turns, self, block_index, index) for index in indices]
        for kind, size in (("warp", 32), ("warpgroup", 128)):
            for first in range(0, self.size, size):
                group = Group(kind, size, self.threads[first : first + size])
                for thread in group.members:
                    setattr(thread, kind, group)

    # Barrier 0 as cuda.syncthreads() knows it: threads that have ended are not waited for.

    def syncthreads(self, thread):
        if self.turns.over:
            raise Abandoned
        self._at_barrier.append(thread)
        if len(self._at_barrier) < self.alive:
            self.wait(thread, "cuda.syncthreads")
        else:
            self._at_barrier = self.turns.open_barrier(self._at_barrier, thread)

    def left(self, thread):
        """A thread has ended. -> what is wrong about it, or None."""
        error = thread.warp.left(thread) or thread.warpgroup.left(thread)
        if not error and self._at_barrier and len(self._at_barrier) == self.alive:
            self._at_barrier = self.turns.open_barrier(self._at_barrier)
        return error
