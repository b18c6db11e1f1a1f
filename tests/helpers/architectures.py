"""Tiny models of every Transformers architecture that takes an attention function, compared with eager attention.

Configurations are made by rules on the names of their fields, weights are random and large enough for attention to
matter, everything is float64. Eager attention takes its softmax in float32; here it takes it in float64 too, so that
what is left is rounding. `sweep(architecture)` gives {check: (outcome, words)}.
"""

import contextlib
import inspect
import signal

import torch
import transformers
from transformers.models.auto import modeling_auto

from numba_flash.compat import transformers as bridge

CHECKS = ("forward", "left", "right", "gradients", "dynamic", "static")
OUTCOMES = ("equal", "refused", "contract", "not comparable", "wrong")
BATCH, LENGTH, TOKENS = 2, 12, 99
# The layers around attention round to float32 in many models. Each of a few dozen such roundings may go either way.
TOLERANCE = 128 * 2.0**-24
# The class that is taken of an architecture: the first that there is.
HEADS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "CTC", "MASKED_LM")


def architectures():
    """{model_type: name of the class}, for those whose code calls an attention function by its registered name."""
    found = {}
    for head in HEADS:
        for model_type, name in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES").items():
            found.setdefault(model_type, name)
    for model_type, names in modeling_auto.MODEL_MAPPING_NAMES.items():
        found.setdefault(model_type, names if isinstance(names, str) else names[0])
    return {model_type: found[model_type] for model_type in sorted(found)}


def model_class(model_type):
    """The class, or None where its code takes no attention function."""
    name = architectures()[model_type]
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):  # needs what is not installed
        return None
    code = inspect.getsource(inspect.getmodule(kind))
    supports = kind._supports_sdpa or kind._supports_attention_backend
    return kind if supports or "ALL_ATTENTION_FUNCTIONS" in code else None


