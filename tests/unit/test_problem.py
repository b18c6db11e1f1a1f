"""Problem: what it makes of a right call. Wrong ones are in test_bad_input."""

import dataclasses

import numpy as np
import pytest

from numba_flash.arrays import Layout, read
from numba_flash.problem.forward import Problem
from numba_flash.problem.options import OPTION_NAMES, Options
from numba_flash.problem.strides import contiguous_strides


def array(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def make(q=None, k=None, v=None, **options):
    given = dict(q=array(2, 4, 5, 8) if q is None else q, k=array(2, 2, 7, 8) if k is None else k)
    given |= dict(v=array(2, 2, 7, 6) if v is None else v) | options
    given = {name: read(name, x).layout if isinstance(x, np.ndarray) else x for name, x in given.items()}
    named = {name: given.pop(name) for name in OPTION_NAMES if name in given}
    return Problem.of(**given, options=Options.of(**named))


def test_extents():
    p = make()
    assert (p.batch, p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.head_dim, p.head_dim_v) == (2, 4, 2, 5, 7, 8, 6)
    assert p.o_shape == (2, 4, 5, 6) and p.lse_shape == (2, 4, 5)
    assert p.scale == 8**-0.5 and p.number("softcap") is None and p.arrays == () and p.uses == ()


def test_layouts_differ_in_nothing_but_where_things_lie():
    turned = make(array(2, 5, 4, 8), array(2, 7, 2, 8), array(2, 7, 2, 6), layout="bshd")
    p = make()
    assert turned.o_shape == (2, 5, 4, 6) and turned.lse_shape == p.lse_shape
    assert turned.q_strides == (160, 8, 32, 1) and p.q_strides == (160, 40, 8, 1)
    same = dict(
        q_strides=p.q_strides, k_strides=p.k_strides, v_strides=p.v_strides, o_strides=p.o_strides, layout="bhsd"
    )
    assert dataclasses.replace(turned, **same) == p


# Steps, reversed axes, repeated ones, and axes of one element, along which nothing is ever stepped.
@pytest.mark.parametrize(
    ("q", "strides"),
    [
        (array(2, 4, 10, 16)[:, :, ::2, ::2], (640, 160, 32, 2)),
        (array(2, 4, 5, 8)[:, ::-1], (160, -40, 8, 1)),
        (np.broadcast_to(array(8), (2, 4, 5, 8)), (0, 0, 0, 1)),
        (array(2, 4, 1, 8), (32, 8, 0, 1)),
    ],
)
def test_strides_are_in_elements(q, strides):
    assert make(q).q_strides == strides


# Each shape that broadcasts to (2, 4, 5, 7): missing and 1-long axes have stride 0.
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((), (0, 0, 0, 0)), ((7,), (0, 0, 0, 1)), ((5, 1), (0, 0, 1, 0)), ((4, 1, 7), (0, 7, 0, 1)),
        ((2, 1, 5, 7), (35, 0, 7, 1)), ((2, 4, 5, 7), (140, 35, 7, 1)), ((1, 1, 1, 1), (0, 0, 0, 0)),
    ],
)  # fmt: skip
def test_bias_and_mask_are_read_as_if_they_were_whole(shape, strides):
    p = make(bias=array(*shape), mask=array(*shape, dtype=bool))
    assert p.array("bias") == ("bias", "float32", strides, False, False)
    assert p.array("mask") == ("mask", "bool", strides, False, False)


# Read in pairs: from an address that allows it, with even strides and keys side by side.
@pytest.mark.parametrize(
    ("shape", "strides", "aligned", "pairs"),
    [
        ((2, 4, 5, 8), None, True, True), ((2, 4, 5, 8), None, False, False), ((1, 8), None, True, True),
        ((5, 1), None, True, False), ((2, 4, 5, 8), (320, 80, 9, 1), True, False),
        ((2, 4, 5, 8), (640, 160, 16, 2), True, False),
    ],
)  # fmt: skip
def test_a_bias_is_read_in_pairs_of_keys_where_that_is_possible(shape, strides, aligned, pairs):
    bias = Layout("numpy", None, shape, strides or contiguous_strides(shape), 4, "float32", False)
    p = make(k=array(2, 4, 8, 8), v=array(2, 4, 8, 8), bias=bias, bias_aligned=aligned)
    assert p.array("bias").pairs == pairs


