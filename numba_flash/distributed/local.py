"""One rank's computation: calls of attention for its tokens, over keys at the positions of the whole sequence.

The keys of other ranks are put at their places in arrays as long as the whole. So positions are the same as in one
process, and so are causal, window, ALiBi, functions and dropped weights, which depend on them. Tiles begin at the same
keys, too. Hence a row's sum has the same terms in the same order, and its bits are those of one process, as long as
the kernel divides the keys in the same way (docs/context_parallel.md).

Arrays are (batch, tokens, heads, head_dim) here, views of the caller's; packed documents have a batch of one.
"""

import functools
import itertools
from typing import Any, NamedTuple

import array_api_compat

from ..api.backward import attention_backward
from ..api.forward import attention
from ..api.varlen import attention_varlen, attention_varlen_backward
from ..problem.options import OF_HEADS, SEEDED, AttentionGradients
from .groups import Group, contiguous, empty, namespace
from .layout import Layout, Reach

# options with a number for each head, whose gradients are those of the rank's rows


class Call(NamedTuple):
    """Arguments that are the same on all ranks. options: those of attention that do not follow from the layout;
    slices: the numbers of KV heads that are moved together; ahead: how many slices a rank holds at once."""

    group: Group
    layout: Layout
    reach: Reach
    packed: bool
    options: dict[str, Any]
    slices: tuple[int, ...] = ()
    ahead: int = 2

    @property
    def rank(self) -> int:
        return self.group.rank

    def of_heads(self, heads: slice) -> "Call":
        """The call for these query heads alone."""
        own = {name: x[..., heads] for name in OF_HEADS if (x := self.options.get(name)) is not None}
        return self._replace(options=self.options | own)

    def in_slices(self, group: int) -> list[tuple[slice, slice]]:
        """The query heads, of which `group` share a KV head, and the KV heads of each slice."""
        ends = itertools.accumulate(self.slices)
        return [
            (slice((end - n) * group, end * group), slice(end - n, end))
            for end, n in zip(ends, self.slices, strict=True)
        ]


class Task(NamedTuple):
    """One call of attention: some rows of a rank's memory, and their positions. With packed documents `ends` is where
    each document's rows end, and `starts` the position of the first one in its document."""

    rows: slice
    start: int
    ends: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()


@functools.lru_cache(maxsize=1024)
def tasks(layout: Layout, rank: int, documents: tuple[int, ...] | None) -> tuple[Task, ...]:
    """A rank's tasks: one for each run of its tokens; with documents one for each part."""
    found, row = [], 0
    for part in layout.parts[rank]:
        if documents is None:
            for start, stop in part:
                found.append(Task(slice(row, row + stop - start), start))
                row += stop - start
        else:
            found.append(_packed(part, row, documents))
            row = found[-1].rows.stop
    return tuple(found)


def whole(layout: Layout, documents: tuple[int, ...] | None) -> tuple[Task, ...]:
    """The task of a process that has all tokens in their order."""
    return tasks(Layout(((((0, layout.seqlen),),),)), 0, documents) if layout.seqlen else ()


def _packed(part: tuple[tuple[int, int], ...], row: int, documents: tuple[int, ...]) -> Task:
    ends, starts = [0], []
    for first, end in zip(documents, documents[1:], strict=False):
        own = [(max(a, first), min(b, end)) for a, b in part if max(a, first) < min(b, end)]
        if any(left[1] != right[0] for left, right in zip(own, own[1:], strict=False)):
            raise NotImplementedError(
                f"layout has several pieces of document [{first}, {end}) in one part, {part}: make each a part"
            )
        ends.append(ends[-1] + sum(b - a for a, b in own))
        starts.append(own[0][0] - first if own else 0)
    rows = sum(b - a for a, b in part)
    return Task(slice(row, row + rows), 0, tuple(ends), tuple(starts))


