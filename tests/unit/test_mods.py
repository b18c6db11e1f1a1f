"""The ready functions, beside masks and biases made with NumPy, and compiled."""

import math

import numpy as np
import pytest
from contracts.forward import problem
from contracts.metamorphic import both_close

import numba_flash
from numba_flash import mods
from numba_flash.functions import compiled, numbers
from numba_flash.functions.function import Function

Q_POS, K_POS = np.arange(20)[:, None] + 10, np.arange(30)
RNG = np.random.default_rng(0)
SEGMENTS = np.sort(RNG.integers(0, 4, (2, 30)), axis=1)
PREFIX = np.array([12, 3], np.int32)
START = np.array([10, 10], np.int64)
ANCESTORS = np.tril(RNG.random((20, 20)) < 0.4) | np.eye(20, dtype=bool)
TABLE = RNG.standard_normal((16, 2)).astype(np.float32)
SLOPES = np.array([0.5, 0.125], np.float32)


def t5_bias(table, bidirectional):
    """As Transformers computes it, in NumPy: the buckets of relative_position = key - query."""
    relative, buckets, farthest = K_POS - Q_POS, table.shape[0], 24
    bucket = np.zeros_like(relative)
    if bidirectional:
        buckets //= 2
        bucket = (relative > 0) * buckets
        relative = np.abs(relative)
    else:
        relative = -np.minimum(relative, 0)
    exact = buckets // 2
    octaves = np.log(np.maximum(relative, 1) / exact) / np.log(farthest / exact)
    large = exact + (octaves * (buckets - exact)).astype(int)
    bucket = bucket + np.where(relative < exact, relative, np.minimum(large, buckets - 1))
    return table[bucket].transpose(2, 0, 1)[None]


