"""gpu_check on caches: random ones beside the oracle, bits in batches and in pages, shared prefixes, and a graph with
other lengths."""

import functools
from unittest import mock

import numpy as np
from _gpu import Ahead, compile_ahead

import numba_flash
from numba_flash import testing
from numba_flash.dispatch import kvcache, kvcache_on_gpu
from numba_flash.select.decode import FEW_ROWS, FEW_WIDE_ROWS, LEAST_SHARED

PAGES = (0, 1, 3, 16, 64, 256)
LENGTHS = (0, 1, 16, 255, 256, 257, 700, 1024, 1500, 4097)
GROUPS = (  # dtype, (head_dim, head_dim_v), options
    ("bfloat16", (128, 128), {}),
    ("float16", (64, 64), dict(causal=True)),
    ("bfloat16", (128, 128), dict(causal=True, window=(300, 0), sinks=True)),
    ("float16", (80, 59), dict(causal=True, softcap=3.0, alibi_slopes=True)),
    ("float16", (64, 128), dict(causal=True)),
    ("bfloat16", (256, 256), dict(causal=True)),
    ("bfloat16", (128, 128), dict(dropout_p=0.3, seed=7)),
    ("float32", (128, 128), dict(causal=True, sinks=True)),
    ("float32", (80, 59), {}),
    ("float64", (128, 64), dict(causal=True)),
)


