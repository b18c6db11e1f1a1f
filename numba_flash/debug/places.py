"""Lines of a kernel's file, and the simulated threads that run them."""

import contextlib
import importlib
import linecache
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..machine import toolchain
from .kernels import modules

Index3 = tuple[int, ...]  # threadIdx or blockIdx as the simulator counts them: (x, y, z)
Follow = Callable[..., Any]  # a trace function (sys.settrace)


class Code(NamedTuple):
    """The part of a code object that is read here: the file, and the code of the functions that it defines."""

    co_filename: str
    co_consts: tuple[Any, ...]


def make_of(kernel: Any, who: str) -> types.CodeType | Code:
    """The code of a kernel's make(config), or a Code for a caller's own kernel. who: the tool's name, for errors.

    Raises ValueError for a kernel that is not there, TypeError for an object that is no kernel, RuntimeError where the
    simulator is off.
    """
    if not isinstance(kernel, str):
        check_simulated(who)
        function = getattr(kernel, "fn", None)  # the simulator's kernels have it
        if not isinstance(function, types.FunctionType):
            raise TypeError(f"{who} takes the name of a kernel, or a kernel made by cuda.jit, not {kernel!r}")
        return Code(function.__code__.co_filename, (function.__code__, *_device_functions_beside(function)))
    files = modules()
    if kernel not in files:
        raise ValueError(f"{who} knows the kernels {', '.join(files)}, not {kernel!r}")
    check_simulated(who)
    toolchain.cuda()
    code: types.CodeType = importlib.import_module(f"numba_flash.kernels.{files[kernel]}").make.__code__
    return code


def _device_functions_beside(kernel: types.FunctionType) -> list[types.CodeType]:
    """The code of the device functions of a caller's own file that its kernel may call, by the names of its module."""
    functions = [value.fn for value in kernel.__globals__.values() if getattr(value, "_device", False)]
    codes = [function.__code__ for function in functions if isinstance(function, types.FunctionType)]
    return [code for code in codes if code.co_filename == kernel.__code__.co_filename]


def check_simulated(who: str) -> None:
    if not toolchain.simulated():
        raise RuntimeError(
            f"{who} needs Numba's CUDA simulator, which is off: set NUMBA_ENABLE_CUDASIM=1 before Python starts"
        )


@contextlib.contextmanager
def watching(file: str, attach: Callable[[Index3, Index3, types.FrameType], Follow | None]) -> Iterator[None]:
    """Whenever a simulated thread enters the kernel in `file`, call attach(threadIdx, blockIdx, frame).

    It gives the trace function of that thread's kernel, or None to leave the thread alone.
    """

    def at_call(frame: types.FrameType, event: Any, arg: Any) -> Any:
        """The trace function of every thread started meanwhile; the first call in `file` is the kernel's."""
        if frame.f_code.co_filename != file:
            return None
        thread: Any = now.thread
        follow = attach(tuple(thread.threadIdx), tuple(thread.blockIdx), frame)
        if follow is None:
            other = before or now.outer  # whoever traced it anyway: a debugger, coverage
            sys.settrace(other)
            return other and other(frame, event, arg)
        return follow

    from ..ptx.sim import launch, now  # Numba comes in with it

    before, now.follow = now.follow, at_call
    try:
        with launch.of_the_caller():
            yield
    finally:
        now.follow = before


def find_line(make: types.CodeType | Code, line: int | str) -> int:
    """The number of a line with code in a kernel file, inside the functions that `make` defines."""
    file = make.co_filename
    inside = {number: linecache.getline(file, number).strip() for number in lines_inside(make)}
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


def lines_inside(make: types.CodeType | Code) -> list[int]:
    """The lines with code of every function inside `make`."""
    lines: set[int] = set()
    for code in make.co_consts:
        if isinstance(code, types.CodeType):
            # A function's first entry is its `def`, which runs in make.
            lines.update(number for _, _, number in code.co_lines() if number and number != code.co_firstlineno)
            lines.update(lines_inside(code))
    return sorted(lines)
