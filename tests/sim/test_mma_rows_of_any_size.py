"""Rows that do not begin at multiples of 16 bytes on mma, simulated: smaller copies take them, in every kernel."""

import numpy as np
import pytest
from contracts import forward
from contracts.backward import Rung, incoming
from contracts.functions import BY_PLACE

import numba_flash

WANTED = ("dq", "dk", "dv")


def placed(shift):
    """-> a function that copies an array to contiguous memory `shift` bytes past a multiple of 16, or as many as keep
    elements at multiples of their size."""

    def place(x):
        memory = np.zeros(x.nbytes + 32, np.uint8)
        begin = -memory.ctypes.data % 16 + (shift and max(shift, x.itemsize))
        found = memory[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
        found[...] = x
        return found

    return place


# (dtype, head_dim, head_dim_v, bytes past a multiple of 16, bytes of a copy). In rows of 8, 4 and 2 bytes as in those
# of 16, and of rows of 16 bytes at other addresses.
ROWS = [
    ("float16", 20, 12, 0, 8),
    ("bfloat16", 50, 18, 0, 4),
    ("float16", 25, 25, 0, 2),
    ("bfloat16", 16, 16, 2, 2),
    ("float32", 3, 3, 0, 4),
    ("float32", 50, 2, 0, 8),
    ("float32", 24, 59, 0, 4),
    ("float32", 16, 16, 4, 4),
    ("float64", 3, 5, 0, 8),
    ("float64", 25, 16, 0, 8),
    ("float64", 16, 16, 8, 8),
]


@pytest.mark.parametrize(("dtype", "head_dim", "head_dim_v", "shift", "copied"), ROWS)
def test_forward(dtype, head_dim, head_dim_v, shift, copied):
    rung = forward.Rung("mma", placed(shift), tensor=True, tile=16, slow=True, usual=dtype)
    case = rung.problem(19, 21, batch=1, heads=2, heads_kv=1, head_dim=head_dim, head_dim_v=head_dim_v)
    explained = numba_flash.explain(*map(rung.move, (case.q, case.k, case.v)), kernel="mma")
    assert explained.config.copy_bytes == copied
    rung.check(case, causal=True)


@pytest.mark.parametrize(("dtype", "head_dim", "head_dim_v", "shift", "copied"), ROWS)
def test_gradients(dtype, head_dim, head_dim_v, shift, copied):
    rung = Rung("mma", placed(shift), tensor=True, tile=16, slow=True, usual=dtype)
    case = rung.problem(19, 21, batch=1, heads=2, heads_kv=1, head_dim=head_dim, head_dim_v=head_dim_v)
    rung.check(case, wanted=WANTED, causal=True)


@pytest.mark.parametrize("name", ["mma_dbias", "mma_daux"])
def test_gradients_of_a_bias_and_of_aux(name):
    """Kernels that have their own loads."""
    rung = Rung("mma", placed(0), tensor=True, tile=16, slow=True)
    case = rung.problem(33, 19, batch=1, heads=1, head_dim=10, head_dim_v=6)
    bias = np.random.default_rng(2).standard_normal((1, 1, 33, 19), dtype=np.float32)
    options = dict(bias=bias) if name == "mma_dbias" else BY_PLACE
    case.options |= options
    given = incoming(case)
    wanted = ("dbias",) if name == "mma_dbias" else ("daux[0]",)
    rung.check(case, given, wanted)
    do, o, lse, dlse = map(rung.move, given)
    arguments = dict(o=o, lse=lse, dlse=dlse, kernel="mma", wanted=wanted)
    explained = numba_flash.explain_backward(do, **case.arguments(rung.move), **arguments)
    config = next(x for x in explained.configs if x.kernel.startswith(name))
    assert config.copy_bytes == 4
