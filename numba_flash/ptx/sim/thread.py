"""A simulated thread: what stand-ins keep for it, and what it runs on, a greenlet or a thread of Python's.

One runs at a time, and hands on by itself (scheduler.py). Greenlets do that in half a microsecond and Python's threads
in 4 to 12, which is half of the time of a kernel on tensor cores. But debuggers, traces and coverage follow threads of
Python's. So a launch that anybody traces takes these, and so does one without the package greenlet. The order of the
simulated threads is the same on both.
"""

import contextvars
import sys
import threading
from collections import deque

import numpy as np
from numba.cuda.simulator import kernel as numba_kernel
from numba.cuda.simulator.kernelapi import Dim3

from . import now
from .errors import Abandoned, InstructionError

try:
    import greenlet
except ImportError:
    greenlet = None


class Thread:
    """A GPU thread, with the state of the stand-ins: what it waits for, copies under way, values to come.

    `cuda.threadIdx` and the like find it in place of Numba's BlockThread.
    """

    def __init__(self, body, turns, block, block_index, index):
        super().__init__()
        x, y, _ = turns.dimensions
        self.body, self.turns, self.block = body, turns, block
        self.blockIdx, self.threadIdx = Dim3(*block_index), Dim3(*index)
        self.thread_id = index[0] + x * (index[1] + y * index[2])
        self.number = block.rank * block.size + self.thread_id  # in the cluster
        self.ended = False
        self.waits_for = None
        self.copies, self.copy_groups = [], deque()  # cp.async
        self.stores, self.store_groups, self.landing = [], deque(), deque()  # TMA
        self.waited = not block.memory.behind  # for the kernel before (griddepcontrol.py)
        self.reads_in = self.reads_as = None  # epoch of its last read by index, and its number there (shared_memory.py)
        self.unfenced = []  # shared memory that it wrote and the asynchronous proxy may not see

    def frame(self):
        """The frame in which the thread is, of the kernel or of ours on top of it."""
        return sys._getframe() if self is now.thread else self.standing_frame()

    def syncthreads(self):
        self.block.syncthreads(self)

    # Numba's, by way of the block's manager.
    syncthreads_count = numba_kernel.BlockThread.syncthreads_count
    syncthreads_and = numba_kernel.BlockThread.syncthreads_and
    syncthreads_or = numba_kernel.BlockThread.syncthreads_or

    @property
    def _manager(self):
        return self.turns

    def whole(self):
        """Runs the thread from its first turn to its end. -> the thread that runs next, or None after the last one."""
        now.thread = self
        try:
            if not self.turns.over:
                self.body()
                self._check_end()
        except Abandoned:
            pass
        except BaseException as error:  # pytest's are no Exceptions
            self.turns.fail(error, self)
        return self.turns.leave(self)

    def _check_end(self):
        if self.stores or self.store_groups:
            raise InstructionError("leaves the kernel without tma.wait_group_read for what it stores", self)
        if any(self.landing):
            raise InstructionError("leaves the kernel without tma.wait_group for bytes that it stores", self)
        if self.warpgroup.products or self.warpgroup.product_groups:
            raise InstructionError("leaves the kernel without wgmma.wait_group for all products", self)


class OnGreenlet(Thread):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._greenlet = greenlet.greenlet(self._run)
        self._greenlet.gr_context = contextvars.copy_context()  # NumPy 2 has its error state there

    def _run(self):
        self._greenlet.parent.switch()  # in run_all; Python counts how deep calls are from where a greenlet starts
        return self.whole()

    def hand_on(self, following):
        """The following thread runs; returns when somebody hands on to this one."""
        following._greenlet.switch()
        now.thread = self

    def standing_frame(self):
        return self._greenlet.gr_frame

    @staticmethod
    def run_all(threads, first):
        """Until all have ended. An exception here, which no kernel raised (Ctrl-C), leaves them as they are."""
        for thread in threads:
            thread._greenlet.switch()
        try:
            while first is not None:
                first = first._greenlet.switch()  # back at the end of any thread
        finally:
            now.thread = None


class OnThread(Thread, threading.Thread):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.daemon = True
        self._turn = threading.Lock()
        self._turn.acquire()

    def hand_on(self, following):
        following._turn.release()
        self._turn.acquire()
        now.thread = self

    def standing_frame(self):
        return sys._current_frames().get(self.ident)

    def run(self):
        self._turn.acquire()
        with np.errstate(all="ignore"):
            following = self.whole()
        (self._all_ended if following is None else following._turn).release()

    @staticmethod
    def run_all(threads, first):
        all_ended = threading.Lock()
        all_ended.acquire()
        for thread in threads:
            thread._all_ended = all_ended
            thread.start()
        try:
            first._turn.release()
            all_ended.acquire()
        except BaseException:  # Ctrl-C
            first.turns.over = True
            raise
        finally:
            for thread in threads:
                thread.join(timeout=10 if first.turns.over else None)
            now.thread = None


def kind():
    """OnGreenlet where nobody follows threads of Python's and greenlet is there, else OnThread."""
    return OnThread if greenlet is None or _traced() else OnGreenlet


def _traced():
    """Whether a debugger, a trace or the like would follow the threads that are started now."""
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12, where debuggers may use it
    by_debugger = monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
    return by_debugger or sys.gettrace() is not None or threading.gettrace() is not None
