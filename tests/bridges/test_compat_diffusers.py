"""numba_flash as an attention backend of diffusers: its models give what they give with torch's attention."""

import subprocess
import sys
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
diffusers = pytest.importorskip("diffusers", reason="needs diffusers")

from diffusers.models import attention_dispatch  # noqa: E402

from numba_flash.compat import diffusers as backend  # noqa: E402

LAYERS = dict(num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2)


@pytest.fixture(autouse=True)
def generator():
    torch.manual_seed(0)
    backend.register()
    yield
    attention_dispatch._AttentionBackendRegistry.set_active_backend(attention_dispatch.AttentionBackendName.NATIVE)


def flux():
    """(model, what it is called with)"""
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8), **LAYERS
    )
    sizes = dict(hidden_states=(1, 6, 4), encoder_hidden_states=(1, 5, 8), pooled_projections=(1, 8))
    given = {name: torch.randn(size) for name, size in sizes.items()}
    return model, given | dict(timestep=torch.ones(1), img_ids=torch.zeros(6, 3), txt_ids=torch.zeros(5, 3))


def wan():
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8,
        freq_dim=8, ffn_dim=16, num_layers=1, cross_attn_norm=True,
    )  # fmt: skip
    return model, dict(
        hidden_states=torch.randn(1, 4, 2, 4, 4), timestep=torch.ones(1), encoder_hidden_states=torch.randn(1, 5, 8)
    )


@pytest.mark.parametrize("make", [flux, wan])
def test_a_model_computes_the_same(make):
    model, given = make()

    def results():
        model.zero_grad()
        found = model(**given).sample
        found.square().mean().backward()
        return found.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)

    expected = results()
    model.set_attention_backend("numba")
    ours = mock.Mock(wraps=backend.scaled_dot_product_attention)
    with mock.patch.object(backend, "scaled_dot_product_attention", ours):
        found = results()
    assert ours.call_count >= 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["none", "keys", "bool", "additive", "causal", "gqa"])
def test_every_argument_means_the_same(kind):
    heads_kv = 2 if kind == "gqa" else 4
    q, k, v = (torch.randn(2, 7, heads, 8, dtype=torch.float64) for heads in (4, heads_kv, heads_kv))
    masks = dict(keys=torch.arange(7) < torch.tensor([[7], [4]]), bool=torch.rand(2, 1, 7, 7) > 0.3)
    masks |= dict(additive=torch.randn(2, 4, 7, 7, dtype=torch.float64))
    options = dict(attn_mask=masks.get(kind), is_causal=kind == "causal", enable_gqa=kind == "gqa", scale=0.3)
    found = attention_dispatch.dispatch_attention_fn(q, k, v, backend="numba", **options)
    torch.testing.assert_close(found, attention_dispatch.dispatch_attention_fn(q, k, v, backend="native", **options))


def test_as_a_context():
    q = torch.randn(1, 3, 2, 8)
    ours = mock.Mock(wraps=backend.scaled_dot_product_attention)
    with (
        mock.patch.object(backend, "scaled_dot_product_attention", ours),
        attention_dispatch.attention_backend("numba"),
    ):
        attention_dispatch.dispatch_attention_fn(q, q, q)
    attention_dispatch.dispatch_attention_fn(q, q, q)
    assert ours.call_count == 1


def test_compiled_in_one_graph():
    q = torch.randn(1, 3, 2, 8)

    def run(q):
        return attention_dispatch.dispatch_attention_fn(
            q, q, q, backend=attention_dispatch.AttentionBackendName("numba")
        )

    assert torch.equal(torch.compile(run, fullgraph=True, backend="eager")(q), run(q))
    torch.compiler.reset()


def test_refused():
    q = torch.randn(1, 3, 2, 8)
    assert backend.register() == "numba"
    with pytest.raises(ValueError, match="not 'native'"):
        backend.register("native")
    with pytest.raises(NotImplementedError, match="context parallelism"):
        attention_dispatch.dispatch_attention_fn(q, q, q, backend="numba", parallel_config=object())


def test_without_diffusers():
    program = (
        "import sys; sys.modules['diffusers'] = None; from numba_flash.compat import diffusers; diffusers.register()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ImportError: register() needs diffusers" in done.stderr
