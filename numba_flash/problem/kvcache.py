"""A cache of keys and values: contiguous, or in pages that a table names.

A problem of a cache is a Problem with `pages`: the batch strides of its k and v are those of a page, and its seqlen_k
is the capacity of a sequence. A contiguous cache is one with a page for each batch entry. Which pages a sequence has,
and how many of its keys are valid, is in arrays. Where these are in host memory, `lines_of` checks them.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Layout
from ..arrays.dtypes import conversion
from .forward import LAYOUTS, Problem, check_one_place, check_rows_apart
from .options import Options
from .packed import bounds
from .pages import Pages
from .strides import axes_strides, check_strides, element_strides

LENGTH_DTYPES, SLOT_DTYPES = ("int32",), ("int32", "int64")


class Cache(NamedTuple):
    """The arguments of attention_kvcache besides q, the caches and the options: arrays, or their layouts."""

    seqlens_k: Any
    k_new: Any = None
    v_new: Any = None
    page_table: Any = None
    page_indptr: Any = None
    page_indices: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None
    cache_batch_idx: Any = None
    slots: Any = None
    prefix_of: Any = None
    prefix_lens: Any = None
    cu_seqlens_q: Any = None
    rotary_interleaved: Any = None
    max_seqlen_q: Any = None


ARRAYS = Cache._fields[:-2]


class CacheProblem(NamedTuple):
    """A Problem and what goes into the cache before it. new: new keys of each sequence; None: those of its queries.
    rotary_dim: 0 without rotary."""

    problem: Problem
    order: tuple[int, ...]  # the indices of (batch, head, seqlen, dim) in arrays of 4 dimensions
    new: int | None
    rotary_dim: int
    rotary_interleaved: bool
    rotary_rows: int
    v_is_k: bool  # v_cache is a view of k_cache

    @property
    def pages(self) -> Pages:
        assert self.problem.pages is not None
        return self.problem.pages


def problem_of(
    operands: Any, cache: Cache, options: Options, return_lse: Any, alignment: int, v_is_k: bool
) -> CacheProblem:
    """Checks a call. operands: q, k_cache, v_cache, out and its lse, of which the last two may be None. All arrays are
    layouts."""
    q, k, v, out, out_lse = operands
    layout = options.layout
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f'layout must be "bhsd" or "bshd", not {layout!r}')
    given = dict(q=q, k_cache=k, v_cache=v) | {name: x for name in ARRAYS if (x := getattr(cache, name)) is not None}
    check_one_place(given)
    for name, array in given.items():
        check_strides(name, array)
    ragged = cache.cu_seqlens_q is not None
    _check_rank("q", q, 3 if ragged else 4, "(total_q, heads, head_dim)" if ragged else _names("batch", layout))
    order, queries = LAYOUTS[layout], q.shape
    heads, head_dim = (q.shape[1], q.shape[2]) if ragged else (q.shape[order[1]], q.shape[order[3]])
    batch = _batch(cache, q, order)
    paged = cache.page_table is not None or cache.page_indices is not None
    entry = "pages" if paged else "batch"
    for name, array in (("k_cache", k), ("v_cache", v)):
        _check_rank(name, array, 4, _names(entry, layout))
        if array.dtype != q.dtype:
            raise TypeError(f"{name} must be {q.dtype} like q, not {array.dtype}; a cache is not converted")
    (count, heads_kv, size, dim), (*of_v, dim_v) = ([x.shape[axis] for axis in order] for x in (k, v))
    if of_v != [count, heads_kv, size]:
        raise ValueError(f"k_cache and v_cache must have one shape but for head_dim, not {k.shape} and {v.shape}")
    if dim != head_dim:
        raise ValueError(f"head_dim of q and k_cache must be the same, not {head_dim} and {dim}: {queries}, {k.shape}")
    pages = _pages(cache, batch, count, size)
    _check_prefixes(cache, batch)
    own = {name: getattr(cache, name) for name in ("seqlens_k", "cu_seqlens_q")}
    new = _check_new(cache, (k, v), q, (batch, heads_kv, dim, dim_v), order, v_is_k)
    rotary_dim, rotary_rows = _rotary(cache, q, head_dim)
    if v_is_k and rotary_dim and cache.k_new is not None and 0 not in k.shape:
        raise NotImplementedError("rotary_cos is not taken where v_cache is a view of k_cache: rotate k_new before")
    # k and v as if they were contiguous: Problem checks their sizes
    shape = [batch, heads_kv, pages.capacity, dim]
    if ragged:
        if options.array("bias") is not None or options.array("mask") is not None:
            raise ValueError("bias and mask are not taken with cu_seqlens_q: use score_mod and mask_mod with aux")
        as_one = [_like(x, (pages.capacity, heads_kv, x.shape[order[3]])) for x in (k, v)]
        spans = bounds(cache.max_seqlen_q, None)
        options = _with(options, spans, own | dict(cu_seqlens_k=cache.cu_seqlens_q))
    else:
        if cache.max_seqlen_q is not None:
            raise ValueError("max_seqlen_q is a bound of the lengths in cu_seqlens_q, which was not given")
        shapes = ([*shape[:3], x.shape[order[3]]] for x in (k, v))
        as_one = [
            _like(x, tuple(dims[order.index(axis)] for axis in range(4)))
            for x, dims in zip((k, v), shapes, strict=True)
        ]
        options = _with(options, layout, dict(seqlens_k=cache.seqlens_k))
    made = Problem.of(q, as_one[0], as_one[1], options, out, out_lse, return_lse, alignment)
    strides = [axes_strides(element_strides(x), order) for x in (k, v)]
    made = dataclasses.replace(made, k_strides=strides[0], v_strides=strides[1], pages=pages)
    assert made.heads == heads
    return CacheProblem(made, order, new, rotary_dim, bool(cache.rotary_interleaved), rotary_rows, v_is_k)


def _with(options: Options, layout: Any, arrays: dict[str, Any]) -> Options:
    from .options import OPTION_ARRAYS

    kept = options.arrays or (None,) * len(OPTION_ARRAYS)
    found = tuple(arrays.get(name, x) for name, x in zip(OPTION_ARRAYS, kept, strict=True))
    return options._replace(arrays=found, layout=layout)


def _like(array: Layout, shape: tuple[int, ...]) -> Layout:
    return dataclasses.replace(array, shape=shape, strides=(0,) * len(shape), readonly=False)


def _names(first: str, layout: str) -> str:
    rows = "page" if first == "pages" else "seqlen"
    order = (first, "heads", rows, "head_dim") if layout == "bhsd" else (first, rows, "heads", "head_dim")
    return f"({', '.join(order)}) in layout {layout!r}"


def _check_rank(name: str, array: Layout, rank: int, words: str) -> None:
    if len(array.shape) != rank:
        raise ValueError(f"{name} must have {rank} dimensions {words}, not shape {array.shape}")


def _check(name: str, array: Layout, shape: tuple[Any, ...], words: str, dtypes: tuple[str, ...]) -> None:
    """None in a shape is any extent."""
    if array.dtype not in dtypes:
        advice = conversion(name, array.family, dtypes[0])
        raise TypeError(f"{name} must be {' or '.join(dtypes)}, not {array.dtype}; {advice}")
    same = len(array.shape) == len(shape)
    if not same or any(want not in (None, have) for want, have in zip(shape, array.shape, strict=True)):
        raise ValueError(f"{name} must have shape {words}, not {array.shape}")


def _batch(cache: Cache, q: Layout, order: tuple[int, ...]) -> int:
    if cache.cu_seqlens_q is not None:
        _check("cu_seqlens_q", cache.cu_seqlens_q, (None,), "(batch + 1,)", LENGTH_DTYPES)
        if not cache.cu_seqlens_q.shape[0]:
            raise ValueError("cu_seqlens_q must have shape (batch + 1,), not (0,): 0, and where each sequence ends")
    batch = q.shape[order[0]] if cache.cu_seqlens_q is None else cache.cu_seqlens_q.shape[0] - 1
    if cache.seqlens_k is None:
        raise TypeError("seqlens_k must be an int32 array (batch,), how many keys are valid, not None")
    _check("seqlens_k", cache.seqlens_k, (batch,), f"(batch,) = ({batch},)", LENGTH_DTYPES)
    return int(batch)


def _pages(cache: Cache, batch: int, count: int, size: int) -> Pages:
    table, indptr, indices, entries = cache.page_table, cache.page_indptr, cache.page_indices, cache.cache_batch_idx
    if (indptr is None) != (indices is None):
        raise TypeError("page_indptr and page_indices belong together, and one was not given")
    named = dict(page_table=table, page_indices=indices, cache_batch_idx=entries)
    both = [name for name, array in named.items() if array is not None]
    if len(both) > 1:
        raise ValueError(f"{' and '.join(both)} both say where a sequence's keys are; give one of them")
    if (table is not None or indices is not None) and size < 1:
        raise ValueError("a page must have at least 1 key, and those of k_cache have none")
    if table is not None:
        _check("page_table", table, (batch, None), f"(batch, pages of a sequence) = ({batch}, ...)", LENGTH_DTYPES)
        return Pages(size, count, size * table.shape[1])
    if indices is not None:
        _check("page_indptr", indptr, (batch + 1,), f"(batch + 1,) = ({batch + 1},)", LENGTH_DTYPES)
        _check("page_indices", indices, (None,), "(pages of all sequences,)", LENGTH_DTYPES)
        return Pages(size, count, size * indices.shape[0])
    if entries is not None:
        _check("cache_batch_idx", entries, (batch,), f"(batch,) = ({batch},)", LENGTH_DTYPES)
        return Pages(size, count, size)
    if count != batch:
        raise ValueError(f"k_cache has {count} batch entries and q {batch}: say which are read, by cache_batch_idx")
    return Pages(size, count, size)


def _check_prefixes(cache: Cache, batch: int) -> None:
    if (cache.prefix_of is None) != (cache.prefix_lens is None):
        raise TypeError("prefix_of and prefix_lens belong together, and one was not given")
    if cache.prefix_of is None:
        return
    for name in ("prefix_of", "prefix_lens"):
        _check(name, getattr(cache, name), (batch,), f"(batch,) = ({batch},)", LENGTH_DTYPES)
    if cache.page_table is cache.page_indices is cache.cache_batch_idx is None:
        raise ValueError(
            "prefix_of says which sequences have the same rows of a cache, and these have batch entries of their own: "
            "pass page_table, page_indices or cache_batch_idx"
        )


def _check_new(
    cache: Cache,
    caches: tuple[Layout, Layout],
    q: Layout,
    sizes: tuple[int, int, int, int],
    order: tuple[int, ...],
    v_is_k: bool,
) -> int | None:
    """-> new keys of each sequence, or None: as many as queries."""
    batch, heads_kv, *dims = sizes
    if cache.k_new is None:
        for name in ("v_new", "slots"):
            if getattr(cache, name) is not None:
                raise TypeError(f"{name} was given without k_new")
        return 0
    if cache.v_new is None and not v_is_k:
        raise TypeError("k_new was given without v_new, and v_cache is no view of k_cache")
    for name, array, written in zip(("k_cache", "v_cache"), caches, (cache.k_new, cache.v_new), strict=True):
        if written is None:
            continue
        if array.readonly:
            raise ValueError(f"{name} is read-only, and new rows are written to it")
        check_rows_apart(name, array)
    ragged = cache.cu_seqlens_q is not None
    new = None if ragged else cache.k_new.shape[order[2]] if len(cache.k_new.shape) == 4 else -1
    for name, dim in zip(("k_new", "v_new"), dims, strict=True):
        array = getattr(cache, name)
        if array is None:
            continue
        if array.dtype != q.dtype:
            raise TypeError(f"{name} must be {q.dtype} like q, not {array.dtype}")
        shape = (batch, heads_kv, new, dim)
        want = (q.shape[0], heads_kv, dim) if ragged else tuple(shape[order.index(axis)] for axis in range(4))
        if array.shape != want:
            raise ValueError(f"{name} must have shape {want if new != -1 else '(batch, ...)'}, not {array.shape}")
    if cache.slots is not None:
        want = (q.shape[0],) if ragged else (batch, new)
        _check("slots", cache.slots, want, str(want), SLOT_DTYPES)
    return new


def _rotary(cache: Cache, q: Layout, head_dim: int) -> tuple[int, int]:
    """-> (how many columns rotate, positions that the tables have)."""
    cos, sin = cache.rotary_cos, cache.rotary_sin
    if (cos is None) != (sin is None):
        raise TypeError("rotary_cos and rotary_sin belong together, and one was not given")
    if cos is None:
        if cache.rotary_interleaved is not None:
            raise TypeError("rotary_interleaved was given without rotary_cos and rotary_sin")
        return 0, 0
    if not isinstance(cache.rotary_interleaved, bool | np.bool_):
        raise TypeError(
            "rotary_interleaved must be True (columns 0 and 1 are a pair, as in GPT-J) or False (columns 0 and "
            f"rotary_dim // 2 are, as in GPT-NeoX and Llama), not {cache.rotary_interleaved!r}: libraries differ"
        )
    floats = tuple(dict.fromkeys((q.dtype, "float32")))
    for name, array in (("rotary_cos", cos), ("rotary_sin", sin)):
        _check(name, array, (None, None), "(positions, rotary_dim // 2)", floats)
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(f"rotary_cos and rotary_sin must be alike, not {cos.shape} and {sin.shape}")
    if 2 * cos.shape[1] > head_dim:
        raise ValueError(f"rotary_dim must be at most head_dim = {head_dim}, not {2 * cos.shape[1]}")
    return 2 * cos.shape[1], cos.shape[0]


class Lines(NamedTuple):
    """Each sequence's lengths and places in host memory: arrays of int64, (batch,)."""

    first_query: Any
    queries: Any
    before: Any  # valid keys before the new ones
    new: Any  # new keys
    keys: Any  # valid keys with the new ones
    offset: Any  # the position of query 0
    first_page: Any  # the index of the number of its first page


