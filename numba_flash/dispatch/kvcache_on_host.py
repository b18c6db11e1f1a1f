"""attention_kvcache in host memory: append, rotary, and the rungs "reference" and "cpu"."""

from typing import Any

import numpy as np

from .. import arrays, reference
from ..arrays import Array
from ..problem.forward import Problem
from ..problem.kvcache import ARRAYS, Cache, CacheProblem, Lines, lines_of, with_contiguous_q
from ..problem.options import Operands
from ..problem.packed import outside


def read(made: CacheProblem, cache: Cache, q_offset: Array | None) -> tuple[dict[str, Any], Any, Lines]:
    """Reads and checks lengths, pages and slots. -> the arrays of the cache, the page numbers, the lines"""
    given = {name: _host(getattr(cache, name)) for name in ARRAYS}
    ids = _page_numbers(given, made.problem.batch)
    return given, ids, lines_of(made, given, ids, _host(q_offset))


def run(made: CacheProblem, kernel: str, operands: Operands, cache: Cache, behind: list[Any]) -> None:
    """Appends, then attends. operands: arrays; o and perhaps lse are written. behind: the seed, if any, and aux."""
    given, ids, lines = read(made, cache, operands.q_offset)
    append(made, given, ids, lines, *(arrays.host_view(x) for x in (operands.k, operands.v)))
    q, problem = _heads_first(made, arrays.host_view(operands.q)), made.problem
    if made.rotary_dim:
        q = _rotated_queries(made, given, lines, q)
        operands = operands._replace(q=Array(arrays.host_pointer(q), operands.q.layout, q, q))
        problem = with_contiguous_q(problem)
    _fill_outside(problem, operands, lines)
    if kernel == "reference":
        _on_reference(made, q, operands, behind, ids, lines)
    else:
        _on_cpu(problem, operands, behind, ids, lines)


def _host(array: Array | None) -> Any:
    return None if array is None else arrays.host_view(array)


def _page_numbers(given: dict[str, Any], batch: int) -> Any:
    """The numbers of pages of all sequences, one after the other. A contiguous cache has a page for each entry."""
    named = (given[name] for name in ("page_table", "page_indices", "cache_batch_idx"))
    ids = next((x for x in named if x is not None), None)
    return np.arange(batch, dtype=np.int32) if ids is None else np.ascontiguousarray(ids).ravel()


def _rows(made: CacheProblem, lines: Lines, counts: Any) -> tuple[Any, ...]:
    """-> for counts[b] rows of each sequence b: the array of b, the array of row numbers, and an index that selects
    them in an array (batch, heads, rows, dim), or (rows, heads, dim) for packed sequences."""
    b = np.repeat(np.arange(len(counts)), counts)
    i = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    if made.problem.packed is not None:
        return b, i, (lines.first_query[b] + i,)
    return b, i, (b, slice(None), i)


def _heads_first(made: CacheProblem, view: Any) -> Any:
    """A view of 4 dimensions as (batch, heads, rows, dim). A packed view stays as it is."""
    return view.transpose(made.order) if view.ndim == 4 else view


def _compute(p: Problem) -> Any:
    return np.dtype(p.compute_dtype)


