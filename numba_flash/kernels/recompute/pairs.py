"""One pair of a query and a key, computed by one warp without the tensor cores: for rows that came out NaN or Inf.

A tensor core multiplies every weight of a tile by every row of the other tile, also the weight of 0 of a key that the
query does not see, and 0 * NaN is NaN. Such values are rare (uninitialised padding, a diverged model), so the loops
over tiles do not check for them. At the end a warp marks rows of its results that are not finite. rows.py, keys.py and
queries.py compute these again, pair by pair, without the pairs that a mask removes.
"""

import functools
import math

from numba import int32

from ..score import at_position, fragments, kept_weights, reads, user
from ..score.stage import FragmentAt
from ..steps import elements, lse_delta, numbers
from ..steps.basics import TRUE, inlined, named
from ..steps.sequence import key_row, kv_head, query_row


@inlined
def own_row(strides, sequence, h_kv, key, of_all):
    return key_row(strides, sequence, h_kv, key)


@functools.cache
def make(config, of_keys=False, of_ds=True, row_of_key=own_row):
    """-> device functions. row_sum: of a row's columns, those of the lane: lane, lane + 32 and so on. of_keys: the
    mask's bits have keys as rows. of_ds: otherwise dS is 0. row_of_key: (strides, sequence, h_kv, key, (arrays,
    strides, sizes)) -> where a row of K begins."""
    made, weight_factor = numbers.of(config.compute_dtype), kept_weights.make(config)
    load, store_element = elements.loader(config.dtype, made.real), elements.storer(config.dtype)
    read, chain = reads.one_by_one(config, of_keys), fragments.chain(config)
    _, weight_or_zero = fragments.weights_at(config)
    apply, apply_with_slope = user.both(config, False), user.both(config, of_ds)
    inf, lse_and_delta = made.real(math.inf), lse_delta.of_query(config)

    @inlined
    def dot(x, x_at, y, y_at, columns, lane):
        """The product of two rows, in all lanes."""
        part = made.real(0)
        for c in range((columns + 31) // 32):
            column = int32(lane + 32 * c)
            if column < columns:
                part += load(x, x_at + column) * load(y, y_at + column)
        return made.warp_sum(part)

    @inlined
    def product_of(sequence, h, query, key, lane, arrays, strides, sizes):
        q_at = query_row(strides.q, sequence, h, query)
        k_at = row_of_key(strides.k, sequence, kv_head(h, sizes), key, (arrays, strides, sizes))
        return dot(arrays.q, q_at, arrays.k, k_at, config.head_dim, lane)

    @inlined
    def in_fragment(sequence, h, query, key, arrays, strides):
        bias, term = read.added(sequence.b, h, query, key, arrays, strides), made.real(0)
        if chain.has_row_term:
            term = chain.row_term(sequence.b, h, arrays, strides)
        return FragmentAt(term * made.real(query + sequence.q_start - key), bias)

    @inlined
    def score_of(sequence, h, query, key, lane, arrays, strides, sizes, score):
        """The score in the scores' unit (kernels/steps/units.py), or -inf."""
        product = product_of(sequence, h, query, key, lane, arrays, strides, sizes)
        seen = read.visible(sequence.b, h, query, key, arrays, strides)
        if seen:
            at = at_position(sequence.b, int32(h), int32(query), int32(key), query + sequence.q_start)
            product, _, seen = apply(product, at, TRUE, arrays, strides, score)
        s = chain.value(product, in_fragment(sequence, h, query, key, arrays, strides), score)
        return s if seen else made.minus_inf

    @inlined
    def gradients(sequence, h, query, key, lane, arrays, strides, sizes, score):
        """-> (the weight in dV, dS times scale); both 0 if the key is not seen."""
        product = product_of(sequence, h, query, key, lane, arrays, strides, sizes)
        dp = made.real(0)
        if of_ds:
            do_at = query_row(strides.do, sequence, h, query)
            v_at = key_row(strides.v, sequence, kv_head(h, sizes), key)
            dp = dot(arrays.do, do_at, arrays.v, v_at, config.head_dim_v, lane)
        lse, delta = lse_and_delta(sequence, h, query, arrays, sizes)
        at = at_position(sequence.b, int32(h), int32(query), int32(key), query + sequence.q_start)
        weight, ds, slope = made.real(0), made.real(0), made.real(1)
        seen = lse != inf and read.visible(sequence.b, h, query, key, arrays, strides)
        if seen:
            product, slope, seen = apply_with_slope(product, at, TRUE, arrays, strides, score)
        if seen:
            here = in_fragment(sequence, h, query, key, arrays, strides)
            p, derivative = weight_or_zero(product, here, score, lse)
            if p != 0:
                factor = weight_factor(at, arrays, sizes, score)
                if factor != 0:  # no NaN from a key whose weight was dropped
                    weight, dp = p * factor, dp * factor
                else:
                    dp = made.real(0)
                if of_ds:
                    ds = p * (dp - delta) * score.scale * (derivative * slope)
        return weight, ds

    @inlined
    def clear(row_sum, columns):
        for c in range((columns + 31) // 32):
            row_sum[c] = made.real(0)

    @inlined
    def add(row_sum, weight, source, at, columns, lane):
        """row_sum += weight * the row at `at`."""
        if weight != 0:
            for c in range((columns + 31) // 32):
                column = int32(lane + 32 * c)
                if column < columns:
                    row_sum[c] += weight * load(source, at + column)

    @inlined
    def store(row_sum, factor, target, at, stride, columns, lane):
        """The row at `at` <- factor * row_sum."""
        for c in range((columns + 31) // 32):
            column = int32(lane + 32 * c)
            if column < columns:
                store_element(target, at + column * stride, row_sum[c] * factor)

    return named(gradients, clear, add, store, score=score_of)
