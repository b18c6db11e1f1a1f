"""A simulated thread: what stand-ins keep for it, and the generator that runs it up to its next wait.

All of them run in the thread of Python that launches. One runs until it has to wait (scheduler.py): then `pause` gives
a Pause, all functions in which the thread is stand still (resumable.py), and another goes on. Debuggers, traces and
coverage follow one thread as if there were no other: while it stands still, its trace function does too.
"""

import functools
import sys
from collections import deque
from types import GeneratorType

from . import now
from .errors import Abandoned, InstructionError

Pause = GeneratorType


def made_when_asked_for(kind):
    """An attribute of a thread that is an empty one of this kind at first. Most threads need few of theirs."""
    return functools.cached_property(lambda thread: kind())


class Thread:
    """A GPU thread, with the state of the stand-ins: what it waits for, copies under way, values to come.

    `cuda.threadIdx` and the like find it in place of Numba's BlockThread.
    """

    ended = False
    paused = False  # a Pause was made, which is not over yet
    waits_for = None
    copies, copy_groups = made_when_asked_for(list), made_when_asked_for(deque)  # cp.async
    stores, store_groups, landing = (made_when_asked_for(kind) for kind in (list, deque, deque))  # TMA
    unfenced = made_when_asked_for(list)  # shared memory that it wrote and the asynchronous proxy may not see

    def __init__(self, body, turns, block, block_index, index, thread_id):
        self.turns, self.block = turns, block
        self.blockIdx, self.threadIdx, self.thread_id = block_index, index, thread_id
        self.number = block.rank * block.size + thread_id  # in the cluster
        self.waited = not block.memory.behind  # for the kernel before (griddepcontrol.py)
        self.known, self.reads = block.order.rows[self.number], block.shared.readers_of(self.number)
        self.steps = self._whole(body)

    def _whole(self, body):
        """Runs the thread from its first turn to its end."""
        if self.turns.over:
            return
        try:
            if now.follow is not None:
                sys.settrace(now.follow)
            yield from driven(body())
            self._check_end()
        except Abandoned:
            pass
        except BaseException as error:  # pytest's are no Exceptions
            self.turns.fail(error, self)
        finally:
            if sys.gettrace() is not None:
                sys.settrace(None)

    def _check_end(self):
        self.check_not_paused()
        seen = vars(self)
        if seen.get("stores") or seen.get("store_groups"):
            raise InstructionError("leaves the kernel without tma.wait_group_read for what it stores", self)
        if any(seen.get("landing", ())):
            raise InstructionError("leaves the kernel without tma.wait_group for bytes that it stores", self)
        if self.warpgroup.products or self.warpgroup.product_groups:
            raise InstructionError("leaves the kernel without wgmma.wait_group for all products", self)

    def check_not_paused(self):
        """An error after an instruction that had to wait in a place where Python cannot stand still."""
        if self.paused:
            raise InstructionError(
                "went on without waiting: the simulator can stop only in functions whose source it finds as it was "
                "imported, and not in a comprehension (pytest changes functions with an `assert`)"
            )

    def frames(self):
        """[(file, line)] of where the thread stands, from the innermost function to the kernel."""
        found = []
        if self.steps.gi_running:
            frame = sys._getframe()
            while frame is not None and frame is not self.steps.gi_frame:
                found.append((frame.f_code.co_filename, frame.f_lineno))
                frame = frame.f_back
            return found
        steps = self.steps
        while isinstance(steps, Pause) and steps.gi_frame is not None:
            found.append((steps.gi_frame.f_code.co_filename, steps.gi_frame.f_lineno))
            steps = steps.gi_yieldfrom
        return found[::-1]

    def syncthreads(self):
        return self.block.syncthreads(self)

    def syncthreads_count(self, value):
        return self.block.vote(self, value, lambda votes: sum(map(bool, votes)))

    def syncthreads_and(self, value):
        return self.block.vote(self, value, lambda votes: int(all(votes)))

    def syncthreads_or(self, value):
        return self.block.vote(self, value, lambda votes: int(any(votes)))


def pause(thread, then=None):
    """-> what a stand-in gives in place of its value when the thread has to wait: it ends when the thread goes on.

    then() -> the value.
    """
    thread.check_not_paused()
    thread.paused = True
    return _pausing(thread, then)


def _pausing(thread, then):
    follow = sys.gettrace()
    if follow is not None:
        sys.settrace(None)  # before Python says that these functions return, which they do not
    yield
    now.thread, thread.paused, thread.waits_for = thread, False, None
    if follow is not None:
        sys.settrace(follow)
    if thread.turns.over:
        raise Abandoned
    return None if then is None else then()


def driven(given):
    """The value of a stand-in that another one calls: yield from driven(...)."""
    return (yield from given) if type(given) is Pause else given
