"""Which weights count, in every layout that a warp's accumulators have, against the oracle."""

from types import SimpleNamespace

import numpy as np
import pytest

from numba_flash import arrays
from numba_flash.kernels.score import kept_weights
from numba_flash.machine import toolchain
from numba_flash.ptx.sim.launch import run
from numba_flash.testing import dropout_mask

P, SEED, HEAD, BATCH = 0.4, 2**63 + 5, 1, 2


def found_by_a_warp(of_keys, strips, columns, group, first_row, first_column, offset):
    """(16 * strips, columns) of bool: kept of a tile whose first row and column are these. offset: of positions."""
    config = SimpleNamespace(group_size=group, seeded=True, dtype="float16")
    made = kept_weights.on_fragments.__wrapped__(config, strips, columns)
    operands, sizes = SimpleNamespace(seed=np.uint64(SEED)), SimpleNamespace(dropped=np.int64(round(P * 2**16)))
    kept = np.zeros(32 * made.words, np.uint32)

    cuda = toolchain.cuda()

    @cuda.jit
    def kernel(kept):
        lane = np.int32(cuda.threadIdx.x)
        own = np.zeros(made.words, np.uint32)
        row, column = np.int32(first_row + lane // 4), np.int32(first_column + 2 * (lane % 4))
        if of_keys:
            made.of_keys(own, np.int64(offset + column), BATCH, HEAD, row, operands, sizes)
        else:
            made.of_queries(own, column, BATCH, HEAD, row, np.int64(offset), operands, sizes)
        for i in range(made.words):
            kept[lane * made.words + i] = own[i]

    run(lambda: kernel, 1, 32, 0, (arrays.read("array", kept),), (), (), 1, False)
    found = np.zeros((16 * strips, columns), bool)
    for lane, r, n, x in np.ndindex(32, 2 * strips, columns // 8, 2):
        word = kept[lane * made.words + r * (made.words // (2 * strips)) + n // 16]
        found[lane // 4 + 8 * r, 8 * n + 2 * (lane % 4) + x] = word >> (2 * (n % 16) + x) & 1
    return found


LAYOUTS = [(1, 16), (2, 48), (1, 112), (1, 128)]


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("strips", "columns"), [*LAYOUTS, (1, 8)])
@pytest.mark.parametrize(("first_key", "offset"), [(0, 0), (144, -7)])
def test_rows_that_are_queries(strips, columns, group, first_key, offset):
    begins = [first_key, first_key + 8] if columns == 8 else [first_key]
    for begin in begins:
        found = found_by_a_warp(False, strips, columns, group, 16, begin, offset)
        for row in range(16 * strips):  # heads of a group are beside each other
            query, head = (16 + row) // group, HEAD + (16 + row) % group
            mask = dropout_mask((BATCH + 1, head + 1, 1, begin + columns), P, SEED, offset + query)
            assert np.array_equal(found[row], mask[BATCH, head, 0, begin:])


@pytest.mark.parametrize(("strips", "columns"), [*LAYOUTS[:-1], (1, 8)])
@pytest.mark.parametrize(("first_key", "offset"), [(0, 0), (144, -7)])
def test_rows_that_are_keys(strips, columns, first_key, offset):
    found = found_by_a_warp(True, strips, columns, 1, first_key, 24, offset)
    mask = dropout_mask((BATCH + 1, HEAD + 1, columns, first_key + 16 * strips), P, SEED, offset + 24)
    assert np.array_equal(found, mask[BATCH, HEAD, :, first_key:].T)
