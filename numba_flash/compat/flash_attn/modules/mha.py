"""Multi-head attention as modules of torch, with the arguments and the weights' names of flash_attn.modules.mha."""

from typing import Any

import torch
from torch import Tensor, nn

from ....api import forward as api
from ...torch_settings import drawn_seed
from ..flash_attn_interface import (
    UNBOUNDED,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from ..layers.rotary import RotaryEmbedding


class FlashSelfAttention(nn.Module):
    """flash_attn.modules.mha.FlashSelfAttention: attention within sequences, for every dtype and device.

    Arguments as in `flash_attn_func`; attention_dropout counts while the module trains."""

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: tuple[int, int] = UNBOUNDED,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.causal, self.softmax_scale, self.window_size = causal, softmax_scale, window_size
        self.deterministic = deterministic
        self.drop = nn.Dropout(attention_dropout)  # for its p
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def options(self, causal: bool | None) -> dict[str, Any]:
        """Arguments of flash_attn_func; causal: in place of the module's."""
        return dict(
            dropout_p=self.drop.p if self.training else 0,
            softmax_scale=self.softmax_scale,
            causal=self.causal if causal is None else causal,
            window_size=self.window_size,
            alibi_slopes=self.alibi_slopes,
            deterministic=self.deterministic,
        )

    def forward(
        self, qkv: Tensor, causal: bool | None = None, cu_seqlens: Tensor | None = None, max_seqlen: Any = None
    ) -> Tensor:
        """-> (batch, seqlen, heads, head_dim) for qkv (batch, seqlen, 3, heads, head_dim); with cu_seqlens (batch + 1,)
        and max_seqlen (total, heads, head_dim) for (total, 3, heads, head_dim)."""
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **self.options(causal))
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **self.options(causal))


class FlashCrossAttention(FlashSelfAttention):
    """flash_attn.modules.mha.FlashCrossAttention: queries of one sequence, keys and values of another."""

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Any = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: Any = None,
    ) -> Tensor:
        """-> (batch, seqlen_q, heads, head_dim) for q of that shape and kv (batch, seqlen_k, 2, heads_kv, head_dim);
        with the four last arguments, both packed, (total_q, heads, head_dim)."""
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **self.options(causal))
        spans = cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k
        return flash_attn_varlen_kvpacked_func(q, kv, *spans, **self.options(causal))


class SelfAttention(nn.Module):
    """flash_attn.modules.mha.SelfAttention: self-attention of padded batches, with a mask of the keys."""

    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.causal, self.softmax_scale, self.drop = causal, softmax_scale, nn.Dropout(attention_dropout)

    def forward(self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """-> (batch, seqlen, heads, head_dim) for qkv (batch, seqlen, 3, heads, head_dim).

        key_padding_mask: bool (batch, seqlen), True = a key."""
        q, k, v = qkv.unbind(2)
        return self.attend(q, k, v, causal, key_padding_mask)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool | None = None,
        key_padding_mask: Tensor | None = None,
        q_offset: Any = 0,
    ) -> Tensor:
        """Attention of q to k and v. key_padding_mask: as in forward; q_offset: query 0's position, with causal."""
        options: dict[str, Any] = dict(causal=self.causal if causal is None else causal, scale=self.softmax_scale)
        if key_padding_mask is not None:
            options["mask"] = key_padding_mask[:, None, None, :]
        if options["causal"]:
            options["q_offset"] = q_offset
        if self.training and self.drop.p:
            options |= dict(dropout_p=self.drop.p, seed=drawn_seed())
        return api.attention(q, k, v, layout="bshd", **options)


