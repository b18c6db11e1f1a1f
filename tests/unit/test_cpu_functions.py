"""What the CPU rung promises of a user's function: its arithmetic, its bounds, its code in the cache, all positions."""

import json
import math
import os
import re
import shutil
import subprocess
import sys

import ml_dtypes
import numba
import numpy as np
import pytest
from contracts import backward, forward
from helpers.machines import problem

import numba_flash
from numba_flash import mods, testing
from numba_flash.cpu import cache, forward as cpu_forward, functions, panel, plan as slot
from numba_flash.cpu.vectors import build
from numba_flash.functions import NARROW
from numba_flash.functions.compiled.number_types import BASES, Table
from numba_flash.functions.function import Function
from numba_flash.testing import Case


def scores_of(function, scores, aux=()):
    """What a score_mod makes of each of these scores, by the compiled kernel: lse of queries that see one key."""
    scores = np.asarray(scores).reshape(1, 1, -1, 1)
    one = np.ones((1, 1, 1, 1), scores.dtype)
    given = dict(scale=1.0, score_mod=function, aux=aux, q_offset=0, return_lse=True, kernel="cpu")
    return numba_flash.attention(scores, one, one, **given).lse.reshape(-1)


# Everything from subnormal to infinite, of both signs, and closely where functions change.
def arguments(dtype):
    info, generator = np.finfo(dtype), np.random.default_rng(0)
    wide = 2.0 ** generator.uniform(info.minexp - info.nmant, info.maxexp - 1, 3000)
    near = [
        np.linspace(-1000, 1000, 4001),
        np.linspace(-2, 2, 4001),
        np.linspace(-110, 110, 4001),
        1 + 2.0 ** -np.arange(60),
    ]
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, info.tiny, info.max, -1, -2, info.tiny / 4]
    return np.concatenate([wide, -wide, *near, special]).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["exp", "log", "log1p", "tanh"])
def test_functions_without_calls(name, dtype):
    """Within a few ulp of NumPy's in a wider type, and the same where that is not finite."""
    x = arguments(dtype)
    function = eval(f"lambda s, b, h, i, j: math.{name}(s)", dict(math=math))
    found = scores_of(function, x)
    with np.errstate(all="ignore"):
        expected = getattr(np, name)(x.astype(np.longdouble)).astype(dtype)
    finite = np.isfinite(expected)
    seen = finite | np.isneginf(expected)  # a row of infinite scores has no lse of its own
    assert np.array_equal(np.isneginf(found[seen]), np.isneginf(expected[seen]))
    assert np.isnan(found[np.isnan(expected)]).all()
    ulp = np.maximum(np.spacing(np.abs(expected[finite])), np.finfo(dtype).tiny * np.finfo(dtype).eps)
    assert (
        np.abs(found[finite].astype(np.longdouble) - expected[finite]) <= (2 if dtype == "float32" else 4) * ulp
    ).all()


# Positions that do not fit into the numbers that LLVM is told of, and those that just do.
@pytest.mark.parametrize("offset", [0, -7, NARROW - 40, NARROW + 1, 2**31 - 100, -(2**31) + 1])
@pytest.mark.parametrize("by_array", [False, True])
@pytest.mark.parametrize("seqlen_q", [2, 33])
def test_positions_of_any_size(offset, by_array, seqlen_q):
    def mod(score, b, h, i, j):
        return score + (i - j) % 7 * 0.25 + i // 1000003 % 5

    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((2, 2, n, 4)).astype(np.float32) for n in (seqlen_q, 50, 50))
    q_offset = np.array([offset, 3], np.int32) if by_array else offset
    case = Case(q, k, v, dict(score_mod=mod, mask_mod=lambda b, h, i, j: (i + j) % 3 != 0, q_offset=q_offset))
    o, lse = numba_flash.attention(q, k, v, **case.options, return_lse=True, kernel="cpu")
    testing.check(case, o, lse)


