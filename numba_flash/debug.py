"""Stop inside a kernel with Python's debugger, without editing the kernel.

    NUMBA_ENABLE_CUDASIM=1 python

    >>> from numba_flash.debug import stop_at
    >>> with stop_at("v2", "alpha = math.exp", thread=3):
    ...     numba_flash.attention(q, k, v, kernel="v2")

`python -m pdb` cannot do this: the simulator runs every GPU thread as a Python thread, a debugger is
attached to one thread, and that is the one that only waits for the others.
"""

import bdb
import contextlib
import functools
import importlib
import linecache
import pdb
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from .gpu.compiled import MODULES
from .machine import toolchain

Index = int | tuple[int, ...]


@contextlib.contextmanager
def stop_at(
    kernel: str,
    line: int | str,
    thread: Index = 0,
    block: Index = 0,
    *,
    debugger: Callable[[], pdb.Pdb] = functools.partial(pdb.Pdb, nosigint=True),  # noqa: B008 - made once is right
) -> Iterator[None]:
    """Stop in one thread of one block whenever it comes to a line of a kernel, in Numba's simulator.

    kernel: its name ("v1", "v2", "safe", "online" or "blocked"). line: a line number of its file, or a
    piece of text that only one line of its code contains. thread, block: threadIdx and blockIdx; an int is x.

    At the prompt everything of pdb works. `n` over cuda.syncthreads() lets all threads come to that
    barrier, so that shared memory then shows what they wrote. `c` goes on to the next time this thread
    comes here, `cl` and `c` to the end. `q` leaves: the launch is given up and bdb.BdbQuit comes out
    of the with statement, because what the kernel should have written is not there.

    debugger: makes the debugger, for another one than pdb's or for other streams. Signal handlers
    belong to the main thread, hence nosigint.

    Raises ValueError for a kernel or line that cannot be found, RuntimeError where the simulator is
    off; warns when the line was never reached. Serves one `with` at a time.
    """
    if kernel not in MODULES:
        raise ValueError(f"stop_at knows the kernels {', '.join(MODULES)}, not {kernel!r}")
    if not toolchain.simulated():
        raise RuntimeError(
            "stop_at needs Numba's CUDA simulator, which is off: set NUMBA_ENABLE_CUDASIM=1 before Python starts"
        )
    toolchain.cuda()
    make = importlib.import_module(f"numba_flash.kernels.{MODULES[kernel]}").make
    file = make.__code__.co_filename
    number = _find_line(make.__code__, line)
    wanted = _index("thread", thread), _index("block", block)
    came = False

    def at_call(frame: types.FrameType, event: Any, arg: Any) -> Any:
        """The trace function of every thread started meanwhile; the first call in `file` is the kernel's."""
        nonlocal came
        if frame.f_code.co_filename != file:
            return None  # before asking for the thread: one that is ending has no name any more
        simulated = threading.current_thread()
        if not hasattr(simulated, "threadIdx"):
            return None  # a thread that launches kernels
        if wanted != (tuple(simulated.threadIdx), tuple(simulated.blockIdx)):  # type: ignore[attr-defined]
            sys.settrace(before)  # left to whoever traced it anyway: a debugger, coverage
            return before and before(frame, event, arg)
        came = True
        return _attach(debugger(), frame)

    before = threading.gettrace()
    stop = bdb.Breakpoint(file, number)  # every debugger made from now on knows it
    threading.settrace(at_call)
    try:
        yield
    except bdb.BdbQuit as quit:  # without the simulator's traceback, which says nothing more
        raise bdb.BdbQuit(f"left the debugger in kernel {kernel!r}, which did not finish: {quit}") from None
    finally:
        threading.settrace(before)  # type: ignore[arg-type]  # None takes the hook away
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

    debugger.reset()
    debugger.botframe = kernel  # where the call stack begins for `w` and `u`: above it is the simulator
    sys.settrace(debugger.trace_dispatch)
    debugger.set_continue()  # to the breakpoint
    return follow


def _find_line(make: types.CodeType, line: int | str) -> int:
    """The number of a line with code in a kernel file, inside the functions that `make` defines."""
    file = make.co_filename
    inside = {number: linecache.getline(file, number).strip() for number in _lines_inside(make)}
    if isinstance(line, int):
        if line not in inside:
            following = [f"; the next one is {n}: {text}" for n, text in inside.items() if n > line]
            raise ValueError(f"line {line} of {file} is not code of the kernel{''.join(following[:1])}")
        return line
    found = [number for number, text in inside.items() if line in text]
    if not found:
        raise ValueError(f"no line of the kernel in {file} contains {line!r}")
    if len(found) > 1:
        listing = "".join(f"\n  {number}: {inside[number]}" for number in found)
        raise ValueError(f"{len(found)} lines of {file} contain {line!r}; give a number or more of the text:{listing}")
    return found[0]


def _lines_inside(make: types.CodeType) -> list[int]:
    """The lines with code of every function inside `make`."""
    lines: set[int] = set()
    for code in make.co_consts:
        if isinstance(code, types.CodeType):
            # A function's first entry is its `def`, which runs in make.
            lines.update(number for _, _, number in code.co_lines() if number and number != code.co_firstlineno)
            lines.update(_lines_inside(code))
    return sorted(lines)


def _index(name: str, value: Index) -> tuple[int, ...]:
    """threadIdx or blockIdx as the simulator counts them: (x, y, z)."""
    parts = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(parts) <= 3 or not all(isinstance(x, int) and x >= 0 for x in parts):
        raise ValueError(f"{name} must be an int or a tuple of up to three, from 0 on, not {value!r}")
    return (*parts, 0, 0)[:3]
