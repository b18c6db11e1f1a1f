"""attention_kvcache on a GPU and in the simulator: the kernel that appends, and behind it attention.

decode takes what it can (select/decode.py). Otherwise a contiguous cache goes to any kernel of `attention`, with the
valid keys as seqlens_k, and pages go to v2 over pages. decode reads lengths as they are: if nothing is appended or
turned, it runs alone.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

from .. import arrays
from ..abi.arguments import Values
from ..abi.parameters import aux_names
from ..arrays import Array, Layout, contiguous_layout
from ..config.kvcache import AppendConfig, PagedConfig
from ..machine.target import Target
from ..problem.forward import Problem
from ..problem.kvcache import Cache, CacheProblem, with_contiguous_q
from ..problem.option_checks import AuxArray
from ..problem.options import ARRAY_NAMES, OPTION_ARRAYS, Operands
from ..problem.strides import element_strides
from ..select import decode
from ..select.around import prologue
from ..select.forward import Choice, config_of, refusal, select
from . import forward
from .call import Call
from .launch import Launch, kernel_launch, sequence_of

OF_PAGES = ("page_table", "page_indices", "cache_batch_idx")
KINDS = dict(page_table="table", page_indices="csr", cache_batch_idx="entries")


class OnGpu(NamedTuple):
    """append: writes new keys, rotated queries, and the numbers of valid keys; names: its arrays' names. attend: None =
    attention itself. choice: the kernel that attends; None = there is no work. not_shared: why each sequence reads its
    prefix itself; None = prefixes are shared, or there are none."""

    append: Launch | None
    names: tuple[str, ...]
    choice: Choice | None
    attend: Launch | None
    of_pages: tuple[str, ...]  # the arrays that `attend` takes before those of aux
    not_shared: str | None = None


def make(made: CacheProblem, operands: Any, cache: Cache, others: Any, target: Target, kernel: str) -> OnGpu:
    """Makes the plan from layouts. operands: q, k and v; cache, others: layouts; kernel: the kernel asked for, used for
    a contiguous cache."""
    name = next((name for name in OF_PAGES if getattr(cache, name) is not None), None)
    kind = "own" if name is None else KINDS[name]
    of_pages = () if name is None else (name, *(("page_indptr",) if kind == "csr" else ()))
    not_shared = None
    if cache.prefix_of is not None:
        not_shared = decode.not_shared(made.problem, target) if kernel == "decode" else "decode alone shares them"
    shares = cache.prefix_of is not None and not_shared is None
    append, names = _append(made, operands, cache, others[-1], kind, of_pages, target)
    if kernel != "decode" and kind == "own" and made.problem.packed is None:
        p = dataclasses.replace(made.problem, pages=None)
        # select raises for a refused problem before keys are written
        chosen = select(with_contiguous_q(p) if made.rotary_dim else p, target, kernel)
        return OnGpu(append, names, chosen, None, ())
    of_pages += ("prefix_of", "prefix_lens") if shares else ()
    aux = tuple(_aux_array(getattr(cache, name)) for name in of_pages)
    alone = kernel == "decode" and cache.k_new is None and not made.rotary_dim
    choice, attend = _attend(made, kind, aux, target, kernel == "decode", alone, shares)
    return OnGpu(None if alone else append, names, choice, attend, of_pages, not_shared)


def _aux_array(layout: Layout) -> AuxArray:
    return AuxArray(layout.dtype, layout.shape, element_strides(layout))


def _attend(
    made: CacheProblem, kind: str, of_pages: tuple[AuxArray, ...], target: Target, by_decode: bool, alone: bool,
    shares: bool,
) -> tuple[Choice | None, Launch]:  # fmt: skip
    """Launch of decode, or of v2 over pages. alone: nothing runs before it. shares: sequences have common prefixes."""
    p = with_contiguous_q(made.problem) if made.rotary_dim else made.problem
    if not alone:
        p = _with_totals(p)
    if not p.batch * p.heads * p.seqlen_q and p.packed is None:
        return None, Launch()
    config: Any = decode.config_of(p, kind, target, shares) if by_decode else _of_v2(p, kind, target)
    steps = sequence_of([*prologue(config, p, target), config], dataclasses.replace(p, aux=(*of_pages, *p.aux)), target)
    return Choice("mma" if by_decode else "v2", config, False, ()), steps


def _of_v2(p: Problem, kind: str, target: Target) -> PagedConfig:
    found = config_of("v2", p, target)
    if found is None:
        raise NotImplementedError(f"kernel='v2' cannot read these pages. {refusal('v2', p, target)}")
    return PagedConfig.of(found, kind)


def _with_totals(p: Problem) -> Problem:
    """The problem with the lengths that `append` computes."""
    lengths = [x._replace(strides=(1,)) if x.name == "seqlens_k" else x for x in p.arrays]
    return dataclasses.replace(p, arrays=tuple(lengths))


def _append(
    made: CacheProblem, operands: Any, cache: Cache, offsets: Any, kind: str, of_pages: tuple[str, ...], target: Target
) -> tuple[Launch, tuple[str, ...]]:
    p, (q, k, v) = made.problem, operands
    one = contiguous_layout("foreign", 0, (p.batch,), "int32")
    taken: dict[str, Any] = dict(
        zip(("pages", "page_indptr"), (getattr(cache, name) for name in of_pages), strict=False)
    )
    taken |= dict(seqlens_k=cache.seqlens_k, totals=one, cu_seqlens_q=cache.cu_seqlens_q, slots=cache.slots)
    if cache.k_new is not None:
        taken |= dict(k_new=cache.k_new, k=k, v_new=cache.v_new, v=None if cache.v_new is None else v)
    if made.rotary_dim:
        turned = contiguous_layout("foreign", 0, _turned_shape(made), p.dtype)
        taken |= dict(rotary_cos=cache.rotary_cos, rotary_sin=cache.rotary_sin, q=q, turned=turned, q_offset=offsets)
    taken = {name: layout for name, layout in taken.items() if layout is not None}
    facts = [_in_order(name, layout, made) for name, layout in taken.items()]
    dims = tuple((name, x.dtype, len(x.shape)) for name, x in zip(taken, facts, strict=True))
    from_lengths = p.q_offset_source in ("seqlens_k", "sequence")
    threads = 32 if target.simulated else 128
    config = AppendConfig(p.dtype, dims, kind, made.rotary_interleaved, from_lengths, threads)
    new = 0 if cache.k_new is None or made.new is None else made.new
    queries = p.seqlen_q if made.rotary_dim and p.packed is None else 0
    rows = p.packed[0] if p.packed is not None else p.batch * max(new, queries)
    if cache.k_new is None and not made.rotary_dim:
        rows = 0
    sizes = dict(
        batch=p.batch, rows=rows, new=new, queries=p.seqlen_q if p.packed is None else 0, heads=p.heads,
        heads_kv=p.heads_kv, head_dim=p.head_dim, head_dim_v=p.head_dim_v, page=max(made.pages.size, 1),
        pages=made.pages.total, capacity=made.pages.capacity, row_step=max(new, queries, 1),
        q_offset=0 if p.q_offset_source in ("seqlens_k", "sequence") else p.q_offset,
        total_q=0 if p.packed is None else p.packed[0],
    )  # fmt: skip
    strides = {name: (*x.shape, *x.strides) for name, x in zip(aux_names(len(facts)), facts, strict=True)}
    values = Values.of(config, strides=strides, sizes=sizes, score={})
    return kernel_launch(config, target, rows + p.batch, values), tuple(taken)


def _turned_shape(made: CacheProblem) -> tuple[int, ...]:
    p = made.problem
    if p.packed is not None:
        return (p.packed[0], p.heads, p.head_dim)
    return (p.batch, p.heads, p.seqlen_q, p.head_dim)


def _in_order(name: str, layout: Layout, made: CacheProblem) -> AuxArray:
    """An array's dtype, shape and strides; of 4 dimensions in the order (batch, head, row, column)."""
    array = _aux_array(layout)
    if len(array.shape) != 4 or name == "turned":
        return array
    return array._replace(
        shape=tuple(array.shape[axis] for axis in made.order), strides=tuple(array.strides[axis] for axis in made.order)
    )


