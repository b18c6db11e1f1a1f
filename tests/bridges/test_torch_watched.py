"""What counts and measures programs sees attention: torch.utils.flop_counter and torch.profiler."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import numba_flash  # noqa: E402
from numba_flash.arrays import reading  # noqa: E402
from numba_flash.compat.torch import scaled_dot_product_attention  # noqa: E402

BATCH, HEADS, SEQLEN_Q, SEQLEN_K, DIM, DIM_V = 2, 4, 5, 6, 8, 3
PRODUCT = 2 * BATCH * HEADS * SEQLEN_Q * SEQLEN_K  # of all queries with all keys, for each entry of a row


def given(requires_grad=True, layout="bhsd", heads_kv=2, device="cpu"):
    shapes = [(BATCH, HEADS, SEQLEN_Q, DIM), (BATCH, heads_kv, SEQLEN_K, DIM), (BATCH, heads_kv, SEQLEN_K, DIM_V)]
    made = [torch.randn(shape, device=device) for shape in shapes]
    made = made if layout == "bhsd" else [x.transpose(1, 2) for x in made]
    return [x.contiguous().requires_grad_(requires_grad) for x in made]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(dropout_p=0.5, seed=1)], ids=str)
def test_operations_are_counted_as_of_torchs_own_attention(layout, options):
    q, k, v = given(layout=layout)
    with FlopCounterMode(display=False) as forward:
        o = numba_flash.attention(q, k, v, layout=layout, **options)
    with FlopCounterMode(display=False) as backward:
        o.sum().backward()
    assert forward.get_total_flops() == PRODUCT * (DIM + DIM_V)
    assert backward.get_total_flops() == PRODUCT * (3 * DIM + 2 * DIM_V)
    with FlopCounterMode(display=False) as eager, torch.no_grad():
        numba_flash.attention(q, k, v, layout=layout, **options)
    assert eager.get_total_flops() == forward.get_total_flops()


def test_the_same_count_as_torchs():
    q, k, v = given(heads_kv=HEADS)
    counts = []
    for function in (torch.nn.functional.scaled_dot_product_attention, scaled_dot_product_attention):
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            function(*(x.to("meta") for x in (q, k, v)), is_causal=True)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


def test_a_counter_that_is_older_than_the_first_call():
    program = (
        "import torch; from torch.utils.flop_counter import FlopCounterMode; import numba_flash\n"
        "with FlopCounterMode(display=False) as counter: numba_flash.attention(*[torch.ones(1, 1, 2, 4)] * 3)\n"
        "print(counter.get_total_flops())"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(found.stdout.split()[-1]) == 2 * 2 * 2 * 8


@pytest.mark.filterwarnings("ignore::UserWarning:torch.profiler")
@pytest.mark.parametrize("score_mod", [None, lambda score, b, h, q_pos, k_pos: 2 * score], ids=["plain", "score_mod"])
def test_the_profiler_shows_each_call(score_mod):
    options = {} if score_mod is None else dict(score_mod=score_mod)
    q, k, v = given()
    for _ in range(2):  # also a call like one before
        numba_flash.attention(q, k, v, **options).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            numba_flash.attention(q, k, v, **options).sum().backward()
        with torch.no_grad():
            numba_flash.attention(q, k, v, **options)
    counts = {entry.key: entry.count for entry in profiler.key_averages()}
    assert counts["numba_flash.attention"] == 4 and counts["numba_flash.attention_backward"] == 3


def test_the_short_path_is_left_only_while_the_profiler_is_on():
    q, k, v = given(requires_grad=False)
    numba_flash.attention(q, k, v)
    facts = reading.fast_paths[torch.Tensor].facts
    assert facts(q, k, v) is not None
    with torch.autograd.profiler.profile():
        assert facts(q, k, v) is None
    assert facts(q, k, v) is not None
