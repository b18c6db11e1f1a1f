"""Runs one exercise in the simulator and says what is wrong, in the words of the tool that found it."""

import ast
import bdb
import contextlib
import datetime
import importlib.util
import json
import linecache
import re
import signal
import traceback
from pathlib import Path

from _wrong import Wrong

HERE = Path(__file__).resolve().parent
PROGRESS = HERE / "progress.json"
SECONDS = 60  # that an exercise may take
HUNTS = range(15, 21)

# What the simulator says, and what it means.
MEANINGS = (
    (
        "is read before it arrived",
        "The copy is still under way. Its thread must wait for its group, and a barrier must follow if others read the "
        "tile.",
    ),
    (
        "is written while a copy to it is under way",
        "Two copies, or a copy and a store, go to one place at the same time. Which buffer is free?",
    ),
    ("is read with no barrier in between", "A race: a barrier must lie between that write and this read."),
    (
        "is written over with no barrier in between",
        "A race: the other thread may not be done. A barrier must lie between its access and this write.",
    ),
    (
        "Nobody can go on",
        "A deadlock: everyone waits. Look for the barrier that is waited for, and for who should have arrived there. "
        "mbarrier.wait(barrier, p) waits until the phase of parity p has ended.",
    ),
)

WRONG_PARITY = (
    "mbarrier.wait goes on at once if the phase of that parity has ended: did the wait before that line wait?"
)

# What Python raises, and what it means in a kernel.
REASONS = (
    (IndexError, "The index lies past the end of the array. Which threads, rows or keys do not exist?"),
    (
        OverflowError,
        "e^x is too large. On a GPU it is inf, with no error. x must be at most 0: which maximum is subtracted here, "
        "and from what?",
    ),
    (ZeroDivisionError, "On a GPU x / 0 is inf or NaN, with no error. What is 0 at this line?"),
)


class TooLong(Exception):
    """A loop without an end."""


def path_of(number, solution=False):
    """The file of an exercise."""
    folder = HERE / "solutions" if solution else HERE
    (found,) = folder.glob(f"{number:02d}_*.py")
    return found


def numbers():
    return sorted(int(path.name[:2]) for path in HERE.glob("[0-9][0-9]_*.py"))


def about(path):
    """{"title": ..., "Teaches": ..., "Minutes": ..., "Read": ..., "Solution": ...}, from the file's docstring."""
    title, _, rest = ast.get_docstring(ast.parse(path.read_text())).partition("\n")
    fields = dict(re.findall(r"^(\w+): (.*(?:\n    .*)*)", rest, re.MULTILINE))
    return {"title": title, **{name: " ".join(text.split()) for name, text in fields.items()}}


def result(path, check):
    """Nothing if the exercise in this file is solved, else what is wrong."""
    try:
        holes = open_holes(path)
        if holes:
            return holes
        with time_limit():
            check(loaded(path))
    except Wrong as wrong:
        return str(wrong)
    except TooLong:
        return f"It has not ended after {SECONDS} s: is there a loop without an end?"
    except SyntaxError as error:
        return f"line {error.lineno} is no Python: {error.msg}\n    {(error.text or '').strip()}"
    except bdb.BdbQuit:  # somebody left the debugger
        raise
    except Exception as error:
        return said_by(error, path)
    return None


def open_holes(path):
    """The lines of a file in which `...` still stands."""
    text = path.read_text()
    lines = sorted({n.lineno for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and n.value is ...})
    shown = [f"  line {number}: {text.splitlines()[number - 1].strip()}" for number in lines]
    return "\n".join(["Put code in the place of each `...`:", *shown]) if lines else None


def loaded(path):
    """The file as a module."""
    linecache.checkcache(str(path))  # it may have changed since the last time
    spec = importlib.util.spec_from_file_location(f"exercise_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def said_by(error, path):
    """An exception of a reader's code: what, in which line and thread, and what it means."""
    text = named_barriers(re.sub(r"/\S*/", "", str(error)), path)  # without folders
    meanings = [meaning for said, meaning in MEANINGS if said in text]
    if text.startswith("block ("):  # the simulator's own messages name line and thread
        if "no barrier in between" in text and "mbarrier.wait(" in path.read_text():
            meanings = [WRONG_PARITY]
        return "\n".join([text, *meanings[:1]])
    kind = type(error).__name__
    thread = re.match(r"tid=\[(\d+), 0, 0\] ctaid=\[(\d+), 0, 0\](?:: )?(.*)", text, re.DOTALL)
    if thread:
        kind, text = f"{kind} in thread {thread[1]} of block {thread[2]}", thread[3]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    lines = [f"line {frames[-1].lineno}: {frames[-1].line}"] if frames else []
    lines.append(f"{kind}: {text}")
    lines += [text for raised, text in REASONS if isinstance(error, raised)]
    return "\n".join(lines)


def named_barriers(text, path):
    """Addresses of mbarriers as the names that the exercise gives them. They lie at the first static address."""
    names = re.search(r"^BARRIERS = (\(.*\))", path.read_text(), re.MULTILINE)
    for number, name in enumerate(ast.literal_eval(names[1]) if names else ()):
        text = re.sub(rf"\b{1024 + 8 * number:#x}\b", name, text)
    return text


@contextlib.contextmanager
def time_limit():
    """TooLong after a while, where the system has timers."""

    def stop(*_):
        raise TooLong

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# Progress.


def solved():
    """{number: the day on which it was solved}"""
    with contextlib.suppress(OSError, ValueError):
        return {int(number): day for number, day in json.loads(PROGRESS.read_text()).items()}
    return {}


def keep(number):
    days = {number: datetime.date.today().isoformat()} | solved()
    PROGRESS.write_text(json.dumps(days, sort_keys=True, indent=1) + "\n")


def overview():
    """A line for each exercise."""
    days, lines = solved(), []
    for number in numbers():
        facts = about(path_of(number))
        mark = "solved" if number in days else f"{facts['Minutes']} min"
        lines.append(f"{number:>3}  {mark:<7}  {facts['title']}")
    left = sum(int(about(path_of(number))["Minutes"]) for number in numbers() if number not in days)
    lines.append(f"{len(days)} of {len(numbers())} are solved; the others take about {left} minutes.")
    return "\n".join(lines)
