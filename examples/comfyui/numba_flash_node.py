"""A node for ComfyUI that puts a model's attention on numba_flash.

Copy this file into ComfyUI/custom_nodes, restart, and put "numba_flash attention" between a model and its sampler.
"""

from numba_flash.compat.torch import scaled_dot_product_attention


def attend(
    original, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **more
):
    """ComfyUI calls this in the place of its own function, `original`. attn_precision: sums are in float32 anyway."""
    if not skip_reshape:  # they are (batch, tokens, heads * head_dim)
        q, k, v = (x.unflatten(-1, (-1, q.shape[-1] // heads)).transpose(1, 2) for x in (q, k, v))
    if mask is not None and mask.ndim < 4:  # (tokens, keys) or (batch, tokens, keys)
        mask = mask[None, None] if mask.ndim == 2 else mask[:, None]
    options = {name: more[name] for name in ("scale", "enable_gqa") if name in more}
    o = scaled_dot_product_attention(q, k, v, mask, **options)
    return o if skip_output_reshape else o.transpose(1, 2).flatten(2)


class NumbaFlashAttention:
    CATEGORY = "model_patches"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls):
        return dict(required=dict(model=("MODEL",)))

    def patch(self, model):
        model = model.clone()
        model.model_options["transformer_options"]["optimized_attention_override"] = attend
        return (model,)


NODE_CLASS_MAPPINGS = dict(NumbaFlashAttention=NumbaFlashAttention)
NODE_DISPLAY_NAME_MAPPINGS = dict(NumbaFlashAttention="numba_flash attention")
