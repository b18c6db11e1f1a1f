"""gpu_check on a caller's own functions: forward and backward, gradients of aux, block_mask, and functions that compute
what an option is."""

import contextlib
import math
import os
import subprocess
import sys
import tempfile
from typing import NamedTuple

import _gpu_backward
import numpy as np

import numba_flash
from numba_flash import mods, testing
from numba_flash.dispatch import backward as dispatch
from numba_flash.select import backward_kernels as select_backward, rungs

# Functions of this file and of mods that other processes find by name. All that take arrays take all of them.
_BY_BUCKET = mods.relative_position(16, 64)


def relative(score, b, h, i, j, table):
    return _BY_BUCKET(score, b, h, i, j, table)


def capped(score, b, h, i, j):
    return 5.0 * math.tanh(score / 5.0)


def dilated(b, h, i, j):
    return (i - j) % 3 == h % 3


def causal(b, h, i, j):
    return j <= i


def sloped(score, b, h, i, j, slopes, segments):
    return score - slopes[h] * abs(i - j)


def of_documents(b, h, i, j, slopes, segments):
    return segments[b, i] == segments[b, j]


def with_everything(score, b, h, i, j, table, slopes, segments):
    """A branch on the score, a loop, and whole numbers that say where to read."""
    y = score - slopes[h] * abs(i - j)
    for n in range(segments[b, j] + 1):
        y = y + 0.5 * table[n, h] * score
    return y if y < 4 else 4 + math.log(y - 3)


def of_segments(b, h, i, j, table, slopes, segments):
    return segments[b, i] == segments[b, j] or (i + j) % 5 == 0


def added(score, b, h, i, j, bias):
    return score + bias[b, h, i - (bias.shape[3] - bias.shape[2]), j]


def segments_of(generator, batch, seqlen):
    """Documents of unequal lengths, some of many tiles."""
    ends = np.sort(generator.integers(0, seqlen, (batch, 3)), axis=1)
    return (np.arange(seqlen)[None, :, None] >= ends[:, None]).sum(2).astype(np.int32)


# {name: (options, of which aux there are gradients)} for a problem of this size; dtype: q's.
def kinds(generator, batch, heads, seqlen_q, seqlen_k, dtype):
    def normal(*shape, dtype=dtype):
        return generator.standard_normal(shape).astype(dtype)

    slopes = generator.random(heads).astype(np.float32)
    segments = segments_of(generator, batch, seqlen_k)
    everything = dict(
        score_mod=with_everything, mask_mod=of_segments, aux=(normal(4, heads), slopes, segments),
        bias=normal(1, heads, seqlen_q, seqlen_k), mask=generator.random((batch, 1, 1, seqlen_k)) < 0.8,
        dropout_p=0.2, seed=7,
    )  # fmt: skip
    return {
        "ALiBi": (dict(score_mod=mods.alibi, aux=(slopes,)), (0,)),
        "tanh": (dict(score_mod=capped), ()),
        "documents": (dict(mask_mod=mods.document, aux=(segments,)), ()),
        "prefix": (dict(mask_mod=mods.prefix_lm, aux=(generator.integers(0, seqlen_k, batch),)), ()),
        "relative table": (dict(score_mod=relative, aux=(normal(16, heads),)), (0,)),
        "dilated": (dict(mask_mod=dilated), ()),
        "everything": (everything, (0, 1)),
    }


