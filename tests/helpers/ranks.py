"""Ranks as threads of this process, which exchange arrays through queues: contexts of any size in milliseconds."""

import concurrent.futures
import queue

from numba_flash.distributed import Group

PATIENCE = 60  # seconds; only a rank that has failed makes another wait so long


class Threads:
    """What the ranks share. moved: bytes that each rank has sent."""

    def __init__(self, size):
        self.size = size
        self.queues = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
        self.moved = [0] * size

    def run(self, work):
        """work(group) on each rank -> the results by rank. The first error of a rank is raised."""
        with concurrent.futures.ThreadPoolExecutor(self.size) as pool:
            started = [pool.submit(work, ThreadGroup(self, rank)) for rank in range(self.size)]
            failed = [each.exception() for each in concurrent.futures.wait(started).done if each.exception()]
        others = [error for error in failed if not isinstance(error, queue.Empty)]
        if failed:
            raise (others or failed)[0]
        return [each.result() for each in started]


class ThreadGroup(Group):
    def __init__(self, shared, rank):
        self.shared, self.rank, self.size = shared, rank, shared.size
        self.calls, self.early = 0, {}

    def send_recv(self, sends, receives, then=None):
        call, self.calls = self.calls, self.calls + 1
        for to, listed in sends.items():
            assert to != self.rank and listed, "nothing is sent to oneself"
            assert all(x.size and x.flags.c_contiguous for x in listed), "and nothing empty"
            self.shared.queues[self.rank, to].put((call, [x.copy() for x in listed]))
            self.shared.moved[self.rank] += sum(x.nbytes for x in listed)

        def finish():
            for source, listed in receives.items():
                for came, x in zip(self.from_call(call, source), listed, strict=True):
                    assert came.shape == x.shape and came.dtype == x.dtype
                    x[...] = came
            if then is not None:
                then()

        return finish

    def from_call(self, call, source):
        """Exchanges may end in another order than that in which they began."""
        while (call, source) not in self.early:
            number, came = self.shared.queues[source, self.rank].get(timeout=PATIENCE)
            self.early[number, source] = came
        return self.early.pop((call, source))
