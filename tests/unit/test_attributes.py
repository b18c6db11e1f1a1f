"""Attributes of what a kernel closes over are constants (kernels/attributes.py)."""

import collections

import pytest
from helpers import compiler

from numba_flash.config.forward import places
from numba_flash.config.softmax import OnlineConfig

pytestmark = compiler.needed
CONFIG = OnlineConfig("float32", 128)


def to_ptx(kernel):
    from numba import cuda, float32, types, void

    import numba_flash.kernels  # noqa: F401  its rewrites

    return cuda.compile(kernel, void(types.CPointer(float32)), device=False, abi="numba", cc=(9, 0), output="ptx")[0]


def test_a_branch_on_a_fact_of_a_config_is_dropped_before_types_are_inferred():
    def kernel(out):
        if CONFIG.shared_bytes:  # 0, a property
            out.no_such_attribute = 1

    assert "st.global" not in to_ptx(kernel)


def test_a_fact_of_a_config_is_the_size_of_an_array():
    from numba import float32

    from numba_flash.ptx import local

    def kernel(out):
        row = local.array(CONFIG.threads, float32)
        row[0] = CONFIG.threads
        out[0] = row[0]

    assert str(0x43000000) in to_ptx(kernel)  # 128.0


def test_a_tuple_in_a_tuple_is_read_by_its_fields():
    plan = places(q=places(first=3), v=5)

    def kernel(out):
        out[0] = plan.q.first + plan.v

    assert str(0x41000000) in to_ptx(kernel)  # 8.0


def test_tuples_of_other_programs_are_left_to_numba():
    from numba_flash.kernels import attributes

    assert attributes.is_constant(CONFIG) and attributes.is_constant(places(q=3))
    assert not attributes.is_constant(collections.namedtuple("Pair", "a b")(1, 2))


def test_functions_are_read_under_their_own_names():
    from numba_flash.kernels import attributes
    from numba_flash.kernels.steps.basics import named, nothing

    made = named(nothing, factor=3)
    assert made._fields == ("nothing", "factor") and made.nothing is nothing and attributes.is_constant(made)

    def kernel(out):
        out[0] = made.factor

    assert str(0x40400000) in to_ptx(kernel)  # 3.0


@pytest.mark.parametrize("value", [3, "mma", (3, 4), pytest])
def test_other_values_are_no_holders(value):
    from numba_flash.kernels import attributes

    assert not attributes.is_constant(value)
