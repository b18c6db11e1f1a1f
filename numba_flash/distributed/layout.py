"""Layout: which tokens each rank holds, and which of them another rank must see. Integers only.

A Layout and the window determine all messages between ranks. So each rank knows what it sends and what it gets without
asking, and a test can check it without any process.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

Run = tuple[int, int]  # the tokens [start, stop)
Part = tuple[Run, ...]
ZIGZAG = "zigzag"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the tokens of a sequence, or of packed documents, are divided among ranks.

    >>> Layout.zigzag(16, 2).parts
    ((((0, 4),), ((12, 16),)), (((4, 8),), ((8, 12),)))

    parts[rank] is a tuple of parts, and a part a tuple of runs [start, stop) of tokens. A rank stores its tokens in
    this order. A part is computed by one call, so its runs must rise, and a document may have only one piece in it.
    Each token belongs to one rank. A rank may have none.
    """

    parts: tuple[tuple[Part, ...], ...]

    def __post_init__(self) -> None:
        runs = sorted(run for rank in range(self.size) for run in self.runs(rank))
        ends = [0, *(stop for _, stop in runs)]
        if any(start != end or stop <= start for (start, stop), end in zip(runs, ends, strict=False)):
            raise ValueError(f"parts must have each token once, in runs (start, stop) that are not empty, not {runs}")
        for of_rank in self.parts:
            for part in of_rank:
                if list(part) != sorted(part):
                    raise ValueError(f"the runs of a part must rise, not {part}")

    @staticmethod
    def contiguous(seqlen: int, size: int) -> "Layout":
        """Rank r has the r-th of `size` parts, whose lengths differ by at most one token. With causal the last rank
        has most of the work."""
        bounds = _bounds(0, seqlen, size)
        return Layout(tuple(_parts([bounds[rank]]) for rank in range(size)))

    @staticmethod
    def zigzag(seqlen: int, size: int) -> "Layout":
        """Rank r has the chunks r and 2 * size - 1 - r of 2 * size, so that all ranks have equal work with causal.
        If `size` divides `seqlen`, all have equally many tokens."""
        bounds = _bounds(0, seqlen, 2 * size)
        return Layout(tuple(_parts([bounds[rank]], [bounds[-1 - rank]]) for rank in range(size)))

    @staticmethod
    def per_document(cu_seqlens: Any, size: int) -> "Layout":
        """Each of the documents [cu_seqlens[d], cu_seqlens[d + 1]) is divided in zigzag. A rank stores the first
        chunks of all documents, and then the second ones."""
        ends = document_ends(cu_seqlens)
        chunks = [_bounds(start, stop, 2 * size) for start, stop in zip(ends, ends[1:], strict=False)]
        return Layout(tuple(_parts([c[rank] for c in chunks], [c[-1 - rank] for c in chunks]) for rank in range(size)))

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.parts)

    def __hash__(self) -> int:
        """Cached: a layout may have thousands of runs, and each call looks up results by it."""
        return self._hash

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.parts)

    @functools.cached_property
    def seqlen(self) -> int:
        """The number of tokens of all ranks."""
        return sum(self.counts)

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """How many tokens each rank has."""
        return tuple(sum(stop - start for start, stop in self.runs(rank)) for rank in range(self.size))

    def runs(self, rank: int) -> Part:
        """The runs of a rank, in the order in which it stores them."""
        return tuple(run for part in self.parts[rank] for run in part)

    def positions(self, rank: int) -> np.ndarray:
        """The position in the whole of each token of a rank."""
        return np.concatenate([np.arange(0), *(np.arange(*run) for run in self.runs(rank))])