# Of each rung, which functions in which dtypes and widths: each is a handful of kernels.
IN_16_BITS = (
    ("ALiBi", "float16", 64), ("tanh", "bfloat16", 128), ("documents", "float16", 128), ("prefix", "bfloat16", 256),
    ("relative table", "bfloat16", 64), ("dilated", "float16", 40), ("everything", "float16", 128),
    ("everything", "bfloat16", 256),
)  # fmt: skip
ROWS = {
    "wgmma": (
        *IN_16_BITS, ("everything", "float32", 64), ("tanh", "float32", 128), ("documents", "float32", 128),
        ("everything", "float32", 192), ("ALiBi", "float32", 256),
    ),
    "mma": (
        *IN_16_BITS[:5], ("everything", "float16", 128), ("everything", "float32", 64), ("everything", "float64", 128),
        ("dilated", "float32", 40), ("documents", "float64", 64), ("ALiBi", "float32", 256),
    ),
    "v2": (
        ("ALiBi", "float32", 64), ("tanh", "float16", 128), ("documents", "float64", 40), ("prefix", "bfloat16", 64),
        ("relative table", "float16", 40), ("everything", "float32", 128), ("dilated", "float32", 256),
    ),
}  # fmt: skip
# (batch, heads, heads_kv, seqlen_q, seqlen_k, options): odd lengths, GQA, causal, a window; the same kernels.
SHAPES = (
    (2, 2, 2, 65, 190, {}),
    (1, 4, 2, 101, 131, dict(causal=True)),
    (1, 2, 1, 130, 257, dict(window=(70, 20))),
)


def problem(number, dtype, head_dim, shape):
    """(Case without functions, a generator for the rest)"""
    batch, heads, heads_kv, seqlen_q, seqlen_k, options = shape
    generator = np.random.default_rng(number)
    q, k, v = (
        testing.rows_padded(generator.standard_normal((batch, *of, head_dim)).astype(dtype))
        for of in ((heads, seqlen_q), (heads_kv, seqlen_k), (heads_kv, seqlen_k))
    )
    return testing.Case(q, k, v, dict(options)), generator


class Problem(NamedTuple):
    case: testing.Case
    wanted_aux: tuple[int, ...] = ()
    judge: testing.Case | None = None  # the same problem with the option in place of the function
    of_option: str = ""  # the gradient that daux[0] is then


def with_functions(kernel, small):
    """{name: Problem}"""
    found: dict[str, Problem] = {}
    for row, (kind, dtype, head_dim) in enumerate(ROWS[kernel][:: 4 if small else 1]):
        for number, shape in enumerate(SHAPES):
            case, generator = problem(100 * row + number, dtype, head_dim, shape)
            of_case = case.q.shape[:2] + (case.q.shape[2], case.k.shape[2])
            options, wanted_aux = kinds(generator, *of_case, dtype)[kind]
            case.options |= options
            found[f"{kind}, {dtype}, head_dim {head_dim}, shape {number}"] = Problem(case, wanted_aux)
    return found


def like_an_option(kernel, small):
    """{name: Problem}: longer ones, because their judges need no Python for each score."""
    found: dict[str, Problem] = {}
    dtype = "float16" if rungs.RUNGS[kernel].tensor_cores else "float32"
    shape = (2, 4, 2, 70, 150, {}) if small else (2, 4, 2, 333, 600, {})
    for number, kind in enumerate(("alibi_slopes", "bias", "softcap", "causal")):
        case, generator = problem(5000 + number, dtype, 64, shape)
        batch, heads, seqlen_q, seqlen_k = (*case.q.shape[:3], case.k.shape[2])
        slopes = generator.random(heads).astype(np.float32)
        bias = generator.standard_normal((batch, heads, seqlen_q, seqlen_k)).astype(np.float32)
        own, option, of_option = {
            "alibi_slopes": (dict(score_mod=mods.alibi, aux=(slopes,)), dict(alibi_slopes=slopes), "dalibi_slopes"),
            "bias": (dict(score_mod=added, aux=(bias,)), dict(bias=bias), "dbias"),
            "softcap": (dict(score_mod=capped), dict(softcap=5.0), ""),
            "causal": (dict(mask_mod=causal), dict(causal=True), ""),
        }[kind]
        judge = testing.Case(case.q, case.k, case.v, case.options | option)
        case.options |= own
        found[f"a function that is {kind}="] = Problem(case, (0,) if of_option else (), judge, of_option)
    return found


@contextlib.contextmanager
def whole_tiles():
    """With the tiles of wgmma's backward that it takes where there is enough to do for all multiprocessors."""
    kept = select_backward._halved
    select_backward._halved = lambda config, problem, target: config
    try:
        select_backward.configs_of.cache_clear()
        dispatch._plans.clear()
        yield
    finally:
        select_backward._halved = kept
        select_backward.configs_of.cache_clear()
        dispatch._plans.clear()