# By TMA: in 16 bits, from an address that allows it, with rows, heads and entries at multiples of 16 bytes.
@pytest.mark.parametrize(
    ("shape", "strides", "dtype", "aligned", "boxes"),
    [
        ((2, 4, 5, 8), None, "float16", True, True), ((5, 8), None, "float16", True, True),
        ((5, 8), None, "float32", True, False), ((5, 8), None, "float16", False, False),
        ((8,), None, "float16", True, False), ((5, 1), None, "float16", True, False),
        ((5, 8), (12, 1), "float16", True, False), ((5, 8), (24, 2), "float16", True, False),
        ((5, 8), (-16, 1), "float16", True, False), ((4, 5, 8), (-80, 16, 1), "float16", True, False),
        ((4, 5, 8), (8, 32, 1), "float16", True, True), ((2, 4, 5, 8), (164, 40, 8, 1), "float16", True, False),
        ((4, 5, 8), (2**39, 8, 1), "float16", True, False),
    ],
)  # fmt: skip
def test_a_bias_comes_by_tma_where_that_is_possible(shape, strides, dtype, aligned, boxes):
    bias = Layout("numpy", None, shape, strides or contiguous_strides(shape), np.dtype(dtype).itemsize, dtype, False)
    q, k = array(2, 4, 5, 8, dtype=np.float16), array(2, 4, 8, 8, dtype=np.float16)
    p = make(q, k, k, bias=bias, bias_aligned=aligned)
    assert p.array("bias").boxes == boxes


# No bound, each side, causal over a window that reaches further, and bounds beyond all positions.
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(), (None, None)),
        (dict(causal=True), (None, 0)),
        (dict(causal=np.True_, window=(3, 9)), (3, 0)),
        (dict(window=(3, None)), (3, None)),
        (dict(window=[None, np.int64(4)]), (None, 4)),
        (dict(window=(10**15, 10**15), causal=True), (None, 0)),
        (dict(window=(0, 0)), (0, 0)),
    ],
)
def test_causal_and_window_become_two_bounds(options, expected):
    p = make(**options)
    assert (p.left, p.right) == expected


# Bottom-right, from the padded cache's lengths, a number of any integer type, and an array.
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(), (2, "number")),
        (dict(q_offset=-9), (-9, "number")),
        (dict(q_offset=np.int8(3)), (3, "number")),
        (dict(seqlens_k=array(2, dtype=np.int32)), (-5, "seqlens_k")),
        (dict(seqlens_k=array(2, dtype=np.int32), q_offset=1), (1, "number")),
        (dict(q_offset=array(2, dtype=np.int32)), (0, "array")),
    ],
)
def test_where_query_0_stands(options, expected):
    p = make(**options)
    assert (p.q_offset, p.q_offset_source) == expected


# Slopes per head, for all batch entries alike, or for each.
@pytest.mark.parametrize(("shape", "strides"), [((4,), (0, 1)), ((2, 4), (4, 1))])
def test_alibi_slopes(shape, strides):
    assert make(alibi_slopes=array(*shape)).array("alibi_slopes").strides == strides


def test_equal_problems_are_one_key():
    first = make(causal=True, window=(3, 4), scale=0.5)
    assert make(causal=True, window=(3, 4), scale=0.5) == first
    assert make(causal=True, window=[3, 4], scale=0.5) == first
    assert make(causal=True, window=(3, None), scale=0.5) == first, "causal bounds the right side"
    assert make(causal=False, window=(3, 4), scale=0.5) != first
    assert hash(dataclasses.replace(first)) == hash(first) and dataclasses.replace(first, scale=0.25) != first


def test_numbers_of_any_kind_are_taken():
    for scale in (np.float32(0.5), np.float64(0.5), 0.5):
        assert make(scale=scale).scale == 0.5
    assert make(scale=np.int64(2)).scale == 2.0 and make(softcap=30).number("softcap") == 30.0


def test_a_problem_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().batch = 3
