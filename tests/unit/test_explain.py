"""explain, explain_backward: they say what a call would do, in data and in words, and do nothing."""

import numpy as np
import pytest
from contract import problem

import numba_flash
from numba_flash.select import rungs


def explain(case, **options):
    return numba_flash.explain(**case.arguments(), **options)


def test_it_names_the_kernel_and_why_not_the_others():
    explanation = explain(problem())
    assert explanation.kernel == "cpu" and explanation.config is None and explanation.blocks == 0
    assert not explanation.copies
    assert {name for name, _ in explanation.refused} == set(rungs.KERNELS) - {"cpu"}
    for name, reason in explanation.refused:
        assert f"not {name!r}: {reason}" in str(explanation)


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


def test_it_allocates_nothing_of_the_problems_size():
    huge = np.broadcast_to(np.float32(0), (1, 1, 2**30, 128))
    explanation = numba_flash.explain(huge, huge, huge)
    assert explanation.problem.seqlen_q == 2**30


def test_a_backward_is_explained():
    case = problem(bias=np.zeros((20, 30), np.float32))
    o, lse = numba_flash.attention(**case.arguments(), return_lse=True)
    explanation = numba_flash.explain_backward(o, o=o, lse=lse, **case.arguments(), wanted=("dk", "dbias"), causal=True)
    assert explanation.kernel == "cpu" and explanation.configs == explanation.blocks == ()
    assert {name for name, _ in explanation.refused} == set(rungs.KERNELS) - {"cpu"}
    for fragment in ("kernel 'cpu' on the CPU", "20 x 30", "all before, 0 after", "gradients: dk, dbias", "not 'v1': "):
        assert fragment in str(explanation), explanation
    with pytest.raises(ValueError, match="wanted names dalibi_slopes"):
        numba_flash.explain_backward(o, o=o, lse=lse, **case.arguments(), wanted=("dalibi_slopes",))