def forward(call: Call, task: Task, q: Any, k: Any, v: Any, o: Any, lse: Any) -> None:
    """Writes o (batch, tokens, heads, head_dim_v) and lse (batch, heads, tokens) of the task's rows."""
    q, o = q[:, task.rows], o[:, task.rows]
    if call.packed:
        placed = _placed(call, task, q)
        _, part = attention_varlen(q[0], k[0], v[0], out=o[0], return_lse=True, **placed, **call.options)
    else:
        options = dict(call.options, q_offset=task.start, layout="bshd")
        _, part = attention(q, k, v, out=o, return_lse=True, **options)
    lse[:, :, task.rows] = part


def backward(
    call: Call, task: Task, do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, wanted: tuple[str, ...]
) -> AttentionGradients:
    """The gradients of the task's rows. dk and dv are its shares for keys [0, seen_end). All have a batch dimension."""
    do, q, o = do[:, task.rows], q[:, task.rows], o[:, task.rows]
    end = seen_end(call, task)
    k, v = k[:, :end], v[:, :end]
    lse, dlse = (None if x is None else contiguous(x[:, :, task.rows]) for x in (lse, dlse))
    if not call.packed:
        options = dict(call.options, q_offset=task.start, layout="bshd")
        return attention_backward(do, q, k, v, o, lse, dlse=dlse, wanted=wanted, **options)
    operands = (x[0] for x in (do, q, k, v, o, lse))
    options = dict(call.options, dlse=None if dlse is None else dlse[0], **_placed(call, task, q))
    found = attention_varlen_backward(*operands, wanted=wanted, **options)
    return found._replace(**{x: getattr(found, x)[None] for x in ("dq", "dk", "dv") if x in wanted})


def seen_end(call: Call, task: Task) -> int:
    """The end of the keys that the task's rows see. With documents, a seed or seqlens_k it is the end of all keys,
    since these count all keys."""
    right, seqlen = call.reach.right, call.layout.seqlen
    of_all = call.packed or call.options.get(SEEDED) or call.options.get("seqlens_k") is not None
    if right is None or of_all:
        return seqlen
    return max(min(task.start + task.rows.stop - task.rows.start + right, seqlen), 0)


def _placed(call: Call, task: Task, like: Any) -> dict[str, Any]:
    """Options that give each document's rows and all keys of the document."""
    arrays = dict(cu_seqlens_q=task.ends, cu_seqlens_k=call.reach.ends, q_offset=task.starts)
    where = namespace(like), array_api_compat.device(like)
    return {name: _int32(*where, values) for name, values in arrays.items()}


@functools.lru_cache(maxsize=1024)
def _int32(xp: Any, device: Any, values: tuple[int, ...]) -> Any:
    """int32 numbers on the device. Cached, because the host waits for a copy to a GPU."""
    return xp.asarray(list(values), dtype=xp.int32, device=device)


def wide(x: Any) -> Any:
    """The dtype of sums and of lse."""
    xp = namespace(x)
    return xp.float64 if x.dtype == xp.float64 else xp.float32


def new_results(q: Any, v: Any) -> tuple[Any, Any]:
    """-> o (batch, tokens, heads, head_dim_v) and lse (batch, heads, tokens), not written to."""
    batch, tokens, heads, _ = q.shape
    return empty(q, (batch, tokens, heads, v.shape[3])), empty(q, (batch, heads, tokens), wide(q))


class OptionGradients:
    """Gradients of options with a number for each head: sums over calls and slices."""

    def __init__(self, call: Call, wanted: tuple[str, ...]) -> None:
        self.options = {name: call.options[name] for name in OF_HEADS if f"d{name}" in wanted}
        self.sums = {name: empty(x, tuple(x.shape), wide(x), fill=0) for name, x in self.options.items()}

    def add(self, found: AttentionGradients, heads: slice) -> None:
        for name, total in self.sums.items():
            total[..., heads] += getattr(found, f"d{name}")

    def results(self) -> dict[str, Any]:
        """The sums in the options' own dtypes."""
        found = {}
        for name, total in self.sums.items():
            found[f"d{name}"] = made = empty(self.options[name], tuple(total.shape))
            made[...] = total
        return found
