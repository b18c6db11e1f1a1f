"""explain, explain_backward: they say what a call would do, in data and in words, and do nothing."""

import re

import numpy as np
import pytest
from contracts.forward import problem
from helpers import machines

import numba_flash
from numba_flash.api import estimates
from numba_flash.api.explain import Explanation, _duration, _refused
from numba_flash.api.measured import CALL_MICROSECONDS, CPU_GFLOPS, TFLOPS
from numba_flash.select import forward as select, rungs


def explain(case, **options):
    return numba_flash.explain(**case.arguments(), **options)


def test_it_names_the_kernel_and_why_not_the_others():
    explanation = explain(problem())
    assert explanation.kernel == "cpu" and explanation.config is None and explanation.blocks == 0
    assert not explanation.copies
    assert {name for name, _ in explanation.refused} == set(rungs.RUNGS) - {"cpu"}
    for name, reason in explanation.refused:
        (line,) = (line for line in str(explanation).splitlines() if line.startswith("  not ") and repr(name) in line)
        assert line.endswith(f": {reason}")


def test_a_reason_that_several_kernels_share_is_said_once():
    refused = (("reference", "holds all scores"), *((name, "no GPU") for name in ("v1", "v2", "mma", "wgmma")))
    found = _refused(refused)
    assert found == [("not 'reference'", "holds all scores"), ("not 'v1', 'v2', 'mma', 'wgmma'", "no GPU")]


def test_the_words_say_what_is_computed():
    text = str(explain(problem(dtype="float16"), window=(5, None), causal=True, scale=0.25, kernel="reference"))
    for fragment in (
        "kernel 'reference' on the CPU", "batch 2", "heads 2 over 1", "20 x 30", "head_dim 4 and 4", "float16",
        "scale 0.25", "5 before, 0 after", "i + 10",
    ):  # fmt: skip
        assert fragment in text, text
    assert "all before, all after" in str(explain(problem()))
    lengths = np.array([3, 4], np.int32)
    assert "seqlens_k[b] - 20" in str(explain(problem(), seqlens_k=lengths))
    assert "q_offset[b]" in str(explain(problem(), q_offset=lengths))
    assert "where mask" in str(explain(problem(), mask=np.ones((20, 30), bool)))


def test_it_takes_what_attention_takes_and_runs_nothing():
    case = problem()
    out = np.full(case.q.shape, np.nan, np.float32)
    explanation = explain(case, out=out, kernel="cpu")
    assert np.isnan(out).all()
    assert explanation.problem.o_shape == out.shape
    assert explanation.problem == explain(case).problem


def test_it_takes_what_attention_kvcache_takes():
    k, lengths = np.zeros((10, 2, 16, 8), np.float32), np.array([5, 20], np.int32)
    given = dict(k_cache=k, v_cache=k, seqlens_k=lengths, page_table=np.arange(6, dtype=np.int32).reshape(2, 3))
    explanation = numba_flash.explain(np.zeros((2, 8, 1, 8), np.float32), **given, causal=True, window=(30, 0))
    assert explanation.kernel == "cpu" and explanation.problem.left == 30
    assert "  cache: 10 pages of 16 keys, up to 48 keys of a sequence" in str(explanation).splitlines()
    with pytest.raises(TypeError, match=r"attention_kvcache\(\) missing a required argument: 'seqlens_k'"):
        numba_flash.explain(k, k_cache=k, v_cache=k)
    with pytest.raises(TypeError, match="causal must be"):
        numba_flash.explain(np.zeros((2, 8, 1, 8), np.float32), **given, causal=3)


def test_it_allocates_nothing_of_the_problems_size():
    huge = np.broadcast_to(np.float32(0), (1, 1, 2**30, 128))
    explanation = numba_flash.explain(huge, huge, huge)
    assert explanation.problem.seqlen_q == 2**30