class CrossAttention(SelfAttention):
    """flash_attn.modules.mha.CrossAttention: cross-attention of padded batches, with a mask of the keys."""

    def forward(  # type: ignore[override]
        self, q: Tensor, kv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """-> (batch, seqlen_q, heads, head_dim). q: likewise; kv: (batch, seqlen_k, 2, heads_kv, head_dim).

        key_padding_mask: bool (batch, seqlen_k), True = a key. With causal the last query stands at the last of its
        batch entry's keys, so padding must be behind them, as there."""
        keys = kv.shape[1] if key_padding_mask is None else key_padding_mask.sum(-1, dtype=torch.int32)
        k, v = kv.unbind(2)
        return self.attend(q, k, v, causal, key_padding_mask, keys - q.shape[1])


class MHA(nn.Module):
    """flash_attn.modules.mha.MHA: projections, rotary embedding, attention and the output's projection.

    Weights have flash-attn's names: Wqkv, or with cross_attn Wq and Wkv, and out_proj. use_flash_attn: use
    FlashSelfAttention, which takes packed sequences and no mask; otherwise SelfAttention, which takes a mask. Both
    compute with `numba_flash.attention`. window_size, use_alibi: with use_flash_attn. With causal and key_padding_mask
    a query sees the keys up to its own; flash-attn shifts them by the padding if num_heads_kv differs from num_heads.

    Raises NotImplementedError for dwconv, checkpointing, inference_params and mixer_subset. fused_bias_fc changes no
    result and does nothing here.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: tuple[int, int] = UNBOUNDED,
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        refuse(dwconv=dwconv, checkpointing=checkpointing)
        heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if num_heads % heads_kv or embed_dim % num_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_heads_kv and divide embed_dim: they are {num_heads}, {heads_kv}, "
                f"{embed_dim}"
            )
        if not use_flash_attn and (use_alibi or tuple(window_size) != UNBOUNDED):
            raise ValueError("use_alibi and window_size need use_flash_attn=True")
        if cross_attn and rotary_emb_dim:
            raise ValueError("rotary_emb_dim must be 0 with cross_attn=True: its keys have other positions")
        self.num_heads, self.num_heads_kv, self.head_dim = num_heads, heads_kv, embed_dim // num_heads
        self.cross_attn, self.causal, self.layer_idx = cross_attn, causal, layer_idx
        self.rotary_emb_dim, self.use_flash_attn, self.return_residual = rotary_emb_dim, use_flash_attn, return_residual
        if rotary_emb_dim:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved, rotary_emb_scale_base, device
            )
        placed: dict[str, Any] = dict(device=device, dtype=dtype)
        width, width_kv = num_heads * self.head_dim, 2 * heads_kv * self.head_dim
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, width, bias=qkv_proj_bias, **placed)
            self.Wkv = nn.Linear(embed_dim, width_kv, bias=qkv_proj_bias, **placed)
        else:
            self.Wqkv = nn.Linear(embed_dim, width + width_kv, bias=qkv_proj_bias, **placed)
        options: dict[str, Any] = dict(causal=causal, softmax_scale=softmax_scale, attention_dropout=dropout)
        if use_flash_attn:
            slopes = torch.tensor(alibi_slopes(num_heads), device=device) if use_alibi else None
            options |= dict(window_size=window_size, alibi_slopes=slopes)
        self.inner_attn = (FlashSelfAttention if use_flash_attn else SelfAttention)(**options)
        self.inner_cross_attn = (FlashCrossAttention if use_flash_attn else CrossAttention)(**options)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **placed)

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Any = None,
        mixer_subset: Any = None,
        inference_params: Any = None,
        **named: Any,
    ) -> Any:
        """-> like x; with return_residual (that, x).

        x: (batch, seqlen, embed_dim), or with cu_seqlens (batch + 1,) and max_seqlen packed, (total, embed_dim). x_kv:
        the source of keys and values, with cross_attn. key_padding_mask: bool (batch, seqlen), True = a key; only
        without use_flash_attn. named: cu_seqlens_k and max_seqlen_k, with cross_attn and packed x_kv.
        """
        refuse(mixer_subset=mixer_subset is not None, inference_params=inference_params is not None)
        if self.use_flash_attn and key_padding_mask is not None:
            raise ValueError("key_padding_mask needs use_flash_attn=False: pack the sequences with unpad_input instead")
        if not self.use_flash_attn and cu_seqlens is not None:
            raise ValueError("cu_seqlens needs use_flash_attn=True")
        options: dict[str, Any] = named
        if cu_seqlens is not None:
            options = options | dict(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        if key_padding_mask is not None:
            options = options | dict(key_padding_mask=key_padding_mask)
        of_heads = self.num_heads, self.head_dim
        if self.cross_attn:
            q = self.Wq(x).unflatten(-1, of_heads)
            kv = self.Wkv(x if x_kv is None else x_kv).unflatten(-1, (2, self.num_heads_kv, self.head_dim))
            found = self.inner_cross_attn(q, kv, **options)
        else:
            found = self._within(self.Wqkv(x).unflatten(-1, (-1, self.head_dim)), options)
        result = self.out_proj(found.flatten(-2))
        return (result, x) if self.return_residual else result

    def _within(self, qkv: Tensor, options: dict[str, Any]) -> Tensor:
        """Attention of x to itself. qkv: (..., num_heads + 2 * num_heads_kv, head_dim)."""
        heads, heads_kv = self.num_heads, self.num_heads_kv
        if self.rotary_emb_dim:
            spans = {name: options[name] for name in ("cu_seqlens", "max_seqlen") if name in options}
            qkv = self.rotary_emb(qkv, num_heads_q=heads, **spans)
        if heads == heads_kv:
            return self.inner_attn(qkv.unflatten(-2, (3, heads)), **options)
        if "key_padding_mask" in options:  # queries and keys of one sequence: the first stands at the first
            return self.inner_attn.attend(*qkv.split([heads, heads_kv, heads_kv], -2), **options)
        if "cu_seqlens" in options:
            options = options | dict(cu_seqlens_k=options["cu_seqlens"], max_seqlen_k=options["max_seqlen"])
        return self.inner_cross_attn(qkv[..., :heads, :], qkv[..., heads:, :].unflatten(-2, (2, heads_kv)), **options)


def refuse(**given: Any) -> None:
    for name, value in given.items():
        if value:
            instead = "; call flash_attn_with_kvcache with your cache" if name == "inference_params" else ""
            raise NotImplementedError(f"{name} is not implemented in MHA{instead}")


def alibi_slopes(heads: int) -> list[float]:
    """The slopes of Press et al. (2022) for any number of heads."""
    whole = 1 << (heads.bit_length() - 1)  # a power of two
    slopes = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
    return slopes + [2 ** (-4 * (2 * head + 1) / whole) for head in range(heads - whole)]