def random_case(number, dtype, dims, options):
    """A testing.Case of sequences of many lengths."""
    g = np.random.default_rng(number)
    heads_kv, group, queries = (int(g.choice(x)) for x in ((1, 2, 4), (1, 3, 4, 8), (1, 2, 4, 7, 16)))
    few = FEW_ROWS if dtype.endswith("float16") else FEW_WIDE_ROWS
    queries = min(queries, few // group)  # with more a contiguous cache is for another kernel
    lengths = g.choice(LENGTHS, int(g.integers(1, 7))).astype(np.int32)
    shapes = ((heads_kv * group, queries, dims[0]), *((heads_kv, int(max(lengths.max(), 1)), dim) for dim in dims))
    made = [testing.strided(g.standard_normal((len(lengths), *shape)), dtype, "plain") for shape in shapes]
    if number % 2:  # neighbours among the chunks that cancel if they are joined first: another order loses the rest
        made[0][...] = 0
        for first in range(0, made[2].shape[2], 1024):
            made[2][:, :, first : first + 256], made[2][:, :, first + 256 : first + 512] = 30000, -30000
    named = dict(options)
    for name in ("sinks", "alibi_slopes"):
        if name in named:
            named[name] = g.standard_normal(heads_kv * group).astype(np.float32) ** 2
    return testing.Case(*made, named | dict(seqlens_k=lengths))


def lay(case, page, seed):
    """The arguments of attention_kvcache: pages in any order, and NaN wherever no key is. page: 0 = contiguous."""
    g, lengths = np.random.default_rng(seed), case.options["seqlens_k"]
    arrays, more = [], {}
    batch, heads, most, _ = case.k.shape
    if page:
        of_each = -(-most // page)
        numbers = g.permutation(batch * of_each + 3)[: batch * of_each].reshape(batch, of_each).astype(np.int32)
        behind = np.arange(of_each)[None] >= -(-lengths // page)[:, None]
        more = dict(page_table=np.where(behind, -1, numbers).astype(np.int32))
    for x in (case.k, case.v):
        rows = x.copy()
        for b, n in enumerate(lengths):
            rows[b, :, n:] = np.nan
        if page:
            cut = np.full((batch, heads, of_each * page, x.shape[3]), np.nan, x.dtype)
            cut[:, :, :most] = rows
            rows = np.full((batch * of_each + 3, heads, page, x.shape[3]), np.nan, x.dtype)
            rows[numbers] = cut.reshape(batch, heads, of_each, page, -1).swapaxes(1, 2)
        arrays.append(rows)
    return dict(q=case.q, k_cache=arrays[0], v_cache=arrays[1], **case.options, **more)


def results(given, kernel, on_gpu):
    moved = {name: on_gpu(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    o, lse = numba_flash.attention_kvcache(**moved, return_lse=True, kernel=kernel)
    return o.get(), lse.get()


def configs_of(given, kernel, on_gpu):
    """The kernels of a call, which is prepared and does not run."""
    found, sequence_of = [], kvcache_on_gpu.sequence_of

    def noted(configs, problem, target):
        found.extend((config, target.cc) for config in configs)
        return sequence_of(configs, problem, target)

    moved = {name: on_gpu(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    with mock.patch.object(kvcache_on_gpu, "sequence_of", noted), mock.patch.object(kvcache, "run", kvcache.prepare):
        numba_flash.attention_kvcache(**moved, return_lse=True, kernel=kernel)
    return found


def same(one, other):
    pairs = zip(one, other, strict=True)
    return all(np.ascontiguousarray(x).tobytes() == np.ascontiguousarray(y).tobytes() for x, y in pairs)


def part(case, b, queries):
    """One sequence, and its last queries."""
    own = {name: x for name, x in case.options.items() if name != "seqlens_k"}
    lengths = case.options["seqlens_k"][b : b + 1]
    return testing.Case(
        case.q[b : b + 1, :, -queries:], case.k[b : b + 1], case.v[b : b + 1], own | dict(seqlens_k=lengths)
    )


def check(kernel, options, tools):
    if kernel != "mma":
        return "mma's kernel alone"
    run, count = functools.partial(results, kernel=kernel, on_gpu=tools.on_gpu), 0
    cases = [
        (number, named, random_case(number * 31 + index, dtype, dims, named), f"{number}, {dtype}, {dims}, {named}")
        for number in range(2 if options.small else 12)
        for index, (dtype, dims, named) in enumerate(GROUPS)
    ]
    jobs = []
    for number, named, case, _ in cases:
        for few in (case, part(case, 0, 1)) if "causal" in named else (case,):
            for page in (PAGES[number % 6], (16, 0)[PAGES[number % 6] == 16]):
                jobs += configs_of(lay(few, page, number), kernel, tools.on_gpu)
    jobs += configs_of(sharing(0)[0], kernel, tools.on_gpu) + configs_of(sharing(0)[1], kernel, tools.on_gpu)
    compile_ahead(jobs)
    if Ahead.only:
        return Ahead.note
    for number, named, case, name in cases:
        page = PAGES[number % 6]
        found = run(lay(case, page, number))
        assert same(found, run(lay(case, page, number))), f"{name}: other bits"
        testing.check(case, *found, name)
        assert same(found, run(lay(case, (16, 0)[page == 16], number))), f"{name}: other bits in other pages"
        causal, dropped = "causal" in named, "dropout_p" in named  # dropout depends on b
        for b in range(0 if dropped else len(case.q)):
            for queries in {case.q.shape[2], 1} if causal else {case.q.shape[2]}:
                alone = run(lay(part(case, b, queries), page, number))
                own = found[0][b : b + 1, :, -queries:], found[1][b : b + 1, :, -queries:]
                assert same(alone, own), f"{name}: sequence {b} alone, {queries} queries"
        count += 1
    for number in range(3 if options.small else 20):
        alone, shared = sharing(number)
        expected = run(alone)
        assert all(same(run(shared), expected) for _ in range(3)), f"{number}: other bits with a shared prefix"
    return f"{count} caches, each twice, in other pages, and each sequence alone; {check_graph(kernel)}"


def sharing(number):
    """Sequences of which some share a prefix: the arguments of attention_kvcache without a word of it, and with it.
    Then every second one has pages of NaN there: they are not read, whatever a tile has. A part has up to 4 chunks."""
    g, page, heads_kv, dim, pages = np.random.default_rng(number), 16, 2, 128, 2048
    groups = g.integers(1, 24, 4)  # with more members than a tile has
    firsts = np.repeat(np.cumsum(groups) - groups, groups).astype(np.int32)
    shared = np.repeat(1024 * g.integers(1, 5, 4), groups).astype(np.int32)
    lengths = (shared + g.integers(1, 700, len(shared))).astype(np.int32)
    table = g.integers(1, pages, (len(shared), LEAST_SHARED // page)).astype(np.int32)  # with less room none is shared
    q = g.standard_normal((len(shared), 8, 1, dim)).astype(np.float16)
    k, v = (g.standard_normal((pages, heads_kv, page, dim)).astype(np.float16) for _ in range(2))
    k[0] = v[0] = np.nan
    for b, first in enumerate(firsts):
        table[b, : shared[b] // page] = table[first, : shared[b] // page]
    read = table.copy()
    for b, first in enumerate(firsts):
        read[b, : shared[b] // page if (b - first) % 2 else 0] = 0
    given = dict(q=q, k_cache=k, v_cache=v, seqlens_k=lengths, causal=True)
    return given | dict(page_table=table), given | dict(page_table=read, prefix_of=firsts, prefix_lens=shared)


def check_graph(kernel):
    """A captured call replays with other lengths and pages, many times: counters are zero behind each."""
    import cupy as cp

    g, batch, heads_kv, page, dim = np.random.default_rng(0), 5, 2, 16, 128
    capacity = 4096 // page
    q = cp.asarray(g.standard_normal((batch, 8, 1, dim)).astype(np.float16))
    k, v = (cp.asarray(g.standard_normal((batch * capacity, heads_kv, page, dim)).astype(np.float16)) for _ in range(2))
    lengths, out = cp.full(batch, 4096, np.int32), cp.empty_like(q)
    table = cp.asarray(g.permutation(batch * capacity).reshape(batch, capacity).astype(np.int32))
    call = dict(seqlens_k=lengths, page_table=table, causal=True, kernel=kernel)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        numba_flash.attention_kvcache(q, k, v, out=out, **call)
        stream.synchronize()
        stream.begin_capture()
        numba_flash.attention_kvcache(q, k, v, out=out, **call)
        graph = stream.end_capture()
    for number in range(20):
        lengths[...] = cp.asarray(g.integers(-1, 4097, batch).astype(np.int32))
        table[...] = cp.asarray(g.permutation(batch * capacity).reshape(batch, capacity).astype(np.int32))
        cp.cuda.Device().synchronize()
        out.fill(7)
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
        eager = numba_flash.attention_kvcache(q, k, v, **call)
        assert same([out.get()], [eager.get()]), f"replay {number} gives other bits for {lengths}"
    return "a graph replays with other lengths and pages"
