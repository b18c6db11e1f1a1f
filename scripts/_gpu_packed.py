"""gpu_check on packed sequences: random ragged problems with gradients, wrong ends, and a graph with other lengths."""

import itertools

import numpy as np
from _gpu import Ahead, compile_ahead

import numba_flash
from numba_flash.select import rungs
from numba_flash.select.around import prologue
from numba_flash.testing import packed as packs

GROUPS = (  # dtype, head_dims, features: each group is a handful of kernels for many lengths
    ("float16", (64,), ("causal", "window")),
    ("bfloat16", (128,), ("causal", "window", "seqlens_k")),
    ("float16", (40, 256), ("causal",)),
    ("bfloat16", (64,), ("causal", "softcap", "alibi_slopes", "sinks", "q_offset")),
    ("float32", (64,), ("causal", "window", "seqlens_k")),
    ("float32", (128, 40), ("causal",)),
    ("float64", (64,), ("causal", "window", "seqlens_k")),
)


def cases_of(kernel, small, takes):
    """{name: PackedCase}"""
    tensor, found = rungs.RUNGS[kernel].tensor_cores, {}
    groups = [group for group in GROUPS if takes(kernel, group[0])]
    if not tensor:
        groups = [("float32", (16,), ("causal", "window", "seqlens_k", "sinks"))]
    for number in range(3 if small else 20):
        for dtype, head_dims, features in groups:
            limits = dict(tile=64, tiles=5) if tensor else dict(tile=32)
            case = packs.packed_case(
                number * 31 + len(found), dtypes=(dtype,), head_dims=head_dims, features=features, max_batch=6, **limits
            )
            found[f"{kernel}, {dtype}, {number}"] = case
    return found


def configs_of(case, kernel, on_gpu):
    """What a case runs, with gradients."""
    import cupy as cp

    given = case.arguments(on_gpu)
    explained = numba_flash.explain(**given, return_lse=True, kernel=kernel)
    configs = [*prologue(explained.config, explained.problem, explained.target), explained.config]
    if rungs.RUNGS[kernel].has_backward:
        q, v = given["q"], given["v"]
        o = cp.empty((*q.shape[:2], v.shape[2]), q.dtype)
        lse = cp.empty(q.shape[1::-1], "float64" if q.dtype == np.float64 else "float32")
        configs += numba_flash.explain_backward(o, o=o, lse=lse, **given, kernel=kernel).configs
    return [(config, explained.target.cc) for config in configs]


def results(given, kernel, do=None, dlse=None):
    """o, lse, and the gradients of q, k and v, in host memory."""
    o, lse = numba_flash.attention_varlen(**given, return_lse=True, kernel=kernel)
    if do is None or not rungs.RUNGS[kernel].has_backward:
        return [o.get(), lse.get()]
    made = numba_flash.attention_varlen_backward(do, o=o, lse=lse, dlse=dlse, **given, kernel=kernel)
    return [x.get() for x in (o, lse, *made[:3])]


def same(one, other):
    return all(
        np.ascontiguousarray(x).tobytes() == np.ascontiguousarray(y).tobytes() for x, y in zip(one, other, strict=True)
    )


def check(kernel, options, tools):
    cases = cases_of(kernel, options.small, tools.takes)
    compile_ahead(itertools.chain.from_iterable(configs_of(case, kernel, tools.on_gpu) for case in cases.values()))
    if Ahead.only:
        return Ahead.note
    for name, case in cases.items():
        given, (do, dlse) = case.arguments(tools.on_gpu), packs.outer_packed(case)
        found = results(given, kernel, tools.on_gpu(do), tools.on_gpu(dlse))
        assert same(found, results(given, kernel, tools.on_gpu(do), tools.on_gpu(dlse))), f"{name}: other bits"
        o, lse, *gradients = found
        packs.check_packed(case, o, lse, name)
        if gradients:
            made = numba_flash.AttentionGradients(*gradients)
            packs.check_packed_gradients(case, made, do, o, lse, dlse, name)
        check_alone(name, case, kernel, found, do, dlse, tools.on_gpu)
    wrong = check_wrong_ends(kernel)
    return f"{len(cases)} problems, each twice, and each sequence alone; {wrong}; {check_graph(kernel)}"