def lines_of(made: CacheProblem, given: dict[str, Any], ids: Any, q_offset: Any = None) -> Lines:
    """Reads and checks the arrays that say where keys are. given: those of Cache in host memory, or None; ids: the
    numbers of pages of all sequences, one after the other."""
    p, pages = made.problem, made.pages
    batch = p.batch
    first_query, queries = np.zeros(batch, np.int64), np.full(batch, p.seqlen_q)
    if p.packed is not None:
        ends = given["cu_seqlens_q"].astype(np.int64)
        first_query, queries = ends[:-1], np.diff(ends)
        if ends[0] < 0 or ends[-1] > p.packed[0] or (queries < 0).any():
            raise ValueError(f"cu_seqlens_q must rise from 0 or more to at most {p.packed[0]}, not {ends.tolist()}")
        if (queries > p.seqlen_q).any():
            raise ValueError(f"max_seqlen_q = {p.seqlen_q} is less than a length of cu_seqlens_q, {queries.max()}")
    lengths = given["seqlens_k"].astype(np.int64)
    room, first_page = _room(made, given)
    new = np.where(lengths < 0, 0, queries if made.new is None else made.new)
    before = np.maximum(lengths, 0)
    if batch and ((lengths < -1).any() or (before + new > room).any()):
        raise ValueError(
            f"seqlens_k must lie in 0 to the room of a sequence less its new keys, {(room - new).tolist()}, or be -1, "
            f"a row of padding, not {lengths.tolist()}"
        )
    keys = before + new
    offset = keys - queries if p.q_offset_source in ("seqlens_k", "sequence") else np.full(batch, p.q_offset)
    if q_offset is not None:
        offset = offset + q_offset
    found = Lines(first_query, queries, before, new, keys, offset, first_page)
    _check_pages(made, found, ids, given["slots"])
    _check_shared(made, found, ids, given)
    if given["slots"] is not None:
        most = pages.total * pages.size
        if given["slots"].size and given["slots"].max() >= most:
            raise ValueError(f"slots must lie below {most}, pages times keys of a page, not {given['slots'].max()}")
    if made.rotary_dim and batch:
        last = np.maximum(np.where(queries > 0, offset + queries, 0), keys)[lengths >= 0].max(initial=0)
        if last > made.rotary_rows:
            raise ValueError(f"rotary_cos has {made.rotary_rows} positions, and position {last - 1} is asked for")
        latest = np.minimum(offset + queries, 0) - 1  # of each sequence's queries before its first key
        sees = (offset < 0) & (queries > 0) & (keys > 0) & (lengths >= 0) & (p.right is None or latest + p.right >= 0)
        if sees.any():
            raise ValueError(
                f"rotary_cos has no negative positions, and sequence {sees.argmax()} has queries before its first key "
                "that see keys: pass causal=True, or fewer queries than keys"
            )
    return found


