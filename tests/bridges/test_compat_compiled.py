"""Every optional argument of every function in compat, compiled: the same as without, in one graph."""

import importlib.util
import inspect

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from numba_flash.compat.flash_attn import flash_attn_func  # noqa: E402
from numba_flash.compat.torch import scaled_dot_product_attention  # noqa: E402

MASK = torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.7
SLOPES = torch.tensor([0.5, 0.25])
CASES = {
    scaled_dot_product_attention: dict(
        attn_mask=[MASK, MASK.float()],
        dropout_p=[0.5, 1.0],
        is_causal=[True],
        scale=[0.3, 1, 0.0],
        enable_gqa=[True],
    ),
    flash_attn_func: dict(
        dropout_p=[0.5],
        softmax_scale=[0.3, 1],
        causal=[True],
        window_size=[(2, 0), (-1, 3), [2, -1]],
        softcap=[3.0, 0.0, 2],
        alibi_slopes=[SLOPES, SLOPES.expand(2, 2)],
        deterministic=[True],
        return_attn_probs=[True],
    ),
}
NO_GRAPH = set()  # which torch.compile leaves its graph for
if importlib.util.find_spec("torch.nn.attention.flex_attention") is not None:  # from torch 2.5 on
    from torch.nn.attention import flex_attention as flex

    from numba_flash.compat.flex_attention import flex_attention

    if torch.__version__ < (2, 13):
        NO_GRAPH.add(flex_attention)
    CASES[flex_attention] = dict(
        score_mod=[lambda score, b, h, q_idx, kv_idx: score + (kv_idx - q_idx)],
        block_mask=["causal"],
        scale=[0.3],
        enable_gqa=[True],
        return_lse=[True],
        kernel_options=[dict(BLOCK_M=16)],
        return_aux=["lse"],
    )
FIRST = dict.fromkeys(CASES, 3)  # how many arguments come before the optional ones
if importlib.util.find_spec("transformers") is not None:
    from numba_flash.compat.transformers import attention as of_transformers

    CASES[of_transformers] = dict(
        dropout=[0.5],
        scaling=[0.3],
        is_causal=[True, False],
        softcap=[3.0],
        position_bias=[MASK.float()],
        s_aux=[SLOPES],
        others=[dict(sinks=SLOPES)],
    )
    FIRST[of_transformers] = 5
EVERY = [
    (function, name, value) for function, names in CASES.items() for name, values in names.items() for value in values
]

MODULE = torch.nn.Linear(1, 1)


@pytest.mark.parametrize("function", CASES)
def test_every_argument_has_a_case(function):
    optional = list(inspect.signature(function).parameters)[FIRST[function] :]
    assert set(optional) == set(CASES[function])


@pytest.mark.parametrize(("function", "name", "value"), EVERY)
def test_compiled(function, name, value):
    if function is flash_attn_func and not hasattr(torch.library, "register_vmap"):
        pytest.skip("torch 2.4 does not trace hasattr of a tensor")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 6, 4, generator=generator) for _ in range(3))
    if function is flash_attn_func:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if name == "enable_gqa":
        k, v = k[:, :1], v[:, :1]
    if name == "block_mask":
        value = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 6, 6, device="cpu")
    if name == "return_aux":
        if not hasattr(flex, "AuxRequest"):
            pytest.skip("this torch has no return_aux")
        value = flex.AuxRequest(lse=True)

    def run(q, k, v):
        given = value if name == "others" else {name: value}
        found = function(q, k, v, **given) if FIRST[function] == 3 else function(MODULE, q, k, v, None, **given)
        found = found if isinstance(found, tuple) else (found,)
        return [x for x in found if isinstance(x, torch.Tensor)]

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=function not in NO_GRAPH, backend="eager")
    for _ in range(2):
        torch.manual_seed(3)
        expected = run(q, k, v)
        torch.manual_seed(3)
        found = compiled(q, k, v)
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
