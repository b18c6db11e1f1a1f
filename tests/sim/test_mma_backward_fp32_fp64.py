"""The part of gradients' contract that mma is run through in the simulator in float32 and float64; all of it runs on a
GPU."""

import math

import numpy as np
import pytest
from contracts.backward import (  # noqa: F401
    Rung,
    incoming,
    test_a_key_of_weight_0_gets_no_gradient_from_a_nonfinite_row,
    test_a_kv_head_gets_the_sum_of_its_group,
    test_any_strides,
    test_head_dim_v_may_differ,
    test_large_scores,
    test_nothing_is_defined,
    test_scale,
    test_what_is_not_wanted_changes_nothing,
)
from contracts.functions import BY_PLACE
from helpers.tile_rows import in_simulator, row as tile_row

import numba_flash
from numba_flash import testing
from numba_flash.config.mma_fused import MmaFusedConfig
from numba_flash.ptx.sim import now, resumable, tma
from numba_flash.ptx.sim.thread import driven
from numba_flash.select import backward_kernels, backward_tiles


@pytest.fixture(scope="module", params=["float32", "float64"])
def rung(request):
    return Rung("mma", testing.rows_padded, tensor=True, tile=16, slow=True, usual=request.param)


def test_all_options(rung):
    case = rung.problem(20, 40, batch=2, heads=2, heads_kv=1, head_dim=20, head_dim_v=37)
    rung.check(
        case, causal=True, window=(30, 3), seqlens_k=np.array([40, 31], np.int32), softcap=3.0, scale=0.7,
        q_offset=np.array([22, -2], np.int32), alibi_slopes=np.array([0.1, 0.8], np.float32),
        dropout_p=0.3, seed=11,
    )  # fmt: skip


# What is read for each score, or asked about it, and all that goes with it.
READ = {
    "bias": lambda rng: dict(bias=rng.standard_normal((2, 18, 41), dtype=np.float32), softcap=2.0, causal=True),
    "bias of its dtype": lambda rng: dict(bias=rng.standard_normal((2, 1, 41)), sinks=np.linspace(-1, 2, 2), scale=0.3),
    "mask": lambda rng: dict(mask=rng.random((1, 2, 18, 41)) < 0.6, seqlens_k=np.array([37], np.int32), dropout_p=0.3),
    "key padding": lambda rng: dict(mask=(np.arange(41) % 32 > 20)[None, None, None]),
    "functions": lambda rng: dict(**BY_PLACE, window=(25, 3), q_offset=20, dropout_p=0.2),
    "score_mod": lambda rng: dict(score_mod=lambda s, b, h, i, j: 2.0 * math.tanh(s) - 0.1 * h * abs(i - j)),
    "mask_mod": lambda rng: dict(mask_mod=lambda b, h, i, j: i // 7 == j // 9, alibi_slopes=np.float32([0.1, 1])),
    "all": lambda rng: dict(
        **BY_PLACE,
        mask=rng.random((18, 41)) < 0.9,
        bias=rng.standard_normal((2, 18, 41), dtype=np.float32),
        softcap=2.0,
    ),
}


@pytest.mark.parametrize("how", READ)
def test_what_is_read_or_asked_for_each_score(rung, how):
    if rung.dtype == "float64" and how not in ("bias of its dtype", "functions", "all"):
        pytest.skip("in float32, by the same functions of each score")
    options = READ[how](np.random.default_rng(4))
    for name in ("bias", "sinks"):
        if name in options and options[name].dtype == np.float64:
            options[name] = options[name].astype(rung.dtype)
    options |= dict(seed=7) if "dropout_p" in options else {}
    rung.check(rung.problem(18, 41, batch=1, heads=2, heads_kv=1, head_dim=20), **options)


# A function may read past the end of an array at a position that does not count, and the simulator sees it.
@pytest.mark.parametrize("how", ["lengths", "mask"])
def test_functions_are_not_called_for_masked_positions(rung, how):
    seqlen_q, seqlen_k = 18, 35
    i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)
    seen = np.broadcast_to(j < 21, (seqlen_q, seqlen_k)) if how == "lengths" else (i + j) % 3 > 0
    allowed = np.where(seen, 1, 2).astype(np.int32)

    def score(s, b, h, q_pos, k_pos, allowed, few):
        return s + few[allowed[q_pos, k_pos]]

    case = rung.problem(seqlen_q, seqlen_k, batch=1, heads=1, head_dim=8, q_offset=0)
    case.options |= dict(seqlens_k=np.array([21], np.int32)) if how == "lengths" else dict(mask=seen[None, None])
    given = incoming(case)
    case.options |= dict(score_mod=score, aux=(allowed, np.array([0.0, 0.5], np.float32)))
    rung.check(case, (*given[:2], given[2] + np.float32(0.5), given[3]))


