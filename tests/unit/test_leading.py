"""q, k and v of any number of dimensions: the same as one call for each entry of the batch."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import numba_flash
from numba_flash.arrays.views import strides_of_view, viewed

rng = np.random.default_rng(0)
HEADS, HEADS_KV, ROWS, KEYS, DIM, DIM_V = 4, 2, 5, 7, 8, 6
ALL = ("dq", "dk", "dv", "dbias", "dalibi_slopes", "dsinks")


def drawn(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def operands(batch, layout="bhsd"):
    """q, k and v; of 2 dimensions where batch is None."""
    if batch is None:
        return drawn(ROWS, DIM), drawn(KEYS, DIM), drawn(KEYS, DIM_V)
    shapes = (HEADS, ROWS, DIM), (HEADS_KV, KEYS, DIM), (HEADS_KV, KEYS, DIM_V)
    order = (0, 1, 2) if layout == "bhsd" else (1, 0, 2)
    return [drawn(*batch, *(shape[axis] for axis in order)) for shape in shapes]


def entry(x, at, batch, tail):
    """What x, which is broadcast to (*batch, ...), has at an index of batch."""
    if x is None or x.ndim <= tail:
        return x
    return np.broadcast_to(x, (*batch, *x.shape[x.ndim - tail :]))[at]


def scores(batch):
    """Options of which each is repeated in all of the batch or in none of it."""
    heads = () if batch is None else (HEADS,)
    batch = batch or ()
    one = (1,) * len(batch)
    yield dict()
    yield dict(bias=drawn(ROWS, KEYS))
    yield dict(bias=drawn(*one, *heads, ROWS, 1), mask=rng.random((*batch, *(1 for _ in heads), ROWS, KEYS)) > 0.3)
    yield dict(bias=drawn(*batch, *heads, ROWS, KEYS), alibi_slopes=drawn(*heads), sinks=drawn(*batch, *heads))
    yield dict(
        seqlens_k=rng.integers(0, KEYS + 1, batch).astype(np.int32), causal=True,
        q_offset=rng.integers(0, 3, batch).astype(np.int32), alibi_slopes=drawn(*batch, *heads),
    )  # fmt: skip


TAILS = dict(bias=3, mask=3, alibi_slopes=1, sinks=1, seqlens_k=0, q_offset=0)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("batch", [None, (), (2, 3), (1, 2, 3), (3, 1), (2, 0)], ids=str)
@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_any_number_of_leading_dimensions(batch, layout, kernel):
    q, k, v = operands(batch, layout)
    for options in scores(batch):
        found = numba_flash.attention(q, k, v, **options, layout=layout, return_lse=True, kernel=kernel)
        dims = batch or ()
        assert found.o.shape == (*q.shape[:-1], DIM_V)
        assert found.lse.shape == (*dims, *(() if batch is None else (HEADS,)), ROWS)
        do, dlse = drawn(*found.o.shape), drawn(*found.lse.shape)
        wanted = tuple(name for name in ALL if name in ("dq", "dk", "dv") or name[1:] in options)
        given = dict(options, layout=layout, wanted=wanted, kernel=kernel, dlse=dlse)
        gradients = numba_flash.attention_backward(do, q, k, v, *found, **given)
        named = dict(dq=q, dk=k, dv=v, **{f"d{name}": x for name, x in options.items()})
        sums = {name: np.zeros(named[name].shape) for name in wanted}
        for at in np.ndindex(dims):
            four = _one_entry((do, q, k, v, found.o), at, batch, layout)
            lse, dlse_4 = (x[at].reshape(1, -1, ROWS) for x in (found.lse, dlse))
            own = {name: entry(x, at, dims, TAILS[name]) if name in TAILS else x for name, x in options.items()}
            own = {name: _ranked(name, x, batch) for name, x in own.items()}
            o = numba_flash.attention(*four[1:4], **own, layout=layout, kernel=kernel)
            np.testing.assert_array_equal(o.reshape(found.o[at].shape), found.o[at])
            one = numba_flash.attention_backward(
                *four, lse, **own, dlse=dlse_4, layout=layout, wanted=wanted, kernel=kernel
            )
            for name in wanted:
                x, shape = getattr(one, name), named[name].shape
                tail = TAILS.get(name[1:], 3 if batch is not None else 2)
                place = at if len(shape) > tail or name in ("dq", "dk", "dv") else ()
                place = tuple(0 if n == 1 else i for i, n in zip(place, shape, strict=False))
                sums[name][place] += x.reshape(sums[name][place].shape)
        for name in wanted:
            assert getattr(gradients, name).shape == named[name].shape
            np.testing.assert_allclose(getattr(gradients, name), sums[name], atol=2e-5, err_msg=name)


def _one_entry(arrays, at, batch, layout):
    if batch is not None:
        return [x[at][None] for x in arrays]
    return [x[None, :, None] if layout == "bshd" else x[None, None] for x in arrays]


def _ranked(name, x, batch):
    """An option of one entry as a call of 4 dimensions takes it."""
    if name in ("seqlens_k", "q_offset"):
        return x.reshape(1)
    return x.reshape(1) if name in ("alibi_slopes", "sinks") and batch is None else x


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_out_is_written_and_given_back(layout):
    for batch in (None, (), (2, 3)):
        q, k, v = operands(batch, layout)
        right = numba_flash.attention(q, k, v, layout=layout, return_lse=True)
        out = np.empty_like(right.o), np.empty_like(right.lse)
        found = numba_flash.attention(q, k, v, layout=layout, return_lse=True, out=out)
        assert found.o is out[0] and found.lse is out[1]
        np.testing.assert_array_equal(out[0], right.o)
        np.testing.assert_array_equal(out[1], right.lse)
        assert numba_flash.attention(q, k, v, layout=layout, out=out[0]) is out[0]


def test_functions_count_the_entries_in_order():
    q, k, v = operands((2, 3))
    table = np.arange(6, dtype=np.float32)
    found = numba_flash.attention(q, k, v, score_mod=lambda s, b, h, i, j, t: s + t[b] * j, aux=(table,))
    for number, at in enumerate(np.ndindex(2, 3)):
        one = numba_flash.attention(
            *(x[at] for x in (q, k, v)), score_mod=lambda s, b, h, i, j, c=float(number): s + c * j
        )
        np.testing.assert_allclose(one, found[at], atol=1e-6)


def test_explain_and_warmup_take_them():
    q, k, v = operands((2, 3))
    numba_flash.warmup(q, k, v)
    assert numba_flash.explain(q, k, v).problem.batch == 6
    o, lse = numba_flash.attention(q, k, v, return_lse=True)
    assert numba_flash.explain_backward(o, q, k, v, o, lse).problem.forward.batch == 6


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(q=drawn(3, 2, HEADS, ROWS, DIM).swapaxes(0, 1)), NotImplementedError, r"q of shape .* pass q.copy\(\)"),
        (dict(bias=drawn(2, 1, 1, ROWS, KEYS)), NotImplementedError, "bias of shape .* is repeated in some of q's"),
        (dict(mask=np.ones((3, 1, ROWS, KEYS), bool)), NotImplementedError, "mask of shape .* is repeated in some"),
        (dict(out=drawn(3, 2, HEADS, ROWS, DIM_V).swapaxes(0, 1)), NotImplementedError, "pass a contiguous array$"),
    ],
)
def test_what_would_need_a_copy_is_named(change, error, words):
    q, k, v = operands((2, 3))
    with pytest.raises(error, match=words):
        numba_flash.attention(**(dict(q=q, k=k, v=v) | change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(k=drawn(3, 2, HEADS_KV, KEYS, DIM)), "k must have the leading dimensions of q"),
        (dict(v=drawn(6, HEADS_KV, KEYS, DIM_V)), "v must have the leading dimensions of q"),
        (dict(bias=drawn(2, 2, 1, ROWS, KEYS)), "bias must be broadcastable to q's leading dimensions"),
        (dict(bias=drawn(1, 1, 1, 1, ROWS, KEYS)), "bias must be broadcastable to q's leading dimensions"),
        (dict(seqlens_k=np.ones(6, np.int32)), "seqlens_k must have the leading dimensions of q"),
        (dict(alibi_slopes=drawn(3, 2, HEADS)), "alibi_slopes must be broadcastable"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change, words):
    q, k, v = operands((2, 3))
    with pytest.raises(ValueError, match=words):
        numba_flash.attention(**(dict(q=q, k=k, v=v) | change))


@pytest.mark.parametrize(
    ("heads", "change", "words"),
    [
        ((HEADS,), dict(v=drawn(KEYS, DIM_V)), "v must have 3 dimensions, not shape"),
        ((HEADS,), dict(seqlens_k=np.ones(1, np.int32)), "seqlens_k must have 0 dimensions, not shape"),
        ((), dict(k=drawn(1, KEYS, DIM)), "k must have 2 dimensions, not shape"),
    ],
)
def test_without_a_batch_the_number_of_dimensions_is_named(heads, change, words):
    q, k, v = drawn(*heads, ROWS, DIM), drawn(*heads, KEYS, DIM), drawn(*heads, KEYS, DIM_V)
    with pytest.raises(ValueError, match=words):
        numba_flash.attention(**(dict(q=q, k=k, v=v) | change))


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_strides_of_a_view_are_numpys(data):
    """For arrays of any strides: those of NumPy's reshape where it makes a view, and none where it copies."""
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
    x = np.arange(math.prod(shape) * 4).reshape(*shape, 4)
    x = x.transpose(data.draw(st.permutations(range(x.ndim))))[::-1]
    if data.draw(st.booleans()):
        x = np.broadcast_to(x[:1], (4, *x.shape[1:]))
    new, left = [], x.size
    while left > 1 and len(new) < 4:
        new.append(data.draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
        left //= new[-1]
    new = (*new, left)
    expected, found = x.reshape(new), strides_of_view(x.shape, x.strides, new)
    assert (found is not None) == np.shares_memory(expected, x)
    if found is not None:
        np.testing.assert_array_equal(np.lib.stride_tricks.as_strided(x, new, found), expected)


def test_views_of_numba_s_device_arrays_and_of_unknown_ones():
    class DeviceNDArray:
        def __init__(self, shape, strides, dtype, stream, gpu_data):
            self.shape, self.strides, self.dtype, self.stream, self.gpu_data = shape, strides, dtype, stream, gpu_data

    DeviceNDArray.__module__ = "numba.cuda.cudadrv.devicearray"
    view = viewed("q", DeviceNDArray((2, 3, 5, 8), (480, 160, 32, 4), "f4", 7, "memory"), (6, 5, 8))
    assert vars(view) == dict(shape=(6, 5, 8), strides=(160, 32, 4), dtype="f4", stream=7, gpu_data="memory")
    DeviceNDArray.__module__ = "elsewhere"
    with pytest.raises(NotImplementedError, match="q must have 4 dimensions"):
        viewed("q", DeviceNDArray((2, 3), (12, 4), "f4", 0, None), (6,))
