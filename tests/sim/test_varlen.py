"""Packed sequences on the GPU kernels, simulated."""

import dataclasses

import numpy as np
import pytest
from contracts import forward, suite, varlen

import numba_flash
from numba_flash import testing
from numba_flash.config import wgmma_backward
from numba_flash.dispatch import backward as dispatch_backward, forward as dispatch, launch
from numba_flash.kernels.wgmma import backward_block_tiles
from numba_flash.machine.target import Target
from numba_flash.problem import packed as problem_packed
from numba_flash.ptx.sim import launch as sim_launch
from numba_flash.select import backward_kernels, features, rungs
from numba_flash.testing import packed

TestVarlen = suite(varlen)


@pytest.fixture(scope="session", params=["v1", "v2", "mma", "wgmma"])
def rung(request):
    if rungs.RUNGS[request.param].tensor_cores:
        return forward.Rung(request.param, testing.rows_padded, tensor=True, tile=32, slow=True)
    return forward.Rung(request.param, slow=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_more_bits_on_tensor_cores(rung, dtype):
    if not rung.tensor:
        pytest.skip("the other tests are in these dtypes")
    own = dataclasses.replace(rung, usual=dtype)
    case = varlen.ragged(own, [(17, 20), (0, 3), (5, 33)], heads=2, heads_kv=1, head_dim=8, causal=True)
    (o, lse), (do, dlse) = varlen.forward(own, case), packed.outer_packed(case)
    packed.check_packed(case, o, lse)
    packed.check_packed_gradients(case, varlen.backward(own, case, do, o, lse, dlse), do, o, lse, dlse)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nothing_of_a_neighbour_is_seen_in_more_bits(rung, dtype):
    if not rung.tensor:
        pytest.skip("the other tests are in these dtypes")
    varlen.test_nothing_of_a_neighbour_is_seen(dataclasses.replace(rung, usual=dtype))


def incoming(case):
    """do, o, lse and dlse: o and lse are the oracle's, where a test is about gradients alone."""
    o, lse = numba_flash.attention_varlen(**case.arguments(), return_lse=True, kernel="reference")
    do, dlse = packed.outer_packed(case)
    return do, o, lse, dlse


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_tile_is_found_behind_more_sequences_than_a_warp_looks_at(dtype):
    """Two of 70 have queries, and two rows behind all are of none."""
    rung = forward.Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True, usual=dtype)
    lengths = [(0, 0)] * 40 + [(3, 5)] + [(0, 1)] * 28 + [(2, 2)]
    case = varlen.ragged(rung, lengths, heads=1, heads_kv=1, head_dim=8)
    case = dataclasses.replace(case, q=np.concatenate([case.q, case.q[:2]]))
    packed.check_packed(case, *varlen.forward(rung, case))


@pytest.mark.slow
@pytest.mark.parametrize(("one_kernel", "most"), [(False, None), (True, None), (True, 20)])
def test_wrong_ends_touch_nothing_outside(rung, one_kernel, most, monkeypatch, nothing_remembered):
    """What a device holds is not checked: ends that fall, are negative or too large. Every row is written all the same.
    If two sequences have it, either may write it, which is an error in the simulator elsewhere."""
    if rung.kernel == "v1" or (one_kernel and rung.kernel != "wgmma"):
        pytest.skip("the other tests are of all its kernels")
    monkeypatch.setattr(problem_packed, "check_spans", lambda *_: None)
    monkeypatch.setattr(sim_launch.Pointer, "store", lambda pointer, *_: pointer.mark_written())
    monkeypatch.setattr(backward_kernels, "gains_by_one_kernel", lambda *_: one_kernel)
    of_q = np.array([0, 25, 10, 5000, -7, 17, 2**31 - 1, -(2**31), 15], np.int32)
    of_k = np.array([20, 5, 29, 31, -1, 0, 8, 9, 2**30], np.int32)
    bounds = {} if most is None else dict(max_seqlen_q=most, max_seqlen_k=most)
    case = dataclasses.replace(varlen.ragged(rung, [(30, 30)], heads=1, heads_kv=1, head_dim=8), options=bounds)
    case, (do, dlse) = dataclasses.replace(case, cu_seqlens_q=of_q, cu_seqlens_k=of_k), packed.outer_packed(case)
    o, lse = varlen.forward(rung, case)
    found = varlen.backward(rung, case, do, o, lse, dlse)
    assert np.isfinite(o).all() and all(np.isfinite(x).all() for x in found[:3])
    assert not o[lse.T == -np.inf].any()


