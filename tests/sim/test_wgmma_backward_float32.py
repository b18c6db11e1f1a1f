"""The part of gradients' contract that wgmma is run through in the simulator in float32; all of it runs on a GPU."""

import numpy as np
import pytest
from contracts.backward import (  # noqa: F401
    Rung,
    incoming,
    same,
    test_a_key_of_weight_0_gets_no_gradient_from_a_nonfinite_row,
    test_head_dim_v_may_differ,
    test_large_scores,
    test_nothing_is_defined,
    test_scale,
    test_whole_numbers_come_out_exactly,
)
from helpers.tile_rows import row as tile_row
from numba import cuda

from numba_flash import arrays, testing
from numba_flash.kernels.recompute import keys as recompute_keys, queries as recompute_queries
from numba_flash.kernels.steps import row_writers
from numba_flash.ptx.sim import block
from numba_flash.ptx.sim.launch import run
from numba_flash.select import backward_tiles as tiles


@pytest.fixture(scope="module")
def rung():
    return Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True, usual="float32")


# Two tiles of its own and several of the walk, of both kernels; panels of 64 columns and less.
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "options"),
    [
        (70, 70, 69, 40, {}), (70, 100, 24, 97, dict(causal=True)), (80, 70, 40, 24, dict(causal=True, q_offset=-45)),
        (70, 70, 24, 24, dict(window=(20, 9))), (40, 70, 33, 128, dict(softcap=2.0, causal=True)),
    ],
    ids=["full", "causal", "queries without keys", "window", "softcap"],
)  # fmt: skip
def test_two_tiles(rung, seqlen_q, seqlen_k, head_dim, head_dim_v, options):
    case = rung.problem(seqlen_q, seqlen_k, batch=1, heads=1, head_dim=head_dim, head_dim_v=head_dim_v)
    rung.check(case, **options)


def test_all_options(rung):
    case = rung.problem(20, 40, batch=1, heads=4, heads_kv=2, head_dim=20, head_dim_v=37)
    rung.check(
        case, causal=True, window=(30, 3), seqlens_k=np.array([31], np.int32), softcap=3.0, scale=0.7,
        q_offset=np.array([-2], np.int32), alibi_slopes=np.linspace(0.1, 0.8, 4).astype(np.float32),
        sinks=np.linspace(-1.0, 2.0, 4).astype(np.float32),
    )  # fmt: skip


