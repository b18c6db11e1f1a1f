"""A pipeline of diffusers on numba_flash: two lines. The model is tiny and random, so that this runs anywhere."""

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

import numba_flash.compat.diffusers

torch.manual_seed(0)
sizes = dict(in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2)
pipeline = FluxPipeline(
    transformer=FluxTransformer2DModel(
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), **sizes
    ),
    vae=AutoencoderKL(block_out_channels=(4,), latent_channels=1, norm_num_groups=1, shift_factor=0.0),
    scheduler=FlowMatchEulerDiscreteScheduler(),
    **dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")),
)
pipeline.set_progress_bar_config(disable=True)
prompt = dict(prompt_embeds=torch.randn(1, 8, 32), pooled_prompt_embeds=torch.randn(1, 32))


def image():
    generator = torch.Generator().manual_seed(1)
    options = dict(height=16, width=16, num_inference_steps=2, guidance_scale=1.0, output_type="pt")
    return pipeline(**prompt, **options, generator=generator).images


expected = image()
numba_flash.compat.diffusers.register()
pipeline.transformer.set_attention_backend("numba")
found = image()
print("largest difference from torch's attention:", float((found - expected).abs().max()))
assert torch.allclose(found, expected, atol=1e-4)