LENGTHS = [(0, 3), (70, 140), (1, 0), (20, 0), (0, 0), (1, 9), (0, 1)]
ONE_KERNEL = [  # options, heads, head_dim, blocks, lengths
    ({}, 1, 8, 1, LENGTHS), (dict(causal=True), 2, 8, 2, LENGTHS), (dict(causal=True), 1, 72, 3, [(70, 140), (5, 9)]),
    (dict(window=(30, 10)), 2, 72, 2, [(40, 140), (140, 20)]),
    (dict(seqlens_k=np.array([3, 133, 0], np.int32)), 1, 8, 2, [(3, 9), (20, 140), (9, 5)]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("options", "heads", "head_dim", "blocks", "lengths"), ONE_KERNEL, ids=range(len(ONE_KERNEL)))
def test_one_kernel_computes_all_gradients(options, heads, head_dim, blocks, lengths, monkeypatch, nothing_remembered):
    """Key tiles of all sequences have numbers, some of them no tile. NaN stands in rows of no sequence and behind the
    valid keys."""
    monkeypatch.setattr(backward_kernels, "gains_by_one_kernel", lambda *_: True)
    monkeypatch.setattr(launch, "blocks_at_a_time", lambda _: blocks)
    rung = forward.Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True)
    heads_kv = 1 if head_dim == 8 else heads
    case = varlen.ragged(rung, lengths, heads=heads, heads_kv=heads_kv, head_dim=head_dim, **options)
    if "seqlens_k" in options:
        for b, valid in enumerate(options["seqlens_k"]):
            rows = case.keys(b)
            case.k[rows][valid:], case.v[rows][valid:] = np.nan, np.inf
    (o, lse), (do, dlse) = varlen.forward(rung, case), packed.outer_packed(case)
    packed.check_packed(case, o, lse)
    packed.check_packed_gradients(case, varlen.backward(rung, case, do, o, lse, dlse), do, o, lse, dlse)


ONE_TILE = [  # options, heads_kv, head_dim
    (dict(causal=True), 2, 8), ({}, 1, 72), (dict(window=(30, 10)), 2, 72),
    (dict(seqlens_k=np.array([50, 0, 3, 0], np.int32)), 1, 8),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("options", "heads_kv", "head_dim"), ONE_TILE, ids=range(len(ONE_TILE)))
def test_keys_that_are_one_tile_by_their_bound_need_no_tickets(
    options, heads_kv, head_dim, monkeypatch, nothing_remembered
):
    """A block then has all keys of a sequence and head. NaN stands behind the valid keys; the bits are those of blocks
    that take tickets, whichever way their heads go."""
    monkeypatch.setattr(backward_kernels, "gains_by_one_kernel", lambda *_: True)
    monkeypatch.setattr(launch, "blocks_at_a_time", lambda _: 3)
    rung = forward.Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True)
    lengths = [(70, 100), (5, 9), (0, 3), (1, 0)]
    case = varlen.ragged(rung, lengths, heads=2, heads_kv=heads_kv, head_dim=head_dim, **options)
    for b, valid in enumerate(options.get("seqlens_k", ())):
        rows = case.keys(b)
        case.k[rows][valid:], case.v[rows][valid:] = np.nan, np.inf
    most, given = dict(max_seqlen_q=70, max_seqlen_k=128), incoming(case)
    found = [varlen.backward(rung, case, *given, **bounds) for bounds in (most, most | dict(max_seqlen_k=129))]
    packed.check_packed_gradients(case, found[0], *given)
    assert all(forward.same_bits(*of) for of in zip(*found, strict=True) if of[0] is not None)


@pytest.mark.slow
def test_heads_of_a_sequence_go_side_by_side(monkeypatch, nothing_remembered):
    """As many as have so many key tiles; no more than there are. Up, the last key tile comes first; the others go down.
    The next sequence follows. The number changes no bit."""
    monkeypatch.setattr(backward_kernels, "gains_by_one_kernel", lambda *_: True)
    monkeypatch.setattr(launch, "blocks_at_a_time", lambda _: 1)
    rung, taken, found = forward.Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True), [], []
    key_tile_of = backward_block_tiles.key_tile_of
    monkeypatch.setattr(backward_block_tiles, "key_tile_of", lambda *of: taken.append(key_tile_of(*of)) or taken[-1])
    case = varlen.ragged(rung, [(2, 300), (2, 3)], heads=4, heads_kv=4, head_dim=8, causal=True)
    given = incoming(case)
    for most in (3, 4):
        monkeypatch.setattr(wgmma_backward, "heads_in_flight", lambda *_, most=most: most)
        dispatch_backward._plans.clear()
        found.append(varlen.backward(rung, case, *given))
    one = [(h, j) for h in range(4) for j in ((0, 1, 2) if h % 2 else (2, 1, 0))]
    both = [(h, j) for j in (2, 1, 0) for h in (0, 2)] + [(h, j) for j in (0, 1, 2) for h in (1, 3)]
    short = [(h, 0) for h in (0, 2, 1, 3)]
    assert [(h, j) for _, h, j, _ in taken] == [*one, *short, *both, *short]
    assert all(forward.same_bits(*of) for of in zip(*found, strict=True) if of[0] is not None)


