"""Packed sequences on the GPU kernels, simulated."""

import dataclasses

import pytest
from contracts import forward, suite, varlen

from numba_flash import testing
from numba_flash.select import rungs
from numba_flash.testing import packed

TestVarlen = suite(varlen)


@pytest.fixture(scope="session", params=["v1", "v2", "mma", "wgmma"])
def rung(request):
    if rungs.RUNGS[request.param].tensor_cores:
        return forward.Rung(request.param, testing.rows_padded, tensor=True, tile=32, slow=True)
    return forward.Rung(request.param)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_more_bits_on_tensor_cores(rung, dtype):
    if not rung.tensor:
        pytest.skip("the other tests are in these dtypes")
    own = dataclasses.replace(rung, usual=dtype)
    case = varlen.ragged(own, [(17, 20), (0, 3), (5, 33)], heads=2, heads_kv=1, head_dim=8, causal=True)
    (o, lse), (do, dlse) = varlen.forward(own, case), packed.outer_packed(case)
    packed.check_packed(case, o, lse)
    packed.check_packed_gradients(case, varlen.backward(own, case, do, o, lse, dlse), do, o, lse, dlse)
