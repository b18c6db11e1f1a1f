"""Context parallelism in a ring: K and V go from rank to rank, and no rank has more than two ranks' share of them.

Each step gives o and lse over some keys, which `merge` joins in float32. A step's o is rounded to q's dtype before
that, so the bits are not those of one process; they are the same in every run. In the backward float32 sums of dK and
dV go round with K and V. The owner adds its share first, then each rank behind it.
"""

from collections.abc import Callable, Iterator
from typing import Any

from ..api.backward import attention_backward
from ..api.forward import attention
from ..api.merge import merge
from . import local
from .groups import empty, namespace
from .layout import Piece, pieces
from .local import Call, OptionGradients, Task


def forward(call: Call, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    xp = namespace(q)
    batch, tokens, heads, _ = q.shape
    o = empty(q, (batch, tokens, heads, v.shape[3]), local.wide(q), 0)
    lse, begun = empty(q, (batch, heads, tokens), local.wide(q), -float("inf")), set()
    for source, keys in _round(call, k, v):
        for task, piece in _seen(call, source):
            given = q[:, task.rows], *_of(keys, piece, k.shape[3])
            part = attention(*given, return_lse=True, **_options(call, task, piece))
            if task.start in begun:
                _join(o[:, task.rows], lse[:, :, task.rows], *part)
            else:
                o[:, task.rows], lse[:, :, task.rows] = part
            begun.add(task.start)
    sinks = call.options.get("sinks")
    if sinks is not None and tokens:  # a sink is a key without a value
        of_sinks = empty(lse, tuple(lse.shape))
        of_sinks[...] = sinks[..., None]
        o, lse = merge(o, lse, xp.zeros_like(o), of_sinks, layout="bshd")
    return xp.astype(o, q.dtype), lse


def backward(
    call: Call, do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, wanted: tuple[str, ...]
) -> dict[str, Any]:
    xp, group = namespace(q), call.group
    dq = empty(q, tuple(q.shape), local.wide(q), 0)
    asked = tuple(name for name in wanted if name != "dsinks")
    options = OptionGradients(call, asked)
    passed, width = _nothing, k.shape[3]  # sums from the rank before this one
    coming: Any = None
    for source, keys in _round(call, k, v):
        share = empty(keys, tuple(keys.shape), local.wide(q), 0)
        for task, piece in _seen(call, source):
            rows = do[:, task.rows], q[:, task.rows], *_of(keys, piece, width), o[:, task.rows]
            own = [None if x is None else local.contiguous(x[:, :, task.rows]) for x in (lse, dlse)]
            found = attention_backward(*rows, own[0], dlse=own[1], wanted=asked, **_options(call, task, piece))
            if "dq" in wanted:
                dq[:, task.rows] += found.dq
            for name, columns in (("dk", slice(width)), ("dv", slice(width, None))):
                if name in wanted:
                    share[:, piece.here, :, columns] += getattr(found, name)
            options.add(found, slice(None))
        passed()
        if coming is not None:
            share = coming + share
        coming, passed = _pass_on(call, share, call.layout.counts[(source - 1) % group.size])
    passed()
    results = {"dq": dq, "dk": coming[..., :width], "dv": coming[..., width:]}
    named = {name: xp.astype(x, q.dtype) for name, x in results.items() if name in wanted} | options.results()
    if "dsinks" in wanted:
        named["dsinks"] = _of_sinks(call.options["sinks"], do, o, lse, dlse)
    return named


def _join(o: Any, lse: Any, part: Any, part_lse: Any) -> None:
    """Merges a part into o and lse in place. A part is as large as this rank's o, so a copy would cost memory."""
    xp = namespace(o)
    top = xp.maximum(lse, part_lse)
    reference = xp.where(top == -float("inf"), xp.zeros_like(top), top)
    before, here = xp.exp(lse - reference), xp.exp(part_lse - reference)
    total = xp.where(top == -float("inf"), xp.ones_like(top), before + here)
    o *= (before / total).swapaxes(1, 2)[..., None]
    o += part * (here / total).swapaxes(1, 2)[..., None]
    lse[...] = xp.where(top == -float("inf"), top, reference + xp.log(total))


def _nothing() -> None:
    pass


def _round(call: Call, k: Any, v: Any) -> Iterator[tuple[int, Any]]:
    """Yields each rank, this one first, and its keys: (batch, its tokens, heads_kv, head_dim + head_dim_v)."""
    group, (batch, tokens, heads_kv, width) = call.group, k.shape
    keys = empty(k, (batch, tokens, heads_kv, width + v.shape[3]))
    keys[..., :width], keys[..., width:] = k, v
    for step in range(group.size):
        source, following = (group.rank - step) % group.size, (group.rank - step - 1) % group.size
        arriving, arrived = None, _nothing
        if step + 1 < group.size:
            arriving, arrived = _pass_on(call, keys, call.layout.counts[following])
        yield source, keys
        arrived()
        keys = arriving


def _pass_on(call: Call, x: Any, tokens: int) -> tuple[Any, Callable[[], Any]]:
    """Starts to send x to the next rank, and to receive an array with `tokens` tokens from the one before."""
    group = call.group
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    arriving = empty(x, (x.shape[0], tokens, *x.shape[2:]))
    return arriving, group.send_recv({after: [x]} if x.shape[1] else {}, {before: [arriving]} if tokens else {})


def _seen(call: Call, source: int) -> Iterator[tuple[Task, Piece]]:
    """Yields pairs: a run of this rank, and a run of the source's tokens of which it sees some."""
    left, right, _ = call.reach
    for task in local.tasks(call.layout, call.rank, None):
        end = task.start + task.rows.stop - task.rows.start
        low = 0 if left is None else max(task.start - left, 0)
        high = call.layout.seqlen if right is None else min(end + right, call.layout.seqlen)
        for piece in pieces(call.layout, source, ((low, high),)):
            yield task, piece


def _of(keys: Any, piece: Piece, width: int) -> tuple[Any, Any]:
    return keys[:, piece.here, :, :width], keys[:, piece.here, :, width:]


def _options(call: Call, task: Task, piece: Piece) -> dict[str, Any]:
    """The options, with positions relative to the first key of the piece. No sinks: they count once, at the end."""
    made = dict(call.options, sinks=None, q_offset=task.start - piece.start, layout="bshd")
    lengths = made.get("seqlens_k")
    if lengths is not None:
        made["seqlens_k"] = (lengths - piece.start).clip(0, piece.tokens)
    return made


def _of_sinks(sinks: Any, do: Any, o: Any, lse: Any, dlse: Any) -> Any:
    """The sum over rows of -e^(sink - lse) * (rowsum(do * o) - dlse)."""
    xp = namespace(lse)
    products = xp.astype(do, lse.dtype) * xp.astype(o, lse.dtype)
    delta = xp.sum(xp.where(o == 0, xp.zeros_like(products), products), axis=-1).swapaxes(1, 2)
    if dlse is not None:
        delta = delta - dlse
    weight = xp.exp(xp.astype(sinks, lse.dtype)[..., None] - lse)
    term = xp.where((lse == -float("inf")) | (weight == 0), xp.zeros_like(lse), -weight * delta)
    return xp.astype(xp.sum(term, axis=2 if sinks.ndim == 2 else (0, 2)), sinks.dtype)
