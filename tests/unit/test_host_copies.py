"""NumPy arrays through a GPU kernel asked for by name, without the GPU: what is planned, and what is copied."""

import ctypes
import dataclasses

import numpy as np
import pytest
from helpers.machines import HOPPER

import numba_flash
from numba_flash.dispatch import forward as dispatch, host_copies

HOST = dataclasses.replace(HOPPER, arrays_on_host=True)
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(dispatch.Target, "of", lambda device: HOST if device is None else HOPPER)
    monkeypatch.setattr(dispatch, "_plans", {})  # nothing planned for the machine that is here


def made(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def test_what_runs_is_planned_for_the_copies():
    """Whose strides are others: o is given with rows of 130 bytes, and its copy is written 16 bytes at a time."""
    q = made(1, 2, 40, 64, dtype=np.float16)
    out = np.empty((1, 2, 40, 65), np.float16)[..., :64]
    explained = numba_flash.explain(q, q, q, kernel="mma", out=out)
    assert explained.copies and explained.config.o_vectorized


def test_the_copies_are_contiguous_and_the_results_come_back(monkeypatch):
    """With memory of the host in place of the GPU's, and the CPU's kernel in place of v2."""
    monkeypatch.setattr(host_copies, "_default_stream", lambda: None)

    class Memory:
        def __init__(self, size):
            self.bytes = (ctypes.c_char * size)()
            self.handle = ctypes.addressof(self.bytes)

    monkeypatch.setattr(host_copies, "_memory", lambda size, stream: Memory(size))
    monkeypatch.setattr(host_copies.arrays, "move", lambda to, origin, size, stream: ctypes.memmove(to, origin, size))
    real, seen = dispatch.make_launch, []

    def on_host(choice, problem, target):
        seen.append(problem)
        return real(choice._replace(kernel="cpu"), problem, target)

    monkeypatch.setattr(dispatch, "make_launch", on_host)
    q, k, v = made(2, 9, 4, 8)[::-1].transpose(0, 2, 1, 3), made(2, 4, 7, 8)[..., ::-1], made(2, 4, 14, 5)[:, :, ::2]
    bias, lengths = made(4, 1, 7), np.array([7, 3], np.int32)
    out = np.zeros((9, 2, 5, 4), np.float32).transpose(1, 3, 0, 2), np.zeros((2, 4, 9), np.float32)
    options = dict(causal=True, bias=bias, seqlens_k=lengths, q_offset=np.array([1, 2], np.int32), scale=0.4)
    given = [x.copy() for x in (q, k, v)]
    o, lse = numba_flash.attention(q, k, v, kernel="v2", return_lse=True, out=out, **options)
    assert o is out[0] and lse is out[1]
    problem = seen[-1]
    assert (problem.q_strides, problem.v_strides, problem.o_strides) == (
        (4 * 9 * 8, 9 * 8, 8, 1), (4 * 7 * 5, 7 * 5, 5, 1), (4 * 9 * 5, 9 * 5, 5, 1)
    )  # fmt: skip
    expected = numba_flash.attention(*given, kernel="reference", return_lse=True, **options)
    assert np.allclose(o, expected.o, atol=1e-5) and np.allclose(lse, expected.lse, atol=1e-5)
    assert all(np.array_equal(x, before) for x, before in zip((q, k, v), given, strict=True))
