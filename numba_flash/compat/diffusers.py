"""numba_flash as an attention backend of diffusers."""

from typing import Any

from torch import Tensor

from .torch import scaled_dot_product_attention

TAKEN = {"register", "_backends", "_supported_arg_names"}  # attributes of diffusers' registry that this module uses


def register(name: str = "numba") -> str:
    """Registers numba_flash as an attention backend of diffusers, for set_attention_backend(name). Returns the name.

    >>> numba_flash.compat.diffusers.register()
    >>> pipeline.transformer.set_attention_backend("numba")

    Forward and backward, on CPUs and GPUs, in every dtype, with bool and additive masks. diffusers' own names are an
    enum, to which this adds one; calling it again changes nothing. It takes diffusers 0.35 and newer.

    Raises ImportError where diffusers is missing or has no such registry, and ValueError for a name that diffusers has
    already. With context parallelism of diffusers the call raises NotImplementedError.
    """
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    except ImportError as error:
        raise ImportError("register() needs diffusers 0.35 or newer: pip install diffusers") from error
    if missing := [taken for taken in sorted(TAKEN) if not hasattr(_AttentionBackendRegistry, taken)]:
        raise ImportError(f"the registry of attention backends in this diffusers has no {', '.join(missing)}")
    names: Any = AttentionBackendName
    if name in names._value2member_map_:
        if _AttentionBackendRegistry._backends.get(names(name)) is not _attention:
            raise ValueError(f"name must be one that diffusers does not have yet, not {name!r}")
        return name
    member = str.__new__(names, name)
    member._name_, member._value_ = name.upper(), name
    names._member_map_[member._name_] = names._value2member_map_[name] = member
    names._member_names_.append(member._name_)
    _AttentionBackendRegistry.register(member)(_attention)
    return name


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """query: (batch, seqlen_q, heads, head_dim); key and value likewise. attn_mask: as torch takes it, or (batch,
    seqlen_k)."""
    if _parallel_config is not None:
        raise NotImplementedError("context parallelism of diffusers is not implemented for numba_flash")
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None, :]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    o = scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return o.transpose(1, 2)
