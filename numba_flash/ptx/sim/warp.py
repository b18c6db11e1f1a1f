"""Warps and warpgroups come together: all lanes hand in what they have, the last to come computes for all."""

import sys
from collections import deque

from .errors import InstructionError, name, place
from .now import current


class Group:
    """The 32 lanes of a warp or the 128 threads of a warpgroup, and the instruction they are gathering at."""

    def __init__(self, kind, size, members):
        self.kind, self.size, self.members = kind, size, members
        self.numbers = slice(members[0].number, members[0].number + len(members))
        self.given = [None] * size
        self.came, self.results = [], None
        self.instruction = self.where = None
        self.products, self.product_groups = [], deque()  # wgmma under way, of a warpgroup

    def left(self, thread):
        """-> the error if others wait here for a thread that ends, or None."""
        if not self.came:
            return None
        text = f"leaves the kernel, but {_who(self.came)} waits in {self.instruction[0]} at {place(self.came[0])}"
        return InstructionError(f"{text}; all of a {self.kind} must come there", thread)


def together(instruction, compute, given, group="warp"):
    """Come to `instruction`: a tuple of its name and what must be the same in all lanes.

    compute(group, [given of lane 0, ...]) -> what each lane gets, or None; called once, by the last lane.
    The lanes must come from one place of one function: an instruction on each side of an `if` is two.
    """
    thread = current()
    group = thread.warp if group == "warp" else thread.warpgroup
    frame = sys._getframe(2)
    where = frame.f_code, frame.f_lasti
    if not group.came:
        group.instruction, group.where = instruction, where
        _all_are_there(group)
    elif group.instruction != instruction or group.where != where:
        other = group.came[0]
        raise InstructionError(
            f"{_text(instruction)} is reached while {name(other)} waits in {_text(group.instruction)} at "
            f"{place(other)}; all of a {group.kind} must come to one instruction with one set of operands"
        )
    lane = thread.thread_id % group.size
    group.given[lane] = given
    group.came.append(thread)
    if len(group.came) < group.size:
        return thread.turns.wait(thread, instruction[0], lambda: _result(group, lane))
    group.results = compute(group, group.given)
    came, group.came = group.came, []
    thread.turns.wake_all(came[:-1])
    return _result(group, lane)


def _result(group, lane):
    """A lane's result. The next instruction's results come only when all lanes have taken theirs."""
    return None if group.results is None else group.results[lane]


def same(group, given, what):
    """The one value that all lanes gave."""
    for thread, value in zip(group.members, given, strict=True):
        if value != given[0]:
            raise InstructionError(
                f"{what} is {value} here and {given[0]} in {name(group.members[0])}: it must be the same", thread
            )
    return given[0]


def _all_are_there(group):
    if len(group.members) < group.size:
        raise InstructionError(
            f"a {group.kind} of {len(group.members)} threads, not {group.size}: launch whole {group.kind}s"
        )
    for thread in group.members:
        if thread.ended:
            raise InstructionError(f"{name(thread)} has left the kernel; all of a {group.kind} must come here")


def _text(instruction):
    first, *rest = instruction
    return f"{first}{tuple(rest) if rest else ''}"


def _who(threads):
    return name(threads[0]) + (f" and {len(threads) - 1} more" if len(threads) > 1 else "")
