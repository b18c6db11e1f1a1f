"""What PeerMemory is on GPUs, of processes on a CPU: files that all map, and streams that are threads with delays."""

import ctypes
import functools
import queue
import random
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from numba_flash.distributed.groups import copy
from numba_flash.distributed.peer_memory import in_planes
from numba_flash.distributed.peers import FLAGS, PULLING, SLOTS, STAGING, PeerGroup

PATIENCE = 120  # seconds until a flag must have risen


class Link:
    """slot: bytes; queues: 2 if streams run beside each other, 1 if the GPU has one queue for them; first: the number
    of the first letter."""

    def __init__(self, group, slot, queues, first):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder, group_src=0, group=group)
        nbytes = FLAGS + slot * SLOTS * (size - 1)
        every = [torch.from_file(f"{folder[0]}/{r}", shared=True, size=nbytes, dtype=torch.uint8) for r in range(size)]
        self.every, self.memory, self.bases = every, every[rank], [x.data_ptr() for x in every]
        self.memory[:FLAGS].view(torch.int32)[...] = (first + 2**31) % 2**32 - 2**31  # as a signed number
        self.delays, self.errors = random.Random(rank), []
        made = [queue.Queue() for _ in range(queues)]
        for each in made:
            threading.Thread(target=self.work, args=(each,), daemon=True).start()
        self.streams = {STAGING: made[0], PULLING: made[-1]}
        dist.barrier(group)
        for r in range(size) if rank == 0 else ():
            Path(folder[0], str(r)).unlink()

    def work(self, stream):
        while True:
            try:
                stream.get()()
            except Exception as error:
                self.errors.append(error)

    def late(self, stream, work):
        """Enqueues work that begins after some time."""
        delay = self.delays.choice([0, 0, 1e-3, 5e-3])
        self.streams[stream].put(lambda: (time.sleep(delay), work()))

    def serves(self, like):
        return True

    def begin(self):
        pass  # the host has done everything before

    def end(self, then):
        staged, done = threading.Event(), threading.Event()
        self.streams[STAGING].put(staged.set)
        self.streams[PULLING].put(lambda: (staged.wait(), then and then(), done.set()))

        def finish():
            assert done.wait(PATIENCE) and not self.errors, self.errors

        return finish

    def stage(self, at, letter):
        for offset, x in letter:
            place = self.memory[at + offset :][: x.nbytes].view(x.dtype).view(x.shape)
            self.late(STAGING, functools.partial(copy, place, x))

    def pull(self, address, letter):
        for offset, x in letter:
            width, rows, pitch, planes = in_planes(x)
            for n, plane in enumerate(planes):
                to, source = x.data_ptr() + plane, address + offset + n * width * rows
                self.late(PULLING, functools.partial(copy_rows, to, source, width, rows, pitch))

    def write(self, stream, address, value):
        flag = ctypes.c_uint32.from_address(address)
        self.late(stream, lambda: setattr(flag, "value", value))

    def wait(self, stream, address, value):
        flag = ctypes.c_uint32.from_address(address)

        def reached():
            ends = time.monotonic() + PATIENCE
            while (flag.value - value) % 2**32 >= 2**31:
                time.sleep(1e-4)
                assert time.monotonic() < ends, f"waits for {value}, is {flag.value}"

        self.streams[stream].put(reached)


def copy_rows(to, source, width, rows, pitch):
    for row in range(rows):
        ctypes.memmove(to + row * pitch, source + row * width, width)


def peers(group, slot, queues=2, first=0):
    made = PeerGroup(group, Link(group, slot, queues, first))
    made.sent, made.pulled = [first] * made.size, [first] * made.size
    return made
