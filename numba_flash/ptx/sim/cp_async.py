"""Stand-ins for ptx.cp_async. A copy arrives when its thread waits for its group, no sooner."""

import functools

from .errors import InstructionError
from .now import current


def copy16(target, source, count):
    _start("copy16", 16, target, source, count)


@functools.cache
def small_copy(size):
    def copy(target, source, count):
        _start(f"small_copy({size})", size, target, source, count)

    return copy


def _start(name, size, target, source, count):
    thread = current()
    block, target, count = thread.block, int(target), int(count)
    if not 0 <= count <= size:
        raise InstructionError(f"cp_async.{name} copies 0 to {size} bytes, not {count}")
    words = block.shared.words(target, size, size)
    data = block.memory.bytes_at(source, count, size) if count else None
    block.shared.start_copy(words, thread)
    thread.copies.append((target, size, words, data, count))


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


def _arrive(thread, target, size, words, data, count):
    shared = thread.block.shared
    shared.copying[words] = False
    shared.write(words, thread)
    shared.data[target + count : target + size] = 0
    if count:
        shared.data[target : target + count] = data
