"""Transformers' continuous batching: requests come and go in one batch over pages of a cache.

Each request gets the tokens that it gets alone by eager attention. Steps that read pages in place, for which
Transformers wants a GPU, are let in on the CPU, too.
"""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs Transformers")
if not hasattr(transformers, "ContinuousBatchingConfig"):
    pytest.skip("needs Transformers with ContinuousBatchingConfig, as 5.24 has", allow_module_level=True)

from transformers import modeling_flash_attention_utils  # noqa: E402
from transformers.generation.continuous_batching import initialization  # noqa: E402

from numba_flash.compat import transformers_paged as bridge  # noqa: E402

NAME = bridge.register()
DECODER = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
PROMPTS = (3, 40, 9, 1)
NEW = 14


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))


def gemma2():
    """Softcap, and a window in every other layer."""
    config = transformers.Gemma2Config(**DECODER, head_dim=16, sliding_window=7, attn_logit_softcapping=5.0)
    return transformers.Gemma2ForCausalLM(config)


def gpt_oss():
    """Sinks, and a window in every other layer."""
    config = transformers.GptOssConfig(
        **DECODER, head_dim=16, sliding_window=7, num_local_experts=2, num_experts_per_tok=1
    )
    model = transformers.GptOssForCausalLM(config)
    model._compatible_flash_implementations = [NAME]  # as docs/frameworks.md says
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def made(model):
    torch.manual_seed(0)
    return model().eval()


def batched(model, prompts, **settings):
    """The new tokens of each prompt."""
    sizes = dict(page_size=4, num_blocks=64, max_batch_tokens=24, auto_switch_to_flash=False) | settings
    given = dict(inputs=prompts, generation_config=asked(), progress_bar=False)
    found = model.generate_batch(**given, continuous_batching_config=transformers.ContinuousBatchingConfig(**sizes))
    return [found[request].generated_tokens for request in sorted(found)]


def asked():
    return transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=96, pad_token_id=0)


def alone(model, prompts):
    model.set_attn_implementation("eager")
    return [model.generate(torch.tensor([x]), generation_config=asked())[0, len(x) :].tolist() for x in prompts]


@pytest.fixture
def prompts():
    torch.manual_seed(1)
    return [torch.randint(3, 96, (length,)).tolist() for length in PROMPTS]


@pytest.mark.parametrize("model", [llama, gemma2, gpt_oss])
def test_requests_get_the_tokens_that_they_get_alone(model, prompts):
    """max_batch_tokens is less than the prompts: they come in chunks, beside steps of others."""
    model = made(model)
    expected = alone(model, prompts)
    model.set_attn_implementation(NAME)
    assert batched(model, prompts) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_one_token_read_and_append_to_pages(prompts, dtype, monkeypatch):
    monkeypatch.setattr(initialization, "is_torch_xpu_available", lambda: True)  # the gate; nothing else asks it there
    steps, own = [], bridge._one_token_each
    monkeypatch.setattr(bridge, "_one_token_each", lambda *given: steps.append(given) or own(*given))
    model = made(llama).to(dtype)
    model.set_attn_implementation(NAME)
    gathered = batched(model, prompts, max_blocks_per_request=0)
    assert not steps
    in_place = batched(model, prompts, max_blocks_per_request=16)
    assert len(steps) > NEW  # each has two layers
    assert in_place == gathered
    if dtype == torch.float32:
        assert in_place == alone(model, prompts)


def test_rows_of_padding_change_nothing():
    """As in a graph for more requests than there are: no page, and a length of 0."""
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(2, 6, 4, 2, 16).unbind()
    q, k, v = torch.randn(1, 3, 4, 16), torch.randn(1, 3, 2, 16), torch.randn(1, 3, 2, 16)
    table = torch.tensor([[1, 4], [-1, -1], [-1, -1]], dtype=torch.int32)
    before, options = [x.clone() for x in (k_cache, v_cache)], dict(scale=None, window=(None, 0))
    given = dict(k_cache=k_cache, v_cache=v_cache, block_table=table)
    o = bridge._one_token_each(q, k, v, given | dict(cu_seq_lens_k=torch.tensor([0, 6, 6, 6]).int()), options)
    for cache, old, new in zip((k_cache, v_cache), before, (k, v), strict=True):
        old[4, 1] = new[0, 0]
        assert torch.equal(cache, old)
    keys, values = (torch.cat([x[1], x[4, :2]]).repeat_interleave(2, 1) for x in (k_cache, v_cache))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[0, :1].transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1)
    )
    torch.testing.assert_close(o[0, 0], expected[:, 0])
    assert not o[0, 1:].any()


def test_generate_without_batching_takes_it_too(prompts):
    model = made(llama)
    expected = alone(model, prompts[:1])
    model.set_attn_implementation(NAME)
    assert [model.generate(torch.tensor(prompts[:1]), generation_config=asked())[0, 3:].tolist()] == expected


def test_other_names_are_loaded_as_before():
    with pytest.raises((ImportError, ValueError)):
        modeling_flash_attention_utils._lazy_imports("flash_attention_3")
    assert bridge.register() == NAME and bridge.register("my_flash_3") == "my_flash_3"


@pytest.mark.parametrize("name", ["numba_attention", "flash_attention", "2_flash"])
def test_a_name_that_batching_would_not_take_is_refused(name):
    with pytest.raises(ValueError, match=f"must contain .*, but is '{name}'"):
        bridge.register(name)


def test_what_is_not_taken_is_named():
    x = torch.zeros(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="attention_mask, dropout and output_attentions"):
        bridge.attention(made(llama), x, x, x, None, dropout=0.5, write_index=[])
