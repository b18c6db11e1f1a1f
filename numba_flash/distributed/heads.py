"""Context parallelism by heads (DeepSpeed's Ulysses): each rank gets all tokens of some of the heads.

Then each rank calls attention as one process would for these heads, so all results and gradients have the bits of one
process. All of q, k, v and o is moved, where gathering moves k and v to all ranks.
"""

from collections.abc import Callable
from typing import Any

from . import local
from .groups import contiguous, empty
from .layout import pieces
from .local import Call, OptionGradients


def forward(call: Call, q: Any, k: Any, v: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """-> this rank's o and lse, and what `backward` takes."""
    given = to_heads(call, q, k, v)
    o, lse = local.new_results(given[0], given[2])
    own = _own(call, q.shape[2], k.shape[2])
    for task in _whole(call):
        local.forward(own, task, given[0], given[1], given[2], o, lse)
    of_rows, rows = to_tokens(call, o, lse.swapaxes(1, 2)[..., None])
    return of_rows, as_lse(rows), (*given, o, lse)


def backward(call: Call, do: Any, dlse: Any, saved: tuple[Any, ...], wanted: tuple[str, ...]) -> dict[str, Any]:
    q, k, v, o, lse = saved
    size = call.group.size
    do, *of_lse = to_heads(call, do, *([] if dlse is None else [dlse.swapaxes(1, 2)[..., None]]))
    dlse = as_lse(of_lse[0]) if of_lse else None
    options = OptionGradients(call, wanted)
    own = _own(call, q.shape[2] * size, k.shape[2] * size)
    found: dict[str, Any] = {}
    heads, _ = call.heads(q.shape[2] * size, k.shape[2] * size, size)[call.rank]
    for task in _whole(call):
        part = local.backward(own, task, do, q, k, v, o, lse, dlse, wanted)
        found = {name: getattr(part, name) for name in ("dq", "dk", "dv") if name in wanted}
        options.add(part, heads)
    if not found:  # there is no token
        found = {name: x for name, x in (("dq", q), ("dk", k), ("dv", v)) if name in wanted}
    return dict(zip(found, to_tokens(call, *found.values()), strict=True)) | options.results()


def _whole(call: Call) -> tuple[local.Task, ...]:
    return local.whole(call.layout, call.reach.ends if call.packed else None)


def _own(call: Call, heads: int, heads_kv: int) -> Call:
    return call.of_heads(call.heads(heads, heads_kv, call.group.size)[call.rank][0])


def as_lse(x: Any) -> Any:
    """(batch, tokens, heads, 1), as it is moved, as (batch, heads, tokens)"""
    return contiguous(x[..., 0].swapaxes(1, 2))


def to_heads(call: Call, *arrays: Any) -> list[Any]:
    """Of each (batch, this rank's tokens, all heads, dim) -> (batch, all tokens, this rank's heads, dim)"""
    return _finished([_to_heads(call, x) for x in arrays])


def to_tokens(call: Call, *arrays: Any) -> list[Any]:
    """The other way: (batch, all tokens, this rank's heads, dim) -> (batch, this rank's tokens, all heads, dim)"""
    return _finished([_to_tokens(call, x) for x in arrays])


def _finished(started: list[tuple[Any, Callable[[], Any]]]) -> list[Any]:
    for _, finish in started:
        finish()
    return [made for made, _ in started]


def _to_heads(call: Call, x: Any) -> tuple[Any, Callable[[], Any]]:
    group, layout = call.group, call.layout
    batch, tokens, heads, dim = x.shape
    each = heads // group.size
    sends, receives = {}, {}
    for rank in range(group.size):
        if rank != group.rank and tokens:
            sends[rank] = [contiguous(x[:, :, rank * each : (rank + 1) * each])]
        if rank != group.rank and layout.counts[rank]:
            receives[rank] = [empty(x, (batch, layout.counts[rank], each, dim))]
    made = empty(x, (batch, layout.seqlen, each, dim))

    def place() -> None:
        own = x[:, :, group.rank * each : (group.rank + 1) * each]
        for rank, (part,) in (receives | {group.rank: [own]}).items():
            for piece in pieces(layout, rank):
                made[:, piece.whole] = part[:, piece.here]

    return made, group.send_recv(sends, receives, place)


def _to_tokens(call: Call, x: Any) -> tuple[Any, Callable[[], Any]]:
    group, layout = call.group, call.layout
    batch, _, each, dim = x.shape
    tokens = layout.counts[group.rank]
    sends, receives = {}, {}
    for rank in range(group.size):
        if layout.counts[rank]:
            part = empty(x, (batch, layout.counts[rank], each, dim))
            for piece in pieces(layout, rank):
                part[:, piece.here] = x[:, piece.whole]
            sends[rank] = [part]
        if rank != group.rank and tokens:
            receives[rank] = [empty(x, (batch, tokens, each, dim))]
    own = sends.pop(group.rank, None)
    made = empty(x, (batch, tokens, each * group.size, dim))

    def place() -> None:
        for rank, (part,) in (receives | ({} if own is None else {group.rank: own})).items():
            made[:, :, rank * each : (rank + 1) * each] = part

    return made, group.send_recv(sends, receives, place)
