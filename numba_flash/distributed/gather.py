"""Context parallelism by gathering keys: each rank computes its own rows over all keys that they see.

K and V are gathered in slices of KV heads; the next slice arrives while this one is computed. Results need no merge.
The backward gathers them again. Each rank sends its shares of dK and dV to the ranks that own the keys, which sum them
in float32 in the order of ranks.
"""

import collections
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from . import local
from .groups import MOST_MESSAGES, copy, empty
from .layout import Piece, count, needed, pieces, unseen
from .local import Call, OptionGradients


class Gathered(NamedTuple):
    k: Any  # (batch, all tokens, heads, head_dim)
    v: Any
    finish: Callable[[], Any]  # waits until k and v have arrived


def forward(call: Call, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """q, k, v: this rank's (batch, tokens, heads, head_dim) -> o and lse."""
    o, lse = local.new_results(q, v)
    ends = list[Callable[[], Any]]()
    for heads, _, now in _slices(call, q, k, v):
        own = call.of_heads(heads)
        given = q[:, :, heads], now.k, now.v, o[:, :, heads], lse[:, heads]
        for lane, task in enumerate(reversed(_tasks(call))):  # the last tokens see the most keys, and so take longest
            work = functools.partial(local.forward, own, task, *given)
            ends.append(call.group.beside(work, q, lane))
        if call.ahead < len(call.slices):  # the next slice may reuse these keys' memory
            _all(ends)
    _all(ends)
    return o, lse


def _all(ends: list[Callable[[], Any]]) -> None:
    while ends:
        ends.pop()()


def backward(
    call: Call, do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, wanted: tuple[str, ...]
) -> dict[str, Any]:
    """-> the wanted gradients by name; dq, dk and dv have the shapes of q, k and v."""
    found = {f"d{name}": empty(x, tuple(x.shape)) for name, x in (("q", q), ("k", k), ("v", v)) if f"d{name}" in wanted}
    options = OptionGradients(call, wanted)
    summed, names = None, [name for name in ("dk", "dv") if name in wanted]
    for heads, heads_kv, now in _slices(call, q, k, v):
        own = call.of_heads(heads)
        shares = {name: _Share(x, call.layout.seqlen) for name, x in (("dk", now.k), ("dv", now.v)) if name in wanted}
        for task in _tasks(call):
            given = do[:, :, heads], q[:, :, heads], now.k, now.v, o[:, :, heads], lse[:, heads]
            part = local.backward(own, task, *given, None if dlse is None else dlse[:, heads], wanted)
            if "dq" in wanted:
                found["dq"][:, task.rows, heads] = part.dq
            for name, share in shares.items():
                share.add(getattr(part, name), local.seen_end(call, task))
            options.add(part, heads)
        if summed is not None:
            summed()
        every = [share.whole() for share in shares.values()]
        summed = _sum(call, every, [found[name][:, :, heads_kv] for name in names])
    assert summed is not None
    summed()
    return found | options.results()


class _Share:
    """This rank's share of dk or dv of all tokens, summed over its tasks."""

    def __init__(self, like: Any, seqlen: int) -> None:
        self.sum, self.used = empty(like, tuple(like.shape), local.wide(like)), 0

    def add(self, part: Any, end: int) -> None:
        """Adds a part, which has keys [0, end)."""
        self.sum[:, : min(end, self.used)] += part[:, : min(end, self.used)]
        if end > self.used:
            self.sum[:, self.used : end] = part[:, self.used : end]
            self.used = end

    def whole(self) -> Any:
        self.sum[:, self.used :] = 0
        return self.sum


def _slices(call: Call, q: Any, k: Any, v: Any) -> Iterator[tuple[slice, slice, Gathered]]:
    """Yields each slice's query heads, KV heads and gathered keys. `call.ahead` slices are held at once: as soon as one
    is computed, the transfer of another one starts."""
    ranges = call.in_slices(q.shape[2] // k.shape[2])
    coming = collections.deque(_start(call, k, v, heads_kv) for _, heads_kv in ranges[: call.ahead])
    for n, (heads, heads_kv) in enumerate(ranges):
        now = coming.popleft()
        now.finish()
        yield heads, heads_kv, now
        del now
        if n + call.ahead < len(ranges):
            coming.append(_start(call, k, v, ranges[n + call.ahead][1]))


def _tasks(call: Call) -> tuple[local.Task, ...]:
    return local.tasks(call.layout, call.rank, call.reach.ends if call.packed else None)


def _moved(call: Call, owner: int, to: int) -> tuple[Piece, ...]:
    """The owner's tokens whose keys `to` sees."""
    return pieces(call.layout, owner, needed(call.layout, to, call.reach))


def _others(call: Call) -> list[int]:
    return [rank for rank in range(call.group.size) if rank != call.rank]


def _start(call: Call, k: Any, v: Any, heads: slice) -> Gathered:
    """Starts to gather the keys of some KV heads that this rank's rows see. All other keys are zeros."""
    own = k[:, :, heads], v[:, :, heads]
    if call.group.takes_views(k):
        return _start_views(call, *own)
    whole = [empty(x, (x.shape[0], call.layout.seqlen, *x.shape[2:])) for x in own]
    _keep(call, whole, own)
    coming = {rank: _arriving(whole, _moved(call, rank, call.rank), in_place=True) for rank in _others(call)}

    def place() -> None:
        for found in coming.values():
            for to, part in found.parts:
                copy(to, part)

    sends = {rank: _leaving(whole, _moved(call, call.rank, rank)) for rank in _others(call)}
    finish = call.group.send_recv(_filled(sends), _filled({r: x.buffers for r, x in coming.items()}), place)
    _clear(call, whole)  # meanwhile
    return Gathered(whole[0], whole[1], finish)


def _start_views(call: Call, k: Any, v: Any) -> Gathered:
    """`_start` where the group moves each piece of tokens from its place to its place, without copies here."""
    own = [x.swapaxes(1, 2) for x in (k, v)]  # (batch, heads, tokens, dim), as messages are
    whole = [empty(x, (*x.shape[:2], call.layout.seqlen, x.shape[3])) for x in own]
    sends = {r: [x[:, :, piece.here] for x in own for piece in _moved(call, call.rank, r)] for r in _others(call)}
    receives = {r: [x[:, :, piece.whole] for x in whole for piece in _moved(call, r, call.rank)] for r in _others(call)}
    finish = call.group.send_recv(_filled(sends), _filled(receives))
    whole = [x.swapaxes(1, 2) for x in whole]
    _keep(call, whole, (k, v))  # meanwhile
    _clear(call, whole)
    return Gathered(whole[0], whole[1], finish)


def _keep(call: Call, whole: list[Any], own: tuple[Any, Any]) -> None:
    for made, x in zip(whole, own, strict=True):
        for piece in pieces(call.layout, call.rank):
            copy(made[:, piece.whole], x[:, piece.here])


def _clear(call: Call, whole: list[Any]) -> None:
    """Writes zeros where no key arrives."""
    for start, stop in unseen(call.layout, call.rank, call.reach):
        for made in whole:
            made[:, start:stop] = 0


def _sum(call: Call, shares: list[Any], results: list[Any]) -> Callable[[], Any]:
    """Starts to send this rank's shares of dk and dv, (batch, all tokens, ...), to the ranks that have the keys.
    -> a function after which `results`, this rank's dk and dv, are the sums of all shares."""
    totals = [empty(result, tuple(result.shape), share.dtype) for result, share in zip(results, shares, strict=True)]
    sends = {rank: _leaving(shares, _moved(call, rank, call.rank)) for rank in _others(call)}
    coming = {rank: _arriving(totals, _moved(call, call.rank, rank), in_place=False) for rank in _others(call)}
    mine = pieces(call.layout, call.rank)
    begins = _moved(call, call.rank, 0) == mine  # the sum starts with rank 0's share, which has all of these keys
    own = [(t[:, piece.here], x[:, piece.whole]) for t, x in zip(totals, shares, strict=True) for piece in mine]

    def add() -> None:
        for total in () if begins else totals:
            total[...] = 0
        for rank in range(call.group.size):
            for to, part in own if rank == call.rank else coming[rank].parts:
                if rank == 0 and begins:
                    to[...] = part
                else:
                    to += part  # noqa: PLW2901 - a view
        for result, total in zip(results, totals, strict=True):
            result[...] = total

    return call.group.send_recv(_filled(sends), _filled({r: x.buffers for r, x in coming.items()}), add)


# Messages between ranks: tokens of arrays (batch, tokens, heads, dim). Each piece of each batch entry is sent as it
# lies in memory. If that would be too many messages, a copy of all pieces is sent.


def _leaving(arrays: list[Any], found: tuple[Piece, ...]) -> list[Any]:
    """The buffers to send: `found` in arrays of all tokens."""
    if _few(arrays, found):
        return [x[b, piece.whole] for x in arrays for b in range(x.shape[0]) for piece in found]
    copies = []
    for x in arrays:
        copies.append(empty(x, (x.shape[0], count(found), *x.shape[2:])))
        for here, piece in _in_copy(found):
            copy(copies[-1][:, here], x[:, piece.whole])
    return copies


class Arriving(NamedTuple):
    """Data received from a rank: buffers, and their parts that must be copied, each with its destination."""

    buffers: list[Any]
    parts: list[tuple[Any, Any]]


def _arriving(arrays: list[Any], found: tuple[Piece, ...], in_place: bool) -> Arriving:
    """The buffers to receive into. in_place: arrays have all tokens and are written; else this rank's, added to."""
    few, made = _few(arrays, found), Arriving([], [])
    if few and in_place:
        return Arriving(_leaving(arrays, found), [])
    for x in arrays:
        to = [x[:, piece.whole if in_place else piece.here] for piece in found]
        if few:
            places = [place[b] for b in range(x.shape[0]) for place in to]
            made.buffers.extend(empty(x, tuple(place.shape)) for place in places)
            made.parts.extend(zip(places, made.buffers[-len(places) :], strict=True))
        elif found:
            copy = empty(x, (x.shape[0], count(found), *x.shape[2:]))
            made.buffers.append(copy)
            made.parts.extend((place, copy[:, here]) for place, (here, _) in zip(to, _in_copy(found), strict=True))
    return made


def _few(arrays: list[Any], found: tuple[Piece, ...]) -> bool:
    return sum(x.shape[0] for x in arrays) * len(found) <= MOST_MESSAGES


def _in_copy(found: tuple[Piece, ...]) -> list[tuple[slice, Piece]]:
    """Where each piece lies in a copy of all pieces, one after the other."""
    placed, at = [], 0
    for piece in found:
        placed.append((slice(at, at + piece.tokens), piece))
        at += piece.tokens
    return placed


def _filled(messages: dict[int, list[Any]]) -> dict[int, list[Any]]:
    return {rank: listed for rank, listed in messages.items() if listed and listed[0].shape[0]}
