"""Context parallelism with ranks that are threads: its results beside those of one call."""

import functools

import numpy as np
import pytest
from helpers.ranks import Threads

import numba_flash
from numba_flash import distributed
from numba_flash.distributed import Layout
from numba_flash.distributed.layout import Reach, needed

HEADS, HEADS_KV, DIM = 4, 2, 16


def arrays(seqlen, batch=1, heads=HEADS, heads_kv=HEADS_KV, dim=DIM, dim_v=DIM, dtype="float32", seed=0):
    """q, k, v and do in the layout bshd."""
    generator = np.random.default_rng(seed)
    sizes = (heads, dim), (heads_kv, dim), (heads_kv, dim_v), (heads, dim_v)
    return [generator.standard_normal((batch, seqlen, *size)).astype(dtype) for size in sizes]


def whole(parts, layout, dim):
    """The ranks' parts in the order of the whole."""
    positions = np.concatenate([layout.positions(rank) for rank in range(layout.size)])
    return np.take(np.concatenate(parts, dim), np.argsort(positions), dim)


def on_ranks(given, size, layout, packed=False, shared=None, **options):
    """o, lse, dq, dk, dv and dsinks of all ranks, as one process has them. given: q, k, v, do in bshd, or packed."""
    threads = shared or Threads(size)
    tokens = given[0].shape[0 if packed else 1]
    chosen = distributed.whole.layout_of(layout, size, tokens)
    more = dict(layout=layout, seqlen=tokens, **({} if packed else dict(dims="bshd")), **options)

    def work(group):
        q, k, v, do = (distributed.shard(x, group, 0 if packed else 1, layout) for x in given)
        o, lse = distributed.context_parallel_attention(q, k, v, group, return_lse=True, **more)
        wanted = ("dq", "dk", "dv", *(["dsinks"] if options.get("sinks") is not None else []))
        dlse = np.cos(np.where(np.isfinite(lse), lse, 0))
        backward = distributed.context_parallel_attention_backward
        return o, lse, *backward(do, q, k, v, o, lse, group, dlse=dlse, wanted=wanted, **more)

    found = list(zip(*threads.run(work), strict=True))
    dim, last = (0, 1) if packed else (1, 2)
    o, lse, dq, dk, dv = (whole(x, chosen, last if n == 1 else dim) for n, x in enumerate(found[:5]))
    dsinks = None if found[7][0] is None else np.sum(found[7], 0)
    return o, lse, dq, dk, dv, dsinks


def alone(given, cu_seqlens=None, **options):
    """The same of one process."""
    q, k, v, do = given
    wanted = ("dq", "dk", "dv", *(["dsinks"] if options.get("sinks") is not None else []))
    if cu_seqlens is None:
        options = dict(options, q_offset=0, layout="bshd")
        o, lse = numba_flash.attention(q, k, v, return_lse=True, **options)
        dlse = np.cos(np.where(np.isfinite(lse), lse, 0))
        found = numba_flash.attention_backward(do, q, k, v, o, lse, dlse=dlse, wanted=wanted, **options)
    else:
        ends = np.array(cu_seqlens, "int32")
        o, lse = numba_flash.attention_varlen(q, k, v, ends, return_lse=True, **options)
        dlse = np.cos(np.where(np.isfinite(lse), lse, 0))
        backward = numba_flash.attention_varlen_backward
        found = backward(do, q, k, v, o, lse, ends, dlse=dlse, wanted=wanted, **options)
    return o, lse, found.dq, found.dk, found.dv, found.dsinks


NAMES = ("o", "lse", "dq", "dk", "dv", "dsinks")
ROWS = NAMES[:3]


def compare(found, expected, same=(), rtol=2e-5):
    """same: names whose bits must be equal."""
    for name, one, other in zip(NAMES, found, expected, strict=True):
        if other is None:
            continue
        assert one.dtype == other.dtype and one.shape == other.shape, name
        if name in same:
            np.testing.assert_array_equal(one, other, name)
        else:
            np.testing.assert_allclose(one, other, rtol, rtol, err_msg=name)


OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window=(40, 0)),
    "a window that looks ahead": dict(window=(7, 30)),
    "sinks": dict(causal=True, sinks=np.linspace(-1, 2, HEADS).astype("float32")),
    "softcap and alibi": dict(causal=True, softcap=3.0, alibi_slopes=np.linspace(0.01, 0.3, HEADS).astype("float32")),
    "seqlens_k": dict(causal=True, seqlens_k=np.array([211], "int32")),
}
FUNCTIONS = {
    "functions": dict(
        score_mod=lambda s, b, h, i, j, x: s + x[h, (i - j) % 5], mask_mod=lambda b, h, i, j, x: (i + j + h) % 7 != 0
    ),
    "dropout": dict(dropout_p=0.3, seed=5),
}
FUNCTIONS["functions"]["aux"] = (np.random.default_rng(1).standard_normal((HEADS, 5)).astype("float32"),)


@pytest.mark.parametrize(("kernel", "size"), [("reference", 3), *(("cpu", size) for size in (1, 2, 3, 4))])
@pytest.mark.parametrize("name", OPTIONS | FUNCTIONS)
def test_gathered_rows_have_the_bits_of_one_process(name, size, kernel):
    options = (OPTIONS | FUNCTIONS)[name] | dict(kernel=kernel)
    given = arrays(431 if kernel == "cpu" else 41)
    if "seqlens_k" in options and kernel == "reference":
        options["seqlens_k"] = np.array([29], "int32")
    found = on_ranks(given, size, "zigzag", **options)
    compare(found, alone(given, **options), same=ROWS)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_heads_have_all_bits_of_one_process(name, size):
    options = OPTIONS[name] | dict(kernel="cpu")
    if "sinks" in options:
        options["sinks"] = np.linspace(-1, 2, 8).astype("float32")
    if "alibi_slopes" in options:
        options["alibi_slopes"] = np.linspace(0.01, 0.3, 8).astype("float32")
    given = arrays(431, heads=8, heads_kv=4)
    found = on_ranks(given, size, "zigzag", method="heads", **options)
    compare(found, alone(given, **options), same=NAMES)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_ring(name, size):
    options = OPTIONS[name] | dict(kernel="cpu")
    given = arrays(431)
    found = on_ranks(given, size, "zigzag", method="ring", **options)
    compare(found, alone(given, **options))
    again = on_ranks(given, size, "zigzag", method="ring", **options)
    compare(again, found, same=NAMES)


DOCUMENTS = (0, 150, 150, 157, 400)  # one of none, one of few tokens
PACKED_LAYOUTS = {"zigzag": "zigzag", "per document": None}


@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
@pytest.mark.parametrize(("method", "size"), [("gather", 2), ("gather", 3), ("gather", 4), ("heads", 2)])
@pytest.mark.parametrize("name", ["plain", "causal", "window", "sinks", "functions"])
def test_packed_documents(name, method, size, layout):
    """The last tokens are of no document."""
    options = (OPTIONS | FUNCTIONS)[name] | dict(kernel="cpu")
    ends, seqlen = DOCUMENTS, DOCUMENTS[-1] + 9
    chosen = PACKED_LAYOUTS[layout]
    if chosen is None:
        chosen, seqlen = Layout.per_document(ends, size), ends[-1]
    given = [x[0] for x in arrays(seqlen)]
    if method == "heads" and name == "functions":
        with pytest.raises(NotImplementedError, match="score_mod.*use method='gather'"):
            on_ranks(given, size, chosen, packed=True, method=method, cu_seqlens=ends, **options)
        return
    found = on_ranks(given, size, chosen, packed=True, method=method, cu_seqlens=ends, **options)
    # Of the short document a rank has fewer rows than the kernel divides as one process would.
    compare(found, alone(given, ends, **options), same=NAMES if method == "heads" else ())