def natten(shape, window, dilation):
    """By NATTEN's words: of the tokens of one remainder, the window's number of them around the query, moved until all
    of them are there."""
    sees = np.ones((1, 1), bool)
    for extent, side, step in zip(shape, window, dilation, strict=True):
        of_dimension = np.zeros((extent, extent), bool)
        for query in range(extent):
            same = list(range(query % step, extent, step))
            start = min(max(same.index(query) - side // 2, 0), len(same) - side)
            of_dimension[query, same[start : start + side]] = True
        sees = np.kron(sees, of_dimension)
    return sees


ORDER, BACK = mods.tile_order((5, 6), (2, 4))
INDPTR = np.concatenate([[0], np.cumsum(RNG.integers(0, 6, 10))]).astype(np.int64)
INDICES = np.concatenate([np.sort(RNG.permutation(15)[:n]) for n in np.diff(INDPTR)]).astype(np.int32)


def of_csr(tile=2):
    """The pattern as a mask of 20 queries and 30 keys."""
    pattern = np.zeros((10, 15), bool)
    for row in range(10):
        pattern[row, INDICES[INDPTR[row] : INDPTR[row + 1]]] = True
    return np.kron(pattern, np.ones((tile, tile), bool))


MASKS = {
    "neighborhood, 1-D": (mods.neighborhood(30, 5, 3), (), natten((30,), (5,), (3,))[10:]),
    "neighborhood, even": (mods.neighborhood(30, 6), (), natten((30,), (6,), (1,))[10:]),
    "neighborhood, 2-D": (mods.neighborhood((5, 6), (5, 2), (1, 2)), (), natten((5, 6), (5, 2), (1, 2))[10:]),
    "neighborhood, 3-D": (mods.neighborhood((5, 2, 3), (3, 1, 3)), (), natten((5, 2, 3), (3, 1, 3), (1, 1, 1))[10:]),
    "neighborhood, ordered": (
        mods.neighborhood((5, 6), 3, ordered=True),
        (ORDER,),
        natten((5, 6), (3, 3), (1, 1))[ORDER][:, ORDER][10:],
    ),
    "block sparse": (mods.block_sparse(2), (INDPTR, INDICES), of_csr()),
    "causal": (mods.causal, (), K_POS <= Q_POS),
    "window": (mods.sliding_window(4, 2), (), (Q_POS - 4 <= K_POS) & (K_POS <= Q_POS + 2)),
    "dilated": (mods.dilated(3), (), (K_POS <= Q_POS) & ((Q_POS - K_POS) % 3 == 0)),
    "document": (mods.document, (SEGMENTS,), (SEGMENTS[:, 10:, None] == SEGMENTS[:, None])[:, None]),
    "prefix": (mods.prefix_lm, (PREFIX,), ((K_POS < PREFIX[:, None, None]) | (K_POS <= Q_POS))[:, None]),
    "tree": (mods.tree, (ANCESTORS, START), np.hstack([np.ones((20, 10), bool), ANCESTORS])),
}
BIASES = {
    "alibi": (mods.alibi, (SLOPES,), -SLOPES[:, None, None] * np.abs(Q_POS - K_POS)),
    "t5": (mods.relative_position(16, 24), (TABLE,), t5_bias(TABLE, True)),
    "t5, causal": (mods.relative_position(16, 24, False), (TABLE,), t5_bias(TABLE, False)),
    "from the end": (
        lambda s, b, h, i, j, table: s + table[(i - j) % 9 - 4, h], (TABLE,),
        TABLE[(Q_POS - K_POS) % 9 - 4].transpose(2, 0, 1)[None],
    ),
}  # fmt: skip


def by(case, **options):
    return numba_flash.attention(**case.arguments(), **options, kernel="reference", return_lse=True)


@pytest.mark.parametrize("which", MASKS)
def test_masks(which):
    function, aux, mask = MASKS[which]
    assert 0.05 < mask.mean() < 0.95
    case = problem()
    assert both_close(by(case, mask_mod=function, aux=aux), by(case, mask=mask))


def tiles_that_are_not_empty(mask, size):
    return mask.reshape(mask.shape[0] // size, size, -1, size).any((1, 3)).sum()


def test_an_order_of_tiles_leaves_more_tiles_empty_and_is_undone():
    shape, window = (16, 128), (7, 7)
    order, back = mods.tile_order(shape, (4, 8))
    mask = natten(shape, window, (1, 1))
    assert tiles_that_are_not_empty(mask[order][:, order], 32) < 0.6 * tiles_that_are_not_empty(mask, 32)
    np.testing.assert_array_equal(order[back], np.arange(2048))
    q = RNG.standard_normal((1, 1, 2048, 8)).astype(np.float32)
    pattern = numba_flash.block_mask(mods.neighborhood(shape, window, ordered=True), 1, 1, 2048, 2048, aux=(order,))
    moved = q[:, :, order]
    o = numba_flash.attention(moved, moved, moved, block_mask=pattern)[:, :, back]
    np.testing.assert_allclose(o, numba_flash.attention(q, q, q, mask=mask), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: mods.neighborhood((5, 6), 6), "window times dilation must be at most shape"),
        (lambda: mods.neighborhood((5, 6), 3, 2), "window times dilation must be at most shape"),
        (lambda: mods.neighborhood((5, 6), (3, 3, 3)), "window one number from 1"),
        (lambda: mods.neighborhood((5, 6), 3, 0), "dilation one number from 1"),
        (lambda: mods.neighborhood((2, 2, 2, 2), 2), "shape must have 1 to 3 dimensions"),
        (lambda: mods.tile_order((4, 4), (2,)), "tile must have a number from 1 for each dimension"),
        (lambda: mods.tile_order((4, 4), 2), "tile must have a number from 1 for each dimension"),
        (lambda: mods.tile_order((), ()), "tile must have a number from 1 for each dimension"),
        (lambda: mods.block_sparse(0), "tile must be a whole number from 1, not 0"),
        (lambda: mods.relative_position(3), "buckets must be at least 4, and farthest above 1, not 3 and 128"),
        (lambda: mods.relative_position(32, 8), "buckets must be at least 4, and farthest above 8, not 32 and 8"),
        (lambda: mods.relative_position(0), "buckets must be a whole number from 1, not 0"),
        (lambda: mods.softcap(0), "cap must be a finite number above 0, not 0"),
        (lambda: mods.softcap(None), "cap must be a finite number above 0, not None"),
        (lambda: mods.dilated(0), "step must be a whole number from 1, not 0"),
    ],
)
def test_what_has_no_meaning_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    "make", [lambda: mods.neighborhood(10.5, 3), lambda: mods.neighborhood(10, 3.5), lambda: mods.block_sparse(1.5)]
)
def test_numbers_are_whole(make):
    with pytest.raises(TypeError, match="(shape|window|tile) must be a whole number or a tuple of them, not"):
        make()


def test_numbers_may_be_numpys():
    i = np.arange(30)
    near, same = mods.neighborhood(np.int64(30), np.int32(3)), mods.neighborhood(30, 3)
    assert [near(0, 0, 5, j) for j in i] == [same(0, 0, 5, j) for j in i]