def test_a_backward_is_explained():
    case = problem(bias=np.zeros((20, 30), np.float32))
    o, lse = numba_flash.attention(**case.arguments(), return_lse=True)
    explanation = numba_flash.explain_backward(o, o=o, lse=lse, **case.arguments(), wanted=("dk", "dbias"), causal=True)
    assert explanation.kernel == "cpu" and explanation.configs == explanation.blocks == ()
    assert {name for name, _ in explanation.refused} == set(rungs.RUNGS) - {"cpu"}
    for fragment in ("kernel 'cpu' on the CPU", "20 x 30", "all before, 0 after", "gradients: dk, dbias", "'v1', 'v2'"):
        assert fragment in str(explanation), explanation
    with pytest.raises(ValueError, match="wanted names dalibi_slopes"):
        numba_flash.explain_backward(o, o=o, lse=lse, **case.arguments(), wanted=("dalibi_slopes",))


def test_it_is_read_as_it_stands_in_a_repl_and_in_a_notebook():
    explanation = explain(problem(), kernel="reference")
    assert repr(explanation) == str(explanation)
    page = explanation._repr_html_()
    assert [re.sub("<.*?>", "", row) for row in re.findall("<tr>(.*?)</tr>", page)]
    for name, text in explanation.facts():
        assert f"<th>{name}</th>".replace("'", "&#x27;") in page and text.replace("'", "&#x27;") in page
    hostile = Explanation("<b>", None, explanation.problem, explanation.target, 0, False, (("x", "<script>"),))
    assert "<script>" not in hostile._repr_html_() and hostile._repr_html_().count("<b>") == 1


# Time and cost. The speeds themselves are results_to_docs's; here it is what is made of them.


def of(target, kernel="auto", **options):
    asked = machines.problem(**options)
    return Explanation.of(asked, target, select.select(asked, target, kernel, "cupy"))


def mask(seqlen):
    return machines.empty(1, 1, seqlen, seqlen, dtype="bool", strides=(0, 0, 0, 0))


def bias(seqlen, dtype="float16"):
    return machines.empty(1, 1, seqlen, seqlen, dtype=dtype, strides=(0, 0, 0, 0))


def test_time_of_a_large_problem_is_its_products_over_what_was_measured():
    seconds = of(machines.HOPPER, heads=64, seqlen=8192, head_dim=128).seconds
    assert seconds == pytest.approx(4 * 64 * 8192**2 * 128 / (TFLOPS["wgmma"][128] * 1e12))
    causal = of(machines.HOPPER, heads=64, seqlen=8192, head_dim=128, causal=True).seconds
    assert causal == pytest.approx(seconds / 2, rel=0.02)
    window = of(machines.HOPPER, heads=64, seqlen=8192, head_dim=128, causal=True, window=(1023, 0)).seconds
    assert window == pytest.approx(seconds / 8, rel=0.1)


def test_a_problem_that_fills_a_part_of_the_gpu_takes_as_long_as_one_that_fills_more():
    one, many = (of(machines.HOPPER, "v2", heads=heads, seqlen=256, dtype="float32").seconds for heads in (1, 100))
    assert one == pytest.approx(many) and of(machines.HOPPER, "v2", heads=264, seqlen=256).seconds > 1.9 * one


def test_nothing_is_quicker_than_a_call():
    assert of(machines.HOPPER, seqlen=16).seconds == pytest.approx(CALL_MICROSECONDS * 1e-6)
    assert of(
        machines.HOPPER, q=machines.empty(1, 2, 0, 64), k=machines.empty(1, 2, 5, 64), v=machines.empty(1, 2, 5, 64)
    ).seconds


def test_time_on_the_cpu(monkeypatch):
    monkeypatch.setenv("NUMBA_NUM_THREADS", "3")
    x = np.broadcast_to(np.float32(0), (2, 4, 1000, 64))
    explanation = numba_flash.explain(x, x, x)
    assert explanation.seconds == pytest.approx(4 * 8 * 1000**2 * 64 / (3e9 * CPU_GFLOPS))
    assert "time: about" in str(explanation)


@pytest.mark.parametrize("target", [machines.A100, machines.ADA])
def test_no_time_where_nothing_was_measured(target):
    assert of(target).seconds is None and "time:" not in str(of(target))
    for dtype, kernel in dict(float32="wgmma", float64="mma").items():
        explanation = of(machines.HOPPER, dtype=dtype)
        assert explanation.kernel == kernel and explanation.seconds is None and explanation.cost is None


