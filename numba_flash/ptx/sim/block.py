"""A block of the simulator: the state that its threads share, and cuda.syncthreads."""

import functools

from numba.cuda.simulator.kernelapi import Dim3

from .errors import Abandoned
from .register_limits import Registers
from .shared_memory import SharedMemory
from .thread import Thread, driven
from .warp import Group


class Block:
    """A block's state that its threads share. rank: its number in the cluster, which is `turns.blocks`."""

    def __init__(self, turns, rank, shared_bytes):
        self.turns, self.rank, self.order = turns, rank, turns.order
        self.memory, self.dimensions, self.grid = turns.memory, turns.dimensions, turns.grid  # memory: GlobalMemory
        self.wait, self.wake, self.transfers = turns.wait, turns.wake, turns.transfers
        self.size = turns.size
        self.shared = SharedMemory(shared_bytes, self.order, rank * self.size)
        self.mbarriers, self.barriers = {}, {}  # by address; by number
        self.registers = Registers()
        self.alive = self.size
        self._at_barrier, self.votes = [], [0] * self.size

    def make_threads(self, body, block_index):
        block_index, indices = Dim3(*block_index), _indices(*self.dimensions)
        self.threads = [Thread(body, self.turns, self, block_index, index, i) for i, index in enumerate(indices)]
        for name, size in (("warp", 32), ("warpgroup", 128)):
            for first in range(0, self.size, size):
                group = Group(name, size, self.threads[first : first + size])
                for thread in group.members:
                    setattr(thread, name, group)

    # Barrier 0 as cuda.syncthreads() knows it: threads that have ended are not waited for.

    def syncthreads(self, thread):
        if self.turns.over:
            raise Abandoned
        self._at_barrier.append(thread)
        if len(self._at_barrier) < self.alive:
            return self.wait(thread, "cuda.syncthreads")
        self._at_barrier = self.turns.open_barrier(self._at_barrier, thread)
        return None

    def vote(self, thread, value, result):
        """A barrier with something of each thread. result([of each]) -> what all of them get."""
        self.votes[thread.thread_id] = value
        yield from driven(self.syncthreads(thread))
        found = result(self.votes)
        yield from driven(self.syncthreads(thread))
        return found

    def left(self, thread):
        """A thread has ended. -> what is wrong about it, or None."""
        error = thread.warp.left(thread) or thread.warpgroup.left(thread)
        if not error and self._at_barrier and len(self._at_barrier) == self.alive:
            self._at_barrier = self.turns.open_barrier(self._at_barrier)
        return error


@functools.lru_cache(16)
def _indices(x, y, z):
    """threadIdx of all threads of a block, in the order of their numbers."""
    return [Dim3(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