@pytest.mark.parametrize("which", BIASES)
def test_biases(which):
    function, aux, bias = BIASES[which]
    case = problem()
    assert both_close(by(case, score_mod=function, aux=aux), by(case, bias=bias.astype(np.float32)))


def buckets_of_transformers(distances, buckets, farthest, bidirectional):
    """In float32, as its models run, of key - query."""
    own = buckets // 2 if bidirectional else buckets
    size = np.abs(distances) if bidirectional else -np.minimum(distances, 0)
    exact = own // 2
    octaves = np.log(np.maximum(size, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        math.log(farthest / exact)
    )
    large = exact + (octaves * np.float32(own - exact)).astype(int)
    bucket = np.where(size < exact, size, np.minimum(large, own - 1))
    return bucket + own * ((distances > 0) & bidirectional)


# At a distance of 64 of 128 the logarithm is a whole number of buckets, or in float64 just below one.
@pytest.mark.parametrize(
    ("buckets", "farthest", "bidirectional"),
    [(32, 128, True), (32, 128, False), (16, 64, True), (64, 256, True), (32, 20, False), (256, 4096, True)],
)
def test_every_distance_is_in_the_bucket_that_transformers_puts_it_in(buckets, farthest, bidirectional):
    distances = np.arange(-farthest - 9, farthest + 9)
    function = mods.relative_position(buckets, farthest, bidirectional)
    table = np.arange(buckets)[:, None]
    found = [function(0, 0, 0, 0, int(k_pos), table) for k_pos in distances]
    assert found == buckets_of_transformers(distances, buckets, farthest, bidirectional).tolist()


def test_softcap():
    case = problem(size=3.0)
    assert both_close(by(case, score_mod=mods.softcap(2.0)), by(case, softcap=2.0))


# Each compiled for the CPU, at every position of two heads.
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("which", [*MASKS, *BIASES])
def test_compiled_they_are_the_same(which, narrow):
    """narrow: whole numbers are int32 where they fit, as in a kernel whose positions are known to be small."""
    from numba import njit
    from numba.core import types
    from numba.core.extending import intrinsic

    is_mask = which in MASKS
    given, aux, _ = (MASKS | BIASES)[which]
    function = Function.of("mod", given)
    asks_row = function.asks_row
    fast = njit(error_model="numpy")
    call = fast(function.build(compiled.stand_ins("float32"), fast))
    whole, real = compiled.as_number("whole", "float32", narrow), compiled.as_number("real", "float32")
    value = compiled.truth_of("mask_mod", function) if is_mask else compiled.result("score_mod", "float32", function)
    tables = [compiled.as_table(x.dtype.name, x.ndim, "float32", narrow) for x in aux]

    @intrinsic
    def pointer(typingctx, x):
        def codegen(context, builder, sig, args):
            return context.make_array(sig.args[0])(context, builder, args[0]).data

        element = types.uint8 if x.dtype == types.boolean else x.dtype
        return types.CPointer(element)(x), codegen

    first = tables[0] if tables else None
    second = tables[1] if len(tables) > 1 else None
    sizes = [(*x.shape, *(s // x.itemsize for s in x.strides)) for x in aux]
    arrays = [x.view(np.uint8) if x.dtype == bool else x for x in aux]
    if len(aux) == 0:

        @fast
        def at(where):
            return value(call(*where))

    elif len(aux) == 1:
        size = sizes[0]

        @fast
        def at(where, x):
            return value(call(*(where + (first(pointer(x), size),))))

    else:
        size, other = sizes

        @fast
        def at(where, x, y):
            return value(call(*(where + (first(pointer(x), size), second(pointer(y), other)))))

    @fast
    def all_of(found, *arrays):
        for h in range(2):
            for i in range(20):
                for j in range(30):
                    where = ((whole(i),) if asks_row else ()) + (whole(0), whole(h), whole(i + 10), whole(j))
                    if is_mask:
                        found[h, i, j] = at(where, *arrays)
                    else:
                        found[h, i, j] = at((real(np.float32(0)), *where), *arrays)

    found = np.zeros((2, 20, 30), np.float32)
    all_of(found, *arrays)
    read = [numbers.Table(np.float32, x) for x in aux]
    for h, i, j in np.ndindex(found.shape):
        where = (0, h, i + 10, j, i)
        if is_mask:
            expected = numbers.mask_of(function, np.float32, where, read)
        else:
            expected = numbers.score_of(function, np.float32, 0.0, where, read, False).x
        assert found[h, i, j] == expected
