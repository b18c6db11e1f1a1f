"""Finds the fields of a Config that follow from the problem alone, and the rows of a table that are for it."""

import dataclasses
import functools
import operator
from typing import Any

from ..abi.parameters import AS_BITS
from ..arrays.dtypes import ITEM_SIZE
from ..config.forward import tiles_by_bound, tiles_of_all
from ..machine.target import Target
from ..problem.forward import Problem
from ..problem.options import BY_NAME, Uses, changes_by_distance_alone, changes_scores, of_scores
from ..problem.strides import Strides
from .refusals import strides_that_matter
from .tiles import ANY, Facts, Row, rows_of

LARGE_FLOAT64 = (9, 0)  # m16n8k16 is one instruction on these GPUs; sm_100 splits it, with local memory
LOOSE = 8  # the bounds of the lengths allow more than so many times the tiles of packed sequences


def features_of(kind: Any, problem: Any, target: Target) -> dict[str, Any]:
    """The fields of a Config of this kind that follow from the problem, and not from the tile."""
    p, of_gradients = problem.forward, problem.wanted is not None
    bias, size, uses = p.array("bias"), ITEM_SIZE[p.dtype], _uses_of(kind, p)
    read = [strides for _, strides in strides_that_matter(p)] + ([problem.do_strides] if of_gradients else [])
    given = dict(
        dtype=p.dtype,
        head_dim=p.head_dim,
        head_dim_v=p.head_dim_v,
        write_lse=p.return_lse,
        uses=of_scores(uses) if of_gradients else uses,
        q_offset_source=p.q_offset_source,
        narrow=p.narrow and any(BY_NAME[name].function and used != AS_BITS for name, used in uses),
        scores_finished=changes_scores(p.uses) or p.scale <= 0,
        bias_pairs=bias is not None and bias.pairs,
        bias_boxes=bias is not None and bias.boxes,
        o_vectorized=p.o_strides[3] == 1 and copied(p, p.o_strides) == 16 and p.head_dim_v * size % 16 == 0,
        copy_bytes=copied(p, *read),
        in_order=loosely_bound(p),
        large_f64=p.dtype == "float64" and target.cc == LARGE_FLOAT64,
    )
    return {name: value for name, value in given.items() if name in _fields(kind)}


def _uses_of(kind: Any, p: Problem) -> Uses:
    """The options that a kernel is compiled for. They are the same for every mask_mod that it reads as bits."""
    if not kind.reads_mask_mod or p.function("mask_mod") is None:
        return p.uses
    from ..abi.mask_bits import is_read_as_bits  # a plain call does not import it

    if not is_read_as_bits(p):
        return p.uses
    used = dict(p.uses) | dict(mask_mod=AS_BITS)
    return tuple((name, given) for name, given in used.items() if name != "aux")


def loosely_bound(problem: Problem) -> bool:
    """Whether packed sequences have far fewer tile numbers than the bounds of the lengths allow tiles. Finding the tile
    of a number takes longer than finding that there is none: 5 times as many blocks cost nothing (H200)."""
    sides = ((tiles_of_all(problem, 64, side), tiles_by_bound(problem, 64, side)) for side in (False, True))
    return problem.packed is not None and any(LOOSE * numbers < by_bound for numbers, by_bound in sides)


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


def copied(problem: Problem, *arrays: Strides) -> int:
    """How many bytes one copy of a row can have, at most 16: rows of arrays with these strides begin at multiples of
    it."""
    steps = [stride * ITEM_SIZE[problem.dtype] for strides in arrays for stride in strides[:3]]
    joined = functools.reduce(operator.or_, steps, problem.alignment)
    return min(joined & -joined, 16)


def rows_for(tables: dict[str, tuple[Row, ...]], table: str, problem: Any, target: Target) -> list[Row]:
    """The rows of a table that are for the problem, the best first."""
    rows = rows_of(tables, table, problem.forward.dtype, target)
    facts = _facts_of(problem, any(row.when.per_score for row in rows))
    return [row for row in rows if row.when.holds(facts)]


def _facts_of(problem: Any, asks_per_score: bool) -> Facts:
    p, of_gradients = problem.forward, problem.wanted is not None
    bias, mask, called = p.array("bias") is not None, p.array("mask") is not None, bool(p.functions)
    changed = changes_scores(tuple(use for use in p.uses if not BY_NAME[use[0]].function))  # apart from functions
    bare, rising = not (changed or mask or p.seeded), of_gradients or p.scale > 0
    words = dict(
        unread=not (bias or mask or called or (p.seeded and not of_gradients)),
        plain=bare and not called and rising,
        masked=mask and not (bias or called or p.seeded),
        # With lengths of keys the row for ALiBi alone spills.
        sloped=changes_by_distance_alone(p.uses) and rising and p.packed is None,
        linear=not any(BY_NAME[name].derivative for name, _ in p.uses),
        functions=bare and called,
    )
    true = frozenset(name for name, so in words.items() if so)
    per_score = _per_score(p) if asks_per_score else ""
    # The longest packed sequence must not decide for all.
    rows = (p.seqlen_q, p.seqlen_k) if p.packed is None else (ANY, ANY)
    return Facts(p.widest, min(p.head_dim, p.head_dim_v), rows, p.heads_kv * p.seqlen_k, true, per_score)


def _per_score(p: Problem) -> str:
    """The entry of tiles.PER_SCORE that fits the problem; "" if no option acts on single scores."""
    found = [name for name, _ in p.uses if BY_NAME[name].per_score]
    kinds = {"functions" if BY_NAME[name].function else "read" if BY_NAME[name].shape else name for name in found}
    if not found:
        return ""
    if len(found) == 1 and not changes_scores(p.uses):
        return "mask_mod" if found == ["mask_mod"] else "mask or dropped weights"
    used, bias = dict(p.uses), p.array("bias")
    others = tuple((name, given) for name, given in p.uses if name not in found)
    if found == ["bias"] and bias is not None and bias.boxes and not changes_scores(others):
        return "mask or dropped weights"
    if len(kinds) > 1 or ("bias" in used and changes_scores(others)):
        return "several kinds"
    return "one kind"