def run(call: Any, plan: Any, given: Any, cache: Cache, others: list[Any], behind: list[Any]) -> Any:
    """call: a CacheCall; given: q, k, v, o and lse as they were read; behind: the seed and aux."""
    made, launches = plan.made, plan.on_gpu
    p, (q, k, v, o, lse) = made.problem, given
    work_on = arrays.stream_of([*given, *others], call.stream)
    empty = arrays.empty if call.stream is None else functools.partial(arrays.empty_for, work_on)
    totals = cache.seqlens_k if launches.append is None else empty(q, (p.batch,), "int32")
    turned = empty(q, _turned_shape(made), p.dtype) if made.rotary_dim else None
    if launches.append is not None:
        taken = dict(cache._asdict(), totals=totals, q=q, turned=turned, k=k, v=v, q_offset=others[-1])
        taken["pages"] = next((x for name in OF_PAGES if (x := getattr(cache, name)) is not None), None)
        launches.append.run([taken[name] for name in launches.names], work_on)
    if launches.attend is None:
        return _contiguous(call, made, totals, turned)
    if o is None:
        o = empty(q, p.o_shape, p.dtype)
    if lse is None and call.return_lse:
        lse = empty(q, p.lse_shape, p.compute_dtype)
    operands = Operands(turned or q, k, v, o, lse, *others)._replace(seqlens_k=totals)
    if p.packed is not None:
        operands = operands._replace(cu_seqlens_q=cache.cu_seqlens_q, cu_seqlens_k=cache.cu_seqlens_q)
    seed, aux = behind[: p.seeded], behind[p.seeded :]
    of_pages = [getattr(cache, name) for name in launches.of_pages]
    launches.attend.run([*operands, *seed, *of_pages, *aux], work_on)
    if lse is None:
        return arrays.give(q, o)
    return forward.AttentionOutput(arrays.give(q, o), arrays.give(q, lse))


def _contiguous(call: Any, made: CacheProblem, totals: Array, turned: Array | None) -> Any:
    q, k, v, out = call.operands
    if turned is not None:
        q = turned.owner if call.options.layout == "bhsd" else turned.owner.swapaxes(1, 2)
    options = call.options
    kept = options.arrays or (None,) * len(OPTION_ARRAYS)
    of_arrays = tuple(totals.owner if name == "seqlens_k" else x for name, x in zip(OPTION_ARRAYS, kept, strict=True))
    assert len(ARRAY_NAMES) == len(OPTION_ARRAYS) + 1
    options = options._replace(arrays=of_arrays)
    return forward.run(Call((q, k, v, out), options, call.return_lse, stream=call.stream, kernel=call.kernel))
