"""Records the variables of a kernel's threads at the lines that a comment marks."""

import contextlib
import copy
import linecache
import re
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from .places import Follow, Index3, lines_inside, make_of, watching

MARK = re.compile(r"#.*\bwatch: *(\w+(?: *, *\w+)*)")


class Seen(NamedTuple):
    """The variables of one thread that came to a marked line, before the line ran."""

    thread: Index3
    block: Index3
    line: int
    values: dict[str, Any]  # by name; one that is not set yet is left out


@contextlib.contextmanager
def watch(kernel: Any) -> Iterator[list[Seen]]:
    """Record the variables of a kernel at its lines with a comment `# watch: names`, in Numba's simulator.

    NUMBA_ENABLE_CUDASIM=1 python

    >>> @cuda.jit
    ... def my_kernel(x, out):
    ...     i = cuda.grid(1)
    ...     m = -math.inf
    ...     for j in range(x.shape[1]):
    ...         m = max(m, x[i, j])
    ...     out[i] = m  # watch: i, m
    >>> with numba_flash.debug.watch(my_kernel) as seen:
    ...     my_kernel[1, 4](x, out)
    >>> seen[0].values
    {'i': 0, 'm': 1.3}

    kernel: made by cuda.jit (it runs as in race_check), or the name of one of ours, as `explain` shows it. Arrays are
    copied.
    The list has an entry for each time that a thread comes to a marked line, in the order in which they came.

    Raises ValueError where no line has such a comment, RuntimeError where the simulator is off. Serves one `with` at a
    time.
    """
    make = make_of(kernel, "watch")
    names = {}
    for number in lines_inside(make):
        found = MARK.search(linecache.getline(make.co_filename, number))
        if found:
            names[number] = [name.strip() for name in found[1].split(",")]
    if not names:
        raise ValueError(f"no line of the kernel in {make.co_filename} has a comment such as '# watch: m, l'")
    seen: list[Seen] = []

    def attach(thread: Index3, block: Index3, frame: types.FrameType) -> Follow:
        def follow(frame: types.FrameType, event: str, arg: Any) -> Any:
            if event == "line" and frame.f_lineno in names:
                now = frame.f_locals
                values = {name: copy.copy(now[name]) for name in names[frame.f_lineno] if name in now}
                seen.append(Seen(thread, block, frame.f_lineno, values))
            return follow

        return follow

    with watching(make.co_filename, attach):
        yield seen
