"""Packed sequences on the GPU kernels, simulated."""

import dataclasses

import pytest
from contracts import forward, suite, varlen

from numba_flash import testing
from numba_flash.dispatch import forward as dispatch
from numba_flash.machine.target import Target
from numba_flash.select import rungs
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
