"""Twins of ptx.cp_async. A copy arrives when its thread waits for its group, no sooner."""

import functools

from .errors import InstructionError
from .warp import current


def copy16(target, source, count):
    thread = current()
    block, target, count = thread.block, int(target), int(count)
    if not 0 <= count <= 16:
        raise InstructionError(f"cp_async.copy16 copies 0 to 16 bytes, not {count}")
    words = block.shared.words(target, 16, 16)
    data = block.memory.bytes_at(source, count, 16) if count else None
    block.shared.start_copy(words, thread)
    thread.copies.append((target, words, data, count))


def commit_group():
    thread = current()
    thread.copy_groups.append(thread.copies)
    thread.copies = []


@functools.cache
def wait_group(newest):
    def wait():
        thread = current()
        while len(thread.copy_groups) > newest:
            for copy in thread.copy_groups.popleft():
                _arrive(thread, *copy)

    return wait


def _arrive(thread, target, words, data, count):
    shared = thread.block.shared
    shared.copying[words] = False
    shared.write(words, thread)
    shared.data[target + count : target + 16] = 0
    if count:
        shared.data[target : target + count] = data