def _room(made: CacheProblem, given: dict[str, Any]) -> tuple[Any, Any]:
    """-> (keys that each sequence has room for, the index of the number of its first page)."""
    p, pages = made.problem, made.pages
    if given["page_indptr"] is None:
        return np.full(p.batch, pages.capacity), np.arange(p.batch) * (pages.capacity // max(pages.size, 1))
    ends, total = given["page_indptr"].astype(np.int64), given["page_indices"].shape[0]
    if ends[0] < 0 or ends[-1] > total or (np.diff(ends) < 0).any():
        raise ValueError(f"page_indptr must rise from 0 or more to at most {total}, not {ends.tolist()}")
    return np.diff(ends) * pages.size, ends[:-1]


def _check_pages(made: CacheProblem, lines: Lines, ids: Any, slots: Any) -> None:
    """Checks the pages that are read or written. Others may have any number: those behind a sequence's keys, and those
    that a window has left behind."""
    p, pages = made.problem, made.pages
    if ids.size and ids.min() >= 0 and ids.max() < pages.total:
        return
    first = np.zeros(p.batch, np.int64) if p.left is None else np.clip(lines.offset - p.left, 0, None)
    if slots is None:  # new keys are written behind the others
        first = np.where(lines.new > 0, np.minimum(first, lines.before), first)
    size = max(pages.size, 1)
    begin, end = first // size, -(-lines.keys // size)
    count = np.where(lines.keys > first, end - begin, 0)
    of_all = np.repeat(lines.first_page + begin - (np.cumsum(count) - count), count) + np.arange(count.sum())
    used = ids[of_all]
    wrong = (used < 0) | (used >= pages.total)
    if wrong.any():
        b = int(np.repeat(np.arange(p.batch), count)[wrong.argmax()])
        own = ids[lines.first_page[b] + begin[b] : lines.first_page[b] + end[b]].tolist()
        raise ValueError(
            f"the pages of sequence {b}, keys {int(first[b])} to {int(lines.keys[b]) - 1}, must lie in 0 to "
            f"{pages.total - 1}, not {own}"
        )


def _check_shared(made: CacheProblem, lines: Lines, ids: Any, given: dict[str, Any]) -> None:
    """Checks that sequences which share a prefix have the same pages there."""
    if given["prefix_of"] is None:
        return
    size = max(made.pages.size, 1)
    for b, (first, length) in enumerate(zip(given["prefix_of"].tolist(), given["prefix_lens"].tolist(), strict=True)):
        if first in (-1, b):
            continue
        if not 0 <= first < b:
            raise ValueError(
                f"prefix_of[{b}] must be {b} or -1, or a sequence before it, the first with its prefix, not {first}"
            )
        most = min(lines.keys[b], lines.keys[first])
        if not 0 <= length <= most:
            raise ValueError(f"prefix_lens[{b}] must lie in 0 to {most}, the keys of both sequences, not {length}")
        own, other = (ids[(start := lines.first_page[n]) : start - (-length // size)] for n in (b, first))
        if (own != other).any():
            raise ValueError(
                f"sequences {first} and {b} must have the same pages in the {length} keys of their prefix, not "
                f"{other.tolist()} and {own.tolist()}"
            )


@functools.lru_cache(maxsize=1024)
def with_contiguous_q(p: Problem) -> Problem:
    """The problem of queries that have been turned: (batch, heads, rows, head_dim), or (rows, heads, head_dim)."""
    row = p.heads * p.head_dim
    packed = 0, p.head_dim, row, 1
    dense = row * p.seqlen_q, p.seqlen_q * p.head_dim, p.head_dim, 1
    return dataclasses.replace(p, q_strides=dense if p.packed is None else packed)