def check(kernel, options, tools):
    """All of this file on one rung."""
    if kernel not in ROWS:
        return "no functions in its backward"
    every = with_functions(kernel, options.small) | like_an_option(kernel, options.small)
    wanted_aux = {name: each.wanted_aux for name, each in every.items()}
    judges = {name: (each.judge, each.of_option) for name, each in every.items() if each.judge is not None}
    cases = {name: each.case for name, each in every.items()}
    notes = [tools.compare(cases, kernel, judges={name: judge for name, (judge, _) in judges.items()})]
    parts = [cases]
    if kernel == "wgmma":  # its backward is in 16 bits; a third in whole tiles
        with_backward = {name: case for name, case in cases.items() if case.q.dtype.itemsize == 2}
        whole = dict(list(with_backward.items())[2::3])
        parts = [{name: case for name, case in with_backward.items() if name not in whole}, whole]
    for number, part in enumerate(parts):
        with whole_tiles() if number else contextlib.nullcontext():
            found = _gpu_backward.compare(part, kernel, tools.on_gpu, wanted_aux=wanted_aux, judges=judges)
        notes.append(f"backward: {found}")
    return "; ".join(notes)


def check_graph(kernel, options, tools):
    """Forward and backward with functions, captured in one graph and replayed with other contents of aux: which tiles
    are empty is found anew in each replay."""
    import cupy as cp

    if kernel not in ROWS:
        return "no functions in its backward"
    generator, dtype = np.random.default_rng(0), "float16" if rungs.RUNGS[kernel].tensor_cores else "float32"
    q, k, v, do = (cp.asarray(generator.standard_normal((2, 2, 300, 64)).astype(dtype)) for _ in range(4))
    aux = tuple(map(cp.asarray, (generator.random(2).astype(np.float32), segments_of(generator, 2, 300))))
    own = dict(score_mod=sloped, mask_mod=of_documents, aux=aux, kernel=kernel)

    def step():
        o, lse = numba_flash.attention(q, k, v, **own, return_lse=True)
        made = numba_flash.attention_backward(do, q, k, v, o, lse, **own, wanted=("dq", "dk", "dv", "daux[0]"))
        return o, *made[:3], made.daux[0]

    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        step()  # everything is loaded, and memory for the workspace in the pool
        stream.synchronize()
        stream.begin_capture()
        captured = step()
        graph = stream.end_capture()
    for seed in (1, 2):
        other = np.random.default_rng(seed)
        for array, values in zip(aux, (other.random(2), segments_of(other, 2, 300)), strict=True):
            array[...] = cp.asarray(values)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert all(bool((x == y).all()) for x, y in zip(captured, step(), strict=True))
    return "captured once, replayed twice with other slopes and documents"


FIRST_CALL = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import time, cupy as cp, cuda.core
from numba_flash import attention

def damped(score, b, h, q_pos, k_pos):
    return score / (1.0 + 0.01 * abs(q_pos - k_pos))

q = cp.ones((1, 1, 64, 64), DTYPE)
start = time.perf_counter()
attention(q, q, q, score_mod=damped, kernel=KERNEL)
cp.cuda.Device().synchronize()
print(time.perf_counter() - start)
"""


def check_first_call(kernel, options, tools):
    """A fresh process on one core calls with a function of its own: with no disk cache, then with one."""
    if kernel not in ROWS:
        return "no functions in its backward"
    dtype = "float16" if rungs.RUNGS[kernel].tensor_cores else "float32"
    program = FIRST_CALL.replace("DTYPE", repr(dtype)).replace("KERNEL", repr(kernel))
    with tempfile.TemporaryDirectory() as folder:
        places = dict(NUMBA_FLASH_CACHE_DIR=folder, CUDA_CACHE_PATH=folder, PYTHONPATH=os.pathsep.join(sys.path))
        seconds = []
        for _ in range(2 if options.small else 4):
            done = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | places, check=True
            )
            seconds.append(float(done.stdout))
    return (
        f"cold {seconds[0]:.1f} s, cached {1e3 * min(seconds[1:]):.0f} ms, on one core, behind the imports of CuPy, "
        "cuda.core and numba_flash"
    )