def append(made: CacheProblem, given: dict[str, Any], ids: Any, lines: Lines, k: Any, v: Any) -> None:
    """Writes new keys and values to the caches, except those without a place."""
    if given["k_new"] is None:
        return
    p, pages = made.problem, made.pages
    b, i, at = _rows(made, lines, lines.new)
    position = lines.before[b] + i
    if given["slots"] is None:
        page, row = ids[lines.first_page[b] + position // pages.size], position % pages.size
    else:
        slots = given["slots"][at[0]] if p.packed is not None else given["slots"][b, i]
        kept = slots >= 0
        b, i, position, slots = b[kept], i[kept], position[kept], slots[kept]
        at = (lines.first_query[b] + i,) if p.packed is not None else (b, slice(None), i)
        page, row = slots // pages.size, slots % pages.size
    for name, cache in (("k_new", k), ("v_new", v)):
        if given[name] is None:
            continue
        rows = _heads_first(made, given[name])[at]  # (rows, heads, dim)
        if name == "k_new" and made.rotary_dim:
            rows = _rotated(made, given, rows.transpose(1, 0, 2), position).transpose(1, 0, 2)
        _heads_first(made, cache)[page, :, row] = rows


def _rotated(made: CacheProblem, given: dict[str, Any], rows: Any, positions: Any) -> Any:
    p = made.problem
    tables = given["rotary_cos"], given["rotary_sin"]
    made_rows = reference.rotated(rows, positions, *tables, made.rotary_interleaved, _compute(p))
    with np.errstate(over="ignore"):
        return made_rows.astype(rows.dtype)


def _rotated_queries(made: CacheProblem, given: dict[str, Any], lines: Lines, q: Any) -> Any:
    """q, rotated by positions, contiguous in memory of its own."""
    b, i, at = _rows(made, lines, lines.queries)
    turned = np.array(q, order="C")
    rows = turned[at]
    turned[at] = _rotated(made, given, rows.transpose(1, 0, 2), lines.offset[b] + i).transpose(1, 0, 2)
    return turned


def _fill_outside(p: Problem, operands: Operands, lines: Lines) -> None:
    """o = 0 and lse = -inf in rows of no packed sequence."""
    if p.packed is None:
        return
    rows = outside(list(zip(lines.first_query.tolist(), lines.queries.tolist(), strict=True)), p.packed[0])
    if rows.any():
        arrays.host_view(operands.o)[rows] = 0
        if operands.lse is not None:
            arrays.host_view(operands.lse)[:, rows] = -np.inf


def _on_reference(made: CacheProblem, q: Any, operands: Operands, behind: list[Any], ids: Any, lines: Lines) -> None:
    """Gathers each sequence's keys and values, and calls the reference."""
    from .for_reference import options_at, write

    p, pages = made.problem, made.pages
    b, i, _ = _rows(made, lines, lines.keys)
    first = np.zeros(p.batch, np.int64) if p.left is None else np.clip(lines.offset - p.left, 0, None)
    seen = i >= first[b]  # a key that the window has passed may have no page
    b, i = b[seen], i[seen]
    page = ids[lines.first_page[b] + i // max(pages.size, 1)]
    gathered = []
    for cache, dim in ((operands.k, p.head_dim), (operands.v, p.head_dim_v)):
        view = _heads_first(made, arrays.host_view(cache))
        rows = np.zeros((p.batch, p.heads_kv, p.seqlen_k, dim), view.dtype)
        rows[b, :, i] = view[page, :, i % max(pages.size, 1)]
        gathered.append(rows)
    b, i, at = _rows(made, lines, lines.queries)
    padded = np.zeros((p.batch, p.heads, p.seqlen_q, p.head_dim), q.dtype)
    padded[b, :, i] = q[at]
    options = options_at(p, operands, behind, lines.keys, lines.offset, lines.queries)
    o, lse = reference.forward(padded, *gathered, **options)
    to, to_lse = arrays.host_view(operands.o), operands.lse
    if p.packed is None:
        write(_heads_first(made, to), o)
        if to_lse is not None:
            write(arrays.host_view(to_lse), lse)
        return
    rows, of_lse = to[at], None if to_lse is None else arrays.host_view(to_lse)
    write(rows, o[b, :, i])
    to[at] = rows
    if of_lse is not None:
        of_lse[:, at[0]] = lse[b, :, i].T


def _on_cpu(p: Problem, operands: Operands, behind: list[Any], ids: Any, lines: Lines) -> None:
    from ..cpu import kvcache as cpu
    from ..cpu.plan import LINE_NUMBERS
    from ..functions.outside import OutsideRead, error_of
    from .launch import addresses_of

    table = np.empty((p.batch, LINE_NUMBERS), np.int64)
    own = np.arange(p.batch), lines.first_query, lines.queries, lines.keys, lines.offset
    for n, column in enumerate((*own, lines.first_page * 4 + arrays.host_pointer(ids))):
        table[:, n] = column
    try:
        cpu.run(p, addresses_of([*operands, *behind]), table)
    except OutsideRead as error:
        aux, function = [arrays.host_view(x) for x in behind[p.seeded :]], p.function(error.read.option)
        assert function is not None
        raise error_of(error.read, function, p.compute_dtype, aux) from None
