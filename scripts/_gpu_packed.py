"""gpu_check on packed sequences: random ragged problems with gradients, many sequences again and again, wrong ends, and
a graph with other lengths."""

import itertools

import numpy as np
from _gpu import Ahead, compile_ahead
from _gpu_backward import Guarded

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


MANY = (  # dtype, head_dim, causal, the longest: of up to 128 keys wgmma's backward has a form of its own
    ("float16", 64, True, 500), ("float16", 64, True, 128), ("bfloat16", 128, False, 500), ("bfloat16", 128, True, 128),
    ("float32", 64, True, 500),
)  # fmt: skip


def many(dtype, head_dim, causal, longest):
    """Many more sequences than a warp looks at together, in turn short ones, long ones and ones without rows. Rows of
    none, NaN, are in front of them, and thousands behind."""
    g = np.random.default_rng(head_dim + longest)
    lengths = g.choice((0, 0, 0, 0, 0, 1, 3, 20, 129), (2, 150)).clip(max=longest)
    lengths[:, 40:110] = 0
    lengths[0, [5, 75, 140]] = lengths[1, [6, 75, 140]] = longest
    of_q, of_k = (np.cumsum([11, *each]).astype(np.int32) for each in lengths)
    q, k, v = (
        g.standard_normal((of[-1] + 3000, heads, head_dim)).astype(dtype)
        for of, heads in ((of_q, 2), (of_k, 1), (of_k, 1))
    )
    bounds = dict(max_seqlen_q=longest, max_seqlen_k=longest)
    case = packs.PackedCase(q, k, v, of_q, of_k, dict(causal=causal) | bounds)
    q[case.outside("q")], k[case.outside("k")], v[case.outside("k")] = np.nan, np.nan, np.nan
    return case


def check(kernel, options, tools):
    cases, groups = cases_of(kernel, options.small, tools.takes), (("float32", 16, True, 500),)
    if rungs.RUNGS[kernel].tensor_cores:
        groups = [group for group in MANY if tools.takes(kernel, group[0])][:: 3 if options.small else 1]
    of_many = {f"{kernel}, many sequences, {group}": many(*group) for group in groups}
    every = (cases | of_many).values()
    compile_ahead(itertools.chain.from_iterable(configs_of(case, kernel, tools.on_gpu) for case in every))
    if Ahead.only:
        return Ahead.note
    for name, case in cases.items():
        found, do, dlse = check_repeats(name, case, kernel, 2, tools.on_gpu)
        check_alone(name, case, kernel, found, do, dlse, tools.on_gpu)
    repeats = 5 if options.small else 100
    for name, case in of_many.items():
        check_repeats(name, case, kernel, repeats, tools.on_gpu)
    own = f"{len(cases)} problems, each twice, and each sequence alone; {len(of_many)} of 150 sequences {repeats} times"
    return f"{own}; {check_wrong_ends(kernel)}; {check_graph(kernel)}"


def check_repeats(name, case, kernel, repeats, on_gpu):
    """Against the oracle, and the same bits beside a stream that keeps the GPU busy now and then. -> the results, and
    do and dlse that were given."""
    import cupy as cp

    busy, big = cp.cuda.Stream(non_blocking=True), cp.ones((2048, 2048), cp.float32)
    given, (do, dlse) = case.arguments(on_gpu), packs.outer_packed(case)
    moved, found = [on_gpu(x) for x in (do, dlse)], None
    for number in range(repeats):
        if number % 7 == 6:
            with busy:
                big @ big
        again = results(given, kernel, *moved)
        found = found or again
        assert same(found, again), f"{name}: other bits in repeat {number}"
    o, lse, *gradients = found
    packs.check_packed(case, o, lse, name)
    if gradients:
        packs.check_packed_gradients(case, numba_flash.AttentionGradients(*gradients), do, o, lse, dlse, name)
    return found, do, dlse


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
    for most in (None, 200, 128):  # with the last wgmma's backward does not put ends in order
        out.fill(np.nan)
        call = given | ends | dict(max_seqlen_q=most, max_seqlen_k=most, kernel=kernel)
        o, lse = numba_flash.attention_varlen(**call, out=out, return_lse=True)
        assert bool(cp.isnan(memory[:band]).all() and cp.isnan(memory[band + out.size :]).all()), "written outside"
        assert bool(cp.isfinite(out).all()), "a row was not written"
        if rungs.RUNGS[kernel].has_backward:
            guarded = Guarded()
            with cp.cuda.using_allocator(guarded):
                made = numba_flash.attention_varlen_backward(out, **call, o=out, lse=lse)
                cp.cuda.Device().synchronize()
                assert all(bool(cp.isfinite(x).all()) for x in made[:3]), "a gradient was not written"
            guarded.check()
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
    for lengths in (
        [0, 3, 200],
        [0, 0, 0],
        [20, 20, 21],
        [7, 7, 7],
        [0, 100, 200],
    ):  # the counters are 0 behind none, too
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
