"""Context parallelism by gathering keys: each rank computes its own rows over all keys that they see.

K and V come in slices of KV heads, the next ones while this one is computed. Nothing has to be merged. In the backward
they come again, and each rank's shares of dK and dV go back to the ranks that have the keys, which sum them in float32
in the order of ranks.
"""

import collections
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from . import local
from .groups import empty
from .layout import Piece, count, needed, pieces, unseen
from .local import Call, OptionGradients


class Gathered(NamedTuple):
    k: Any  # (batch, all tokens, heads, head_dim)
    v: Any
    finish: Callable[[], Any]  # they are there after this


def forward(call: Call, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """q, k, v: this rank's (batch, tokens, heads, head_dim) -> o and lse."""
    o, lse = local.new_results(q, v)
    for heads, _, now in _slices(call, q, k, v):
        own = call.of_heads(heads)
        for task in _tasks(call):
            local.forward(own, task, q[:, :, heads], now.k, now.v, o[:, :, heads], lse[:, heads])
    return o, lse


def backward(
    call: Call, do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, wanted: tuple[str, ...]
) -> dict[str, Any]:
    """-> the wanted gradients by name, those of q, k and v like them."""
    found = {f"d{name}": empty(x, tuple(x.shape)) for name, x in (("q", q), ("k", k), ("v", v)) if f"d{name}" in wanted}
    options = OptionGradients(call, wanted)
    summed = None
    for heads, heads_kv, now in _slices(call, q, k, v):
        own = call.of_heads(heads)
        of_keys: dict[str, Any] = {x: found[x][:, :, heads_kv] for x in ("dk", "dv") if x in wanted}
        shares = {
            x: empty(y, (y.shape[0], call.layout.seqlen, *y.shape[2:]), local.wide(y), 0) for x, y in of_keys.items()
        }
        for task in _tasks(call):
            given = do[:, :, heads], q[:, :, heads], now.k, now.v, o[:, :, heads], lse[:, heads]
            part = local.backward(own, task, *given, None if dlse is None else dlse[:, heads], wanted)
            if "dq" in wanted:
                found["dq"][:, task.rows, heads] = part.dq
            for name, share in shares.items():
                share += getattr(part, name)
            options.add(part, heads)
        if summed is not None:
            summed()
        summed = _sum(call, shares, of_keys)
    assert summed is not None
    summed()
    return found | options.results()


def _slices(call: Call, q: Any, k: Any, v: Any) -> Iterator[tuple[slice, slice, Gathered]]:
    """Query heads, their KV heads and these heads' keys, of one slice after the other. `call.ahead` of them are held at
    once: as soon as a slice is computed, another one is on its way."""
    ranges = call.heads(q.shape[2], k.shape[2], call.slices)
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
    """Starts to gather the keys of some KV heads that this rank's rows see; elsewhere there are zeros."""
    k, v = k[:, :, heads], v[:, :, heads]
    batch, _, heads_kv, head_dim = k.shape
    seqlen, width = call.layout.seqlen, head_dim + v.shape[3]
    packed: dict[tuple[Piece, ...], Any] = {}  # ranks that see the same keys get the same buffer
    sends, receives = {}, {}
    for rank in _others(call):
        sent, got = _moved(call, call.rank, rank), _moved(call, rank, call.rank)
        if sent:
            if sent not in packed:
                packed[sent] = buffer = empty(k, (batch, count(sent), heads_kv, width))
                for here, piece in _in_buffer(sent):
                    buffer[:, here, :, :head_dim], buffer[:, here, :, head_dim:] = k[:, piece.here], v[:, piece.here]
            sends[rank] = packed[sent]
        if got:
            receives[rank] = empty(k, (batch, count(got), heads_kv, width))
    whole = [empty(x, (batch, seqlen, *x.shape[2:])) for x in (k, v)]

    def place() -> None:
        for rank, buffer in receives.items():
            for here, piece in _in_buffer(_moved(call, rank, call.rank)):
                whole[0][:, piece.whole] = buffer[:, here, :, :head_dim]
                whole[1][:, piece.whole] = buffer[:, here, :, head_dim:]

    finish = call.group.send_recv(sends, receives, place)
    # While that is on its way; it writes none of these tokens.
    for piece in pieces(call.layout, call.rank):
        whole[0][:, piece.whole], whole[1][:, piece.whole] = k[:, piece.here], v[:, piece.here]
    for start, stop in unseen(call.layout, call.rank, call.reach):
        whole[0][:, start:stop], whole[1][:, start:stop] = 0, 0
    return Gathered(whole[0], whole[1], finish)


def _in_buffer(found: tuple[Piece, ...]) -> list[tuple[slice, Piece]]:
    """Where each piece is in a buffer that has them one after the other."""
    placed, at = [], 0
    for piece in found:
        placed.append((slice(at, at + piece.tokens), piece))
        at += piece.tokens
    return placed


def _sum(call: Call, shares: dict[str, Any], results: dict[str, Any]) -> Callable[[], Any]:
    """Starts to send this rank's shares of dk and dv, (batch, all tokens, ...), to the ranks that have the keys.
    -> a function after which `results`, this rank's dk and dv, are the sums of all shares."""
    sends, receives = {}, {}
    widths = [x.shape[3] for x in shares.values()]
    starts = dict(zip(shares, (slice(sum(widths[:n]), sum(widths[: n + 1])) for n in range(len(widths))), strict=True))
    for rank in _others(call) if shares else ():
        like = next(iter(shares.values()))
        batch, _, heads, _ = like.shape
        sent, got = _moved(call, rank, call.rank), _moved(call, call.rank, rank)
        if sent:
            sends[rank] = empty(like, (batch, count(sent), heads, sum(widths)))
            for name, share in shares.items():
                for here, piece in _in_buffer(sent):
                    sends[rank][:, here, :, starts[name]] = share[:, piece.whole]
        if got:
            receives[rank] = empty(like, (batch, count(got), heads, sum(widths)))

    def add() -> None:
        for name, result in results.items():
            total = empty(result, tuple(result.shape), shares[name].dtype, fill=0)
            for rank in range(call.group.size):
                for here, piece in _in_buffer(_moved(call, call.rank, rank)):
                    own = shares[name][:, piece.whole]
                    total[:, piece.here] += own if rank == call.rank else receives[rank][:, here, :, starts[name]]
            result[...] = total

    return call.group.send_recv(sends, receives, add)
