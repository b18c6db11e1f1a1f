"""The contract of attention(), line by line, for whatever kernel the fixture `rung` holds.

Each tier has its own `rung` (reference and cpu; the GPU kernels simulated; the GPU kernels on a GPU). Random problems
are compared with the oracle; the other tests state one promise each, and compare bits wherever the promise is about
bits.

What a rung refuses is skipped, in the words of select, and only for the reasons that are listed here.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st

import numba_flash
from numba_flash import testing
from numba_flash.testing import Case


def identity(x):
    return x


@dataclass(frozen=True)
class Rung:
    """A kernel and the arrays it takes."""

    # Why a kernel on tensor cores may refuse a problem: nothing else is a reason to skip a test.
    REFUSALS: ClassVar = ("not float32", "not float64", "head_dim up to")

    kernel: str
    move: Callable[[np.ndarray], Any] = identity
    back: Callable[[Any], np.ndarray] = identity
    limits: dict = field(default_factory=lambda: dict(max_seqlen=150))  # of random cases: seqlens over several tiles
    tensor: bool = False  # on tensor cores
    usual: str = ""  # the dtype of a problem that does not say which, if not the kernel's first
    tile: int = 16  # keys that it takes in one step, about
    slow: bool = False  # in the simulator every call takes a second, and rows that are computed again take more

    @property
    def dtype(self):
        """Of a problem that does not say which."""
        return self.usual or ("float16" if self.tensor else "float32")

    @property
    def batch(self):
        """Entries of a problem that is not about them."""
        return 1 if self.slow else 2

    def problem(self, *seqlens, dtype=None, **options):
        return problem(*seqlens, dtype=dtype or self.dtype, **options)

    @contextlib.contextmanager
    def skipping_refusals(self):
        try:
            yield
        except NotImplementedError as refused:
            if not self.tensor or not any(reason in str(refused) for reason in self.REFUSALS):
                raise
            pytest.skip(str(refused).partition(" What would run")[0])

    def attention(self, *operands, **arguments):
        """attention() by this kernel, for arrays that have been moved."""
        with self.skipping_refusals():
            return numba_flash.attention(*operands, kernel=self.kernel, **arguments)

    def __call__(self, case, **options):
        """(o, lse) of a case as NumPy arrays."""
        o, lse = self.attention(**case.arguments(self.move) | options, return_lse=True)
        return self.back(o), self.back(lse)

    def check(self, case, **options):
        case.options |= options
        testing.check(case, *self(case), self.kernel)


def problem(
    seqlen_q=20, seqlen_k=30, *, batch=2, heads=2, heads_kv=1, head_dim=4, head_dim_v=None, dtype="float32", seed=0,
    size=1.0, **options,
):  # fmt: skip
    """A case with plain strides in layout bhsd; small, but over several tiles of the simulator."""
    generator = np.random.default_rng(seed)

    def array(*shape):
        return testing.strided(generator.standard_normal(shape) * size, dtype, "plain")

    q = array(batch, heads, seqlen_q, head_dim)
    k = array(batch, heads_kv, seqlen_k, head_dim)
    v = array(batch, heads_kv, seqlen_k, head_dim if head_dim_v is None else head_dim_v)
    return Case(q, k, v, options)


def same_bits(one, other):
    one, other = (np.ascontiguousarray(x) for x in (one, other))
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def unchanged(rung, o, clean_o):
    """Rows of o that see nothing strange, beside what they are without it.

    A tensor core multiplies what is strange by 0 in a row that does not see it, and the row is computed again in
    another order of sums.
    """
    if not rung.tensor:
        return same_bits(o, clean_o)
    # In 16 bits it is the rounding of o that shows. In more, both are off by what testing.check allows: about 8 eps
    # here, eps (1 + |lse| + |s|) |v|.
    units = 2 if clean_o.dtype.itemsize == 2 else 16
    o, clean_o, eps = o.astype(np.float64), clean_o.astype(np.float64), testing.EPS[clean_o.dtype.name]
    return np.allclose(o, clean_o, rtol=units * eps, atol=units * eps)


def lse_unchanged(rung, lse, clean_lse):
    """Likewise of lse. A kernel on tensor cores that takes 16 bits computes only O of a row again, one that takes more
    bits lse, too.
    """
    if not rung.tensor or rung.dtype == "float16":
        return same_bits(lse, clean_lse)
    units = 16 * testing.EPS[rung.dtype]
    return np.allclose(lse, clean_lse, rtol=units, atol=units)


@given(st.data())
def test_random_problems_agree_with_the_oracle(rung, data):
    case = data.draw(testing.cases(**rung.limits))
    rung.check(case)


# Every dtype that is taken, each with all that changes a score.
@pytest.mark.parametrize("dtype", testing.DTYPES)
def test_all_options_at_once(rung, dtype):
    generator = np.random.default_rng(1)
    added = dict(
        bias=generator.standard_normal((2, 1, 17, 33)).astype(dtype), mask=generator.random((1, 2, 17, 33)) < 0.7
    )
    rung.check(
        rung.problem(17, 33, dtype=dtype, head_dim_v=5),
        **added,
        causal=True,
        window=(20, 3),
        seqlens_k=np.array([33, 12], np.int32),
        q_offset=np.array([16, -2], np.int32),
        softcap=3.0,
        scale=0.7,
        alibi_slopes=np.array([0.5, 0.125], np.float32),
        sinks=np.array([0.3, -1.5], dtype),
    )


# The default, none, one that turns the order around, and one by which a single key takes all.
@pytest.mark.parametrize("scale", [None, 0, -0.5, 1e4])
def test_scale(rung, scale):
    case = rung.problem(scale=scale, batch=rung.batch)
    o, lse = rung(case)
    if scale == 0:
        mean = case.v.astype(np.float64).mean(2, keepdims=True)
        assert np.allclose(o.astype(np.float64), mean, rtol=0, atol=8 * testing.EPS[rung.dtype])
        assert np.allclose(lse, np.log(30), rtol=1e-6)
    else:
        testing.check(case, o, lse, rung.kernel)


# The types whose largest number is near: 65504, and 3e38 with few digits.
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scores_beyond_the_range_of_the_inputs_dtype(rung, dtype):
    case = rung.problem(dtype=dtype, size=300.0, scale=1.0)
    assert np.abs(case.q.astype(np.float64)[0, 0] @ case.k.astype(np.float64)[0, 0].T).max() > 65504
    o, lse = rung(case)
    assert np.isfinite(o.astype(np.float64)).all()
    testing.check(case, o, lse, rung.kernel)


# One element; odd and prime, which no vector or tile divides; past 256, the limit of most kernels;
# DeepSeek's 576.
@pytest.mark.parametrize("head_dim", [1, 7, 59, 257, 576])
def test_any_head_dim(rung, head_dim):
    rung.check(rung.problem(5, 9, batch=1, heads=2, heads_kv=1, head_dim=head_dim))


# Either may be the larger one, by less and by more than a tile.
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 9), (33, 1), (3, 70)])
def test_head_dim_v_may_differ(rung, head_dim, head_dim_v):
    rung.check(rung.problem(6, 11, batch=1, head_dim=head_dim, head_dim_v=head_dim_v))


# One query head a KV head, a group that is no power of two, and multi-query attention.
@pytest.mark.parametrize(("heads", "heads_kv"), [(3, 3), (6, 2), (8, 1)])
def test_query_head_h_reads_kv_head_h_over_group(rung, heads, heads_kv):
    case = rung.problem(4, 10, batch=1, heads=heads, heads_kv=heads_kv)
    case.v[:] = np.arange(heads_kv)[None, :, None, None]
    expected = np.arange(heads) // (heads // heads_kv)
    assert np.allclose(rung(case)[0], expected[None, :, None, None], rtol=1e-6)


# Below, at and above the tile sizes of all kernels (multiples of 4 and 6), and lengths of one.
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (1, 40), (40, 1), (15, 17), (16, 16), (17, 15), (33, 47), (3, 64)]
)
def test_lengths_need_be_no_multiple(rung, seqlen_q, seqlen_k):
    rung.check(rung.problem(seqlen_q, seqlen_k, batch=1), causal=True)


# Each extent that may be 0, alone.
@pytest.mark.parametrize("nothing", ["batch", "seqlen_q", "seqlen_k", "heads", "heads of q"])
def test_nothing_is_defined(rung, nothing):
    extents = dict(batch=2, seqlen_q=5, seqlen_k=6) | {nothing.removesuffix(" of q"): 0}
    if nothing == "heads":
        extents["heads_kv"] = 0
    case = rung.problem(**extents)
    o, lse = rung(case)
    assert o.shape == (*case.q.shape[:3], 4) and lse.shape == case.q.shape[:3]
    assert (o == 0).all() and (lse == -np.inf).all()


# Every way in which a row can come to see no key. Rows 0 and 3 of each batch entry are hidden, others not.
HIDING = {
    "mask": dict(mask=(np.arange(6) % 3 != 0)[None, None, :, None]),
    "causal": dict(causal=True, q_offset=-2),
    "window": dict(window=(0, 0), q_offset=np.array([-4, 4], np.int32)),
    "seqlens_k": dict(seqlens_k=np.array([0, 3], np.int32)),
    "bias": dict(bias=np.where(np.arange(6) % 3 != 0, 0, -np.inf).astype(np.float32)[None, None, :, None]),
}


# Every way, with v finite and not: 0 is stored, never computed.
@pytest.mark.parametrize("value", [1.0, np.nan, np.inf])
@pytest.mark.parametrize("how", HIDING)
def test_a_row_that_sees_no_key_is_zero(rung, how, value):
    case = rung.problem(6, 7)
    visible = np.broadcast_to(
        testing.formula.visible_keys(Case(case.q, case.k, case.v, HIDING[how])), (2, 2, 6, 7)
    ).any(-1)
    if how == "bias":
        visible = np.broadcast_to(np.arange(6) % 3 != 0, visible.shape)
    assert visible.any() and not visible.all()
    case.v[...] = value
    o, lse = rung(case, **{name: rung.move(x) if isinstance(x, np.ndarray) else x for name, x in HIDING[how].items()})
    assert (o[~visible] == 0).all() and (lse[~visible] == -np.inf).all()
    assert np.array_equal(o[visible], np.full_like(o[visible], value), equal_nan=True) or value == 1.0
    assert np.isfinite(lse[visible]).all()


# Such a row has its sink alone, of its own head; without one, or with one of -inf, it is what it was.
@pytest.mark.parametrize("value", [1.0, np.nan])
@pytest.mark.parametrize("how", HIDING)
def test_a_row_that_sees_no_key_has_its_sink(rung, how, value):
    sinks = np.array([[1.25, -np.inf], [-2.5, 80.0]], np.float32)
    case = rung.problem(6, 7, **HIDING[how])
    lse = rung(case)[1]
    case.v[...] = value
    o, lse_of_sinks = rung(case, sinks=rung.move(sinks))
    empty = lse == -np.inf
    assert empty.any() and not empty.all()
    assert (o[empty] == 0).all() and np.isnan(o[~empty]).all() == np.isnan(value)
    expected = np.logaddexp(lse, sinks[:, :, None])
    assert np.allclose(lse_of_sinks, expected, rtol=1e-6, atol=1e-6)


# Scores of a size that others do not reach: the lowest and the highest number of a dtype, which frameworks write for
# keys that are not to be seen and which is no -inf, half of it, less, and where the CPU begins to count otherwise.
LEVELS = ("max", "max / 2", 1e12, 11629080.0)


def at_a_level(rung, dtype, level, sign, seqlen_k=60, heads=1, **options):
    """A problem with a bias of that size: for all keys of row 0; beside 0, first and last; beside less of it; beside
    -inf; and beside its neighbour among the numbers, the larger one last."""
    number = ml_dtypes.finfo(dtype).max
    if level != "max":
        number = number / type(number)(2) if level == "max / 2" else type(number)(level)
    end, half = number if sign > 0 else -number, seqlen_k * 0.52
    first = np.arange(seqlen_k) < half
    bias = np.zeros((1, 1, 6, seqlen_k), dtype)
    bias[..., 0, :], bias[..., 1, first], bias[..., 2, ~first], bias[..., 3, :] = end, end, end, end * type(end)(0.75)
    bias[..., 3, 5], bias[..., 4, :], bias[..., 4, 3:9] = end, -np.inf, end
    bias[..., 5, :] = np.where(first, *sorted((end, np.nextafter(end, type(end)(0)))))
    return rung.problem(6, seqlen_k, batch=1, heads=heads, head_dim=7, dtype=dtype, bias=bias, **options)


def check_at_a_level(rung, *level, **options):
    """Scores without a rounding of their own (scale 0) are held to more than the bound, which is in units of them."""
    case = at_a_level(rung, *level, scale=0.0, **options)
    o, lse = rung(case)
    testing.check(case, o, lse, rung.kernel)
    right, right_lse = testing.oracle(case)
    assert np.abs(o - right).max() <= 8 * testing.EPS[case.dtype] * np.abs(right).max()
    assert (np.abs(lse - right_lse) <= 2 * testing.EPS[str(lse.dtype)] * np.abs(right_lse)).all()


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_scores_of_any_size(rung, dtype, level, sign):
    check_at_a_level(rung, dtype, level, sign)


# docs/numerics.md: |v| times one more than the keys is below the largest number. A factor of 2^122 changes no digit.
def test_large_values(rung):
    case = rung.problem(6, 30, dtype="float32", batch=1, heads=1, head_dim=8, scale=0.0)  # all weights are 1
    case.v[...] = np.where(np.arange(8) % 2, 1.9, -1.9) + 0.05 * np.sign(case.v)
    o, lse = rung(case)
    case.v *= np.float32(2.0**122)
    large, lse_of_large = rung(case)
    assert same_bits(large, o * np.float32(2.0**122)) and same_bits(lse_of_large, lse)


# docs/numerics.md: q . k is below the largest number before it is scaled.
def test_products_up_to_the_largest_number(rung):
    case = rung.problem(6, 30, dtype="float32", batch=1, heads=1, head_dim=8, scale=1e-38)
    case.q[...], case.k[...] = 0, 0
    case.q[..., 0], case.k[..., 0] = 1e19, np.linspace(-3.3e19, 3.3e19, 30)  # scores from -3.3 to 3.3
    for _ in range(2):
        for got, right in zip(rung(case), testing.oracle(case), strict=True):
            assert np.abs(got - right).max() <= 1e-5 * np.abs(right).max()
        case.k[..., 0] *= 1.2  # the largest products would be Inf
        case.q[...], case.options["scale"] = case.q * np.float32(1e-38), 1.0


# What hides key 13 from some queries, from all of the 20, or from one batch entry.
BLINDS = {
    "causal": dict(causal=True, q_offset=0),
    "causal, all rows": dict(causal=True, q_offset=-8),
    "left": dict(window=(4, None), q_offset=0),
    "right": dict(window=(None, 2), q_offset=0),
    "both": dict(window=(3, 2), q_offset=0),
    "seqlens_k": dict(seqlens_k=np.array([13, 30], np.int32)),
    "mask": dict(mask=np.random.default_rng(5).random((2, 2, 20, 30)) < 0.5),
    "mask and softcap": dict(mask=(np.arange(30) != 13)[None, None, None], softcap=2.0),
}


def poisoned(rung, how, *places, value, dtype=None):
    """(case, the same with `value` at key 13 in each of the places, which rows see it)."""
    extents = {}
    if rung.slow:  # a row is computed again by itself: two entries and two heads each have to be there once
        extents = dict(batch=2 if how in ("causal", "seqlens_k") else 1, heads=2 if how == "mask" else 1)
    cases = [rung.problem(dtype=dtype, **extents, **BLINDS[how]) for _ in range(2)]
    whole = (*cases[0].q.shape[:3], 30)
    for case in cases:
        if how == "mask":
            case.options["mask"] = case.options["mask"][: whole[0]]
        if "bias" in places:
            case.options["bias"] = np.zeros(whole, np.float32)
    for name in places:
        array = cases[1].options["bias"].swapaxes(2, 3) if name == "bias" else getattr(cases[1], name)
        array[:, :, 13] = value
    visible = np.broadcast_to(testing.formula.visible_keys(cases[0]), whole)[..., 13]
    assert not visible.all()
    return *cases, visible


# NaN, both infinities, and a number whose product overflows, in everything that belongs to a key at once.
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 6e4])
@pytest.mark.parametrize("how", BLINDS)
def test_what_is_hidden_never_reaches_o(rung, how, value):
    if rung.slow and not (np.isnan(value) or (value == 6e4 and how == "mask")):
        pytest.skip("minutes in the simulator, where NaN must do; every value on a GPU")
    dtype = "float16" if value == 6e4 else rung.dtype
    clean, strange, visible = poisoned(rung, how, "k", "v", "bias", value=value, dtype=dtype)
    (clean_o, clean_lse), (o, lse) = rung(clean), rung(strange)
    assert unchanged(rung, o[~visible], clean_o[~visible]) and lse_unchanged(rung, lse[~visible], clean_lse[~visible])


# Each place alone: one that shows must not make up for one that is swallowed.
@pytest.mark.parametrize("where", ["k", "v", "bias"])
@pytest.mark.parametrize("how", ["causal", "mask"])
def test_nan_that_is_seen_does_reach_o(rung, how, where):
    _, strange, visible = poisoned(rung, how, where, value=np.nan)
    assert visible.any()
    o, lse = rung(strange)
    assert np.isnan(o[visible]).all() and not np.isnan(o[~visible]).any()
    assert where == "v" or np.isnan(lse[visible]).all()


# In tiles of keys: the loops over free tiles and over those that either edge cuts, tiles that no row sees, rows that
# see no key above and below others, and the last, ragged tile.
TILES = {
    "free": dict(),
    "causal": dict(causal=True),
    "causal, empty rows": dict(causal=True, q_offset=-0.7),
    "left": dict(window=(1.6, None)),
    "left, far": dict(window=(0.1, 0), q_offset=2.3),
    "both": dict(window=(1.3, 0.4), q_offset=1.0),
    "beyond": dict(window=(0.2, 0.2), q_offset=4.1),
    "lengths": dict(seqlens_k=(2.2, 0.0)),
    "causal lengths": dict(seqlens_k=(3.0, 0.5), causal=True),
}


@pytest.mark.parametrize("how", TILES)
def test_many_tiles(rung, how):
    def in_keys(x):
        return x if x is None or isinstance(x, bool) else int(x * rung.tile)

    given = dict(TILES[how])
    for name in ("window", "seqlens_k"):
        if name in given:
            given[name] = tuple(map(in_keys, given[name]))
    if "q_offset" in given:
        given["q_offset"] = in_keys(given["q_offset"])
    if "seqlens_k" in given:
        given["seqlens_k"] = np.array(given["seqlens_k"], np.int32)
    seqlen_q, seqlen_k = int(1.4 * rung.tile), int(4.3 * rung.tile)
    case = rung.problem(seqlen_q, seqlen_k, heads=1, head_dim=8, batch=2 if "seqlens_k" in given else 1, **given)
    rung.check(case)


# Scores that rise or fall from key to key, by `powers` of two a tile, so that the running maximum moves in each tile,
# in some, or never, whichever way a kernel walks. They do so in two of three rows, or in one of sixteen, which a warp
# may hold together.
# One head_dim for each kind of tile.
@pytest.mark.parametrize(
    ("powers", "which", "head_dim"),
    [(powers, "many", 8) for powers in (-40, -5, 5, 40)]
    + [(powers, which, 8) for powers in (-40, 40) for which in (2, 9)]
    + [(5, "many", 72), (-40, 2, 72), (40, 9, 72)],
)
def test_maxima_that_move(rung, powers, which, head_dim):
    case = rung.problem(int(0.6 * rung.tile), int(4.3 * rung.tile), batch=1, heads=1, head_dim=head_dim, scale=1.0)
    case.q[..., 1:] *= 0.1
    row = np.arange(case.q.shape[2])
    case.q[..., 0] = row % 3 != 2 if which == "many" else row % 16 == which
    case.k[..., 0] = np.arange(case.k.shape[2]) * (powers * math.log(2) / rung.tile)
    rung.check(case)


# Whatever a running maximum begins with, it must not stay above scores that are all far below zero.
@pytest.mark.parametrize("level", [-3000, -89, 89, 3000])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_whose_scores_are_all_far_from_zero(rung, level, causal):
    case = rung.problem(int(0.6 * rung.tile), int(4.3 * rung.tile), batch=1, heads=1, head_dim=8, scale=1.0)
    case.q[..., 0], case.k[..., 0] = 16, level / 16
    rung.check(case, causal=causal)


# Whole tiles of keys that are seen and whose scores are all -inf: the first that a kernel walks, whichever way it does,
# the last, some between, and all that there are. They count like keys that are not seen: no NaN from -inf - -inf.
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("those", [(1.2, 9), (0, 3.1), (1.2, 3.1), (0, 9)])
def test_scores_of_minus_infinity_in_whole_tiles(rung, those, causal):
    case = rung.problem(int(0.6 * rung.tile), int(4.3 * rung.tile), batch=1, heads=1, head_dim=8, causal=causal)
    first, end = (int(x * rung.tile) for x in those)
    case.q[..., 0], case.k[:, :, first:end, 0] = 1, -np.inf
    rung.check(case)


def test_nothing_hidden_reaches_rows_whose_scores_are_all_minus_infinity(rung):
    """NaN in v at a key that no row sees, in the tile where the last of them end."""
    case = rung.problem(3, 2 * rung.tile, batch=2, heads=1, head_dim=8, causal=True, q_offset=rung.tile + 2)
    case.q[..., 0], case.k[1, :, :, 0], case.k[0, :, rung.tile :, 0] = 1, -np.inf, -np.inf
    case.v[:, :, rung.tile + 9] = np.nan
    rung.check(case)
    o, lse = rung(case)
    assert (o[1] == 0).all() and (lse[1] == -np.inf).all() and np.isfinite(o).all()


def test_what_is_strange_in_one_of_many_tiles(rung):
    """Seen by some rows of a tile; the tile before and the one behind are looked at, too."""
    seqlen_q, at = int(1.4 * rung.tile), 3 * rung.tile - 1
    case = rung.problem(
        seqlen_q, 6 * rung.tile, batch=1, heads=1, head_dim=8, window=(3, 2), q_offset=2 * rung.tile + 3
    )
    case.k[:, :, at], case.v[:, :, at + 1] = np.inf, np.nan
    rung.check(case)


def test_padding_of_a_cache_is_never_read(rung):
    case = rung.problem(3, 40, seqlens_k=np.array([7, 25], np.int32))
    clean = rung(case)
    for b, length in enumerate((7, 25)):
        case.k[b, :, length:] = np.nan
        case.v[b, :, length:] = np.nan
    assert all(same_bits(x, y) for x, y in zip(rung(case), clean, strict=True))


def test_nan_in_q_stays_in_its_row(rung):
    case = rung.problem()
    clean_o, _ = rung(case)
    case.q[0, 1, 5, 3] = np.nan
    o, lse = rung(case)
    nonfinite = np.zeros(o.shape[:3], bool)
    nonfinite[0, 1, 5] = True
    assert np.isnan(o[nonfinite]).all() and np.isnan(lse[nonfinite]).all()
    assert same_bits(o[~nonfinite], clean_o[~nonfinite])


# Every dtype: its own conversions, accumulators and tiles.
@pytest.mark.parametrize("dtype", testing.DTYPES)
def test_equal_calls_give_equal_bits(rung, dtype):
    case = rung.problem(dtype=dtype, causal=True, batch=rung.batch)
    first = rung(case)
    for _ in range(1 if rung.slow else 3):
        assert all(same_bits(x, y) for x, y in zip(rung(case), first, strict=True))


# Few queries, where keys may be split over tasks, and many.
@pytest.mark.parametrize("seqlen_q", [1, 7, 40])
def test_bits_do_not_depend_on_batch_neighbours(rung, seqlen_q):
    case = rung.problem(seqlen_q, 45, batch=3, causal=True)
    o, lse = rung(case)
    for b in range(3):
        alone = Case(case.q[b : b + 1], case.k[b : b + 1], case.v[b : b + 1], case.options)
        assert all(same_bits(x, y[b : b + 1]) for x, y in zip(rung(alone), (o, lse), strict=True))


# Both layouts; each dtype that lse is computed in.
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("dtype", "lse_dtype"), [("float16", "float32"), ("float64", "float64")])
def test_what_is_returned(rung, layout, dtype, lse_dtype):
    case = rung.problem(5, 6, heads=4, head_dim_v=3, dtype=dtype)
    q, k, v = (rung.move(x if layout == "bhsd" else x.transpose(0, 2, 1, 3)) for x in (case.q, case.k, case.v))
    o = rung.attention(q, k, v, layout=layout)
    assert type(o) is type(q) and o.dtype == q.dtype
    assert o.shape == ((2, 4, 5, 3) if layout == "bhsd" else (2, 5, 4, 3))
    both = rung.attention(q, k, v, layout=layout, return_lse=True)
    assert isinstance(both, numba_flash.AttentionOutput) and type(both.lse) is type(q)
    assert both.lse.shape == (2, 4, 5) and both.lse.dtype == lse_dtype
    assert same_bits(rung.back(both.o), rung.back(o))


def test_layouts_are_the_same_function(rung):
    case = rung.problem(causal=True)
    turned = Case(*(np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (case.q, case.k, case.v)), dict(causal=True))
    o, lse = rung(turned, layout="bshd")
    expected_o, expected_lse = rung(case)
    assert same_bits(o.transpose(0, 2, 1, 3), expected_o) and same_bits(lse, expected_lse)


# A fresh array, every second element of one, and one whose heads and queries are swapped.
@pytest.mark.parametrize("how", ["contiguous", "sliced", "transposed", "negative"])
@pytest.mark.parametrize("head_dim", [4, 16])  # less than 16 bytes of 16-bit elements, and more
def test_out_is_written_and_returned(rung, how, head_dim):
    batch = rung.batch
    case = rung.problem(batch=batch, head_dim=head_dim)
    expected, expected_lse = rung(case)

    def memory(*shape):
        return rung.move(np.full(shape, np.nan, case.q.dtype))

    base = {
        "contiguous": memory(batch, 2, 20, head_dim),
        "sliced": memory(batch, 2, 40, 2 * head_dim)[:, :, ::2, ::2],
        "transposed": memory(batch, 20, 2, head_dim).transpose(0, 2, 1, 3),
        "negative": memory(batch, 2, 20, head_dim)[:, :, ::-1],
    }[how]
    arguments = case.arguments(rung.move)
    assert rung.attention(**arguments, out=base) is base
    assert same_bits(rung.back(base), expected)
    lse = rung.move(np.full((batch, 2, 20), np.nan, expected_lse.dtype))
    both = rung.attention(**arguments, out=(base, lse), return_lse=True)
    assert both.o is base and both.lse is lse
    assert same_bits(rung.back(lse), expected_lse)
    only_o = rung.attention(**arguments, out=base, return_lse=True)
    assert only_o.o is base and same_bits(rung.back(only_o.lse), expected_lse)


# Columns that are written one by one, and 16 bytes at a time.
@pytest.mark.parametrize("head_dim", [4, 15, 16])
def test_nothing_is_written_around_out(rung, head_dim):
    case = rung.problem(head_dim=head_dim, batch=rung.batch)
    larger = rung.move(np.full((rung.batch, 2, 22, 32), 7, case.q.dtype))
    inside = np.s_[:, :, 1:-1, 8 : 8 + head_dim]
    rung.attention(**case.arguments(rung.move), out=larger[inside])
    around = rung.back(larger).copy()
    assert same_bits(around[inside], rung(case)[0])
    around[inside] = 7
    assert (around == 7).all()


def test_inputs_are_left_alone(rung):
    given = dict(
        causal=True,
        seqlens_k=np.array([30, 4], np.int32),
        bias=np.ones((1, 1, 20, 30), np.float32),
        mask=np.ones((1, 1, 20, 30), bool),
        alibi_slopes=np.ones(2, np.float32),
        sinks=np.ones(2, np.float32),
    )
    case = rung.problem(**given)
    moved = case.arguments(rung.move)
    before = {name: rung.back(x).copy() for name, x in moved.items() if hasattr(x, "shape")}
    rung.attention(**moved)
    assert all(same_bits(rung.back(moved[name]), x) for name, x in before.items())


# How k and v may not lie for some: 16 bytes must be fetched at once, and TMA, which brings wgmma 16-bit elements, has
# no strides of 0 and none backwards.
NOT_FETCHED = dict.fromkeys(("mma", "wgmma"), ("sliced", "negative", "fortran"))
NOT_FETCHED_BY_TMA = (*NOT_FETCHED["wgmma"], "broadcast", "backwards", "repeated")


def check_where_fetched(rung, case, how, **options):
    by_tma = rung.kernel == "wgmma" and case.q.dtype.itemsize == 2
    if how in (NOT_FETCHED_BY_TMA if by_tma else NOT_FETCHED.get(rung.kernel, ())):
        with pytest.raises(NotImplementedError, match="not contiguous along dim|begins at an address|fetched by TMA"):
            rung(case)
    else:
        rung.check(case, **options)


# Wider than what a block of mma computes: two have the columns of a row between them, and these do not end where panels
# of 64 columns do. With NaN in the last key, rows that do not see it are computed again.
@pytest.mark.parametrize("head_dim_v", [264, 320, 400])
@pytest.mark.parametrize("last", [0, np.nan])
def test_wide_rows_of_v(rung, head_dim_v, last):
    case = rung.problem(5, 12, batch=1, heads=1, head_dim=8, head_dim_v=head_dim_v, causal=True, window=(3, 0))
    case.v[:, :, 11] = last
    rung.check(case)


# Every unusual stride that the testing kit knows, for all three arrays at once.
@pytest.mark.parametrize("how", testing.STRIDES)
def test_any_strides(rung, how):
    case = rung.problem(9, 14, head_dim=8)
    strange = Case(*(testing.strided(x, rung.dtype, how) for x in (case.q, case.k, case.v)))
    check_where_fetched(rung, strange, how)


# Rows backwards, and each row the same; 16 bytes long, so that every rung can take them.
@pytest.mark.parametrize("how", ["backwards", "repeated"])
def test_rows_of_any_stride(rung, how):
    case = rung.problem(9, 14, head_dim=8)
    case.k, case.v = (
        x[:, :, ::-1] if how == "backwards" else np.broadcast_to(x[:, :, 3:4], x.shape) for x in (case.k, case.v)
    )
    check_where_fetched(rung, case, how, causal=True)


# All that broadcasting allows: a number, missing axes, each axis of one element.
@pytest.mark.parametrize(
    "shape", [(), (14,), (9, 14), (2, 1, 14), (1, 2, 9, 1), (2, 1, 1, 14), (2, 1, 9, 14), (2, 2, 9, 14)]
)
def test_bias_and_mask_are_broadcast(rung, shape):
    if rung.slow and shape not in ((), (1, 2, 9, 1), (2, 1, 1, 14)):
        pytest.skip("seconds in the simulator, where each axis is of one element in one of three shapes")
    generator = np.random.default_rng(3)
    bias, mask = generator.standard_normal(shape).astype(np.float32), np.asarray(generator.random(shape) < 0.8)
    bias, mask = np.asarray(bias), np.asarray(mask)
    whole = (2, 2, 9, 14)
    case = rung.problem(9, 14, bias=bias, mask=mask)
    same = rung.problem(9, 14, bias=np.broadcast_to(bias, whole).copy(), mask=np.broadcast_to(mask, whole).copy())
    assert all(same_bits(x, y) for x, y in zip(rung(case), rung(same), strict=True))


# Of all entries, and every second of a larger array. A tile of a few queries has rows of several heads, of which 3 do
# not divide it and 4 do.
@pytest.mark.parametrize("dtype", testing.DTYPES)
@pytest.mark.parametrize(("group", "seqlen_q"), [(1, 20), (3, 1), (4, 1), (4, 20)])
def test_each_head_has_its_sink(rung, dtype, group, seqlen_q):
    heads = 2 * group
    sinks = np.linspace(-3, 4, 4 * heads).reshape(2, 2 * heads).astype(dtype)[:, ::2]
    case = rung.problem(seqlen_q, heads=heads, heads_kv=2, dtype=dtype, causal=True)
    rung.check(case, sinks=sinks)


@pytest.mark.parametrize("dtype", testing.DTYPES)
def test_sinks_of_all_entries_may_be_float32(rung, dtype):
    rung.check(rung.problem(dtype=dtype, causal=True), sinks=np.array([-3, 2], np.float32))


# Far below all scores, among them, where it leaves them e^-14 together, and far above. Scores are 0, so that the answer
# is known; were the sink a row's first maximum, the weights of the third would be among float16's smallest numbers.
@pytest.mark.parametrize("sink", [-200.0, 0.5, 14.0, 80.0])
@pytest.mark.parametrize("dtype", testing.DTYPES)
def test_a_sink_of_any_size(rung, dtype, sink):
    case = rung.problem(5, 150, dtype=dtype, batch=1, heads=1, sinks=np.full(1, sink, np.float32))
    case.q[...], case.v[...] = 0, 100
    o, lse = rung(case)
    whole = 150 + np.exp(sink)
    tiny, eps = float(ml_dtypes.finfo(dtype).smallest_subnormal), max(testing.EPS[dtype], testing.EPS["float32"])
    assert np.allclose(o.astype(np.float64), 100 * 150 / whole, rtol=4 * eps, atol=tiny)
    assert np.allclose(lse, np.log(whole), rtol=1e-6)


# With more columns of V than a block has, and with rows that are computed again.
@pytest.mark.parametrize("last", [0, np.nan])
@pytest.mark.parametrize("head_dim_v", [5, 400])
def test_sinks_of_recomputed_rows(rung, head_dim_v, last):
    case = rung.problem(5, 12, batch=1, head_dim=8, head_dim_v=head_dim_v, causal=True, window=(3, 0))
    case.v[:, :, 11] = last
    rung.check(case, sinks=np.array([0.5, 3.0], np.float32))