def test_packed_documents_of_many_rows_have_the_bits_of_one_process():
    ends = (0, 600, 1300)
    given = [x[0] for x in arrays(ends[-1])]
    for layout in ("zigzag", Layout.per_document(ends, 4)):
        found = on_ranks(given, 4, layout, packed=True, cu_seqlens=ends, causal=True, kernel="cpu")
        compare(found, alone(given, ends, causal=True, kernel="cpu"), same=ROWS)


@pytest.mark.parametrize("method", ["gather", "ring"])
@pytest.mark.parametrize("seqlen", [1, 2, 5, 9])
def test_ranks_without_tokens(method, seqlen):
    given = arrays(seqlen, batch=2)
    options = dict(causal=True, sinks=np.linspace(-1, 2, HEADS).astype("float32"), kernel="cpu")
    compare(on_ranks(given, 4, "zigzag", method=method, **options), alone(given, **options))


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_rows_that_see_no_key(method):
    """All of a rank's: its tokens lie behind the valid keys, whose number is 0 in the second entry."""
    given, lengths = arrays(400, batch=2), np.array([60, 0], "int32")
    options = dict(window=(20, 20), seqlens_k=lengths, kernel="cpu")
    found = on_ranks(given, 4, "contiguous", method=method, **options)
    compare(found, alone(given, **options))
    assert (found[0][1] == 0).all() and np.isneginf(found[1][1]).all()
    assert not any(np.isnan(x).any() for x in found[:5])


def test_nan_in_a_token_reaches_only_those_who_see_it():
    given = arrays(400)
    given[1][0, 390], given[2][0, 390] = np.nan, np.nan
    for method in ("gather", "ring"):
        o, *_ = on_ranks(given, 4, "zigzag", method=method, causal=True, kernel="cpu")
        assert not np.isnan(o[:, :390]).any() and np.isnan(o[:, 390:]).all()


def test_many_pieces_are_sent_as_one(monkeypatch):
    """Instead of each piece as it lies in memory."""
    given, options = arrays(431, batch=2), dict(causal=True, kernel="cpu")
    alike, copied = Threads(3), Threads(3)
    expected = on_ranks(given, 3, "zigzag", shared=alike, **options)
    monkeypatch.setattr(distributed.gather, "MOST_MESSAGES", 0)
    found = on_ranks(given, 3, "zigzag", shared=copied, **options)
    compare(found, expected, same=NAMES)
    assert copied.moved == alike.moved


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("method", ["gather", "heads"])
def test_slices_of_heads_change_no_bits(method, slices):
    given = arrays(300, heads=16, heads_kv=8)
    options = dict(causal=True, sinks=np.linspace(-1, 2, 16).astype("float32"), kernel="cpu")
    options["method"] = method
    compare(on_ranks(given, 2, "zigzag", slices=slices, **options), on_ranks(given, 2, "zigzag", **options), same=NAMES)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes_and_sizes_of_v(dtype):
    given, options = arrays(300, batch=2, dim_v=24, dtype=dtype), dict(causal=True, kernel="cpu")
    for method in ("gather", "ring"):
        found = on_ranks(given, 3, "zigzag", method=method, **options)
        expected = alone(given, **options)
        compare(found, expected, same=ROWS if method == "gather" else (), rtol=1e-2 if dtype == "float16" else 1e-12)


def moved(seqlen, size, layout, method="gather", **options):
    """Bytes that the ranks send in a forward."""
    shared, given = Threads(size), arrays(seqlen)

    def work(group):
        q, k, v, _ = (distributed.shard(x, group, 1, layout) for x in given)
        more = dict(layout=layout, seqlen=seqlen, dims="bshd", kernel="cpu", method=method)
        distributed.context_parallel_attention(q, k, v, group, **more, **options)

    shared.run(work)
    return sum(shared.moved) - 4 * size * (size - 1)  # by which they agree