# In a row alone, and in panels.
@pytest.mark.parametrize("seqlen_q", [1, 40])
@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_reads_outside_an_array_raise_with_the_line(kernel, seqlen_q):
    table, segments = np.arange(5, dtype=np.float32)[::-1], np.zeros((1, 5), np.int64)
    q, k = np.zeros((1, 2, seqlen_q, 4), np.float32), np.zeros((1, 2, 7, 4), np.float32)

    def call(q_offset=0, **options):
        numba_flash.attention(q, k, k, **options, q_offset=q_offset, kernel=kernel)

    def by_key(s, b, h, i, j, x):  # a decision, so that the shapes alone do not tell
        return s + x[j] if h < 9 else s

    line = by_key.__code__.co_firstlineno + 1
    with pytest.raises(IndexError, match=rf"by_key \(.*, line {line}\): .*size 5.*row [0-9]+ of q.*, k_pos 5"):
        call(score_mod=by_key, aux=(table,))
    with pytest.raises(IndexError, match="k_pos 5"):
        call(mask_mod=lambda b, h, i, j, x: x[b, j] == 0 if h < 9 else False, aux=(segments,))
    with pytest.raises(IndexError, match=r"q_pos, here -2, is before the array.*\(row 0 of q\)"):
        call(-2, score_mod=lambda s, b, h, i, j, x: s + x[i] if h < 9 else s, aux=(np.zeros(50),))
    with pytest.raises(IndexError, match="k_pos 0"):  # an index from the score
        call(score_mod=lambda s, b, h, i, j, x: x[int(s) + 9], aux=(table,))
    with pytest.raises(IndexError, match="k_pos 0"):
        call(score_mod=lambda s, b, h, i, j, x: s + x[j - 6] if h < 9 else s, aux=(table,))
    for shape in ((0,), (0, 5), (5, 0)):
        index = ", ".join("4" for _ in shape)
        with pytest.raises(IndexError, match="size 0"):
            call(score_mod=eval(f"lambda s, b, h, i, j, x: s + x[{index}]"), aux=(np.zeros(shape, np.float32),))


# A panel calls a function also for keys that something else hides.
@pytest.mark.parametrize("seqlen_q", [3, 40])
def test_reads_outside_an_array_for_what_is_hidden_are_none(seqlen_q):
    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((2, 2, n, 4)).astype(np.float32) for n in (seqlen_q, 50, 50))
    table, keys = generator.standard_normal(8).astype(np.float32), np.arange(50)

    def near(s, b, h, i, j, x):
        return s + x[i - j] if i >= j else s * 2  # a negative index would count from the end

    def at_key(s, b, h, i, j, x):
        return s + x[j] + int(s)

    for options in (
        dict(score_mod=near, window=(7, 0)),
        dict(score_mod=near, mask_mod=lambda b, h, i, j, x: 0 <= i - j < 8),
        dict(score_mod=at_key, mask=np.broadcast_to(keys < 8, (seqlen_q, 50))),
        dict(score_mod=at_key, mask=np.broadcast_to(keys < 9, (seqlen_q, 50)), mask_mod=lambda b, h, i, j, x: j != 8),
        dict(score_mod=at_key, seqlens_k=np.array([8, 3], np.int32)),
        dict(mask_mod=lambda b, h, i, j, x: x[i - j] > 0, window=(7, 0)),
    ):
        case = Case(q, k, v, options | dict(aux=(table,)))
        testing.check(case, *numba_flash.attention(q, k, v, **case.options, return_lse=True, kernel="cpu"))


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_reads_outside_an_array_raise_in_a_backward(kernel):
    q, table = np.zeros((1, 1, 20, 4)), np.zeros(20)
    options = dict(score_mod=lambda s, b, h, i, j, x: s + x[j] if h < 9 else s)
    o, lse = numba_flash.attention(q, q, q, **options, aux=(table,), return_lse=True, kernel="reference")
    for wanted in (("dq",), ("dv",), ("daux[0]",)):
        with pytest.raises(IndexError, match="k_pos 9"):
            numba_flash.attention_backward(
                q, q, q, q, o, lse, **options, aux=(table[:9],), wanted=wanted, kernel=kernel
            )


