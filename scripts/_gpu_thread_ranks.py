"""Ranks that are threads on one GPU: what ranks do, with its streams, where there are no others and no NCCL.

Each message is a copy on the sender's stream, and an event; the receiver's stream waits for that.
"""

import queue
import threading

import torch

from numba_flash.distributed import Group
from numba_flash.distributed.torch_group import TorchGroup

PATIENCE = 60  # seconds; only a rank that has failed makes another wait so long


class ThreadRank(Group):
    beside = TorchGroup.beside

    def __init__(self, rank, queues):
        self.rank, self.size, self._queues = rank, len(queues), queues
        self._calls, self._early = 0, {}

    def send_recv(self, sends, receives, then=None):
        call, self._calls = self._calls, self._calls + 1
        for to, listed in sends.items():
            assert all(x.is_contiguous() for x in listed)
            copies = [x.clone() for x in listed]
            self._queues[to].put(((self.rank, call), (copies, torch.cuda.current_stream().record_event())))

        def finish():
            for source, listed in receives.items():
                copies, sent = self._from(source, call)
                torch.cuda.current_stream().wait_event(sent)
                for x, copy in zip(listed, copies, strict=True):
                    assert x.is_contiguous() and x.dtype == copy.dtype
                    x.copy_(copy)
            if then is not None:
                then()

        return finish

    def _from(self, source, call):
        """Exchanges may end in another order than that in which they began."""
        while (source, call) not in self._early:
            which, message = self._queues[self.rank].get(timeout=PATIENCE)
            self._early[which] = message
        return self._early.pop((source, call))


def run(work, size):
    """work(group) on each rank -> the results by rank. The first error is raised."""
    queues = [queue.Queue() for _ in range(size)]
    found, errors = [None] * size, []

    def rank_of(rank):
        try:
            found[rank] = work(ThreadRank(rank, queues))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, queue.Empty)), errors[0])
    return found
