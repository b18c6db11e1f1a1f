"""Keys that lie in the pages of a cache (compiled): where their rows are, and the steps of `attend` over them."""

# mypy: ignore-errors

import numpy as np

from . import plan as slot
from .elements import INT, compiled, gather, row_address
from .panel import scores_of_row, values_of_row
from .vectors.build import load, size_of


@compiled
def page_address(start, plan, stride, tile, key):
    """Address of a key's row in its page; `stride` is the slot of the strides of k or v, the page's first."""
    size = load(plan, slot.PAGE_SIZE, INT)
    page = np.int64(load(tile.page_ids, key // size, np.int32(0)))
    return row_address(start, plan, stride, page, tile.kv_head, key % size)


@compiled
def run_of(tile, key, end, start, plan, stride):
    """-> how many of the keys from `key` up to `end` lie in key's page, and the address of key's row."""
    size = load(plan, slot.PAGE_SIZE, INT)
    return min(size - key % size, end - key), page_address(start, plan, stride, tile, key)


@compiled
def gather_pages(to, start, stride, key0, key_end, width, tile, plan, zero):
    """`gather` for keys that lie in pages."""
    row, step, dtype = load(plan, stride + 2, INT), load(plan, stride + 3, INT), load(plan, slot.DTYPE, INT)
    key = key0
    while key < key_end:
        count, source = run_of(tile, key, key_end, start, plan, stride)
        gather(to + (key - key0) * width * size_of(zero), source, row, step, count, width, dtype, zero)
        key += count


@compiled
def scores_in_pages(s, first, end, q, tile, plan, start, zero):
    """`scores_of_row` for keys that lie in pages."""
    key, k_row, head_dim = first, load(plan, slot.K_STRIDE + 2, INT), load(plan, slot.HEAD_DIM, INT)
    while key < end:
        count, k = run_of(tile, key, end, start, plan, slot.K_STRIDE)
        scores_of_row(s + (key - first) * size_of(zero), 1, k, k_row, q, head_dim, count, zero)
        key += count


@compiled
def values_in_pages(sums, first, end, p, tile, plan, start, zero):
    """`values_of_row` for keys that lie in pages."""
    key, v_row, width = first, load(plan, slot.V_STRIDE + 2, INT), load(plan, slot.HEAD_DIM_V, INT)
    while key < end:
        count, v = run_of(tile, key, end, start, plan, slot.V_STRIDE)
        values_of_row(sums, v, v_row, p + (key - first) * size_of(zero), 1, count, width, zero)
        key += count