# Nothing may be written where an array has no elements, whose gradient has none either.
def test_an_array_without_elements_has_a_gradient_without_elements():
    q = np.zeros((1, 2, 20, 4))
    options = dict(score_mod=lambda s, b, h, i, j, x: s + x[h, j] if len(x) else s, aux=(np.zeros((0, 11)),))
    o, lse = numba_flash.attention(q, q, q, **options, return_lse=True)
    found = numba_flash.attention_backward(q, q, q, q, o, lse, **options, wanted=("dq", "daux[0]"))
    assert found.daux[0].shape == (0, 11) and (found.dq == 0).all()
    options["score_mod"] = lambda s, b, h, i, j, x: s + x[h, j]
    with pytest.raises(IndexError, match="size 0"):
        numba_flash.attention_backward(q, q, q, q, o, lse, **options, wanted=("dq", "daux[0]"), kernel="cpu")


@pytest.mark.parametrize("seqlen_q", [3, 40])
@pytest.mark.parametrize(
    "option",
    [dict(mask_mod=lambda b, h, i, j: j != 5), dict(score_mod=lambda s, b, h, i, j: s if j != 5 else -math.inf)],
)
def test_what_one_function_hides_never_reaches_o(option, seqlen_q):
    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((1, 1, n, 4)).astype(np.float32) for n in (seqlen_q, 20, 20))
    clean = numba_flash.attention(q, k, v, **option, kernel="cpu")
    k[:, :, 5] = v[:, :, 5] = np.nan
    assert np.array_equal(numba_flash.attention(q, k, v, **option, kernel="cpu"), clean)


def test_a_row_has_the_bits_that_it_has_in_other_tiles():
    """Alone, in a panel, and beside other batch entries and heads."""

    def mod(score, b, h, i, j, slopes):
        return math.tanh(score) * slopes[h] + math.log1p(abs(i - j)) if j % 2 else math.exp(-score * score)

    generator = np.random.default_rng(1)
    q, k, v = (generator.standard_normal((1, 2, n, 8)).astype(np.float32) for n in (40, 300, 300))
    given = dict(score_mod=mod, aux=(np.array([0.5, -2], np.float32),), causal=True, kernel="cpu")
    whole = numba_flash.attention(q, k, v, **given)
    twice = numba_flash.attention(*(np.concatenate([x, x]) for x in (q, k, v)), **given)
    assert np.array_equal(twice[0], whole[0]) and np.array_equal(twice[1], whole[0])
    part = numba_flash.attention(q[:, :, 7:33], k, v, **given, q_offset=267)
    assert np.array_equal(part, whole[:, :, 7:33])


