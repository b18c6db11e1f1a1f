"""The bits of a number as another type."""

import numpy as np
import pytest
from helpers.instructions import launch
from numba import cuda

from numba_flash.ptx.sim import resumable, views

PAIRS = [
    (one, other) for one in views.KINDS for other in views.KINDS if np.dtype(one).itemsize == np.dtype(other).itemsize
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_they_are_those_of_numpy(one, other):
    bits = np.array([0, 1, 2**31, 0x7F80DEAD, 0x7FC00000, 0xFF800000], np.uint32)  # -0.0, NaN of both kinds, -inf
    view = views.NAMES[f"__view_{other.__name__}"]
    for x in np.concatenate([bits, bits[::-1]]).view(one):
        found = view(x)
        assert type(found) is other and found.tobytes() == x.tobytes()
    assert np.array_equal(view(np.zeros(2, one)), np.zeros(2, other))


def bits_of(x):
    return x.view(np.uint32)


def test_a_kernel_has_other_code_of_the_same_lines_while_it_runs():
    seen, before = [], bits_of.__code__
    device = cuda.jit(device=True)(bits_of)

    def kernel(x, out):
        out[0] = device(x[0])
        seen.append(bits_of.__code__)

    out = np.zeros(1, np.uint32)
    launch(kernel, 1, np.array([-1.0], np.float32), out)
    assert out[0] == 0xBF800000 and bits_of.__code__ is before
    (code,) = seen
    assert "__view_uint32" in code.co_names and "view" not in code.co_names
    assert (code.co_filename, list(code.co_lines())[0][2]) == (before.co_filename, list(before.co_lines())[0][2])
    assert not views.NAMES.keys() & globals().keys()


def test_code_that_is_not_that_of_its_file_stays_as_it_is():
    names = {}
    exec(
        compile("\n" * (bits_of.__code__.co_firstlineno - 1) + "def bits_of(x): return x.view(3)", __file__, "exec"),
        names,
    )
    code = names["bits_of"].__code__
    assert resumable.code_for(names["bits_of"], ()) is code
    assert resumable.code_for(bits_of, ()) is not bits_of.__code__
