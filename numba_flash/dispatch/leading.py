"""Turns calls with another number of dimensions than 4 into calls of 4, by views.

q, k and v are (seqlen, head_dim), (heads, seqlen, head_dim) or (*batch, heads, seqlen, head_dim). The dimensions of
*batch become one, in the order of their indices. Options are broadcast to all of them: an option that is repeated in
every dimension of *batch keeps its one entry; if it is repeated in none, its dimensions become one, too.
"""

import math
from collections.abc import Callable
from typing import Any

from .. import arrays
from ..arrays.views import viewed
from ..problem.options import BY_NAME, GRADIENT_OF, OPTION_ARRAYS, AttentionGradients

FORWARD, BACKWARD = ("q", "k", "v", "out"), ("q", "k", "v", "o", "lse", "do", "dlse")
LIKE_Q = ("q", "k", "v", "o", "do", "out")
# {shape of an option (OPTIONS): (its number of dimensions behind *batch, index of the heads from the end)}
TAILS = dict(scores=(3, -3), heads=(1, -1), batch=(0, None), rows=(2, -2))
Way = tuple[Any, Callable[[Any], Any]]


def folded(call: Any) -> Way:
    """The Call with arrays of 4 dimensions, and a function that gives its results the caller's dimensions."""
    options, q = call.options, call.operands[0]
    shape, heads = tuple(q.shape), -2 if options.layout == "bshd" else -3
    if len(shape) < 2:
        raise ValueError(
            f"q must have 2 dimensions (seqlen, head_dim), 3 (heads, seqlen, head_dim) or more, with a batch of any "
            f"number in front, not shape {shape}"
        )
    batch, dimensions, entries = shape[:-3], len(shape), math.prod(shape[:-3])

    def fold(name: str, x: Any) -> Any:
        if x is None or not arrays.is_array(x):
            return x
        if name in LIKE_Q and len(x.shape) == dimensions > 2 and x.shape[:-3] == batch:
            return viewed(name, x, (entries, *x.shape[-3:]))  # the path below gives the same in twice the time
        kind = "rows" if name in ("lse", "dlse") else "" if name in LIKE_Q else BY_NAME[name].shape
        tail, at = TAILS.get(kind, (3, heads))
        given = _with_heads(tuple(x.shape), at) if len(shape) == 2 and at is not None else tuple(x.shape)
        if kind not in ("scores", "heads"):
            _check(name, x, given, batch, tail, shape)
        own = given[: max(len(given) - tail, 0)]
        if own or kind not in ("scores", "heads"):
            given = (_entries(name, x, own, batch), *given[len(own) :])
        return viewed(name, x, given)

    names = BACKWARD if len(call.operands) == len(BACKWARD) else FORWARD
    named = dict(zip(names, call.operands, strict=True))
    out = named.get("out")
    if isinstance(out, tuple) and len(out) == 2:
        named["out"] = fold("out", out[0]), fold("lse", out[1])
        operands = tuple(fold(name, x) if name != "out" else x for name, x in named.items())
    else:
        operands = tuple(fold(name, x) for name, x in named.items())
    given = options.arrays
    if given is not None:
        given = tuple(fold(name, x) for name, x in zip(OPTION_ARRAYS, given, strict=True))
    options = options._replace(arrays=given, q_offset=fold("q_offset", options.q_offset))

    def unfold(found: Any) -> Any:
        if isinstance(found, AttentionGradients):
            gradients = {
                name: None if (x := getattr(found, name)) is None else viewed(name, x, tuple(of.shape))
                for name, source in GRADIENT_OF.items()
                if (of := named.get(source, call.options.array(source) if source in BY_NAME else None)) is not None
            }
            return found._replace(**gradients)
        return _results(found, out, shape, heads)

    return call._replace(operands=operands, options=options, key=None), unfold


def _results(found: Any, out: Any, shape: tuple[int, ...], heads: int) -> Any:
    """o and lse, of 4 and 3 dimensions, with q's number of dimensions; or the caller's own out= arrays."""
    written = out if isinstance(out, tuple) else (out, None)
    o, lse = found if isinstance(found, tuple) else (found, None)
    batch, alone = shape[:-3], len(shape) == 2

    def given(x: Any, at: int, instead: Any) -> Any:
        own = tuple(x.shape[1:])
        if alone:
            own = tuple(extent for axis, extent in enumerate(own) if axis != len(own) + at)
        return viewed("out", x, (*batch, *own)) if instead is None else instead

    o = given(o, heads, written[0])
    return o if lse is None else type(found)(o, given(lse, -2, written[1]))


def _with_heads(shape: tuple[int, ...], at: int) -> tuple[int, ...]:
    """The shape with a dimension of one head inserted at a place from the end, if it has enough dimensions."""
    place = len(shape) + 1 + at
    return shape if place < 0 else (*shape[:place], 1, *shape[place:])


def _check(name: str, x: Any, given: tuple[int, ...], batch: tuple[int, ...], tail: int, q: tuple[int, ...]) -> None:
    """Raises unless x has exactly the leading dimensions of q."""
    if len(given) != len(batch) + tail or given[: len(batch)] != batch:
        own = tail - (len(q) == 2 < 1 + tail)  # without heads
        what = f"the leading dimensions of q, {batch}," if batch else f"{own} dimension{'s' * (own != 1)},"
        raise ValueError(f"{name} must have {what} not shape {tuple(x.shape)} beside q of shape {q}")


def _entries(name: str, x: Any, own: tuple[int, ...], batch: tuple[int, ...]) -> int:
    """The number of batch entries of an option with dimensions `own` for *batch: 1 for all, or one for each."""
    missing = len(batch) - len(own)
    aligned = (1,) * missing + own
    if missing < 0 or any(extent not in (1, whole) for extent, whole in zip(aligned, batch, strict=True)):
        raise ValueError(f"{name} must be broadcastable to q's leading dimensions {batch}, not shape {tuple(x.shape)}")
    if aligned == batch or 0 in aligned:
        return math.prod(aligned)
    if all(extent == 1 for extent in aligned):
        return 1
    raise NotImplementedError(
        f"{name} of shape {tuple(x.shape)} is repeated in some of q's leading dimensions {batch} and not in others, "
        f"which one call does not do without a copy: call once for each entry of the others, or pass {name} expanded "
        "and copied"
    )