def test_equal_defaults_keep_their_own_types(tmp_path, monkeypatch):
    """Numba keeps one type for all defaults that it takes for equal: 3.0 of float64 and of float32, 3.0 and 3."""
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(tmp_path))  # what has been compiled before hides it

    def real(s, b, h, i, j, c=3.0):
        return s + c * j

    def whole(s, b, h, i, j, c=3):
        return s + (j & c)

    for dtype in ("float64", "float32"):
        for function in (real, whole):
            functions.make("score_mod", Function.of("score_mod", function), dtype, (), False, False)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_gradients_of_aux_of_every_dtype(threads):
    """Rounded once, with the same bits on any number of threads, and also where an array has no elements."""
    generator = np.random.default_rng(0)
    q, k, v, do = (generator.standard_normal((2, 2, n, 8)).astype(np.float32) for n in (300, 40, 40, 300))
    dtypes = ("float16", "bfloat16", "float32", "float64")
    aux = tuple(generator.standard_normal(7).astype(getattr(ml_dtypes, dtype, dtype)) for dtype in dtypes)

    def mod(s, b, h, i, j, x, y, z, w, nothing):
        return s * x[j % 7] + y[i % 7] + z[h] * w[b]

    options = dict(score_mod=mod, aux=(*aux, np.zeros((0, 3), np.float32)))
    o, lse = numba_flash.attention(q, k, v, **options, return_lse=True, kernel="reference")
    wanted = tuple(f"daux[{number}]" for number in range(5))
    before = numba.get_num_threads()
    numba.set_num_threads(min(threads, before))
    try:
        found, again = (
            numba_flash.attention_backward(do, q, k, v, o, lse, **options, wanted=wanted, kernel="cpu").daux
            for _ in range(2)
        )
    finally:
        numba.set_num_threads(before)
    for one, other, array in zip(found, again, options["aux"], strict=True):
        assert one.dtype == array.dtype and one.shape == array.shape and one.tobytes() == other.tobytes()
    known = KNOWN.setdefault("daux", [x.tobytes() for x in found])
    assert [x.tobytes() for x in found] == known
    # what dS of all scores adds up to, by what each is multiplied with: of y it is the sum over the rows i % 7
    assert np.isclose(float(found[1].astype(np.float64).sum()), 0, atol=0.05)  # dS of a row adds up to 0
    assert np.abs(found[0].astype(np.float64)).max() > 0.1


KNOWN = {}


# What LLVM makes of functions in float32 for a processor that need not be this one, so that nothing is run.
OF_A_TARGET = """
import json, math, sys
import llvmlite.binding as llvm

triple, processor, features = sys.argv[1:]
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
llvm.get_process_triple = lambda: triple
import numba

numba.config.CPU_NAME, numba.config.CPU_FEATURES = processor, features
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature
from numba_flash import mods
from numba_flash.cpu import functions
from numba_flash.cpu.vectors import build
from numba_flash.functions.function import Function

FUNCTIONS = dict(
    log=("score_mod", lambda s, b, h, i, j: s + math.log(max(abs(i - j), 8) / 8), ()),
    large=("score_mod", mods.relative_position(), (("float32", 2),)),
    mask=("mask_mod", mods.causal, ()),
)
found = {}
for name, (option, function, aux) in FUNCTIONS.items():
    body = functions._panel(option, Function.of(option, function), "float32", aux, False, narrow=True)
    made = CFunc(body, normalize_signature(functions.SIGNATURE), locals={}, options=dict(error_model="numpy"))
    made.compile()
    found[name] = made.inspect_llvm()
print(json.dumps((build.VECTOR_BYTES, build.Shape(numba.float32).lanes, found)))
"""
AVX512 = "+avx,+avx2,+fma,+avx512f"
LINUX_X86, LINUX_ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
# For sapphirerapids LLVM prefers vectors of 32 bytes.
TARGETS = {
    "x86-64-v2": (LINUX_X86, "+sse4.2", 16),
    "x86-64-v3": (LINUX_X86, "+avx,+avx2,+fma", 32),
    "x86-64-v4": (LINUX_X86, AVX512, 64),
    "znver4": (LINUX_X86, AVX512, 64),
    "sapphirerapids": (LINUX_X86, AVX512, 64),
    "apple-m1": (LINUX_ARM, "+neon", 16),
    "neoverse-v1": (LINUX_ARM, "+neon", 16),
}


