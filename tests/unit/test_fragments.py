"""Where fragments and swizzled rows lie: every map hits every place once."""

import numpy as np
import pytest

from numba_flash.ptx import fragments

LANES = range(fragments.LANES)


# (map, elements a lane, rows, columns)
@pytest.mark.parametrize(
    ("element", "count", "shape"),
    [
        (fragments.a_element, 8, (16, 16)),
        (fragments.b_element, 4, (16, 8)),
        (fragments.c_element, 4, (16, 8)),
        (fragments.c_element, 32, (16, 64)),
        (fragments.a_word, 4, (16, 8)),
        (fragments.a_word, 8, (16, 16)),
        (fragments.a_word, 1, (8, 4)),
        (fragments.b_word, 1, (4, 8)),
        (fragments.b_word, 4, (16, 8)),
    ],
)
def test_every_element_is_held_once(element, count, shape):
    held = [element(lane, i) for lane in LANES for i in range(count)]
    assert sorted(held) == list(np.ndindex(shape))


def test_a_result_is_the_next_products_operand():
    """What a lane holds of C, 16 columns of it, in pairs is what it must hold of A."""
    for lane in LANES:
        of_c = {fragments.c_element(lane, i): i for i in range(8)}
        pairs = [[of_c[fragments.a_element(lane, 2 * register + half)] for half in (0, 1)] for register in range(4)]
        assert pairs == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_of_larger_elements_it_is_too_but_for_the_order_of_columns():
    """The columns of C that a lane holds, in the order in which it must hold them of A; one order for all its rows."""
    for lane in LANES:
        for register in range(4):
            row, column = fragments.a_word(lane, register)
            taken = (register % 2) * 2 + register // 2  # element of C
            assert fragments.c_element(lane, taken) == (row, 2 * (column % 4) + column // 4)


# What the lanes of a quarter of a warp read at a time, 16 bytes each, has to lie in 8 different places of 16 bytes: V
# for float32 and float64, and Q and K for float64 (kernels/mma/products_float32.py and products_float64.py).
@pytest.mark.parametrize("step", [0, 16, 128 + 16])
@pytest.mark.parametrize(
    "place",
    [
        lambda lane: fragments.panel_offset((lane & 3) << 1, lane >> 2, 32),
        lambda lane: fragments.panel_offset(lane >> 2, (lane & 3) << 1, 32),
    ],
)
def test_lanes_that_read_together_use_different_banks(place, step):
    for first in range(0, 32, 8):
        places = [(place(lane) ^ (step & 16)) + (step & 128) for lane in range(first, first + 8)]
        assert len({at // 16 % 8 for at in places}) == 8


def test_row_and_column_are_those_of_the_tables():
    for lane in LANES:
        row, column = fragments.row(lane), fragments.column(lane)
        places = [(row, column), (row, column + 1), (row + 8, column), (row + 8, column + 1)]
        assert [fragments.c_element(lane, i) for i in range(4)] == places


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_a_swizzle_only_exchanges_chunks_inside_a_row(swizzle):
    offset = np.arange(2048)
    places = fragments.swizzled(offset, swizzle)
    np.testing.assert_array_equal(fragments.swizzled(places, swizzle), offset)  # done twice it is undone
    np.testing.assert_array_equal(places // (swizzle or 1), offset // (swizzle or 1))
    np.testing.assert_array_equal(places % 16, offset % 16)


def test_panels_are_swizzled_boxes_behind_each_other():
    rows, columns = 24, 160  # two and a half panels of 64 columns
    places = [fragments.panel_offset(r, c, rows) for c in range(columns // 8) for r in range(rows)]
    boxes = [(c // 8) * rows * 128 + r * 128 + c % 8 * 16 for c in range(columns // 8) for r in range(rows)]
    assert places == [fragments.swizzled(offset, 128) for offset in boxes]


# ldmatrix reads eight rows of one 16-byte column at a time; shared memory has 8 groups of banks of 16 bytes.
@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_eight_rows_of_one_column_lie_in_different_banks(swizzle):
    for column in range(swizzle // 16):
        for first_row in range(0, 64, 8):
            places = [fragments.swizzled((first_row + r) * swizzle + 16 * column, swizzle) for r in range(8)]
            assert len({place // 16 % 8 for place in places}) == 8
