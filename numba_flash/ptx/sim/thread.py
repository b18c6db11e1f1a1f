"""A simulated thread: what stand-ins keep for it, and what it runs on, a greenlet or a thread of Python's.

One runs at a time, and hands on by itself (scheduler.py). Greenlets do that in half a microsecond and Python's threads
in 4 to 12, which is half of the time of a kernel on tensor cores. But debuggers, traces and coverage follow threads of
Python's. So a launch that anybody traces takes these, and so does one without the package greenlet. The order of the
simulated threads is the same on both.
"""

import contextvars
import functools
import sys
import threading
from collections import deque

import numpy as np
from numba.cuda.simulator import kernel as numba_kernel

from . import now
from .errors import Abandoned, InstructionError

try:
    import greenlet
except ImportError:
    greenlet = None


def made_when_asked_for(kind):
    """An attribute of a thread that is an empty one of this kind at first. Most threads need few of theirs."""
    return functools.cached_property(lambda thread: kind())


class Thread:
    """A GPU thread, with the state of the stand-ins: what it waits for, copies under way, values to come.

    `cuda.threadIdx` and the like find it in place of Numba's BlockThread.
    """

    ended = False
    waits_for = None
    copies, copy_groups = made_when_asked_for(list), made_when_asked_for(deque)  # cp.async
    stores, store_groups, landing = (made_when_asked_for(kind) for kind in (list, deque, deque))  # TMA
    unfenced = made_when_asked_for(list)  # shared memory that it wrote and the asynchronous proxy may not see

    def __init__(self, body, turns, block, block_index, index, thread_id):
        super().__init__()
        self.body, self.turns, self.block = body, turns, block
        self.blockIdx, self.threadIdx, self.thread_id = block_index, index, thread_id
        self.number = block.rank * block.size + thread_id  # in the cluster
        self.waited = not block.memory.behind  # for the kernel before (griddepcontrol.py)
        self.known, self.reads = block.order.rows[self.number], block.shared.readers_of(self.number)

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
        seen = vars(self)
        if seen.get("stores") or seen.get("store_groups"):
            raise InstructionError("leaves the kernel without tma.wait_group_read for what it stores", self)
        if any(seen.get("landing", ())):
            raise InstructionError("leaves the kernel without tma.wait_group for bytes that it stores", self)
        if self.warpgroup.products or self.warpgroup.product_groups:
            raise InstructionError("leaves the kernel without wgmma.wait_group for all products", self)


class OnGreenlet(Thread):
    _greenlet = None  # until it has its first turn

    def _start(self):
        """The first turn, on a greenlet of its own. -> who runs next, or None."""
        self._greenlet = greenlet.greenlet(self._run)
        self._greenlet.gr_context = contextvars.copy_context()  # NumPy 2 has its error state there
        return self._greenlet.switch()

    def _run(self):
        thread, following = self, self.whole()
        while following is not None and following._greenlet is None:  # on this greenlet, which is free now
            following._greenlet, thread = thread._greenlet, following
            following = thread.whole()
        return following

    def hand_on(self, following):
        """The following thread runs; returns when somebody hands on to this one."""
        if following._greenlet is None:  # starts in run_all: Python counts how deep calls are from where it starts
            self._greenlet.parent.switch(following)
        else:
            following._greenlet.switch()
        now.thread = self

    def standing_frame(self):
        return self._greenlet.gr_frame

    @staticmethod
    def run_all(threads, first):
        """Until all have ended. An exception here, which no kernel raised (Ctrl-C), leaves them as they are."""
        try:
            while first is not None:  # back at the end of any thread, and for each first turn
                first = first._start() if first._greenlet is None else first._greenlet.switch()
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
