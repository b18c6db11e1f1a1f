"""A bias that TMA fetches, in wgmma's forward and backward: every way in which it may be broadcast or strided, every
width of its panels, what else may be there, and rows that it cannot fetch."""

import dataclasses
import math

import numpy as np
import pytest
from contracts import forward
from contracts.backward import Rung, incoming
from contracts.functions import BY_PLACE
from contracts.metamorphic import both_close
from helpers.tile_rows import row as tile_row

import numba_flash
from numba_flash import testing
from numba_flash.dispatch import forward as dispatch
from numba_flash.kernels.steps.head_rounds import entry_and_head
from numba_flash.machine.target import Target
from numba_flash.select import forward as select, tiles


@pytest.fixture(scope="module")
def rung():
    return Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True)


@pytest.fixture(scope="module")
def forward_rung():
    return forward.Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True)


def random_bias(*shape, dtype="float16"):
    return (2 * np.random.default_rng(5).standard_normal(shape)).astype(dtype)


def fetching(case):
    """Whether all kernels of the case's gradients fetch its bias by TMA, and whether a kernel before them copies it."""
    do, o, lse, _ = incoming(case)
    made = numba_flash.explain_backward(do, **case.arguments(), o=o, lse=lse, kernel="wgmma").configs
    (fetched,) = {config.bias_boxes for config in made if config.kernel in ("wgmma_dkdv", "wgmma_dq")}
    return fetched, made[0].kernel == "bias_rows"


def in_boxes(case):
    """Whether the forward and all kernels of the gradients fetch the bias by TMA from where it is."""
    fetched, copied = fetching(case)
    assert (stages(case) > 0) == (fetched and not copied)
    return fetched and not copied


def stages(case):
    """Of a forward's bias."""
    return numba_flash.explain(**case.arguments(), kernel="wgmma").config.bias_stages


# Tiles are of 32 queries and 64 keys, and of 64 queries and 32 keys: some lie past the end of 20, 40 and 72.
SHAPES = {
    "whole": (2, 2, 20, 72),
    "of all": (20, 72),
    "of each entry": (2, 1, 20, 72),
    "of each head": (2, 20, 72),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_broadcast(rung, forward_rung, shape):
    seqlens = SHAPES[shape][-2:]
    case = rung.problem(*seqlens, batch=2, heads=2, heads_kv=2, head_dim=8, bias=random_bias(*SHAPES[shape]))
    assert in_boxes(case)
    rung.check(case)
    forward_rung.check(case)


def test_heads_of_a_group(rung):
    case = rung.problem(40, 72, batch=1, heads=2, heads_kv=1, head_dim=8, bias=random_bias(2, 40, 72))
    assert not stages(case), "they share a tile in the forward"
    rung.check(case)


def strided(how):
    """-> (a bias, whether TMA can fetch it, whether it is copied for that)"""
    if how == "rows that are longer":
        return random_bias(2, 20, 96)[:, :, 8:80], True, False
    if how == "heads inside":
        return random_bias(20, 2, 72).swapaxes(0, 1), True, False
    if how == "keys not side by side":
        return random_bias(2, 72, 20).swapaxes(1, 2), False, True
    if how == "rows not by 16 bytes":
        return random_bias(2, 20, 76)[:, :, :72], False, True
    if how == "begins between":
        return random_bias(2, 20, 96)[:, :, 4:76], False, True
    if how == "from the end":
        return random_bias(2, 20, 72)[:, ::-1], False, True
    if how == "one row for all":
        return random_bias(2, 1, 72), False, False
    return random_bias(2, 20, 72, dtype="float32"), False, False


@pytest.mark.parametrize(
    "how",
    [
        "rows that are longer", "heads inside", "keys not side by side", "rows not by 16 bytes", "begins between",
        "from the end", "one row for all", "32 bits",
    ],
)  # fmt: skip
def test_strides(rung, forward_rung, how):
    bias, fetched, copied = strided(how)
    case = rung.problem(20, 72, batch=1, heads=2, heads_kv=2, head_dim=8, bias=bias)
    assert fetching(case) == (fetched or copied, copied) and in_boxes(case) == fetched
    forward_rung.check(case)
    rung.check(case)


# Keys that are read in pairs and one by one; a bias of each entry, of each head, and of all of them.
@pytest.mark.parametrize("shape", [(1, 2, 20, 37), (2, 1, 20, 38), (2, 2, 20, 37)])
def test_a_copy_of_rows(rung, shape):
    case = rung.problem(20, shape[3], batch=2, heads=2, heads_kv=1, head_dim=8, bias=random_bias(*shape))
    assert fetching(case) == (True, True)
    assert rung.check(case, wanted=("dq", "dk", "dv", "dbias")).dbias.shape == shape


# Panels of 64, 32 and 16 keys, in both kernels; dK and dV apart.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dkdv", "dq"),
    [
        ((16, 128, 2, 2, False), (128, 16, 2, 2)),
        ((48, 64, 2, 1, True), (64, 48, 2, 1)),
        ((32, 64, 2, 1, False), (64, 96, 2, 2)),
        ((32, 64, 3, 1, False), (64, 128, 3, 2)),
    ],
)
def test_tiles(rung, dkdv, dq, rows_for_every_kind):
    rows_for_every_kind(dkdv, dq)
    case = rung.problem(70, 136, batch=1, heads=1, head_dim=24, head_dim_v=40, dtype="bfloat16")
    case.options["bias"] = random_bias(70, 136, dtype="bfloat16")
    assert in_boxes(case)
    rung.check(case)


