"""Vector clocks say which thread can know of whose writes: one row for each thread of a block,
or of a cluster's blocks.

A thread lives in epochs. What it writes carries its epoch; when it comes to a barrier it tells its epoch there
and begins the next. So a reader has seen a write, by this or by a longer way over other threads, when the
epoch that it knows of the writer is not below the write's. Else a barrier is missing, even if all went well
this time.
"""

import numpy as np

MBARRIERS = 64  # columns for TMA's writes: one each for the first mbarriers of a cluster, then shared
NOBODY = -1  # the last column: everyone has seen its writes
NONE_YET = -1
NEVER = np.iinfo(np.int32).max  # the epoch that no one comes to know


class Order:
    def __init__(self, threads):
        self.threads = threads
        self.known = np.zeros((threads, threads + MBARRIERS + 1), np.int32)  # (reader, writer)
        self.numbers = memoryview(self.known)  # the same memory, of which Python takes one number at half of the cost
        self.rows = [memoryview(row) for row in self.known]
        self.own = np.einsum("ii->i", self.known[:, :threads])  # the epoch of each thread, in the same memory
        self.own[:] = 1
        self.started = np.zeros(MBARRIERS, np.int32)
        # The number that stands for each thread's reads of this epoch (shared_memory.py), or NONE_YET.
        self._reads_as = np.full(threads, NONE_YET, np.int32)
        self.reads_as = memoryview(self._reads_as)
        self.mbarriers = 0

    def now(self, thread):
        """The epoch that a thread is in."""
        return self.numbers[thread, thread]

    def release(self, thread, clock=None):
        """Adds what a thread knows to a clock. The thread's next epoch begins."""
        row = self.known[thread]
        told = row.copy() if clock is None else np.maximum(clock, row)
        row[thread] += 1
        self.reads_as[thread] = NONE_YET
        return told

    def acquire(self, thread, clock):
        """Learn what was told to a clock."""
        if clock is not None:
            np.maximum(self.known[thread], clock, out=self.known[thread])

    def meet(self, threads):
        """A barrier of these threads, a slice or a list: everyone learns what any of them knows."""
        self.known[threads] = np.maximum.reduce(self.known[threads])
        self.own[threads] += 1
        self._reads_as[threads] = NONE_YET

    def known_to(self, threads):
        """The epochs that each of these threads knows of. threads: a slice or a list."""
        return np.minimum.reduce(self.known[threads])

    def new_mbarrier(self):
        """A number for another mbarrier of the cluster."""
        self.mbarriers += 1
        return self.mbarriers - 1

    def transfer(self, mbarrier):
        """(column, epoch) of another transfer that counts on the mbarrier of this number."""
        column = mbarrier % MBARRIERS
        self.started[column] += 1
        return self.threads + column, self.started[column]
