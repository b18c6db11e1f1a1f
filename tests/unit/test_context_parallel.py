"""Context parallelism with ranks that are threads: its results beside those of one call."""

import numpy as np
import pytest
from helpers.ranks import Threads

import numba_flash
from numba_flash import distributed
from numba_flash.distributed import Layout

HEADS, HEADS_KV, DIM = 4, 2, 16
DENSE = dict(bhsd=2, bshd=1)


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


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OPTIONS | FUNCTIONS)
def test_gathered_rows_have_the_bits_of_one_process(name, size, kernel):
    options = (OPTIONS | FUNCTIONS)[name] | dict(kernel=kernel)
    given = arrays(431 if kernel == "cpu" else 41)
    if "seqlens_k" in options and kernel == "reference":
        options["seqlens_k"] = np.array([29], "int32")
    found = on_ranks(given, size, "zigzag", **options)
    compare(found, alone(given, **options), same=("o", "lse", "dq"))


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