def test_only_keys_that_somebody_sees_are_moved():
    token = 2 * HEADS_KV * DIM * 4  # bytes of its k and v
    assert moved(400, 4, "contiguous") == 3 * 400 * token
    assert moved(400, 4, "contiguous", causal=True) == (100 + 200 + 300) * token
    assert moved(400, 4, "contiguous", window=(30, 0)) == 3 * 30 * token
    assert moved(400, 4, "contiguous", window=(0, 30)) == 3 * 30 * token
    assert moved(400, 4, "zigzag", window=(30, 0)) == 6 * 30 * token, "the middle chunks are of one rank"
    assert moved(400, 2, "zigzag", causal=True) == (200 + 100) * token
    whole = (2 * HEADS + 2 * HEADS_KV) * DIM * 4 // 2 + HEADS // 2 * 4  # q, k, v, o and lse of half of the heads
    assert moved(400, 2, "zigzag", method="heads") == 400 * whole


def test_keys_of_other_documents_are_not_moved():
    """Document [150, 250) lies on ranks 1 and 2 of four; the others end where a rank ends."""
    layout, reach = Layout.contiguous(400, 4), Reach(None, 0, (0, 100, 150, 250, 300, 400))
    assert [needed(layout, rank, reach) for rank in range(4)] == [
        ((0, 100),),
        ((100, 200),),
        ((150, 300),),
        ((300, 400),),
    ]


