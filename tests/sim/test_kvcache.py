"""Caches on the GPU kernels, simulated: pages on v2, contiguous ones also on tensor cores."""

import numpy as np
import pytest
from contracts import forward, kvcache, suite

import numba_flash
from numba_flash import testing

TestKvcache = suite(kvcache)


@pytest.fixture(scope="session")
def rung():
    return forward.Rung("v2", slow=True, limits=dict(max_seqlen=20))


@pytest.mark.parametrize("kernel", ["mma", "wgmma"])
@pytest.mark.parametrize("rotary", [False, True])
def test_contiguous_caches_on_tensor_cores(kernel, rotary):
    own = forward.Rung(kernel, testing.rows_padded, tensor=True, tile=32, slow=True)
    if rotary:
        kvcache.test_rotary_turns_queries_and_new_keys_by_their_positions(own, False, 16, True, kind="contiguous")
    else:
        case = kvcache.problem(own, (13, 40, 3), 2, causal=True)
        kvcache.check(own, kvcache.lay(case, "contiguous", new=2))


def test_auto_is_v2(rung):
    cached = kvcache.lay(kvcache.problem(rung, (7,), head_dim=8, heads=1, heads_kv=1), page=4)
    named, _ = cached.run(rung)[:2]
    assert np.array_equal(named, cached.run(forward.Rung("auto"))[0])


def test_nothing_is_written_where_the_kernel_is_refused():
    q, new, length = np.ones((1, 2, 1, 7)), np.ones((1, 1, 1, 7)), np.array([3], np.int32)
    caches = np.zeros((1, 1, 6, 7)), np.zeros((1, 1, 6, 7))
    with pytest.raises(NotImplementedError, match="kernel='wgmma' cannot run"):
        numba_flash.attention_kvcache(q, *caches, seqlens_k=length, k_new=new, v_new=new, kernel="wgmma")
    assert not caches[0].any() and not caches[1].any()
