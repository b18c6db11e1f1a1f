"""gpu_check on short heads, of which mma has all queries and keys in one tile: forwards and gradients."""

import numpy as np
from _gpu_backward import compare as compare_gradients

from numba_flash import testing

LENGTHS, HEAD_DIMS = (16, 20, 33, 49, 64), (8, 24, 32, 64, 128)
BATCH, HEADS = 3, 4
COPIED = "bias in 16 bits"  # whose rows the kernel of gradients copies to shared memory


def short_cases(small):
    """{name: Case}: each length and head_dim with every second of these options, in both dtypes by turns."""
    found, number = {}, 0
    for dim in HEAD_DIMS:
        for n in LENGTHS:
            of_both = options_of(np.random.default_rng(number), n)
            for words in [*of_both][number % 2 :: 2]:
                dtype = ("float16", "bfloat16")[number // 2 % 2]
                found[f"short heads, {n} tokens, head_dim {dim}, {words}"] = short_case(number, n, dim, dtype, words)
            number += 1
    return {name: found[name] for name in [*found][:: 9 if small else 1]}


def options_of(g, n):
    """{words: options}. A bias is broadcast over the batch, so its gradient is a sum over it."""
    bias = g.standard_normal((1, HEADS, n, n)).astype("float32")
    mask = g.random((BATCH, 1, n, n)) < 0.7
    mask[:, :, n // 2] = False  # a row that sees no key
    valid = dict(seqlens_k=np.array([n, n // 2 + 1, 0], np.int32))
    positions = dict(causal=True, q_offset=0)
    return {
        "plain": {},
        "causal": dict(causal=True),
        "bias": dict(bias=bias),
        COPIED: dict(bias=bias),
        "groups": dict(causal=True, window=(n // 2, 0)),
        "mask": dict(mask=mask),
        "lengths": valid | positions,
        "dropout": dict(dropout_p=0.2, seed=n),
        "twice the queries": {},
        "all": dict(bias=bias, mask=mask, dropout_p=0.1, seed=1, softcap=3.0) | valid | positions,
    }


def short_case(number, n, dim, dtype, words):
    """NaN and infinity lie behind the valid keys of an entry."""
    g, options = np.random.default_rng(1000 + number), options_of(np.random.default_rng(number), n)[words]
    heads_kv = 2 if words in ("groups", "all") else HEADS
    queries = 2 * n if words == "twice the queries" else n
    shapes = ((HEADS, queries), (heads_kv, n), (heads_kv, n))
    q, k, v = (g.standard_normal((BATCH, *shape, dim)).astype(dtype) for shape in shapes)
    if words == COPIED:
        options = dict(bias=testing.rows_padded(options["bias"].astype(dtype)))
    for entry, valid in enumerate(options.get("seqlens_k", ())):
        k[entry, :, valid:], v[entry, :, valid:] = np.inf, np.nan
    return testing.Case(q, k, v, options)


def check(kernel, options, tools):
    if kernel != "mma":
        return "only mma has tiles of its own for them"
    cases = short_cases(options.small)
    forward = tools.compare(cases, kernel)
    return f"forward: {forward}; gradients: {compare_gradients(cases, kernel, tools.on_gpu)}"
