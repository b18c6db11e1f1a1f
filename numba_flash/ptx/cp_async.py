"""cp.async: copies from global to shared memory that a thread starts and waits for later (PTX ISA 9.7.9.25.3). cc 8.0.

Every thread for itself. A copy is in no group until commit_group closes the thread's open group; after
wait_group(n) all but the thread's n newest groups have arrived, for this thread only: the others see
them behind a barrier. Not ordered with anything else before that.
"""

import functools

from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


@intrinsic
def copy16(typingctx, target, source, count):
    """cp.async.cg.shared.global [target], [source], 16, count: `count` bytes (0 to 16), then zeros up to 16.

    target: a shared address, source: a global one, both multiples of 16. With count 0 nothing is read.
    """
    text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
    return asm.scalars(text, types.void(types.int32, types.int64, types.int32))


@functools.cache
def small_copy(size):
    """-> a function (target, source, count), as copy16, of 4 or 8 bytes, of which addresses are multiples."""

    @intrinsic
    def copy(typingctx, target, source, count):
        text = f"cp.async.ca.shared.global [$0], [$1], {size}, $2;"
        return asm.scalars(text, types.void(types.int32, types.int64, types.int32))

    return copy


@intrinsic
def commit_group(typingctx):
    """cp.async.commit_group: the copies since the last commit are a group, also when there are none."""
    return asm.scalars("cp.async.commit_group;", types.void())


@functools.cache
def wait_group(newest):
    """-> a function that waits until all but this thread's `newest` newest groups have arrived."""

    @intrinsic
    def wait(typingctx):
        return asm.scalars(f"cp.async.wait_group {newest};", types.void())

    return wait