def _bounds(start: int, stop: int, count: int) -> list[Run]:
    """[start, stop) in `count` pieces whose lengths differ by at most one."""
    at = [start + n * (stop - start) // count for n in range(count + 1)]
    return list(zip(at, at[1:], strict=False))


def _parts(*parts: Sequence[Run]) -> tuple[Part, ...]:
    """The parts without empty runs, and without parts that have no run left."""
    filled = (tuple(run for run in part if run[0] < run[1]) for part in parts)
    return tuple(part for part in filled if part)


def document_ends(cu_seqlens: Any) -> tuple[int, ...]:
    """cu_seqlens on the host, checked: 0, and where each document ends."""
    device = getattr(cu_seqlens, "device", None)
    if getattr(device, "type", "cpu") == "cuda" or hasattr(cu_seqlens, "__cuda_array_interface__"):
        raise TypeError(
            "cu_seqlens must be in host memory, because the ranks' shapes follow from it, not on a GPU; to read it the "
            "host would wait: keep a copy, as with cu_seqlens.tolist()"
        )
    ends = tuple(int(end) for end in np.asarray(cu_seqlens).reshape(-1))
    if not ends or ends[0] != 0 or any(a > b for a, b in zip(ends, ends[1:], strict=False)):
        raise ValueError(f"cu_seqlens must rise from 0, one number more than there are documents, not {list(ends)}")
    return ends


class Reach(NamedTuple):
    """Which keys a token at position p sees: [p - left, p + right] (None = all) of its own document."""

    left: int | None
    right: int | None
    ends: tuple[int, ...]  # where the documents end, beginning with 0


@functools.lru_cache(maxsize=1024)
def needed(layout: Layout, rank: int, reach: Reach) -> Part:
    """The keys that some token of a rank sees, as runs that rise and do not touch."""
    found = []
    for start, stop in layout.runs(rank):
        for first, end in zip(reach.ends, reach.ends[1:], strict=False):
            a, b = max(start, first), min(stop, end)
            if a < b:
                low = first if reach.left is None else max(first, a - reach.left)
                high = end if reach.right is None else min(end, b + reach.right)
                found.append((low, high))
    return _joined(found)


@functools.lru_cache(maxsize=1024)
def unseen(layout: Layout, rank: int, reach: Reach) -> Part:
    """The tokens that a rank neither has nor sees, as runs."""
    known = _joined([*layout.runs(rank), *needed(layout, rank, reach)])
    ends = [0, *(end for run in known for end in run), layout.seqlen]
    return tuple(run for run in zip(ends[::2], ends[1::2], strict=True) if run[0] < run[1])


def _joined(runs: Iterable[Run]) -> Part:
    joined: list[Run] = []
    for start, stop in sorted(run for run in runs if run[0] < run[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


class Piece(NamedTuple):
    """Tokens [start, stop) of the whole, which begin at `local` in the memory of the rank that has them."""

    local: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def here(self) -> slice:
        """The tokens' rows in the memory of the rank that has them."""
        return slice(self.local, self.local + self.tokens)

    @property
    def whole(self) -> slice:
        """The tokens' rows among all tokens."""
        return slice(self.start, self.stop)


@functools.lru_cache(maxsize=4096)
def pieces(layout: Layout, owner: int, wanted: Part | None = None) -> tuple[Piece, ...]:
    """The pieces of the owner's tokens that lie in `wanted` (None = all), in the order of its memory. What is together
    there and in the whole is one piece."""
    found, local = list[Piece](), 0
    for start, stop in layout.runs(owner):
        for low, high in ((start, stop),) if wanted is None else wanted:
            a, b = max(start, low), min(stop, high)
            here = local + a - start
            if found and found[-1].stop == a < b and found[-1].here.stop == here:
                found[-1] = found[-1]._replace(stop=b)
            elif a < b:
                found.append(Piece(here, a, b))
        local += stop - start
    return tuple(found)


def count(found: tuple[Piece, ...]) -> int:
    return sum(piece.tokens for piece in found)


def layout_of(layout: str | Layout, size: int, seqlen: int) -> Layout:
    if isinstance(layout, Layout):
        if layout.size != size:
            raise ValueError(f"layout is for {layout.size} ranks, and group has {size}")
        return layout
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(f"layout must be 'zigzag', 'contiguous' or a Layout, not {layout!r}")
    return _named(layout, seqlen, size)


@functools.lru_cache(maxsize=1024)
def _named(layout: str, seqlen: int, size: int) -> Layout:
    """The named Layout, cached, so that its own cached properties are found again."""
    return Layout.zigzag(seqlen, size) if layout == "zigzag" else Layout.contiguous(seqlen, size)


def check_local(name: str, tokens: int, layout: Layout, rank: int) -> None:
    expected = layout.counts[rank]
    if tokens != expected:
        raise ValueError(
            f"{name} must have {expected} tokens on rank {rank} of {layout.size}, which layout divides as "
            f"{list(layout.counts)}, not {tokens}; if the ranks' numbers differ, say how many there are in all: seqlen="
        )
