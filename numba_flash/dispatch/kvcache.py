"""The path of attention_kvcache() below its signature: read the arrays, plan, append, attend."""

import dataclasses
from typing import Any, NamedTuple

from .. import arrays
from ..arrays import Array
from ..machine.target import Target
from ..problem import kvcache as caches
from ..problem.forward import check_one_place
from ..problem.kvcache import Cache, CacheProblem
from ..problem.memory import anything_near, check_alignments, check_overlap
from ..problem.option_checks import window_sides
from ..problem.options import ARRAY_NAMES, Operands, Options
from ..select import decode
from ..select.refusals import no_gpu
from ..select.rungs import RUNGS, check_request, choose
from .call import alignment_of, caller_functions, read_options, seeds, store
from .forward import AttentionOutput

WHERE_ARRAYS = ("q", "k_cache", "v_cache")


class CacheCall(NamedTuple):
    """The arguments of attention_kvcache()."""

    operands: tuple[Any, ...]  # q, k_cache, v_cache, out
    cache: Cache
    options: Options
    return_lse: Any
    stream: Any
    kernel: Any
    as_nodes: bool = False  # kvcache_nodes.py


class CachePlan(NamedTuple):
    made: CacheProblem
    target: Target
    kernel: str
    refused: tuple[tuple[str, str], ...]  # rungs that do not run, and why not
    not_decode: str | None  # why the decode kernel does not run
    on_gpu: Any = None  # a kvcache_on_gpu.OnGpu


_plans: dict[Any, CachePlan] = {}


def run(call: CacheCall) -> Any:
    given, cache, others, aux, plan = prepare(call)
    made, q, like = plan.made, given[0], given[0]
    p = made.problem
    _, k, v, o, lse = given
    written = (o, lse) if cache.k_new is None else (o, lse, k, v)  # the caller's arrays that are written
    behind = list(aux)
    if call.options.seed is not None or p.numbers:
        behind = list(seeds().with_seed(behind, 0, p, call.options.seed))
    if plan.on_gpu is not None:
        from . import kvcache_on_gpu, kvcache_on_host

        if plan.target.arrays_on_host:
            kvcache_on_host.read(made, cache, others[-1])  # checks what the host can see
        arrays.note_writing(*written)
        return kvcache_on_gpu.run(call, plan, given, cache, others, behind)
    if o is None:
        o = arrays.empty(like, p.o_shape, p.dtype)
    if lse is None and call.return_lse:
        lse = arrays.empty(like, p.lse_shape, p.compute_dtype)
    arrays.note_writing(*written)
    operands = Operands(q, k, v, o, lse, *others)
    from .kvcache_on_host import run as on_host

    on_host(made, plan.kernel, operands, cache, behind)
    o_given, lse_given = arrays.give(like, o), None if lse is None else arrays.give(like, lse)
    return o_given if lse is None else AttentionOutput(o_given, lse_given)


def prepare(call: CacheCall) -> tuple[Any, Cache, list[Array | None], list[Array | None], CachePlan]:
    """Reads the arrays and looks up the plan. -> (q, k, v, o, lse), the cache's arrays, those of ARRAY_NAMES, aux."""
    read = arrays.read
    q, k, v = (read(name, x) for name, x in zip(WHERE_ARRAYS, call.operands, strict=False))
    out, o, lse = call.operands[3], None, None
    if out is not None:
        pair = out if isinstance(out, tuple) else (out,)
        if len(pair) != (2 if call.return_lse and isinstance(out, tuple) else 1):
            raise ValueError("out must be one array, or with return_lse=True also a pair (o, lse)")
        o = read("out", pair[0])
        lse = read("the lse of out", pair[1]) if len(pair) == 2 else None
    named = {name: read(name, x) for name in caches.ARRAYS if (x := getattr(call.cache, name)) is not None}
    cache = call.cache._replace(**named)
    options = call.options
    offsets, q_offset = None, options.q_offset
    if q_offset is not None and arrays.is_array(q_offset):
        offsets, q_offset = read("q_offset", q_offset), None
    others = [*(read_options(options.arrays) if options.arrays else (None,) * (len(ARRAY_NAMES) - 1)), offsets]
    functions, aux = options.functions, []
    if functions is not None:
        functions, aux = caller_functions().read_functions(functions)
    plan = _plan(call, (q, k, v, o, lse), cache, q_offset, others, functions, aux)
    _check_memory(dict(q=q, k_cache=k, v_cache=v, out=o) | {"the lse of out": lse}, named, others, aux)
    return (q, k, v, o, lse), cache, others, aux, plan


