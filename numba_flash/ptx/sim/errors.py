"""A misuse of an instruction in a simulated kernel, and who did what at which line of the kernel."""

import contextlib
import linecache
import os

import numba.cuda

# Frames of these are the simulator's own, not the kernel's.
_OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_NUMBA = os.path.join(os.path.dirname(os.path.abspath(numba.cuda.__file__)), "")
_PYTHON = (contextlib.__file__,)


class InstructionError(RuntimeError):
    """A mistake after which a GPU would give a wrong result, a hang or an illegal access.

    thread: the one that made it, if it is not the thread that raises. scheduler.py adds names and lines.
    """

    def __init__(self, text, thread=None):
        super().__init__(text)
        self.thread = thread


class Abandoned(BaseException):
    """Ends the other threads of a block after an error in one; no Exception, so that no kernel catches it."""


def name(thread):
    """block (0, 0, 0), thread 37 (warp 1, lane 5)."""
    dimensions = thread.block.dimensions
    plain = dimensions[1] == dimensions[2] == 1
    index, number = thread.thread_id if plain else tuple(thread.threadIdx), thread.thread_id
    return f"block {tuple(thread.blockIdx)}, thread {index} (warp {number // 32}, lane {number % 32})"


def place(thread):
    """file:line of the kernel where a thread stands, and its text."""
    return _described(thread.frames())


def place_of_error(error):
    """The place where an exception was raised."""
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _described(frames[::-1])


def _described(frames):
    """Innermost first; a device function's line is followed by those that called it."""
    ours = [(file, line) for file, line in frames if not (file.startswith((_OURS, _NUMBA)) or file in _PYTHON)]
    if not ours:
        return "its start"
    file, line = ours[0]
    callers = "".join(f", called at {os.path.basename(f)}:{n}" for f, n in ours[1:])
    return f"{file}:{line}: {linecache.getline(file, line).strip()}{callers}"