def test_what_is_behind_a_sequence_changes_no_bits_of_one_kernel(monkeypatch, nothing_remembered):
    """The last tile of keys, and of queries, has rows of no sequence: NaN, which would reach dQ by 0 * NaN."""
    monkeypatch.setattr(backward_kernels, "gains_by_one_kernel", lambda *_: True)
    rung = forward.Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True)
    alone = varlen.ragged(rung, [(20, 70)], heads=1, heads_kv=1, head_dim=8)
    (o, lse), (do, dlse) = varlen.forward(rung, alone), packed.outer_packed(alone)
    expected = varlen.backward(rung, alone, do, o, lse, dlse)

    def between(x):
        return np.concatenate(
            [np.full((3, *x.shape[1:]), np.nan, x.dtype), x, np.full((9, *x.shape[1:]), np.nan, x.dtype)]
        )

    ends = {f"cu_seqlens_{side}": getattr(alone, f"cu_seqlens_{side}") + 3 for side in "qk"}
    beside = dataclasses.replace(alone, q=between(alone.q), k=between(alone.k), v=between(alone.v), **ends)
    lse, dlse = (between(x.T).T.copy() for x in (lse, dlse))
    found = varlen.backward(rung, beside, between(do), between(o), lse, dlse)
    for name in ("dq", "dk", "dv"):
        own = slice(3, 3 + len(getattr(expected, name)))
        assert forward.same_bits(getattr(found, name)[own], getattr(expected, name)), name


@pytest.mark.parametrize("head_dim", [8, 72])
def test_rows_that_a_hidden_key_spoils_are_computed_again(head_dim, monkeypatch, nothing_remembered):
    """dQ of a sequence whose keys are one tile is written by the block itself. The last key, NaN, is for the last query
    alone; 0 * NaN is NaN in the rows before."""
    monkeypatch.setattr(backward_kernels, "gains_by_one_kernel", lambda *_: True)
    rung, found = forward.Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True), []
    case = varlen.ragged(rung, [(20, 20), (3, 3)], heads=1, heads_kv=1, head_dim=head_dim, causal=True)
    (o, lse), (do, dlse) = varlen.forward(rung, case), packed.outer_packed(case)
    for key in (0, np.nan):
        case.k[case.keys(0)][19] = key
        found.append(varlen.backward(rung, case, do, o, lse, dlse).dq)
    right, again = (x.astype(np.float32) for x in found)
    np.testing.assert_allclose(again[:19], right[:19], rtol=0.02, atol=2e-3)
    assert np.isnan(again[19]).all() and (again[20:] == right[20:]).all()


NUMBERED = [("float16", {}, 1), ("float16", dict(causal=True), 2), ("float32", dict(window=(9, 3)), 1)]


@pytest.mark.parametrize(("dtype", "options", "heads_kv"), NUMBERED, ids=str)
def test_blocks_of_mma_find_a_tile_by_its_number(dtype, options, heads_kv, monkeypatch, nothing_remembered):
    """Where bounds are loose. Sequences are shorter and longer than a tile, and some have no key or no query; the bits
    are those of a grid with as many blocks as bounds allow."""
    rung = forward.Rung("mma", testing.rows_padded, tensor=True, tile=32, slow=True, usual=dtype)
    lengths = [(0, 3), (70, 40), (1, 0), (0, 0), (3, 9), (0, 1)]
    case = varlen.ragged(rung, lengths, heads=2, heads_kv=heads_kv, head_dim=8, **options)
    case = dataclasses.replace(case, cu_seqlens_q=case.cu_seqlens_q[:-1], cu_seqlens_k=case.cu_seqlens_k[:-1])
    found = []
    for loose in (True, False):
        monkeypatch.setattr(features, "loosely_bound", lambda _, loose=loose: loose)
        backward_kernels.configs_of.cache_clear()
        dispatch._plans.clear(), dispatch_backward._plans.clear()
        (o, lse), (do, dlse) = varlen.forward(rung, case), packed.outer_packed(case)
        packed.check_packed(case, o, lse)
        gradients = varlen.backward(rung, case, do, o, lse, dlse)
        packed.check_packed_gradients(case, gradients, do, o, lse, dlse)
        found.append((o, lse, *gradients[:3]))
    assert all(forward.same_bits(*of) for of in zip(*found, strict=True))


# Blocks stay and count the tiles of all sequences; here several of them share the counter, and some find no tile.
@pytest.mark.slow
@pytest.mark.parametrize("multiprocessors", [2, 12])
def test_blocks_share_the_tiles_of_all_sequences(multiprocessors, monkeypatch, nothing_remembered):
    machine = dataclasses.replace(Target.of(None), multiprocessors=multiprocessors)
    monkeypatch.setattr(dispatch.Target, "of", lambda device: machine)
    rung = forward.Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True)
    lengths = [(0, 3), (150, 40), (1, 0), (0, 0), (1, 9), (70, 33), (0, 1)]
    case = varlen.ragged(rung, lengths, heads=2, heads_kv=1, head_dim=8, causal=True)
    packed.check_packed(case, *varlen.forward(rung, case))
