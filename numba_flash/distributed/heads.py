"""Context parallelism by heads (DeepSpeed's Ulysses): each rank gets all tokens of some of the heads.

Then each rank calls attention as one process would for these heads, so all results and gradients have the bits of one
process. All of q, k, v and o is moved, where gathering moves k and v to all ranks. A rank's heads come in slices: the
next one while this one is computed.

Between ranks arrays are (batch, heads, tokens, dim). So with the caller's "bhsd" the heads of a rank lie together, and
are sent and received without a copy. Here they are seen as (batch, tokens, heads, dim).
"""

from collections.abc import Callable
from typing import Any

from . import local
from .groups import contiguous, empty, is_contiguous
from .layout import pieces
from .local import Call, OptionGradients

KEPT = 5  # arrays of a slice that its backward takes: q, k, v, o, lse


def forward(call: Call, q: Any, k: Any, v: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """-> this rank's o and lse, and what `backward` takes."""
    batch, tokens, heads, _ = q.shape
    cuts = call.in_slices(heads // k.shape[2])
    coming = [to_heads(call, (q, cut), (k, cut_kv), (v, cut_kv)) for cut, cut_kv in cuts]
    kept, ends = list[Any](), []
    for lane, ((cut, _), (given, arrived)) in enumerate(zip(cuts, coming, strict=True)):
        arrived()
        found = local.new_results(given[0], given[2])
        ends.append(call.group.beside(_forward(call.of_heads(_own(call, cut, heads)), *given, *found), q, lane))
        kept += [*given, *found]
    o, lse = _empty(q, (batch, tokens, heads, v.shape[3])), empty(q, (batch, heads, tokens), local.wide(q))
    finishes = []
    for n, ((cut, _), end) in enumerate(zip(cuts, ends, strict=True)):
        end()
        *_, of_slice, lse_of_slice = kept[KEPT * n : KEPT * (n + 1)]
        finishes.append(to_tokens(call, (of_slice, o, cut), (as_columns(lse_of_slice), as_columns(lse), cut)))
    _all(finishes)
    return o, lse, tuple(kept)


def kept_of(call: Call, q: Any, k: Any, v: Any, o: Any, lse: Any) -> tuple[Any, ...]:
    """What `forward` keeps for `backward`, of this rank's arrays."""
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
    running = []
    for lane, ((cut, _), of_slice, (moved, arrived)) in enumerate(zip(cuts, of_slices, coming, strict=True)):
        arrived()
        of_lse = as_lse(moved[1]) if dlse is not None else None
        work = _Backward(call.of_heads(_own(call, cut, heads)), (moved[0], *of_slice, of_lse), wanted)
        running.append((work, call.group.beside(work, do, lane)))
    found, finishes = dict[str, Any](), []
    for (cut, cut_kv), of_slice, (work, end) in zip(cuts, of_slices, running, strict=True):
        end()
        moving = []
        for name, like, all_heads, own in zip(
            ("dq", "dk", "dv"), of_slice, (heads, heads_kv, heads_kv), (cut, cut_kv, cut_kv), strict=False
        ):
            if name in wanted:
                shape = like.shape[0], call.layout.counts[call.rank], all_heads, like.shape[3]
                found.setdefault(name, _empty(like, shape))
                moving.append((like if work.found is None else getattr(work.found, name), found[name], own))
        if work.found is not None:
            options.add(work.found, _own(call, cut, heads))
        finishes.append(to_tokens(call, *moving))
    _all(finishes)
    return found | options.results()


class _Backward:
    """Of a slice. found: its gradients, once this has been called; None without a token."""

    def __init__(self, call: Call, given: tuple[Any, ...], wanted: tuple[str, ...]) -> None:
        self.call, self.given, self.wanted = call, given, wanted
        self.found: Any = None

    def __call__(self) -> None:
        do, q, k, v, o, lse, dlse = self.given
        for task in _whole(self.call):
            self.found = local.backward(self.call, task, do, q, k, v, o, lse, dlse, self.wanted)


def _forward(call: Call, *given: Any) -> Callable[[], None]:
    def work() -> None:
        for task in _whole(call):
            local.forward(call, task, *given)

    return work


def _whole(call: Call) -> tuple[local.Task, ...]:
    """One task, or none."""
    return local.whole(call.layout, call.reach.ends if call.packed else None)


def as_columns(lse: Any) -> Any:
    """(batch, heads, tokens) as (batch, tokens, heads, 1)"""
    return lse.swapaxes(1, 2)[..., None]


def as_lse(columns: Any) -> Any:
    return contiguous(columns[..., 0].swapaxes(1, 2))


def to_heads(call: Call, *given: tuple[Any, slice]) -> tuple[list[Any], Callable[[], Any]]:
    """Starts to bring the tokens of all ranks. given: (batch, this rank's tokens, all heads, dim), and which heads of
    each rank's share. -> each as (batch, all tokens, these heads of this rank's share, dim), there after the function.
    """
    layout, others = call.layout, _others(call)
    sends, receives = ({rank: list[Any]() for rank in others} for _ in range(2))
    made, parts = [], {rank: list[Any]() for rank in others}
    for x, cut in given:
        batch, _, heads, dim = x.shape
        made.append(_empty(x, (batch, layout.seqlen, cut.stop - cut.start, dim)))
        for rank in others:
            sends[rank].append(contiguous(x[:, :, _of(rank, call, cut, heads)].swapaxes(1, 2)))
            receives[rank].append(empty(x, (batch, cut.stop - cut.start, layout.counts[rank], dim)))
            parts[rank].append(receives[rank][-1].swapaxes(1, 2))

    def put(rank: int, of_rank: list[Any]) -> None:
        for whole, part in zip(made, of_rank, strict=True):
            for piece in pieces(layout, rank):
                whole[:, piece.whole] = part[:, piece.here]

    def place() -> None:
        for rank in others:
            put(rank, parts[rank])

    finish = call.group.send_recv(_filled(sends), _filled(receives), place)
    put(call.rank, [x[:, :, _own(call, cut, x.shape[2])] for x, cut in given])  # meanwhile
    return made, finish


def to_tokens(call: Call, *given: tuple[Any, Any, slice]) -> Callable[[], Any]:
    """The other way. given: (batch, all tokens, some heads of this rank's share, dim); the result, (batch, this rank's
    tokens, all heads, dim); which heads of each rank's share. -> a function after which results have them."""
    layout, others = call.layout, _others(call)
    sends, receives = ({rank: list[Any]() for rank in others} for _ in range(2))
    copied = []
    for x, result, cut in given:
        batch, _, count, dim = x.shape
        for rank in others:
            part = empty(x, (batch, count, layout.counts[rank], dim))
            _take(part.swapaxes(1, 2), x, pieces(layout, rank))
            sends[rank].append(part)
            place = result[:, :, _of(rank, call, cut, result.shape[2])].swapaxes(1, 2)
            receives[rank].append(place if is_contiguous(place) else empty(x, tuple(place.shape)))
            if not is_contiguous(place):
                copied.append((place, receives[rank][-1]))

    def put() -> None:
        for place, buffer in copied:
            place[...] = buffer

    finish = call.group.send_recv(_filled(sends), _filled(receives), put)
    for x, result, cut in given:  # meanwhile
        _take(result[:, :, _own(call, cut, result.shape[2])], x, pieces(layout, call.rank))
    return finish


def _take(part: Any, x: Any, found: Any) -> None:
    """part: a rank's tokens of x, which has all."""
    for piece in found:
        part[:, piece.here] = x[:, piece.whole]


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
    return {rank: listed for rank, listed in messages.items() if 0 not in listed[0].shape}


def _all(finishes: list[Callable[[], Any]]) -> None:
    for finish in finishes:
        finish()