def _check_memory(own: dict[str, Any], named: dict[str, Array], others: list[Any], aux: list[Any]) -> None:
    """Checks addresses before anything is written: they are aligned, and no array that is written is an input."""
    of_aux = {f"aux[{number}]": x for number, x in enumerate(aux)}
    given = own | named | dict(zip(ARRAY_NAMES, others, strict=True)) | of_aux
    given = {name: x for name, x in given.items() if x is not None}
    check_alignments(list(given.values()), given.items)
    for name in ("out", "the lse of out"):
        if name in given and anything_near(given[name], list(given.values())):
            check_overlap("out", given[name], given.items())
    inputs = dict(named, q=own["q"])
    for name, new in (("k_cache", "k_new"), ("v_cache", "v_new")):
        if new in named and anything_near(own[name], list(inputs.values())):
            check_overlap(name, own[name], inputs.items())
    k, v, k_new, v_new = own["k_cache"], own["v_cache"], named.get("k_new"), named.get("v_new")
    both = k_new is not None and v_new is not None and 0 not in (*k.layout.shape, *k_new.layout.shape)
    if both and _is_view(v, k) and not _is_view(v_new, k_new):
        raise ValueError(
            "v_cache is a view of k_cache, and v_new would be written over k_new: leave v_new out, or pass the same "
            "view of k_new"
        )


def _is_view(v: Any, k: Any) -> bool:
    """Whether the columns of v are the first ones of k."""
    return v.pointer == k.pointer and v.layout.strides == k.layout.strides and v.layout.unit == k.layout.unit


def _plan(
    call: CacheCall, operands: Any, cache: Cache, q_offset: Any, others: Any, functions: Any, aux: Any
) -> CachePlan:
    layout: Any = [None if x is None else x.layout for x in operands]
    of_cache = Cache(*(x.layout if isinstance(x, Array) else x for x in cache))
    of_others = tuple(None if x is None else x.layout for x in others)
    of_aux = tuple(None if x is None else x.layout for x in aux)
    q, k, v, *_ = operands
    v_is_k = _is_view(v, k)
    alignment = alignment_of(q.pointer | k.pointer | v.pointer)
    options = call.options
    if options.window is not None:  # checked before it is part of a key, where (1.0, 0) equals (1, 0)
        options = options._replace(window=window_sides(options.window))
    numbers = options.numbers
    key: Any = (
        *layout, of_cache, of_others, of_aux, options.causal, options.window, q_offset, numbers, functions,
        options.layout, call.return_lse, call.kernel, call.as_nodes, call.stream is not None, v_is_k, alignment,
        tuple(map(type, (*numbers, q_offset, options.causal, call.return_lse, *cache[-2:]))),
    )  # fmt: skip
    try:
        found = _plans.get(key)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        found, key = None, None
    if found is not None:
        return found
    *own, offsets = of_others
    with_layouts = options._replace(
        q_offset=q_offset if offsets is None else offsets,
        arrays=tuple(own),
        functions=None if functions is None else (*functions, of_aux),
    )
    if of_aux or any(own):
        check_one_place({"q": layout[0]} | {name: x for name, x in zip(ARRAY_NAMES, of_others, strict=True) if x})
    made = caches.problem_of(layout, of_cache, with_layouts, call.return_lse, alignment, v_is_k)
    if call.as_nodes:
        made = made._replace(problem=dataclasses.replace(made.problem, as_nodes=True))
    target = Target.of(layout[0].device)
    check_request(call.kernel, target, layout[0].family, call.stream is not None)
    contiguous = (
        of_cache.page_table is of_cache.page_indices is of_cache.cache_batch_idx is of_cache.cu_seqlens_q is None
    )
    kernel, refused, not_decode = _kernel(target, call.kernel, made, contiguous)
    found = CachePlan(made, target, kernel, refused, not_decode)
    if kernel not in RUNGS or not RUNGS[kernel].on_host:  # "auto" and "decode" are none of them
        from .kvcache_on_gpu import make

        found = found._replace(on_gpu=make(made, layout[:3], of_cache, of_others, target, kernel))
    if key is not None:
        store(_plans, key, found)
    return found


def _kernel(
    target: Target, kernel: str, made: CacheProblem, contiguous: bool
) -> tuple[str, tuple[tuple[str, str], ...], str | None]:
    """-> (the rung, or "decode" for mma's kernel of caches, why not the others, why not decode). A contiguous cache
    that decode does not take goes to the kernel asked for, as in `attention`; "auto" takes the best one."""
    of_mma = None if target.cc is None else decode.refusal(made.problem, target, contiguous)

    def refusal(name: str) -> str | None:
        rung = RUNGS[name]
        if rung.on_host:
            return None if target.arrays_on_host else "it computes in host memory; copy the arrays there first"
        if target.cc is None:
            return no_gpu(target)
        if target.arrays_on_host and not target.simulated:
            return "the caches are in host memory, and are not copied to the GPU"
        if contiguous or name == "v2":
            return None
        return of_mma if name == "mma" else "it reads no pages; mma and v2 do"

    takes = of_mma is None and target.cc is not None and (not target.simulated or kernel == "mma")
    first = "mma" if takes else "" if contiguous else "v2"
    name, refused = choose(kernel, target, refusal, first=first)
    if name == "mma" and of_mma is None:
        return "decode", refused, None
    return name if RUNGS[name].on_host or not contiguous else kernel, refused, of_mma