@pytest.mark.slow
@pytest.mark.parametrize("processor", TARGETS)
def test_functions_are_in_vectors_on(processor):
    triple, features, expected = TARGETS[processor]
    command = [sys.executable, "-c", OF_A_TARGET, triple, processor, features]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    vector_bytes, rows, llvm = json.loads(run.stdout)
    assert vector_bytes == expected
    # Vectors are as long as those of scores, though positions are int64 to the function.
    lengths = set(map(int, re.findall(r"fmul[ \w]* <(\d+) x float>", llvm["log"])))
    assert max(lengths) == vector_bytes // 4 and lengths <= {vector_bytes // 4, 4}  # 4: the end of a row alone
    # A loop with a call in it is none that LLVM makes vectors of.
    assert "biased" not in "".join(re.findall(r"call i32 @(\S+)\(", llvm["large"]))
    if vector_bytes == 64:  # what is shorter is for LLVM to weigh
        assert re.search(r"icmp[ \w]* <16 x i\d+>", llvm["large"])
        # It takes a loop over the rows of a panel apart where that makes little code, and makes no vectors then: only
        # where the number of keys is odd, of the last.
        assert len(re.findall(r"store float", llvm["mask"])) <= rows + 1


def test_one_score_that_is_shown_is_found_wherever_it_lies():
    """In a panel that shows nothing else."""
    rows, keys = build.Shape(numba.float32).lanes, 6
    q, k = np.ones((1, 1, rows, 4), np.float32), np.ones((1, 1, keys, 4), np.float32)
    v = np.arange(1, keys * 4 + 1, dtype=np.float32).reshape(k.shape)
    own = Function.of("mask_mod", lambda b, h, i, j, at: i == at[0] and j == at[1])
    for key in range(keys):
        for row in range(rows):
            at = np.array([row, key], np.int32)
            o = numba_flash.attention(q, k, v, q_offset=0, mask_mod=own, aux=(at,), kernel="cpu")
            assert (o[0, 0, row] == v[0, 0, key]).all(), (row, key)
            assert np.count_nonzero(o) == 4, (row, key)


def test_code_of_one_function_is_not_that_of_another():
    """In the disk cache: by all that a function captures, by dtypes, by whether slopes are written."""
    names = set()

    def made(factor):
        return Function.of("score_mod", lambda score, b, h, i, j, x: score * factor + x[j])

    for function in (made(0.5), made(2.0)):
        for aux in ((("float32", 1),), (("int16", 1),)):
            for derivative in (False, True):
                compiled = functions.make("score_mod", function, "float32", aux, derivative, True)
                kept = compiled._cache
                names.add(kept._cache_file.path(kept._index_key(compiled._sig, compiled._library.codegen)))
    assert len(names) == 8


def test_float16_tables_after_a_gpu_kernel_with_such_a_table(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(tmp_path))  # empty, so that the function is compiled here
    of_gpu = Table("float16", numba.types.float16, 1, BASES["float32"])  # Numba keeps one type of each name
    function = Function.of("score_mod", lambda score, b, h, i, j, x: score + x[j])
    assert functions.make("score_mod", function, "float32", (("float16", 1),), False, True).address
    assert of_gpu.element == numba.types.float16


@pytest.mark.slow
def test_a_second_process_takes_it_from_the_cache(tmp_path):
    numba_flash.attention(*(np.ones((1, 1, 9, 4), np.float32),) * 3, kernel="cpu")
    shutil.copytree(cache.entries_folder(), tmp_path / "cpu", ignore=shutil.ignore_patterns("score_mod-*"))
    program = (
        "import numpy as np, numba_flash\n"
        "q = np.ones((1, 1, 9, 4), np.float32)\n"
        "print(numba_flash.attention(q, q, q * q.cumsum(2), score_mod=lambda s, b, h, i, j: s - j)[0, 0, :, 0])"
    )
    environment = dict(os.environ, NUMBA_FLASH_CACHE_DIR=str(tmp_path))
    outputs, written = [], []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        outputs.append(run.stdout)
        entries = list(tmp_path.glob("cpu/score_mod-*.nbc"))
        written.append([path.stat().st_ino for path in entries])  # a use changes the time, a new entry the number
        if len(written) == 1:
            os.link(entries[0], tmp_path / "first")  # so that no other entry gets its number
    assert outputs[0] == outputs[1] and written[0] == written[1] and len(written[0]) == 1


