"""gpu_check on gradients: random and adversarial problems, graphs, families, memory; for each rung with a backward."""

import contextlib
import dataclasses
import gc
import importlib
import time

import numpy as np
from _gpu import Ahead, by_block_mask, compile_ahead, jobs, pool

import numba_flash
from numba_flash import testing
from numba_flash.api import backward as gradients
from numba_flash.api.backward import AttentionGradients
from numba_flash.dispatch import backward as dispatch, launch
from numba_flash.problem.options import OPTIONS, daux_name
from numba_flash.select import backward_kernels as select_backward, rungs
from numba_flash.testing import exact as testing_exact

BAND, PATTERN = 4096, 0x5A  # bytes before and behind everything that a backward allocates, and what they hold


class Guarded:
    """CuPy's allocator with a band of a pattern around each piece: attention_backward makes its outputs itself."""

    def __init__(self):
        self.pieces = []

    def __call__(self, size):
        import cupy as cp

        memory = cp.get_default_memory_pool().malloc(size + 2 * BAND)
        whole = cp.ndarray((size + 2 * BAND,), cp.uint8, memory)
        whole.fill(PATTERN)
        self.pieces.append((whole, size))
        return memory + BAND

    def check(self):
        for whole, size in self.pieces:
            for band in (whole[:BAND], whole[BAND + size :]):
                assert bool((band == PATTERN).all()), "something was written outside of a gradient or the workspace"


def wanted(case, kernel, aux=()):
    """Every gradient that the case has and the kernel makes, and those of these of aux."""
    every = (*testing.gradients_of(case), *map(daux_name, aux))
    return tuple(name for name in every if not rungs.RUNGS[kernel].tensor_cores or name != "dalibi_slopes")


def check_in_a_process(case, found, given, kernel):
    try:
        testing.check_gradients(case, found, *given, kernel)
    except AssertionError as error:
        return str(error)
    return None


def like_results(arguments, kernel):
    """Arrays that nothing is in, of the shapes and dtypes of a forward's results."""
    import cupy as cp

    problem = numba_flash.explain(**arguments, return_lse=True, kernel=kernel).problem
    o = cp.empty(problem.o_shape, arguments["q"].dtype)
    return o, cp.empty(problem.lse_shape, problem.compute_dtype)


def arrays_of(made):
    """All gradients of a call, those of aux behind the others."""
    return [*made[:-1], *(made.daux or ())]


def compare(cases, kernel, on_gpu, say=None, wanted_aux=(), judges=()):
    """Each case twice, for equal bits, into guarded memory, from the o and lse of the same kernel's forward; the second
    time by a block_mask, if it has a mask_mod.

    wanted_aux: {name of a case: of which aux there are gradients}. judges: {name of a case: (another case with the same
    results, the name that the gradient of aux[0] has there)}.
    """
    import cupy as cp

    start, calls, refused = time.perf_counter(), {}, []
    moved = {name: case.arguments(on_gpu) for name, case in cases.items()}
    compile_ahead(each for arguments in moved.values() for each in jobs(arguments, kernel, return_lse=True))
    for number, (name, case) in enumerate(cases.items()):
        tensor, arguments = rungs.RUNGS[kernel].tensor_cores, moved.pop(name)
        do, dlse = testing.outer_gradients(case, number, strange_strides=not tensor)
        do = testing.rows_padded(do) if tensor and not (kernel == "mma" and number % 3 == 0) else do
        asked = wanted(case, kernel, dict(wanted_aux).get(name, ()))
        options = dict(wanted=asked, kernel=kernel, dlse=on_gpu(dlse) if number % 2 else None)
        try:
            if Ahead.only:  # arrays of these shapes are enough
                o, lse = like_results(arguments, kernel)
            else:
                o, lse = numba_flash.attention(**arguments, kernel=kernel, return_lse=True)
            arguments |= dict(do=on_gpu(do), o=o, lse=lse) | options
            plan = gradients.prepare_call(arguments)[1]
        except NotImplementedError as error:
            assert any(
                reason in str(error)
                for reason in ("head_dim up to", "backward takes no", "gradients are of", "gradients take")
            ), error
            refused.append(name)
            continue
        calls[name] = case, arguments, (do, dlse if number % 2 else None), plan
    compile_ahead((config, each[3].target.cc) for each in calls.values() for config in each[3].choice.configs)
    if Ahead.only:
        return Ahead.note
    compiled, checks, failures = time.perf_counter(), {}, []
    for number, (name, (case, arguments, (do, dlse), plan)) in enumerate(calls.items()):
        results = []
        try:
            for call in (arguments, by_block_mask(arguments, plan.problem.forward)):
                guarded = Guarded()
                with cp.cuda.using_allocator(guarded):
                    results.append(numba_flash.attention_backward(**call))
                guarded.check()
            for one, other in zip(*map(arrays_of, results), strict=True):
                assert one is None or one.tobytes() == other.tobytes(), "two equal calls gave different bits"
        except AssertionError as error:
            failures.append(f"{name}: {error}, in {case}")
            continue
        except Exception:  # what a launch left behind: nothing works from here on
            print(f"      stopped in {name}, {case}", flush=True)
            raise
        own = len(results[0]) - 1
        got = [x if x is None else x.get() for x in arrays_of(results[0])]
        found, judge = AttentionGradients(*got[:own], daux=tuple(got[own:])), case
        if name in judges:
            judge, of_option = judges[name]
            found = found._replace(daux=(), **{of_option: got[own]} if of_option else {})
        given = do, arguments["o"].get(), arguments["lse"].get(), dlse
        checks[name] = pool().submit(check_in_a_process, judge, found, given, kernel)
        if say is not None and number % 100 == 99:
            say(number + 1, len(calls))
    failures += [f"{name}: {check.result()}" for name, check in checks.items() if check.result()]
    for failure in failures[:10]:
        print("     ", failure, flush=True)
    assert not failures, f"{len(failures)} of {len(calls)} problems failed"
    note = f", {len(refused)} that it does not take" if refused else ""
    return (
        f"{len(calls)} problems in {time.perf_counter() - compiled:.0f} s, prepared in {compiled - start:.0f} s{note}"
    )


