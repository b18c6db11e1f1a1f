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


MASKS = {
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
    assert 0.1 < mask.mean() < 0.95
    case = problem()
    assert both_close(by(case, mask_mod=function, aux=aux), by(case, mask=mask))


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
                    where = (whole(0), whole(h), whole(i + 10), whole(j))
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
