"""Stop inside a kernel with Python's debugger, without editing the kernel.

    NUMBA_ENABLE_CUDASIM=1 python

    >>> from numba_flash.debug import stop_at
    >>> with stop_at("v2", "alpha = math.exp", thread=3):
    ...     numba_flash.attention(q, k, v, kernel="v2")

`python -m pdb` with a breakpoint stops in every thread that comes there. This stops in one.
"""

import bdb
import contextlib
import functools
import io
import pdb
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from .places import Follow, Index3, find_line, make_of, watching

Index = int | tuple[int, ...]
_pdb = functools.partial(pdb.Pdb, nosigint=True)  # signal handlers belong to the main thread


@contextlib.contextmanager
def stop_at(
    kernel: Any,
    line: int | str,
    thread: Index = 0,
    block: Index = 0,
    *,
    commands: Sequence[str] | None = None,
    debugger: Callable[[], pdb.Pdb] = _pdb,
) -> Iterator[None]:
    """Stop in one thread of one block whenever it comes to a line of a kernel, in Numba's simulator.

    kernel: the name of one of ours, as `explain` shows it, such as "v2", "mma" or "wgmma_dq" (an unknown name raises
    with all of them), or your own, made by cuda.jit, which then runs as in race_check. line: a line number of its file, or a piece of text that only one
    line of its code contains. thread, block: threadIdx and blockIdx; an int is x.

    At the prompt everything of pdb works. `n` over cuda.syncthreads() lets all threads come to that
    barrier, so that shared memory then shows what they wrote. `c` goes on to the next time this thread
    comes here, `cl`, `y` and `c` to the end. `q` leaves: the launch is given up and bdb.BdbQuit comes out
    of the with statement, because what the kernel should have written is not there.

    commands: what to type, where nobody types: in a script, a notebook, a test. They are printed with what pdb
    answers. After the last one the launch runs to its end.
    debugger: makes the debugger, for another one than pdb's or for other streams.

    Raises ValueError for a kernel or line that cannot be found, and for commands beside a debugger; RuntimeError where
    the simulator is off; warns when the line was never reached. Serves one `with` at a time.
    """
    make = make_of(kernel, "stop_at")
    file, number = make.co_filename, find_line(make, line)
    wanted = _index("thread", thread), _index("block", block)
    if commands is not None:
        if debugger is not _pdb:
            raise ValueError("commands= are typed to pdb: leave them out, or debugger=")
        _check_commands(commands)
    came = False

    def attach(thread_index: Index3, block_index: Index3, frame: types.FrameType) -> Follow | None:
        nonlocal came
        if wanted != (thread_index, block_index):
            return None
        came = True
        return _attach(debugger(), frame)

    stop = bdb.Breakpoint(file, number)  # every debugger made from now on knows it
    if commands is not None:
        typist: Any = _Typist(commands, sys.stdout, stop)  # one: a debugger after the first reads on in the list
        debugger = functools.partial(pdb.Pdb, stdin=typist, stdout=sys.stdout, nosigint=True, readrc=False)
    try:
        with watching(file, attach):
            yield
    except bdb.BdbQuit as quit:  # without the simulator's traceback, which says nothing more
        raise bdb.BdbQuit(f"left the debugger in kernel {kernel!r}, which did not finish: {quit}") from None
    finally:
        if bdb.Breakpoint.bpbynumber[stop.number] is stop:
            stop.deleteMe()
    if not stop.hits:
        what = f"came to {file}:{number}" if came else f"ran kernel {kernel!r}"
        warnings.warn(
            f"stop_at did not stop: no thread {wanted[0]} of block {wanted[1]} {what}", RuntimeWarning, stacklevel=3
        )


def _attach(debugger: pdb.Pdb, kernel: types.FrameType) -> Callable[..., Any]:
    """Let `debugger` follow this thread from the kernel's first line to its end, and no further."""

    def follow(frame: types.FrameType, event: str, arg: Any) -> Any:
        debugger.trace_dispatch(frame, event, arg)
        if event == "return":
            sys.settrace(None)  # stepping on would lead into the simulator
        return follow

    _take_generators_for_functions(debugger)
    debugger.reset()
    debugger.botframe = kernel  # where the call stack begins for `w` and `u`: above it is the simulator
    sys.settrace(debugger.trace_dispatch)
    debugger.set_continue()  # to the breakpoint
    return follow


def _take_generators_for_functions(debugger: Any) -> None:
    """A kernel's functions are generators in the simulator (ptx/sim/resumable.py), but never seen to stand still.

    So for the debugger they return once, and what Python raises at a generator's end is no error of the kernel's.
    """

    def dispatch_return(frame: types.FrameType, arg: Any) -> Any:
        if debugger.stop_here(frame) or frame is debugger.returnframe:
            debugger.set_step()
        return bdb.Bdb.dispatch_return(debugger, frame, arg)

    def dispatch_exception(frame: types.FrameType, arg: Any) -> Any:
        ends = arg[0] is StopIteration and arg[2] is None
        return debugger.trace_dispatch if ends else bdb.Bdb.dispatch_exception(debugger, frame, arg)

    debugger.dispatch_return, debugger.dispatch_exception = dispatch_return, dispatch_exception
    debugger.set_return = lambda frame: debugger._set_stopinfo(frame.f_back, frame)


class _Typist(io.TextIOBase):
    """Types commands, shown as if somebody did, and then lets the kernel run to its end."""

    def __init__(self, commands: Sequence[str], screen: TextIO, stop: bdb.Breakpoint) -> None:
        self._left, self._screen, self._stop = [*commands], screen, stop

    def readline(self, size: Any = -1) -> Any:
        if self._left:
            command = self._left.pop(0)
            self._screen.write(f"{command}\n")
            return f"{command}\n"
        self._stop.disable()
        self._screen.write("\n")  # behind the prompt
        return "continue\n"


def _check_commands(commands: Sequence[str]) -> None:
    if isinstance(commands, str) or not all(isinstance(command, str) for command in commands):
        raise ValueError(f"commands must be a list of pdb's commands, such as ['p m', 'c'], not {commands!r}")


def _index(name: str, value: Index) -> tuple[int, ...]:
    """threadIdx or blockIdx as the simulator counts them: (x, y, z)."""
    parts = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(parts) <= 3 or not all(isinstance(x, int) and x >= 0 for x in parts):
        raise ValueError(f"{name} must be an int or a tuple of up to three, from 0 on, not {value!r}")
    return (*parts, 0, 0)[:3]
