"""The ranks of one host, whose GPUs read each other's memory: copy engines move the tokens, and no multiprocessor does.

Each rank has some slots of shared memory for each other rank. The sender copies a letter, tokens that fit into a slot,
there, and raises a flag in the receiver's memory. The receiver's copy engine pulls the letter to its places, and raises
a flag in the sender's memory: this slot is free. Flags are numbers of letters, which only rise.

Streams wait for flags; the host does not. CUDA does not know of these waits, and may put several streams into one queue
of the GPU. So letters are enqueued in an order that would end if each GPU had a single queue: a letter waits for its
slot only behind this rank's own pulls of all letters before.
"""

import itertools
from collections.abc import Callable
from typing import Any

from .groups import Buffers
from .torch_group import TorchGroup

SLOTS = 4  # letters from one rank to another that are on their way at once
FLAGS, FLAG, ALIGNED = 32 << 10, 128, 256  # bytes: all flags, one flag, and where an array in a slot begins
STAGING, PULLING = 0, 1  # streams

Letter = list[tuple[int, Any]]  # views of some arrays, and where each lies in the slot


class PeerGroup(TorchGroup):
    """link: the shared memory and the streams, as `PeerMemory`."""

    def __init__(self, group: Any, link: Any) -> None:
        super().__init__(group)
        self.link, self.transport = link, "copy engines"
        self.slot = (link.memory.numel() - FLAGS) // max(self.size - 1, 1) // SLOTS // ALIGNED * ALIGNED
        self.sent, self.pulled = [0] * self.size, [0] * self.size  # letters to and from each rank

    def takes_views(self, like: Any) -> bool:
        return bool(self.link.serves(like))

    def send_recv(self, sends: Buffers, receives: Buffers, then: Callable[[], None] | None = None) -> Callable[[], Any]:
        first = next((x for some in (sends, receives) for listed in some.values() for x in listed), None)
        if first is None or not self.takes_views(first):
            return super().send_recv(sends, receives, then)
        self.link.begin()
        for step in range(1, self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            leaving, coming = (letters(x, self.slot) for x in (sends.get(to, []), receives.get(source, [])))
            for sent, pulled in itertools.zip_longest(leaving, coming):
                if sent is not None:
                    self._stage(to, sent)
                if pulled is not None:
                    self._pull(source, pulled)
        wait, kept = self.link.end(then), [sends, receives, then]  # kept alive, as in TorchGroup

        def finish() -> None:
            wait()
            kept.clear()

        return finish

    def _stage(self, to: int, letter: Letter) -> None:
        number, self.sent[to] = self.sent[to], self.sent[to] + 1
        self.link.wait(STAGING, self._flag(self.rank, to, free=True), number + 1 - SLOTS)
        self.link.stage(self._place(self.rank, to, number), letter)
        self.link.write(STAGING, self._flag(to, self.rank, free=False), number + 1)

    def _pull(self, source: int, letter: Letter) -> None:
        number, self.pulled[source] = self.pulled[source], self.pulled[source] + 1
        self.link.wait(PULLING, self._flag(self.rank, source, free=False), number + 1)
        self.link.pull(self.link.bases[source] + self._place(source, self.rank, number), letter)
        self.link.write(PULLING, self._flag(source, self.rank, free=True), number + 1)

    def _flag(self, owner: int, of: int, free: bool) -> int:
        """The address of a flag in the owner's memory: how many letters to `of` have been pulled (free), or how many
        from `of` have come."""
        return int(self.link.bases[owner]) + (2 * of + free) * FLAG

    def _place(self, owner: int, to: int, number: int) -> int:
        """Where the letter of this number from `owner` to `to` begins in the owner's memory."""
        return FLAGS + (((to - owner) % self.size - 1) * SLOTS + number % SLOTS) * self.slot


def letters(arrays: list[Any], room: int) -> list[Letter]:
    """Cuts arrays, and puts the parts into letters. Both ranks do so alike, since the shapes are equal."""
    found, used = list[Letter](), room
    for x in (part for array in arrays for part in _cut(array, room)):
        size = -(-x.numel() * x.element_size() // ALIGNED) * ALIGNED
        if used + size > room:
            found.append([])
            used = 0
        found[-1].append((used, x))
        used += size
    return found


def _cut(x: Any, room: int) -> list[Any]:
    if x.numel() * x.element_size() <= room:
        return [x] if x.numel() else []
    dim = next(n for n, size in enumerate(x.shape) if size > 1)
    return [part for half in x.tensor_split(2, dim) for part in _cut(half, room)]