def test_layouts():
    assert Layout.contiguous(7, 3).counts == (2, 2, 3)
    assert Layout.zigzag(16, 2).runs(1) == ((4, 8), (8, 12))
    assert Layout.zigzag(6, 2).counts == (3, 3), "equal, if the ranks divide the tokens"
    layout = Layout.per_document((0, 8, 8, 24), 2)
    assert layout.parts[0] == (((0, 2), (8, 12)), ((6, 8), (20, 24)))
    assert layout.positions(0).tolist() == [0, 1, 8, 9, 10, 11, 6, 7, 20, 21, 22, 23]
    for seqlen in range(20):
        for size in range(1, 6):
            for layout in (Layout.contiguous(seqlen, size), Layout.zigzag(seqlen, size)):
                every = np.concatenate([layout.positions(rank) for rank in range(size)])
                assert sorted(every) == list(range(seqlen))
                assert seqlen % size or set(layout.counts) == {seqlen // size}
    for parts in ((((0, 2),),), (((1, 3),),), (((2, 2),),)):
        with pytest.raises(ValueError, match="each token once"):
            Layout(((((0, 2),),), parts))
    with pytest.raises(ValueError, match="must rise"):
        Layout(((((2, 4), (0, 2)),),))


def test_the_rule():
    from numba_flash.distributed.rule import method_of, slices_of

    def method(size, heads, heads_kv, **more):
        return method_of(size, heads, heads_kv, **(dict(least_bytes=1, gather_alone=False, most=100) | more))

    assert method(2, 32, 8) == method(4, 32, 8) == method(5, 40, 10) == "gather", "few bytes, or equally many"
    assert method(8, 32, 8) == method(4, 16, 16) == "heads"
    assert method(16, 32, 8) == "gather", "ranks that do not divide the KV heads"
    assert method(2, 32, 8, least_bytes=51) == "ring"
    assert method(8, 32, 8, gather_alone=True) == method(1, 32, 8, least_bytes=51) == "gather"
    assert method(2, 32, 8, gradients=True) == method(4, 72, 8, gradients=True) == "heads"
    assert method(2, 64, 8, gradients=True) == method(4, 80, 8, gradients=True) == "gather", "many heads are moved"

    def slices(heads_kv, tokens=16384, group=4, head_dim=128, **more):
        return slices_of(heads_kv, group, head_dim, tokens, **more)

    assert slices(8) == (2, 4, 2) and slices(4, tokens=32768) == (2, 2) and slices(32, group=1) == (8, 16, 8)
    assert slices(8, group=1) == slices(8, head_dim=64) == (4, 4), "so that the backward is one kernel"
    assert slices(8, tokens=8192) == (8,) and slices(4) == (4,), "what it takes to begin"
    assert slices(2, tokens=65536) == (2,) and slices(1, tokens=131072) == (1,)
    assert slices(6, tokens=32768) == (2, 2, 2) and slices(9) == (9,), "the order of sums"
    assert slices(8, engines=True) == (2, 4, 2) and slices(8, engines=True, gradients=False) == (2, 6)
    assert slices(8, tokens=8192, engines=True, gradients=False) == (2, 6) and slices(8, tokens=4096, engines=True) == (
        8,
    )
    assert slices(8, least_bytes=25, most=100) == (2,) * 4 and slices(6, least_bytes=51, most=100) == (1,) * 6


WRONG = {
    "q has other tokens": (dict(seqlen=20), ValueError, "q must have 10 tokens on rank .*seqlen="),
    "method": (dict(method="best"), ValueError, "method must be 'auto'"),
    "layout": (dict(layout="striped"), ValueError, "layout must be 'zigzag'"),
    "layout of others": (dict(layout=Layout.zigzag(8, 3)), ValueError, "layout is for 3 ranks, and group has 2"),
    "dims": (dict(dims="sbhd"), ValueError, "dims must be"),
    "slices": (dict(slices=3), ValueError, "slices must divide 2 KV heads"),
    "bias": (dict(bias=1), NotImplementedError, "bias is not taken across ranks: use score_mod with aux"),
    "q_offset": (dict(q_offset=1), NotImplementedError, "q_offset is not taken.*use layout"),
    "nonsense": (dict(nonsense=1), TypeError, "unexpected keyword argument 'nonsense'"),
    "dropout": (dict(dropout_p=0.1, seed=1, method="ring"), NotImplementedError, "dropout_p.*use method='gather'"),
    "functions": (dict(score_mod=lambda s, b, h, i, j: s, slices=2), NotImplementedError, "score_mod.*slices"),
    "the row": (dict(mask_mod=lambda b, h, i, j, q_index: True), NotImplementedError, "use q_pos"),
    "window": (dict(window=3), ValueError, "window must be a pair"),
    "more sinks": (dict(sinks=np.ones(HEADS + 1), method="heads"), ValueError, r"sinks must have shape \(heads,\)"),
    "a list": (dict(alibi_slopes=[1.0] * HEADS, method="heads"), TypeError, "alibi_slopes must be an array, not list"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said_before_anything_is_sent(what):
    more, error, match = WRONG[what]
    shared, given = Threads(2), arrays(8)

    def work(group):
        q, k, v, _ = (distributed.shard(x, group, 1) for x in given)
        distributed.context_parallel_attention(q, k, v, group, **(dict(dims="bshd") | more))

    with pytest.raises(error, match=match):
        shared.run(work)
    assert shared.moved == [0, 0]


def test_heads_that_ranks_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="heads_kv that 3 ranks divide.*use method='gather'"):
        on_ranks(arrays(12), 3, "zigzag", method="heads")


def test_documents_are_checked():
    given = [x[0] for x in arrays(12)]
    for ends, match in (
        ((0, 13), "at most 12"),
        ((3, 9), "rise from 0"),
        ((0, 9, 5), "rise from 0"),
        ((), "rise from 0"),
    ):
        with pytest.raises(ValueError, match=match):
            on_ranks(given, 2, "zigzag", packed=True, cu_seqlens=ends)
    with pytest.raises(NotImplementedError, match="cu_seqlens with method='ring': use method='gather'"):
        on_ranks(given, 2, "zigzag", packed=True, cu_seqlens=(0, 12), method="ring")


def test_groups_of_unknown_kinds():
    with pytest.raises(TypeError, match="group must be a process group.*not int"):
        distributed.shard(np.arange(3), 3, 0)


def test_shard_and_unshard():
    x = np.arange(2 * 11 * 3).reshape(2, 11, 3)

    def work(layout, group):
        part = distributed.shard(x, group, -2, layout)
        return distributed.unshard(part, group, 1, layout, seqlen=11)

    for layout in ("zigzag", "contiguous", Layout.per_document((0, 4, 11), 4)):
        assert all((found == x).all() for found in Threads(4).run(functools.partial(work, layout)))
