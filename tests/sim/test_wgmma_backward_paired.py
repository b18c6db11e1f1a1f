"""Gradients in float32 with head_dim above 128 in the simulator: two blocks have half of the columns each."""

import pytest
from contract_backward import Rung

from numba_flash import testing


@pytest.fixture(scope="module")
def rung():
    return Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True, usual="float32")


# Halves of one panel and of two, of whole panels and less, of as many columns and fewer; none in the second.
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "options"),
    [
        (40, 40, 136, 8, {}), (70, 40, 129, 129, dict(causal=True)),
        pytest.param(70, 70, 256, 256, {}, marks=pytest.mark.slow),
        pytest.param(100, 70, 72, 255, dict(causal=True, q_offset=-45), marks=pytest.mark.slow),
        pytest.param(90, 90, 192, 24, dict(window=(20, 9), softcap=2.0), marks=pytest.mark.slow),
    ],
    ids=["full", "causal", "256", "queries without keys", "window"],
)  # fmt: skip
def test_halves_of_columns(rung, seqlen_q, seqlen_k, head_dim, head_dim_v, options):
    case = rung.problem(seqlen_q, seqlen_k, batch=1, heads=1, head_dim=head_dim, head_dim_v=head_dim_v)
    rung.check(case, **options)