# Fields by what their names end with, the first rule that fits: how large they become.
HEADS_Q, HEADS_KV, WIDTH = 4, 2, 32
RULES = (
    (("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_query_groups", "multi_query_group_num"), HEADS_KV),
    (("attention_heads", "num_heads", "n_head", "n_heads", "nhead", "num_attention_head"), HEADS_Q),
    (("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth"), 2),
    (("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    (("num_experts_per_tok", "moe_topk", "num_experts_per_token"), 2),
    (("n_group", "topk_group", "n_shared_experts", "moe_layer_freq"), 1),
    (
        ("head_dim", "kv_channels", "d_kv", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attention_head_dim"),
        8,
    ),
    (("kv_lora_rank", "q_lora_rank"), 16),
    (("hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "projection_dim", "hidden_dim", "dim"), WIDTH),
    (("intermediate_size", "ffn_dim", "d_ff", "dim_feedforward", "n_inner", "ffn_hidden_size", "mlp_dim"), 2 * WIDTH),
    (("vocab_size",), TOKENS),
    (("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "n_ctx"), 64),
    (("sliding_window", "attention_chunk_size", "local_attention"), 4),
    (("image_size",), 32),
    (("patch_size",), 8),
    (("conv_dim",), WIDTH),
)


def smaller(name, value):
    """A field's small value, or None where no rule is for it."""
    if isinstance(value, bool) or not isinstance(value, (int, list, tuple)):  # noqa: UP038
        return 0.0 if isinstance(value, float) and ("dropout" in name or name.endswith("drop")) else None
    if name == "layer_types" or not value:
        return None
    for endings, size in RULES:
        if name.endswith(endings):
            if isinstance(value, int):
                return min(size, value)
            whole = all(isinstance(x, int) and not isinstance(x, bool) for x in value)
            return type(value)(min(size, x) for x in value) if whole else None
    if name.endswith("_token_id") and isinstance(value, int) and value >= TOKENS:
        return 3 + sum(map(ord, name)) % 80
    return None


def tiny(kind):
    """A configuration of class `kind`, and of its parts, as small as the rules make it."""
    usual = kind()
    given = {name: smaller(name, value) for name, value in usual.to_dict().items()}
    given = {name: value for name, value in given.items() if value is not None}
    if getattr(usual, "num_experts_per_tok", 0) is None:
        given["num_experts_per_tok"] = 2
    for name in kind.sub_configs:
        part = getattr(usual, name, None)
        if part is not None:
            given[name] = tiny(type(part)).to_dict()
    if "kv_lora_rank" in given:  # each head has keys of its own
        given |= {name: HEADS_Q for name in given if name == "num_key_value_heads"}
    rope = getattr(usual, "rope_parameters", None)
    if rope and "rope_type" in rope:  # how much of it goes to time, height and width
        half = int(WIDTH // HEADS_Q * rope.get("partial_rotary_factor", 1)) // 2
        given["rope_parameters"] = rope | dict(mrope_section=[half - 2 * (half // 3), half // 3, half // 3])
    layers = given.get("num_hidden_layers")
    types = getattr(usual, "layer_types", None)
    if layers and types:
        both = list(dict.fromkeys(types))
        given["layer_types"] = [both[i % len(both)] for i in range(layers)]
    return kind(**given)


def build(kind):
    config = tiny(kind.config_class)
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="eager", experts_implementation="eager").double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:  # as large as keeps what goes through it as large as it was
                weight.normal_(0, (weight[0].numel()) ** -0.5)
    return model


def inputs(model, images):
    """The arguments of forward that the class needs, tokens and what else it calls its main input."""
    generator = torch.Generator().manual_seed(1)
    names = inspect.signature(model.forward).parameters
    tokens = torch.randint(3, 80, (BATCH, LENGTH), generator=generator)
    main, config = model.main_input_name, model.config
    text = getattr(config, "text_config", None)
    if text is not None and not model.can_generate():  # the result is that of one token, which must not be padding
        eos = getattr(text, "eos_token_id", None)
        tokens[:, LENGTH // 2] = 90 if eos in (None, 2) else eos
    if main not in names:  # of a part that says nothing of its own
        main = next((name for name in ("pixel_values", "input_features", "input_values") if name in names), main)
    given = {}
    if "input_ids" in names and main != "pixel_values":
        given["input_ids"] = tokens
    if main == "pixel_values" or (images and "pixel_values" in names):
        vision = getattr(config, "vision_config", None) or config
        size = getattr(vision, "image_size", 32)
        height, width = (size, size) if isinstance(size, int) else size[:2]
        shape = (BATCH, getattr(vision, "num_channels", 3), height, width)
        given["pixel_values"] = torch.randn(shape, generator=generator, dtype=torch.float64)
    if main == "input_features":
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "encoder_config", config).num_mel_bins
        frames = 2 * getattr(config, "max_source_positions", 64)
        wide = (BATCH, bins, frames) if "whisper" in config.model_type else (BATCH, frames, bins)
        given[main] = torch.randn(wide, generator=generator, dtype=torch.float64)
    elif main == "input_values":
        given[main] = torch.randn((BATCH, 4000), generator=generator, dtype=torch.float64)
    if not given:
        raise NotImplementedError(f"no inputs are made for {main}")
    if config.is_encoder_decoder and "decoder_input_ids" in names:
        given["decoder_input_ids"] = tokens.flip(1)
    return given


def mask_of(given, side):
    """Padding for the first of the inputs, and which entries of the result are compared."""
    first = next(iter(given.values()))
    length = first.shape[1]
    mask = torch.ones(BATCH, length, dtype=torch.long)
    amount = max(1, length // 4)
    mask[0, slice(0, amount) if side == "left" else slice(length - amount, None)] = 0
    return mask


def first_result(output):
    for name in ("logits", "last_hidden_state", "logits_per_image", "text_embeds", "image_embeds", "pooler_output"):
        if getattr(output, name, None) is not None:
            return output[name]
    return next(x for x in output.to_tuple() if isinstance(x, torch.Tensor) and x.is_floating_point())


@contextlib.contextmanager
def softmax_in_float64():
    plain = torch.nn.functional.softmax

    def softmax(x, dim=None, _stacklevel=3, dtype=None):
        return plain(x, dim=dim, dtype=None if x.dtype == torch.float64 else dtype)

    torch.nn.functional.softmax = softmax
    try:
        yield
    finally:
        torch.nn.functional.softmax = plain


class Counted:
    """Our attention, and how often it was called."""

    calls = 0

    @classmethod
    def attention(cls, *arguments, **others):
        cls.calls += 1
        return bridge.attention(*arguments, **others)


OURS = "numba_attention_counted"
transformers.AttentionInterface.register(OURS, Counted.attention)
transformers.AttentionMaskInterface.register(OURS, bridge.visible)


def run(model, how, check, images=False):
    """The tensors of a check with one attention."""
    model.set_attn_implementation(how)
    torch.manual_seed(2)
    given = inputs(model, images)
    if check in ("dynamic", "static"):
        with torch.no_grad():
            return [model.generate(
                **given, max_new_tokens=4, do_sample=False, cache_implementation=check, eos_token_id=None,
                pad_token_id=0, bos_token_id=1, decoder_start_token_id=1, disable_compile=True,
            )]  # fmt: skip
    mask = None
    if check in ("left", "right"):
        given["attention_mask"] = mask = mask_of(given, check)
    with torch.set_grad_enabled(check == "gradients"):
        result = first_result(model(**given))
    if check == "gradients":
        model.zero_grad()
        weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        (result * weights).mean().backward()
        return [x.grad.clone() for x in model.parameters() if x.grad is not None]
    if mask is None or "decoder_input_ids" in given or result.ndim < 3:
        return [result]
    if result.shape[:2] == mask.shape:
        return [result[mask.bool()]]
    # Fewer positions than the input has: which of the first entry are padding is the model's affair, at most a half.
    # A query there that sees no key gives 0, where eager attention gives the mean of all values.
    half = result.shape[1] // 2
    return [result[0, half:] if check == "left" else result[0, :half], result[1:]]


def applies(model, check):
    names = inspect.signature(model.forward).parameters
    if check in ("left", "right"):
        return "attention_mask" in names and model.main_input_name != "pixel_values"
    if check in ("dynamic", "static"):
        return model.can_generate() and "input_ids" in names
    return True


def compare(model, check):
    """(outcome, words) of one check."""
    for images in (False, True):  # some need both
        try:
            golden = run(model, "eager", check, images)
            break
        except TimeoutError:
            raise
        except Exception as error:
            reason = f"eager: {type(error).__name__}: {first_line(error)}"
    else:
        return "not comparable", reason
    if not all(torch.isfinite(x).all() for x in golden):
        return "not comparable", "eager: NaN or Inf"
    again = run(model, "eager", check, images)
    if not same(golden, again)[0]:
        return "not comparable", "eager: another result each time"
    Counted.calls = 0
    try:
        found = run(model, OURS, check, images)
    except NotImplementedError as error:
        return "refused", first_line(error)
    except TimeoutError:
        raise
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {first_line(error)}"
    if not Counted.calls:
        return "not comparable", "the attention function was not called"
    equal, words = same(golden, found)
    if equal:
        return "equal", words
    # Without a mask a causal module is causal for us and for torch's SDPA; eager attention sees everything then, where
    # a model makes none (Moshi of Transformers 5.17).
    with contextlib.suppress(Exception):
        if same(run(model, "sdpa", check, images), found)[0]:
            return "contract", f"eager differs from SDPA and from us: {words}"
    return "wrong", words


def same(golden, found):
    if len(golden) != len(found) or any(a.shape != b.shape for a, b in zip(golden, found, strict=True)):
        return False, "other shapes"
    scale = max(float(x.abs().max()) for x in golden if x.numel())
    error = max(float((a - b).abs().max()) for a, b in zip(golden, found, strict=True) if a.numel())
    return error <= TOLERANCE * scale, f"{error:.1e} of {scale:.1e}"


def first_line(error):
    return (str(error).strip().splitlines() or [""])[0][:160]


@contextlib.contextmanager
def limit(seconds):
    """TimeoutError after so many seconds."""

    def stop(*unused):
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def sweep(model_type, checks=CHECKS, seconds=60):
    """{check: (outcome, words)}; one entry "made" where the model cannot be made, None where it takes no attention."""
    try:
        with limit(seconds), softmax_in_float64():
            kind = model_class(model_type)
            if kind is None:
                return None
            try:
                model = build(kind)
            except TimeoutError:
                raise
            except Exception as error:
                return {"made": ("not comparable", f"{type(error).__name__}: {first_line(error)}")}
            return {check: compare(model, check) for check in checks if applies(model, check)}
    except TimeoutError as error:
        return {"made": ("not comparable", str(error))}
    except ImportError as error:
        return {"made": ("not comparable", first_line(error))}
