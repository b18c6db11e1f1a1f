"""Context parallelism by heads (DeepSpeed's Ulysses): each rank gets all tokens of some of the heads.

Then each rank calls attention as one process would for these heads, so all results and gradients have the bits of one
process. All of q, k, v and o is moved, where gathering moves k and v to all ranks. A rank's heads come in slices: the
next one while this one is computed.

Between ranks arrays are (batch, heads, tokens, dim). So with the caller's "bhsd" the heads of a rank lie together, and
are sent and received without a copy. Here they are seen as (batch, tokens, heads, dim). A group that takes views moves
each piece of tokens from its place to its place.
"""

from collections.abc import Callable
from typing import Any

from . import local
from .groups import contiguous, copy, empty, is_contiguous
from .layout import pieces
from .local import Call, OptionGradients

KEPT = 5  # arrays of a slice that its backward takes: q, k, v, o, lse


def forward(call: Call, q: Any, k: Any, v: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """-> this rank's o and lse, and the arrays that `backward` takes."""
    batch, tokens, heads, _ = q.shape
    cuts = call.in_slices(heads // k.shape[2])
    coming = [to_heads(call, (q, cut), (k, cut_kv), (v, cut_kv)) for cut, cut_kv in cuts]
    o, lse = _empty(q, (batch, tokens, heads, v.shape[3])), empty(q, (batch, heads, tokens), local.wide(q))
    kept, leaving = list[Any](), []
    for (cut, _), (given, arrived) in zip(cuts, coming, strict=True):
        arrived()
        own_q, own_k, own_v = given
        own_o, own_lse = local.new_results(own_q, own_v)
        for task in _whole(call):
            local.forward(call.of_heads(_own(call, cut, heads)), task, own_q, own_k, own_v, own_o, own_lse)
        leaving.append(to_tokens(call, (own_o, o, cut), (as_columns(own_lse), as_columns(lse), cut)))
        kept += [*given, own_o, own_lse]
    _all(leaving)
    return o, lse, tuple(kept)


def kept_of(call: Call, q: Any, k: Any, v: Any, o: Any, lse: Any) -> tuple[Any, ...]:
    """The arrays that `forward` saves for `backward`, made again from this rank's q, k, v, o and lse."""
    cuts = call.in_slices(q.shape[2] // k.shape[2])
    given = [((q, a), (k, b), (v, b), (o, a), (as_columns(lse), a)) for a, b in cuts]
    coming = [to_heads(call, *each) for each in given]
    _all([arrived for _, arrived in coming])
    return tuple(x for (*others, columns), _ in coming for x in (*others, as_lse(columns)))


def backward(call: Call, do: Any, dlse: Any, kept: tuple[Any, ...], wanted: tuple[str, ...]) -> dict[str, Any]:
    of_slices = [kept[n : n + KEPT] for n in range(0, len(kept), KEPT)]
    heads, heads_kv = do.shape[2], sum(call.slices) * call.group.size
    cuts, options = call.in_slices(heads // heads_kv), OptionGradients(call, wanted)
    given = [do] if dlse is None else [do, as_columns(dlse)]
    coming = [to_heads(call, *((x, cut) for x in given)) for cut, _ in cuts]
    all_heads, found, leaving = dict(dq=heads, dk=heads_kv, dv=heads_kv), dict[str, Any](), []
    for (cut, cut_kv), (q, k, v, o, lse), (moved, arrived) in zip(cuts, of_slices, coming, strict=True):
        arrived()
        own, of_lse = _own(call, cut, heads), as_lse(moved[1]) if dlse is not None else None
        parts = dict(dq=q, dk=k, dv=v)  # without tokens the gradients are empty, like these
        for task in _whole(call):
            part = local.backward(call.of_heads(own), task, moved[0], q, k, v, o, lse, of_lse, wanted)
            parts = {name: getattr(part, name) for name in parts}
            options.add(part, own)
        leave = []
        for name, at in dict(dq=cut, dk=cut_kv, dv=cut_kv).items():
            if name in wanted:
                x = parts[name]
                shape = x.shape[0], call.layout.counts[call.rank], all_heads[name], x.shape[3]
                found.setdefault(name, _empty(q, shape))
                leave.append((x, found[name], at))
        leaving.append(to_tokens(call, *leave))
    _all(leaving)
    return found | options.results()


def _whole(call: Call) -> tuple[local.Task, ...]:
    """The task of a rank that has all tokens; none if there are no tokens."""
    return local.whole(call.layout, call.reach.ends if call.packed else None)


def as_columns(lse: Any) -> Any:
    """(batch, heads, tokens) as (batch, tokens, heads, 1)"""
    return lse.swapaxes(1, 2)[..., None]


def as_lse(columns: Any) -> Any:
    return contiguous(columns[..., 0].swapaxes(1, 2))


def to_heads(call: Call, *given: tuple[Any, slice]) -> tuple[list[Any], Callable[[], Any]]:
    """Starts to gather the tokens of all ranks. given: (batch, this rank's tokens, all heads, dim), and which heads of
    each rank's share. -> each as (batch, all tokens, these heads of this rank's share, dim), and a function that waits.
    """
    layout, others = call.layout, _others(call)
    sends, receives = ({rank: list[Any]() for rank in others} for _ in range(2))
    made, parts = [], {rank: list[Any]() for rank in others}
    views = call.group.takes_views(given[0][0])
    for x, cut in given:
        batch, _, heads, dim = x.shape
        made.append(_empty(x, (batch, layout.seqlen, cut.stop - cut.start, dim)))
        for rank in others:
            leaving = x[:, :, _of(rank, call, cut, heads)].swapaxes(1, 2)
            if views:
                sends[rank] += [leaving[:, :, piece.here] for piece in pieces(layout, call.rank)]
                receives[rank] += [made[-1].swapaxes(1, 2)[:, :, piece.whole] for piece in pieces(layout, rank)]
                continue
            sends[rank].append(contiguous(leaving))
            receives[rank].append(empty(x, (batch, cut.stop - cut.start, layout.counts[rank], dim)))
            parts[rank].append(receives[rank][-1].swapaxes(1, 2))

    def put(rank: int, of_rank: list[Any]) -> None:
        for whole, part in zip(made, of_rank, strict=True):
            for piece in pieces(layout, rank):
                copy(whole[:, piece.whole], part[:, piece.here])

    def place() -> None:
        for rank in others:
            put(rank, parts[rank])

    finish = call.group.send_recv(_filled(sends), _filled(receives), None if views else place)
    put(call.rank, [x[:, :, _own(call, cut, x.shape[2])] for x, cut in given])  # meanwhile
    return made, finish


def to_tokens(call: Call, *given: tuple[Any, Any, slice]) -> Callable[[], Any]:
    """The reverse of to_heads. given: (batch, all tokens, some heads of this rank's share, dim); the result to fill,
    (batch, this rank's tokens, all heads, dim); which heads of each rank's share. -> a function that waits."""
    layout, others = call.layout, _others(call)
    sends, receives = ({rank: list[Any]() for rank in others} for _ in range(2))
    copied, views = [], call.group.takes_views(given[0][0])
    for x, result, cut in given:
        batch, _, count, dim = x.shape
        for rank in others:
            place = result[:, :, _of(rank, call, cut, result.shape[2])].swapaxes(1, 2)
            if views:
                sends[rank] += [x.swapaxes(1, 2)[:, :, piece.whole] for piece in pieces(layout, rank)]
                receives[rank] += [place[:, :, piece.here] for piece in pieces(layout, call.rank)]
                continue
            part = empty(x, (batch, count, layout.counts[rank], dim))
            _take(part.swapaxes(1, 2), x, pieces(layout, rank))
            sends[rank].append(part)
            receives[rank].append(place if is_contiguous(place) else empty(x, tuple(place.shape)))
            if not is_contiguous(place):
                copied.append((place, receives[rank][-1]))

    def put() -> None:
        for place, buffer in copied:
            copy(place, buffer)

    finish = call.group.send_recv(_filled(sends), _filled(receives), put if copied else None)
    for x, result, cut in given:  # meanwhile
        _take(result[:, :, _own(call, cut, result.shape[2])], x, pieces(layout, call.rank))
    return finish


def _take(part: Any, x: Any, found: Any) -> None:
    """part: a rank's tokens of x, which has all."""
    for piece in found:
        copy(part[:, piece.here], x[:, piece.whole])


def _of(rank: int, call: Call, cut: slice, heads: int) -> slice:
    """These heads of a rank's share among all `heads`."""
    first = rank * heads // call.group.size
    return slice(first + cut.start, first + cut.stop)


def _own(call: Call, cut: slice, heads: int) -> slice:
    return _of(call.rank, call, cut, heads)


def _others(call: Call) -> list[int]:
    return [rank for rank in range(call.group.size) if rank != call.rank]


def _empty(like: Any, shape: tuple[int, int, int, int]) -> Any:
    """(batch, tokens, heads, dim), in memory in the order of `like`."""
    batch, tokens, heads, dim = shape
    return empty(like, shape) if is_contiguous(like) else empty(like, (batch, heads, tokens, dim)).swapaxes(1, 2)


def _filled(messages: dict[int, list[Any]]) -> dict[int, list[Any]]:
    return {rank: listed for rank, listed in messages.items() if listed and 0 not in listed[0].shape}


def _all(finishes: list[Callable[[], Any]]) -> None:
    for finish in finishes:
        finish()