def check_backward(kernel, options, tools):
    """Random problems of the forward's groups, then adversarial ones."""
    if not rungs.RUNGS[kernel].has_backward:
        return "no backward yet"
    if options.case:
        numbers = [tuple(map(int, options.case.split(":")))]
    else:
        every = tools.groups_with(kernel, options)
        numbers = [(every[n % len(every)], n // len(every)) for n in range(options.problems // 3)]
    cases = {
        f"scripts/gpu_check --only backward --kernels {kernel} --case {group}:{number}"
        + (" --small" if options.small else ""): tools.random_case(kernel, options.small, group, number)
        for group, number in numbers
    }
    start = time.perf_counter()

    def say(done, count):
        print(f"     {done} of {count} random problems, {time.perf_counter() - start:.0f} s", flush=True)

    random = compare(cases, kernel, tools.on_gpu, say)
    if options.case:
        return random
    hard = {
        f"adversarial {number}": case for number, case in enumerate(adversarial(kernel, options.small, tools.takes))
    }
    return f"{random}; adversarial: {compare(hard, kernel, tools.on_gpu)}"


def in_pairs(problem, one_kernel):
    """heads_per_block: two of three query heads of a KV head, or of more."""
    return 2 if problem.forward.heads > 2 * problem.forward.heads_kv else 0


def stays_anyhow(problem, target, members, key_tiles, chosen=select_backward.blocks_stay):
    """blocks_stay, as on a GPU that has not room for two blocks at a time."""
    return chosen(problem, dataclasses.replace(target, multiprocessors=1), members, key_tiles)


@contextlib.contextmanager
def one_kernel_where_possible(few_blocks=False):
    """With the kernel for all gradients also where it is the slower form, as with all that is small; and on wgmma
    groups of three heads and more in parts of two. few_blocks: of wgmma's blocks that can stay there are three, so that
    each takes many tiles."""
    stay = {
        (select_backward, "blocks_stay"): stays_anyhow,
        (launch, "blocks_at_a_time"): lambda target: 3,
    }
    instead = (stay if few_blocks else {}) | {
        (select_backward, "gains_by_one_kernel"): lambda problem, target: True,
        (select_backward, "heads_per_block"): in_pairs,
        (select_backward, "gains_by_mma_fused"): lambda problem: True,
    }
    kept = {(module, name): getattr(module, name) for module, name in instead}

    def use(functions):
        for (module, name), function in functions.items():
            setattr(module, name, function)
        select_backward.configs_of.cache_clear()
        dispatch._plans.clear()

    try:
        use(instead)
        yield
    finally:
        use(kept)


def can_be_one_kernel(kernel, case):
    """Whether nothing in it makes select take two kernels."""
    used = [option for option in OPTIONS if option.name in case.options]
    if kernel == "mma":
        return str(case.q.dtype) in ("float32", "float64") and not any(option.per_score for option in used)
    two = any(option.function or option.name in ("softcap", "alibi_slopes") for option in used)
    return max(case.q.shape[3], case.v.shape[3]) <= 128 and not two


def check_one_kernel(kernel, options, tools):
    """The problems that a kernel for all gradients can take: random ones; on wgmma adversarial ones, whole numbers, the
    same bits again and again, too. mma has one in float32 and float64."""
    if kernel not in ("mma", "wgmma"):
        return "it has none"
    every, cases, number = tools.groups_with(kernel, options), {}, 0
    while len(cases) < options.problems // 6 and number < 10 * options.problems:
        group = every[number % len(every)]
        case = tools.random_case(kernel, options.small, group, number // len(every))
        if can_be_one_kernel(kernel, case):
            cases[f"one kernel, {group}:{number // len(every)}"] = case
        number += 1
    found = []
    if kernel == "wgmma":
        with one_kernel_where_possible(few_blocks=True):
            found.append(f"three blocks: {compare(cases, kernel, tools.on_gpu)}")
    with one_kernel_where_possible():
        found.append(compare(cases, kernel, tools.on_gpu))
        if not options.case and kernel == "wgmma":
            every = enumerate(adversarial(kernel, options.small, tools.takes))
            hard = {f"adversarial {n}": case for n, case in every if can_be_one_kernel(kernel, case)}
            found.append(f"adversarial: {compare(hard, kernel, tools.on_gpu)}")
            found.append(f"whole numbers: {check_whole_numbers(kernel, options, tools)}")
            found.append(f"repeats: {check_repeats(kernel, options, tools)}")
    return "; ".join(found)


def check_whole_numbers(kernel, options, tools):
    """Problems whose products are exact, compared bit by bit; for tensor cores every width whose tiles differ."""
    import cupy as cp

    if not rungs.RUNGS[kernel].has_backward:
        return "no backward yet"
    tensor = rungs.RUNGS[kernel].tensor_cores
    dims = ((24, 40), (64, 64), (80, 96), (128, 128), (128, 64), (192, 128), (192, 192), (256, 256), (250, 40))
    every = [
        (dtype, dim, seqlens, heads, causal)
        for dtype in (("float16", "bfloat16") if tensor else ("float32",))
        for dim in (dims if tensor else dims[:2])
        for seqlens in ((100, 130), (600, 600), (257, 1000))
        for heads in ((2, 2), (6, 2))
        for causal in (False, True)
    ]
    every = every[:: 9 if options.small else 1]
    calls, wrong = [], []
    for number, (dtype, (dim, dim_v), seqlens, (heads, heads_kv), causal) in enumerate(every):
        case, given, right = testing_exact.whole_problem(
            number, dtype, *seqlens, heads=heads, heads_kv=heads_kv, head_dim=dim, head_dim_v=dim_v, causal=causal
        )
        do, o, lse = map(tools.on_gpu, given)
        arguments = case.arguments(tools.on_gpu) | dict(do=do, o=o, lse=lse, kernel=kernel)
        calls.append((arguments, right, gradients.prepare_call(arguments)[1]))
    compile_ahead((config, made.target.cc) for *_, made in calls for config in made.choice.configs)
    if Ahead.only:
        return Ahead.note
    for number, (arguments, right, _) in enumerate(calls):
        found = numba_flash.attention_backward(**arguments)
        for name in ("dq", "dk", "dv"):
            got, exact = cp.asnumpy(getattr(found, name)), getattr(right, name)
            if got.tobytes() != exact.tobytes():
                wrong.append(f"{every[number]}: {int((got != exact).sum())} of {exact.size} elements of {name}")
    for words in wrong[:10]:
        print("     ", words, flush=True)
    assert not wrong, f"{len(wrong)} gradients of {len(every)} problems are not exact"
    return f"{len(every)} problems"


def check_repeats(kernel, options, tools):
    """The same bits a thousand times, beside a stream that keeps the GPU busy now and then."""
    import cupy as cp

    if not rungs.RUNGS[kernel].has_backward:
        return "no backward yet"
    if Ahead.only:
        return Ahead.note
    repeats, dtype = 10 if options.small else 1000, "float16" if rungs.RUNGS[kernel].tensor_cores else "float32"
    busy, big = cp.cuda.Stream(non_blocking=True), cp.ones((2048, 2048), cp.float32)
    g = np.random.default_rng(5)
    long, short = ((8, 700), (2, 900)), ((32, 200), (32, 304))  # short: wgmma's blocks have all keys of heads
    cases = [(64, True, False, long), (128, False, False, long), (128, True, False, long)]
    cases += [(64, False, True, short), (64, True, True, long), (128, True, True, short)]
    for dim, causal, biased, (queries, keys) in cases if dtype == "float16" else cases[:1]:
        shapes = queries, keys, keys
        q, k, v = (cp.asarray(g.standard_normal((2, *shape, dim)).astype(dtype)) for shape in shapes)
        do = cp.asarray(g.standard_normal(q.shape).astype(dtype))
        options, wanted = dict(causal=causal, kernel=kernel), ("dq", "dk", "dv", *["dbias"] * biased)
        if biased:  # of all batch entries; TMA can load its rows, or they are copied first
            columns = keys[1] - 3 * causal
            options["bias"] = cp.asarray(g.standard_normal((queries[0], queries[1], columns)).astype(dtype))
            k, v = k[:, :, :columns], v[:, :, :columns]
        o, lse = numba_flash.attention(q, k, v, **options, return_lse=True)
        first = None
        for number in range(repeats):
            if number % 7 == 0:
                with busy:
                    big @ big
            made = numba_flash.attention_backward(do, q, k, v, o, lse, wanted=wanted, **options)
            made = [x for x in arrays_of(made) if x is not None]
            first = first or made
            assert all(bool((x == y).all()) for x, y in zip(first, made, strict=True)), f"repeat {number}: other bits"
    return f"{repeats} times each"


def adversarial(kernel, small, takes):
    """lse at and beyond both ends of exp, one key that takes all, rows and tiles that see nothing, NaN where nothing
    looks, groups of heads, lengths around tiles; in each dtype that `takes(kernel, dtype)`."""
    g = np.random.default_rng(8)
    dtypes = [dtype for dtype in testing.DTYPES if takes(kernel, dtype)]
    for dtype in dtypes[:1] if small else dtypes:

        def case(seqlen_q, seqlen_k, heads=2, heads_kv=1, batch=1, size=1.0, dim=16, dtype=dtype, **options):
            shapes = ((heads, seqlen_q), (heads_kv, seqlen_k), (heads_kv, seqlen_k))
            arrays = (g.standard_normal((batch, *shape, dim)) * size for shape in shapes)
            return testing.Case(*(x.astype(dtype) for x in arrays), options)

        for level in (-3000, -89, 89, 3000):
            for options in ({}, dict(causal=True, q_offset=-3)):
                made = case(70, 150, scale=1.0, **options)
                made.q[..., 0], made.k[..., 0] = 16, level / 16
                yield made
        yield case(65, 130, size=30.0)
        yield case(65, 130, size=1e-3)
        for window, q_offset in (((3, 0), 100), ((0, 0), -30), ((200, 200), 5), ((1, 1), 400)):
            yield case(150, 260, window=window, q_offset=q_offset)
        for seqlen in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129):
            yield case(seqlen, 130 - seqlen, heads=6, heads_kv=2, causal=True)
        padded = case(40, 190, batch=2, seqlens_k=np.array([190, 33], np.int32), q_offset=0)
        padded.k[1, :, 33:], padded.v[1, :, 33:] = np.inf, np.nan
        yield padded
        empty = case(40, 190, batch=2, seqlens_k=np.array([0, 190], np.int32), causal=True)
        empty.k[0], empty.v[0], empty.q[0] = np.nan, np.nan, np.nan
        yield empty
        for position in (0, 40, 64, 127):  # seen by the rows from there on; in the first tile and in others
            nonfinite = case(150, 150, heads=4, heads_kv=2, causal=True, q_offset=0)
            nonfinite.v[:, :, position] = np.nan
            yield nonfinite
            nonfinite = case(150, 150, heads=4, heads_kv=2, window=(9, 3), q_offset=0)
            nonfinite.q[:, :, position] = np.nan
            yield nonfinite
        mask = g.random((2, 1, 40, 190)) < 0.5
        mask[:, :, :, 17], mask[1, :, 5], mask[0, :, :, 64:128] = False, False, False
        masked = case(40, 190, batch=2, mask=mask, softcap=2.0, bias=g.standard_normal((40, 1)).astype("float32"))
        masked.k[:, :, 17], masked.v[:, :, 17] = np.nan, np.inf
        yield masked


def check_graph(kernel, options, tools):
    """Forward and backward captured in one graph, and replayed with other inputs."""
    import cupy as cp

    if not rungs.RUNGS[kernel].has_backward:
        return "no backward yet"
    g, dtype = np.random.default_rng(0), "float16" if rungs.RUNGS[kernel].tensor_cores else "float32"
    q, k, v, do = (cp.asarray(g.standard_normal((1, 2, 100, 32)).astype(dtype)) for _ in range(4))

    def step():
        o, lse = numba_flash.attention(q, k, v, causal=True, return_lse=True, kernel=kernel)
        return numba_flash.attention_backward(do, q, k, v, o, lse, causal=True, kernel=kernel)[:3]

    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        step()  # everything is loaded, and memory for the workspace in the pool
        stream.synchronize()
        stream.begin_capture()
        captured = step()
        graph = stream.end_capture()
    for seed in (1, 2):
        for array in (q, do):
            array[...] = cp.asarray(np.random.default_rng(seed).standard_normal(q.shape).astype(dtype))
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert all(bool((x == y).all()) for x, y in zip(captured, step(), strict=True))
    return "captured once, replayed twice with other inputs"


def check_families(kernel, options, tools):
    """Each kind of array comes in as it is, and its gradients are of the same kind."""
    import cupy as cp
    from numba import cuda

    if not rungs.RUNGS[kernel].has_backward:
        return "no backward yet"
    dtype = "float16" if rungs.RUNGS[kernel].tensor_cores else "float32"
    case = testing.Case(*(np.random.default_rng(i).standard_normal((1, 2, 50, 16)).astype(dtype) for i in range(3)))
    do, dlse = testing.outer_gradients(case, 0)
    movers = {"cupy": (cp.asarray, cp.asnumpy), "numba": (cuda.to_device, lambda x: x.copy_to_host())}
    for name in ("torch", "jax"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if name == "torch":
            movers[name] = lambda x, m=module: m.from_numpy(x).cuda(), lambda x: x.cpu().numpy()
        else:
            movers[name] = lambda x, m=module: m.device_put(x, m.devices()[0]), np.asarray
    for name, (move, back) in movers.items():
        arguments = case.arguments(move)
        o, lse = numba_flash.attention(**arguments, kernel=kernel, return_lse=True)
        made = numba_flash.attention_backward(
            move(do), **arguments, o=o, lse=lse, dlse=move(dlse), kernel=kernel, wanted=("dq", "dk", "dv")
        )
        assert all(x is None or isinstance(x, type(arguments["q"])) for x in made), name
        found = AttentionGradients(*(x if x is None else back(x) for x in made))
        testing.check_gradients(case, found, do, back(o), back(lse), dlse, f"{kernel}, {name}")
    return ", ".join(movers)


def check_memory(kernel, options, tools):
    """A thousand calls leave nothing behind. One takes the gradients and the workspace that explain_backward states,
    which grows linearly with the length."""
    import cupy as cp

    if not rungs.RUNGS[kernel].has_backward:
        return "no backward yet"
    dtype, memory = "float16" if rungs.RUNGS[kernel].tensor_cores else "float32", cp.get_default_memory_pool()

    def grown(seqlen, repeats):
        q, k, v, do = (cp.ones((1, 2, seqlen, 64), dtype) for _ in range(4))
        o, lse = numba_flash.attention(q, k, v, kernel=kernel, return_lse=True)
        gc.collect()  # what other checks have left
        memory.free_all_blocks()
        before = memory.used_bytes(), memory.total_bytes()
        for _ in range(repeats):
            made = numba_flash.attention_backward(do, q, k, v, o, lse, kernel=kernel)
        taken = memory.total_bytes() - before[1]
        del made
        assert memory.used_bytes() == before[0], (memory.used_bytes(), before[0])
        explained = numba_flash.explain_backward(do, q, k, v, o, lse, kernel=kernel)
        return taken, 3 * q.nbytes, launch.workspace_bytes(explained.configs, explained.problem)

    grown(64, 10 if options.small else 1000)
    if options.small:
        return "10 calls"
    seqlen = 32768
    taken, of_gradients, workspace = grown(seqlen, 1)
    _, _, of_half = grown(seqlen // 2, 1)
    # CuPy rounds each array up, and may have room for a small one.
    assert taken <= of_gradients + workspace + 16 * 512, (taken, of_gradients, workspace)
    assert workspace <= 2 * of_half, (workspace, of_half)
    gradients, beside = (f"{x / 2**20:.0f} MiB" for x in (of_gradients, workspace))
    return f"seqlen {seqlen}: {beside} beside gradients of {gradients}"