# (batch, heads, what makes the options)
READ = {
    "bias": (
        1, 2, lambda rng: dict(bias=rng.standard_normal((2, 20, 71), dtype=np.float32), softcap=2.0, causal=True)
    ),
    "bias in pairs": (
        2, 1,
        lambda rng: dict(bias=rng.standard_normal((2, 1, 1, 70), dtype=np.float32), sinks=np.ones(1, np.float32)),
    ),
    "mask": (
        2, 1, lambda rng: dict(mask=rng.random((2, 1, 20, 70)) < 0.6, seqlens_k=np.array([37, 70], np.int32))
    ),
    "key padding": (1, 2, lambda rng: dict(mask=(np.arange(70) % 64 > 40)[None, None, None])),
    "both": (
        1, 1,
        lambda rng: dict(
            bias=rng.standard_normal((20, 70), dtype=np.float32), mask=rng.random((20, 70)) < 0.1, window=(20, 9)
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", READ)
def test_what_is_read_for_each_score(rung, how):
    batch, heads, make = READ[how]
    options = make(np.random.default_rng(4))
    seqlen_k = options["bias"].shape[-1] if "bias" in options else 70
    case = rung.problem(20, seqlen_k, batch=batch, heads=heads, heads_kv=1, head_dim=20)
    rung.check(case, **options)


# How many rows a block walks over, and how many places tiles have: (rows, stages_a, stages_b).
# It walks over more tiles than there are places, in either kernel.
@pytest.mark.slow
@pytest.mark.parametrize(("how", "seqlen"), [((48, 2, 1), 100), ((64, 1, 1), 70), ((16, 3, 2), 52)], ids=str)
def test_every_kind_of_row(rung, how, seqlen, monkeypatch, nothing_remembered):
    use_rows(monkeypatch, *how)
    for wanted, seqlens in ((("dk", "dv"), (seqlen, 20)), (("dq",), (20, seqlen))):
        case = rung.problem(*seqlens, batch=1, heads=1, head_dim=69, head_dim_v=24)
        rung.check(case, wanted=wanted, window=(seqlen - 2, seqlen - 7), q_offset=3)


@pytest.fixture(scope="module")
def all_at_once(rung):
    """(problem, what comes in, all its gradients)"""
    case = rung.problem(20, 70, batch=1, heads=2, heads_kv=1, head_dim=20, causal=True)
    given = incoming(case)
    return case, given, rung(case, given)


@pytest.mark.parametrize("wanted", [("dk",), ("dv",), ("dq",), ("dq", "dv")], ids="-".join)
def test_each_gradient_alone_has_the_same_bits(rung, wanted, all_at_once):
    case, given, together = all_at_once
    alone = rung(case, given, wanted)
    assert [getattr(alone, name) is not None for name in ("dq", "dk", "dv")] == [
        name in wanted for name in ("dq", "dk", "dv")
    ]
    assert same([getattr(alone, name) for name in wanted], [getattr(together, name) for name in wanted])


def use_rows(monkeypatch, rows, *stages):
    """Tables in which a block walks over so many rows at a time, with stages_a and stages_b."""
    dkdv, dq = (
        tile_row(128, tile_m=m, tile_n=n, stages_a=stages[0], stages_b=stages[1]) for m, n in ((rows, 64), (64, rows))
    )
    monkeypatch.setitem(tiles.TABLES, "wgmma_dkdv_float32", (dkdv,))
    monkeypatch.setitem(tiles.TABLES, "wgmma_dq_float32", (dq,))


# Several tiles of the walk, of more than one head. dV alone has one consumer, which frees both kinds of tiles.
@pytest.mark.parametrize(
    ("wanted", "stages"), [(("dk", "dv", "dq"), (2, 1)), (("dk",), (2, 1)), (("dv",), (1, 2))], ids=["all", "dk", "dv"]
)
def test_products_may_take_long(rung, wanted, stages, slow_products, monkeypatch, nothing_remembered):
    """Nobody gives a place back before the product that reads it is done: the producer writes there at once."""
    use_rows(monkeypatch, 32, *stages)
    case = rung.problem(40, 70, batch=1, heads=2, heads_kv=1, head_dim=8)
    gradients = rung(case, incoming(case), wanted)
    assert all(np.isfinite(getattr(gradients, name)).all() for name in wanted)


def test_every_semaphore_that_is_released_is_acquired(rung, monkeypatch):
    """No named barrier is half full when its block ends."""
    blocks, make_threads = [], block.Block.make_threads

    def note(made, *given):
        blocks.append(made)
        make_threads(made, *given)

    monkeypatch.setattr(block.Block, "make_threads", note)
    rung(rung.problem(5, 6, batch=1, heads=1, head_dim=8))
    used = [barrier for made in blocks for barrier in made.barriers.values()]
    assert used and not any(barrier.came for barrier in used)


# Their own scores would be 0. Where the others are below -100, that is a weight of e^100 or more.
@pytest.mark.parametrize("level", [0, -318])
def test_keys_past_the_end_may_be_anything(rung, level, monkeypatch, nothing_remembered):
    def repair(*_):
        raise AssertionError("a row of dQ was not finite: K past the end was multiplied by 0")

    monkeypatch.setattr(recompute_queries, "make", lambda *_: repair)  # rows would come out right by it, and slowly
    case = rung.problem(24, 90, batch=2, heads=1, head_dim=8)
    if level:
        case.q[..., 0], case.k[..., 0] = 30, level * 8**0.5 / 30
    case.k[1, :, 70:], case.v[1, :, 70:] = np.nan, np.inf
    case.k[0, :, 37:], case.v[0, :, 37:] = np.inf, np.nan
    gradients = rung.check(case, seqlens_k=np.array([37, 70], np.int32), q_offset=0)
    assert all(np.isfinite(x).all() for x in gradients[:3])


def test_what_nothing_sees_costs_no_row_a_second_time(rung, monkeypatch, nothing_remembered):
    """V of a key that a mask hides, and a query whose lse is -inf: rows would come out right if computed again."""

    def repair(*_):
        raise AssertionError("a row was not finite")

    for module in (recompute_keys, recompute_queries):
        monkeypatch.setattr(module, "make", lambda *_: repair)
    case = rung.problem(8, 24, batch=1, heads=1, head_dim=8)
    case.v[:, :, 20] = np.nan
    bias = np.zeros((8, 24), np.float32)
    bias[5] = -np.inf
    gradients = rung.check(case, mask=np.arange(24)[None] != 20, bias=bias)
    assert not gradients.dq[:, :, 5].any() and not gradients.dv[:, :, 20].any() and gradients.dv[:, :, 19].any()


@pytest.mark.parametrize("columns", [23, 24])
def test_a_row_of_a_gradient_is_written_whole_or_not_at_all(columns):
    acc = np.random.default_rng(0).standard_normal((32, 16), dtype=np.float32)  # of each lane (32 / 8, 4)
    rows, each = np.arange(16)[:, None], np.arange(columns)
    expected = 2 * acc[rows % 8 * 4 + each % 8 // 2, each // 8 * 4 + rows // 8 * 2 + each % 2]
    acc[5, 1], acc[14, 6], acc[20, 2] = np.inf, np.nan, np.nan  # in rows 1, 11 and 13
    expected[12:] = 0
    expected[[1, 11, 15]] = -1
    store = row_writers.of_gradient("float32", 16, 4, columns % 2 == 0)

    def kernel(acc, target, found):
        lane = cuda.threadIdx.x
        mine = cuda.local.array(16, np.float32)
        for x in range(16):
            mine[x] = acc[16 * lane + x]
        found[lane] = store(mine, np.float32(2), lane, target, 0, columns, 15, 12, columns)

    target, found = np.full((16, columns), -1, np.float32), np.zeros(32, np.uint32)
    run(lambda: cuda.jit(kernel), 1, 32, 0, tuple(arrays.read("array", x) for x in (acc, target, found)), ())
    np.testing.assert_array_equal(target, expected)
    assert (found == (1 << 1 | 1 << 11)).all()


# A key that some queries do not see and a query that does not see some keys.
@pytest.mark.parametrize("where", ["k", "v", "q", "do"])
def test_nonfinite_rows_are_recomputed(rung, where):
    case = rung.problem(8, 24, batch=1, heads=1, head_dim=8)
    do, _, _, dlse = incoming(case)
    array = do if where == "do" else getattr(case, where)
    array[:, :, 5 if where in ("q", "do") else 20] = np.nan
    case.options |= dict(causal=True)
    _, o, lse, _ = incoming(case)
    gradients = rung.check(case, (do, o, lse, dlse))
    nonfinite = [np.isnan(x).any((0, 1, 3)) for x in gradients[:3]]
    assert any(rows.any() for rows in nonfinite) and not nonfinite[0].all()


def test_numbers_that_bfloat16_rounds_to_inf(rung):
    """They have no parts, and their rows are computed again."""
    case = rung.problem(8, 24, batch=1, heads=1, head_dim=8)
    case.q[..., 2], case.k[:, :, 3, 2] = 0, np.finfo(np.float32).max
    gradients = rung.check(case)
    assert all(np.isfinite(x).all() for x in gradients[:3])


def test_products_are_as_exact_as_float32(rung):
    """With two parts instead of three, or without the products of second parts, dQ, dK and dV are 2^8 units away."""
    case = rung.problem(64, 64, batch=1, heads=1, head_dim=64)
    given = incoming(case)
    found = rung(case, given)
    wide = [x.astype(np.float64) for x in (case.q, case.k, case.v, given[0], given[1])]
    q, k, v, do, o = (x[0, 0] for x in wide)
    lse, dlse = (given[i][0, 0].astype(np.float64)[:, None] for i in (2, 3))
    scale = q.shape[1] ** -0.5
    p = np.exp(scale * q @ k.T - lse)
    ds = p * (do @ v.T - ((do * o).sum(1, keepdims=True) - dlse))
    for made, right in zip(found[:3], (scale * ds @ k, scale * ds.T @ q, p.T @ do), strict=True):
        assert np.linalg.norm(made[0, 0] - right) < 8 * testing.EPS["float32"] * np.linalg.norm(right)