def check_alone(name, case, kernel, found, do, dlse, on_gpu):
    """Each sequence has the bits that it has in the batch."""
    for b in range(case.batch):
        rows, keys = case.queries(b), case.keys(b)
        ends = [np.array([0, part.stop - part.start], np.int32) for part in (rows, keys)]
        alone = packs.PackedCase(case.q[rows], case.k[keys], case.v[keys], *ends, case.sequence(b).options)
        incoming = on_gpu(do[rows]), on_gpu(np.ascontiguousarray(dlse[:, rows]))
        own = results(alone.arguments(on_gpu), kernel, *incoming)
        parts = (rows, (slice(None), rows), rows, keys, keys)
        assert same([x[part] for x, part in zip(found, parts, strict=False)], own), f"{name}: sequence {b} alone"


def check_wrong_ends(kernel):
    """cu_seqlens that fall, are negative or run past the end: nothing outside is touched, and every row is written."""
    import cupy as cp

    g, dtype = np.random.default_rng(0), "float16" if rungs.RUNGS[kernel].tensor_cores else "float32"
    band, total, heads, dim = 4096, 300, 4, 64 if rungs.RUNGS[kernel].tensor_cores else 16
    given = {name: cp.asarray(g.standard_normal((total, heads, dim)).astype(dtype)) for name in "qkv"}
    of_q = cp.asarray(np.array([0, 50, 20, 5000, -7, 90, 2**31 - 1, -(2**31), 30], np.int32))
    of_k = cp.asarray(np.array([200, 10, 299, 301, -1, 0, 77, 78, 2**30], np.int32))
    memory = cp.full(2 * band + total * heads * dim, np.nan, dtype)
    out = memory[band : band + total * heads * dim].reshape(total, heads, dim)
    ends = dict(cu_seqlens_q=of_q, cu_seqlens_k=of_k)
    o, lse = numba_flash.attention_varlen(**given, **ends, out=out, return_lse=True, kernel=kernel)
    assert bool(cp.isnan(memory[:band]).all() and cp.isnan(memory[band + out.size :]).all()), "written outside"
    assert bool(cp.isfinite(out).all()), "a row was not written"
    if rungs.RUNGS[kernel].has_backward:
        made = numba_flash.attention_varlen_backward(out, **given, o=out, lse=lse, **ends, kernel=kernel)
        cp.cuda.Device().synchronize()
        assert all(bool(cp.isfinite(x).all()) for x in made[:3]), "a gradient was not written"
    return "wrong ends are clamped"


def check_graph(kernel):
    """A captured call replays with other lengths."""
    import cupy as cp

    g, dtype = np.random.default_rng(0), "float16" if rungs.RUNGS[kernel].tensor_cores else "float32"
    q, k, v = (cp.asarray(g.standard_normal((200, 2, 32)).astype(dtype)) for _ in range(3))
    ends, out = cp.asarray(np.array([0, 100, 150], np.int32)), cp.empty_like(q)
    stream = cp.cuda.Stream(non_blocking=True)
    call = dict(causal=True, out=out, kernel=kernel)
    with stream:
        numba_flash.attention_varlen(q, k, v, ends, **call)
        stream.synchronize()
        stream.begin_capture()
        numba_flash.attention_varlen(q, k, v, ends, **call)
        graph = stream.end_capture()
    for lengths in ([0, 3, 200], [20, 20, 21], [0, 0, 0]):
        ends[...] = cp.asarray(np.array(lengths, np.int32))
        cp.cuda.Device().synchronize()
        out.fill(7)
        graph.launch(stream)
        stream.synchronize()
        eager = numba_flash.attention_varlen(
            q, k, v, cp.asarray(np.array(lengths, np.int32)), causal=True, kernel=kernel
        )
        assert same([out.get()], [eager.get()]), f"a graph gives other bits for {lengths}"
    return "a graph replays with other lengths"