def of_mma(tile_m, tile_n, warp_rows, column_groups, **more):
    sizes = dict(tile_m=tile_m, tile_n=tile_n, warp_rows=warp_rows, column_groups=column_groups)
    return tile_row(256, **sizes, blocks_per_sm=0, **more)


# Warps of 32 rows, two warps with columns of their own, dK and dV apart, and how many rows a block walks over.
ROWS = {
    "two strips": (("float32", 32, 32, 32, 1), {}),
    "two groups": (("float32", 32, 32, 16, 2), {}),
    "two groups in float64": (("float64", 16, 16, 16, 2), {}),
    "apart": (("float64", 16, 32, 16, 1), dict(apart=True)),
    "64 rows": (("float32", 16, 64, 16, 1), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ROWS)
def test_every_kind_of_row(how, monkeypatch, nothing_remembered):
    (dtype, own, other, warp_rows, groups), more = ROWS[how]
    for kernel, sizes in (("mma_dkdv", (other, own)), ("mma_dq", (own, other))):
        row = of_mma(*sizes, warp_rows, groups, **more)
        monkeypatch.setitem(backward_tiles.TABLES, f"{kernel}_{dtype}", (row,))
    rung = Rung("mma", testing.rows_padded, tensor=True, tile=16, slow=True, usual=dtype)
    case = rung.problem(34, 50, batch=1, heads=1, head_dim=24, head_dim_v=40)
    rung.check(case, causal=True)
    bias, mask = np.random.default_rng(2).standard_normal((34, 50), dtype=np.float32), np.ones((34, 50), bool)
    mask[5:20, 3:40] = False
    rung.check(case, bias=bias, mask=mask, score_mod=lambda s, b, h, i, j: s * s * 0.1 + s)


# A number that is no number in a row of dO or V makes NaN of every dS of its tile. Keys and queries that have no part
# in it are computed again without it, by whatever hides it.
HIDING = {
    "causal": dict(causal=True),
    "mask": dict(mask=np.tri(20, dtype=bool)[None, None], bias=np.full((20, 20), 0.25, np.float32)),
    "functions": dict(mask_mod=lambda b, h, i, j: i >= j, score_mod=lambda s, b, h, i, j: s + 0.01 * j),
}


_clean: dict = {}  # gradients without such a number, by dtype and what hides it


@pytest.mark.parametrize("how", HIDING)
@pytest.mark.parametrize("where", ["do", "v", "k"])
def test_nonfinite_values_reach_only_the_rows_that_see_them(rung, where, how):
    if rung.dtype == "float64" and (where, how) not in (("do", "causal"), ("v", "mask"), ("k", "functions")):
        pytest.skip("pairs run in float32")
    case = rung.problem(20, 20, batch=1, heads=1, head_dim=8, **HIDING[how])
    do, o, lse, dlse = incoming(case, 1)
    (do if where == "do" else getattr(case, where))[0, 0, 12, 3] = np.nan
    found = rung(case, (do, o, lse, dlse))
    if (rung.dtype, how) not in _clean:
        clean = rung.problem(20, 20, batch=1, heads=1, head_dim=8, **HIDING[how])
        _clean[rung.dtype, how] = rung(clean, incoming(clean, 1))
    expected = _clean[rung.dtype, how]
    units = 16 * testing.EPS[rung.dtype]  # rows that are computed again are, in another order of sums

    def unmoved(x, right):
        return np.isfinite(x).all() and np.allclose(x, right, rtol=units, atol=units * abs(right).max())

    if where == "do":  # a query's: keys behind it do not see it
        assert unmoved(found.dk[0, 0, 13:], expected.dk[0, 0, 13:])
    else:  # a key's: queries before it do not see it
        assert unmoved(found.dq[0, 0, :12], expected.dq[0, 0, :12])


# dK, dV and parts of dQ by one kernel: how many heads share a KV head, and options. Key tiles that see some of the
# queries, none, and rows that see no key.
ONE_KERNEL = {
    "full": (1, dict()),
    "causal": (2, dict(causal=True, q_offset=-9)),
    "window": (1, dict(window=(20, 3), q_offset=7)),
    "lengths": (2, dict(seqlens_k=np.array([31], np.int32), causal=True, q_offset=np.array([-20], np.int32))),
}


ROWS_OF_ONE_KERNEL = [
    of_mma(16, 32, 16, 2),
    of_mma(32, 32, 16, 2),
    of_mma(32, 64, 32, 2),
    of_mma(32, 32, 16, 2, blocks=2),
]


def name_of_row(given):
    return given if isinstance(given, str) else "-".join(map(str, given.values))


@pytest.fixture(params=ROWS_OF_ONE_KERNEL, ids=name_of_row)
def one_kernel(request, monkeypatch, nothing_remembered):
    row = request.param
    monkeypatch.setitem(backward_tiles.TABLES, "mma_fused", (in_simulator(row),))
    monkeypatch.setattr(backward_kernels, "gains_by_mma_fused", lambda *_: True)
    rung = Rung("mma", testing.rows_padded, tensor=True, tile=16, slow=True, usual="float64")
    [config] = [x for x in explained(rung.problem(36, 50, head_dim=8)).configs if isinstance(x, MmaFusedConfig)]
    assert {name: getattr(config, name) for name in row.names} == row.tile
    return rung


# All options with one row. With the others, those by which tiles have walks of other lengths.
@pytest.mark.parametrize(
    ("one_kernel", "how"),
    [
        (row, how)
        for number, row in enumerate(ROWS_OF_ONE_KERNEL)
        for how in (ONE_KERNEL if number == 0 else ("causal", "window"))
    ],
    indirect=["one_kernel"],
    ids=name_of_row,
)
def test_partial_sums_of_dq(one_kernel, how):
    heads, options = ONE_KERNEL[how]
    case = one_kernel.problem(36, 50, batch=1, heads=heads, heads_kv=1, head_dim=24, head_dim_v=40, **options)
    assert "mma_fused" in str(explained(case))
    one_kernel.check(case)


def explained(case):
    do, o, lse, dlse = incoming(case)
    return numba_flash.explain_backward(do, **case.arguments(testing.rows_padded), o=o, lse=lse, kernel="mma")


# In K it makes NaN of S, and in V of dP.
@pytest.mark.parametrize(
    ("one_kernel", "where"),
    [(row, "kv"[number % 2]) for number, row in enumerate(ROWS_OF_ONE_KERNEL) if number in (0, 3)],
    indirect=["one_kernel"],
    ids=name_of_row,
)
def test_partial_sums_of_dq_with_nan(one_kernel, where):
    case = one_kernel.problem(40, 40, batch=1, heads=1, head_dim=8, causal=True)
    given, units = incoming(case), 16 * testing.EPS[one_kernel.dtype]
    clean = one_kernel(case, given).dq[0, 0]
    getattr(case, where)[0, 0, 22, 3] = np.nan
    dq = one_kernel(case, given).dq[0, 0]
    assert np.isnan(dq[22:]).any()
    assert np.allclose(dq[:22], clean[:22], rtol=units, atol=units * abs(clean).max())


@pytest.mark.parametrize(
    ("one_kernel", "head_dims"),
    [
        (of_mma(16, 32, 16, 2, blocks=2), (130, 68)),
        (of_mma(32, 32, 16, 2, blocks=2), (72, 100)),
        (of_mma(32, 32, 16, 2, blocks=2), (130, 68)),
    ],
    indirect=["one_kernel"],
)
def test_columns_that_two_blocks_share(one_kernel, head_dims):
    """Each has 64, or 128 of which the second has 2 of q and none of v."""
    case = one_kernel.problem(36, 50, batch=1, heads=1, head_dim=head_dims[0], head_dim_v=head_dims[1])
    one_kernel.check(case, causal=True)


@pytest.mark.parametrize(
    "one_kernel",
    [
        of_mma(16, 32, 16, 2),
        of_mma(16, 32, 16, 2, blocks=2),
    ],
    indirect=True,
)
def test_the_place_of_a_part_is_free_when_copies_have_read_it(one_kernel, monkeypatch):
    """The next tile waits, even for a slow carrier."""
    leave = tma._leave

    def late(*given):
        me = now.current()
        for _ in range(200):
            yield from driven(me.turns.let_others_run(me, None))
        leave(*given)

    monkeypatch.setattr(tma, "_leave", late)
    monkeypatch.setattr(resumable, "may_wait", lambda function, cudas: True)  # also where copies begin
    one_kernel.check(one_kernel.problem(36, 50, batch=1, heads=2, heads_kv=1, head_dim=24, head_dim_v=40))