@pytest.fixture
def slow_arrays(monkeypatch):
    """As if no tensor-core kernel took bias and mask: what is said of options that are so."""
    for name, instead in (("bias", "alibi_slopes="), ("mask", "causal=, window= or seqlens_k=")):
        monkeypatch.setitem(
            estimates.BY_NAME, name, estimates.BY_NAME[name]._replace(on_tensor_cores=False, instead=instead)
        )


def test_the_cost_of_an_option_names_the_remedy(slow_arrays):
    slow = of(machines.HOPPER, heads=64, seqlen=8192, head_dim=128, mask=mask(8192))
    fast = of(machines.HOPPER, heads=64, seqlen=8192, head_dim=128)
    times = f"{slow.seconds / fast.seconds:.2g}"
    assert slow.kernel == "v2" and fast.cost is None
    assert slow.cost == (
        f"v2 instead of wgmma because of mask=: expect about {times} times slower; "
        "causal=, window= or seqlens_k= would run on wgmma"
    )
    assert f"  cost: {slow.cost}" in str(slow)


HOPPER, A100 = machines.HOPPER, machines.A100
OWN = "causal=, window= or seqlens_k= would run on wgmma$"
APART = machines.empty(1, 2, 64, 64, strides=(0, 64 * 128, 128, 2))


@pytest.mark.parametrize(
    ("target", "kernel", "options", "expected"),
    [
        (A100, "auto", dict(bias=bias(4096)), "v2 instead of mma because of bias=: .* times slower, as on an H200; "),
        (A100, "auto", dict(bias=bias(4096)), "; alibi_slopes= would run on mma$"),
        (HOPPER, "auto", dict(bias=bias(4096), mask=mask(4096)), f"of bias= and mask=: .*; alibi_slopes= and {OWN}"),
        (HOPPER, "auto", dict(dtype="float32", mask=mask(4096)), f"v2 instead of wgmma because of mask=; {OWN}"),
        (HOPPER, "auto", dict(dtype="float32", head_dim=520), "because it takes head_dim up to 256, not 520 and 520$"),
        (HOPPER, "mma", dict(dtype="float32"), "mma instead of wgmma because it was asked for$"),
        (machines.ADA, "auto", dict(dtype="float64"), "v2 instead of mma because it takes float64 where .* has 8.9$"),
        (HOPPER, "v2", {}, r"v2 instead of wgmma because it was asked for: expect about \d+ times slower$"),
        (HOPPER, "mma", {}, r"mma instead of wgmma because it was asked for: expect about [\d.]+ times slower$"),
        (HOPPER, "v2", dict(seqlen=16), "asked for: expect about the same time at this size$"),
        (HOPPER, "auto", dict(q=APART, seqlen=64), "v2 instead of wgmma because q is not contiguous along dim$"),
    ],
)
def test_the_cost(target, kernel, options, expected, slow_arrays):
    assert re.search(expected, of(target, kernel, **options).cost)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        (machines.TURING, {}), (machines.A100, {}), (machines.HOPPER, {}), (machines.HOPPER, dict(head_dim=512)),
        (machines.HOPPER, dict(softcap=3.0)), (machines.HOPPER, dict(mask=mask(4096), bias=bias(4096))),
    ],
)  # fmt: skip
def test_no_cost_where_the_fastest_of_the_gpu_runs(target, options):
    assert of(target, **options).cost is None


def test_an_option_for_which_nothing_stands_in_promises_nothing(monkeypatch, slow_arrays):
    alone = estimates.BY_NAME["mask"]._replace(instead="")
    monkeypatch.setitem(estimates.BY_NAME, "mask", alone)
    assert re.search(r"because of mask=: expect about \d+ times slower$", of(HOPPER, mask=mask(4096)).cost)
    both = of(HOPPER, mask=mask(4096), bias=bias(4096, "float32")).cost
    assert re.search(r"because of bias= and mask=: expect about \d+ times slower$", both)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.395e-5, "14 us"),
        (6e-4, "0.6 ms"),
        (0.0214, "21 ms"),
        (0.93, "0.93 s"),
        (61.2, "61 s"),
        (600, "10 min"),
        (7200, "2.0 h"),
    ],
)  # fmt: skip
def test_durations(seconds, text):
    assert _duration(seconds) == text
