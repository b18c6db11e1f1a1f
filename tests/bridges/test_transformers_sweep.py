"""Our attention in tiny models of Transformers' architectures: the result of eager attention, or a clear refusal.

A fixed sample of them, and all with `NUMBA_FLASH_ARCHITECTURES=all` or those that it names: NUMBA_FLASH_ARCHITECTURES=
"llama gemma2". scripts/sweep_transformers writes the outcomes of all of them down.
"""

import os

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs Transformers")

import transformers  # noqa: E402
from helpers import architectures  # noqa: E402

# What each stands for.
SAMPLE = dict(
    llama="decoder, grouped heads",
    gemma2="softcap, a window in every other layer",
    mistral="a window in each layer",
    gpt2="learned positions, heads in one matrix",
    gpt_neox="rotation of a part of each head",
    cohere2="windows and layers without positions",
    bert="encoder",
    modernbert="encoder with windows on both sides",
    bart="encoder and decoder",
    t5="position bias",
    bigbird_pegasus="a causal mask, a module that is not; adds its mask",
    t5gemma2="joins two masks",
    paligemma="a prefix that sees itself",
    lasr_ctc="compares its mask",
    whisper="speech to text",
    wav2vec2="audio encoder",
    vit="images, no mask",
    siglip="images and text",
    llava="images in text",
    doge="makes its mask smaller itself",
    mixtral="experts",
    deepseek_v2="latent keys, values of another size",
    deepseek_v4="compressed keys, for which it makes its mask longer; sinks",
    lfm2="attention and convolutions in turn",
    opt="learned positions from the mask",
    gpt_oss="attention sinks, a window in every other layer",
    voxtral_realtime_encoder="audio, a window, fewer positions than its padding mask has",
)
# Those that a version of Transformers computes itself, whatever attention is asked for: the T5 of 5.17.0 does not say
# that it takes attention functions, and keeps its eager one; that of 5.24.0 does.
ITS_OWN = {("t5", "5.17.0")}
NAMED = os.environ.get("NUMBA_FLASH_ARCHITECTURES", "").split()


def chosen():
    if NAMED == ["all"]:
        return list(architectures.architectures())
    return NAMED or [name for name in SAMPLE if name in architectures.architectures()]


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("model_type", chosen())
def test_every_check_equals_eager_attention_or_is_refused(model_type):
    checks = architectures.sweep(model_type)
    if checks is None:
        pytest.skip(f"{model_type} takes no attention function")
    assert not {check: words for check, (outcome, words) in checks.items() if outcome == "wrong"}
    if (model_type, transformers.__version__) in ITS_OWN:
        assert {words for _, words in checks.values()} == {"the attention function was not called"}
    elif not NAMED:
        assert {outcome for outcome, _ in checks.values()} & {"equal", "refused"}, checks


@pytest.mark.filterwarnings("ignore:.*")
def test_the_sweep_finds_a_future_that_leaks(monkeypatch):
    """As it did where no mask was given for a causal one, and the module's own word was taken."""
    monkeypatch.setitem(
        architectures.transformers.AttentionMaskInterface._global_mapping, architectures.OURS, lambda **unused: None
    )
    outcome, words = architectures.sweep("bigbird_pegasus", ("forward",))["forward"]
    assert outcome == "wrong", words


@pytest.mark.filterwarnings("ignore:.*")
def test_the_sweep_finds_padding_that_is_seen(monkeypatch):
    real = architectures.bridge.visible
    monkeypatch.setitem(
        architectures.transformers.AttentionMaskInterface._global_mapping,
        architectures.OURS,
        lambda **given: real(**dict(given, attention_mask=None)),
    )
    found = architectures.sweep("llama", ("forward", "left"))
    assert found["forward"][0] == "equal" and found["left"][0] == "wrong"
