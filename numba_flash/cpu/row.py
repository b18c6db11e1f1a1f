"""A single query row with keys (compiled): its scores and values, by itself or as one of the rows of a panel."""

# mypy: ignore-errors

from .elements import compiled
from .vectors.build import PANEL_VECTORS, lanes, size_of
from .vectors.row import dot_rows, value_columns


def scores_by_rows(lane):
    """s (keys,) = k (keys, head_dim) @ q (head_dim,): a function; lane: s is one of the rows of a panel."""
    dot_rows_4, dot_rows_1 = dot_rows(4, lane), dot_rows(1, lane)

    @compiled
    def scores_of_row(s, k, k_stride, q, head_dim, keys, zero):
        key, step = 0, (lanes(zero) if lane else 1) * size_of(zero)
        while key + 4 <= keys:
            dot_rows_4(s + key * step, k + key * k_stride, k_stride, q, head_dim, zero)
            key += 4
        while key < keys:
            dot_rows_1(s + key * step, k + key * k_stride, k_stride, q, head_dim, zero)
            key += 1

    return scores_of_row


scores_of_row, scores_of_lane = scores_by_rows(False), scores_by_rows(True)


def values_by_rows(lane):
    """sums (width,) += p (keys,) @ v (keys, width): a function, and a guarded one (values_guarded). lane: p is one of
    the rows of a panel."""
    columns_8, columns_4, columns_1, column = (value_columns(n, lane=lane) for n in (8, 4, 1, 0))
    column_guarded = value_columns(0, guarded=True, lane=lane)

    @compiled
    def values_of_row(sums, v, v_stride, p, keys, width, zero):
        size, vector = size_of(zero), lanes(zero) // PANEL_VECTORS
        at = 0
        while at + 8 * vector <= width:
            columns_8(sums + at * size, v + at * size, v_stride, p, keys, zero)
            at += 8 * vector
        while at + 4 * vector <= width:
            columns_4(sums + at * size, v + at * size, v_stride, p, keys, zero)
            at += 4 * vector
        while at + vector <= width:
            columns_1(sums + at * size, v + at * size, v_stride, p, keys, zero)
            at += vector
        while at < width:
            column(sums + at * size, v + at * size, v_stride, p, keys, zero)
            at += 1

    @compiled
    def values_of_row_guarded(sums, v, v_stride, p, keys, width, zero):
        for at in range(width):
            column_guarded(sums + at * size_of(zero), v + at * size_of(zero), v_stride, p, keys, zero)

    return values_of_row, values_of_row_guarded


values_of_row, values_of_row_guarded = values_by_rows(False)
values_of_lane, values_of_lane_guarded = values_by_rows(True)