# A block takes several query tiles, with one and two consumers, of several tiles of keys, each in its place of the ring
# or in the only one. Tiles of 96 and 48 keys have narrower panels.
@pytest.mark.parametrize(
    ("tile_m", "tile_n", "bias_stages", "causal"),
    [(64, 64, 2, True), (128, 32, 1, True), (64, 96, 1, False), (64, 48, 2, False)],
)
def test_tiles_of_the_forward(forward_rung, tile_m, tile_n, bias_stages, causal, monkeypatch, nothing_remembered):
    machine = dataclasses.replace(Target.of(None), multiprocessors=1)
    monkeypatch.setattr(dispatch.Target, "of", lambda device: machine)
    row = tile_row(256, tile_m=tile_m, tile_n=tile_n, q_buffers=1, rescale_threshold=8)
    monkeypatch.setitem(tiles.TABLES, "wgmma", (row,))
    candidates = select.CANDIDATES["wgmma"]
    with_stages = lambda *given: (made for made in candidates(*given) if made.bias_stages == bias_stages)  # noqa: E731
    monkeypatch.setitem(select.CANDIDATES, "wgmma", with_stages)
    case = forward_rung.problem(250, 136, batch=1, heads=1, head_dim=72, causal=causal)
    case.options["bias"] = random_bias(250, 136)
    config = numba_flash.explain(**case.arguments(), kernel="wgmma").config
    assert (config.tile_m, config.tile_n, config.bias_stages) == (tile_m, tile_n, bias_stages)
    forward_rung.check(case)


BESIDE = {
    "lengths": dict(seqlens_k=np.array([70, 23], np.int32), q_offset=np.array([20, -3], np.int32), window=(25, 4)),
    "scores": dict(softcap=2.0, alibi_slopes=np.array([0.1, 0.3], np.float32), causal=True, scale=0.4),
    "mask": dict(mask=np.random.default_rng(7).random((2, 1, 20, 72)) < 0.8),
    "dropout": dict(dropout_p=0.3, seed=5),
    "functions": BY_PLACE,
}


@pytest.mark.slow
@pytest.mark.parametrize("beside", BESIDE)
def test_beside_all_else(rung, forward_rung, beside):
    options = BESIDE[beside]
    batch, heads = 2 if beside in ("lengths", "mask") else 1, 2 if beside == "scores" else 1
    case = rung.problem(20, 72, batch=batch, heads=heads, heads_kv=heads, head_dim=8)
    case.options["bias"] = random_bias(heads, 20, 72)
    case.options |= options
    assert in_boxes(case)
    rung.check(case)
    forward_rung.check(case)


def test_it_may_hide_keys(rung, forward_rung):
    bias = random_bias(40, 72)
    bias[:, 17] = bias[3] = -math.inf
    case = rung.problem(40, 72, batch=1, heads=1, head_dim=8, bias=bias)
    forward_rung.check(case)
    gradients = rung.check(case)
    assert in_boxes(case) and not gradients.dk[:, :, 17].any() and not gradients.dq[:, :, 3].any()


def test_the_same_in_32_bits(rung):
    """Sums are of the same numbers in the same order, whatever brought the bias."""
    case = rung.problem(40, 72, batch=1, heads=2, heads_kv=1, head_dim=8, bias=random_bias(2, 40, 72))
    given = incoming(case)
    expected = rung.check(case, given)
    case.options["bias"] = case.options["bias"].astype(np.float32)
    assert both_close(rung(case, given)[:3], expected[:3])


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 8), (8, 0)])
def test_nothing_to_fetch(rung, forward_rung, seqlen_q, seqlen_k):
    bias = random_bias(1, 8, 16)[:, :seqlen_q, :seqlen_k]
    case = rung.problem(seqlen_q, seqlen_k, batch=1, heads=1, head_dim=8, bias=bias)
    forward_rung.check(case)
    assert all(not x.any() for x in rung.check(case)[:3])


def test_entries_that_share_a_bias_follow_each_other():
    assert [entry_and_head(n, 2, 3, True) for n in range(6)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert [entry_and_head(n, 2, 3, False) for n in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