# What mask_mod shows of the keys of a panel; "row": a row alone, whose keys lie along the vector.
@pytest.mark.parametrize("width", ["panel", "row"])
@pytest.mark.parametrize("name", ["nothing", "all", "between", "gaps", "one key"])
def test_keys_that_mask_mod_hides_at_the_ends_are_left_out(name, width):
    shown = {
        "nothing": lambda b, h, i, j: j < 0,
        "all": lambda b, h, i, j: i >= 0,
        "between": lambda b, h, i, j: 13 <= j < 20,
        "gaps": lambda b, h, i, j: i < j < i + 40 and j % 7 != 0,
        "one key": lambda b, h, i, j: j == 11 + i,
    }[name]
    own = Function.of("mask_mod", shown)
    plan = cpu_forward.ready(problem(8, dtype="float32", seqlen=40, seqlen_k=90, heads=1, q_offset=0, mask_mod=own))
    first, end = 10, 77
    rows = 1 if width == "row" else 5
    across = 1 if width == "row" else build.Shape(numba.float32).lanes
    s, places = np.ones(across * (end - first), np.float32), np.zeros(2 * across + slot.OF_PANEL, np.int64)
    pointers = np.zeros(slot.ALL_POINTERS, np.int64)

    @numba.njit
    def of_panel(s, places, plan, pointers):
        of = panel.rows_from(3, rows, across, 0, 0, plan, pointers)
        return panel.shown_keys(s, places, first, end, of, plan, pointers, np.float32(0))

    seen = np.array([[bool(shown(0, 0, i, j)) for j in range(first, end)] for i in range(3, 3 + rows)])
    columns = np.flatnonzero(seen.any(0))
    begin, stop = (first + columns[0], first + columns[-1] + 1) if len(columns) else (first, first)
    hides = not seen[:, begin - first : stop - first].all()
    addresses = s.ctypes.data, places.ctypes.data, plan.numbers.ctypes.data, pointers.ctypes.data
    assert of_panel(*addresses) == (begin, stop, hides)


# Packed sequences, of which a panel sees few keys, with what else a panel may need.
@pytest.mark.parametrize("beside", ["nothing", "causal, cap", "score_mod", "mask, bias", "dropout"])
def test_documents_in_both_directions(beside):
    generator = np.random.default_rng(5)
    options = dict(
        nothing={}, causal=dict(causal=True), score_mod=dict(score_mod=lambda s, b, h, i, j, ids: s * (1 + ids[b, j])),
        mask=dict(mask=generator.random((110, 110)) < 0.7), dropout=dict(dropout_p=0.2, seed=3),
        bias=dict(bias=generator.standard_normal((110, 110)).astype(np.float32)), cap=dict(softcap=2.0),
    )  # fmt: skip
    options = {name: value for part in beside.split(", ") for name, value in options[part].items()}
    options |= dict(mask_mod=mods.document, aux=(np.repeat(np.array([[3, 1, 2, 7]]), [30, 3, 50, 27], axis=1),))
    backward.Rung("cpu").check(forward.problem(110, 110, batch=1, head_dim=8), **options)
    forward.Rung("cpu").check(forward.problem(110, 110, batch=1, head_dim=8), **options)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("seqlen_q", [1, 9])
def test_a_read_outside_is_reported_with_its_head_and_score(dtype, seqlen_q):
    def by_score(score, b, h, q_pos, k_pos, table):
        return score + table[k_pos if score < 2 else k_pos + 100]

    q, k = np.ones((1, 2, seqlen_q, 1), dtype), np.ones((1, 2, 6, 1), dtype)
    k[:, 1, 4] = 3
    aux, where = (np.zeros(6, np.float32),), r"index 104 is out of bounds .*, h 1, q_pos -?\d+ \(row \d of q\), k_pos 4"
    with pytest.raises(IndexError, match=where):
        numba_flash.attention(q, k, k, score_mod=by_score, aux=aux, scale=1.0, kernel="cpu")
