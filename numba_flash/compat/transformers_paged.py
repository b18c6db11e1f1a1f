"""numba_flash for Transformers' continuous batching: `model.generate_batch`, with its paged cache.

    from numba_flash.compat import transformers_paged

    model.set_attn_implementation(transformers_paged.register())
    model.generate_batch(prompts, ...)

Continuous batching takes attentions whose names contain "flash", and asks for a number 2 or 3 behind it before it lets
them read the pages of its cache. It takes such a name for that of flash-attn, or of a kernel to download, unless its
loader is told otherwise: that is what `register` does.
"""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, modeling_flash_attention_utils

from ..api import kvcache
from . import flash_attn, packed, transformers
from .flash_attn import bert_padding
from .torch_settings import autocast

NAME = "numba_flash_attention_2"


def register(name: str = NAME) -> str:
    """Make numba_flash known to Transformers under `name`, also for continuous batching. Returns the name.

    Outside of continuous batching it is what `transformers.register` registers. The first tokens of a request run as
    packed sequences, over keys that Transformers gathers; steps of one token each append to the pages and read them in
    place, where Transformers offers its block table (on CUDA devices, in models without sliding layers).

    Raises ValueError for a name by which continuous batching would not take it, and NotImplementedError where
    Transformers has no such loader; 5.24 has it.
    """
    if not any(version in name.partition("flash")[2] for version in "23"):
        raise ValueError(f'name must contain "flash" and behind it 2 or 3, as {NAME!r} does, but is {name!r}')
    load = getattr(modeling_flash_attention_utils, "_lazy_imports", None)
    if load is None:
        raise NotImplementedError("this release of Transformers loads its flash attention otherwise; 5.24 is known")
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, transformers.visible)
    if not hasattr(load, "ours"):
        modeling_flash_attention_utils._lazy_imports = load = _knowing_ours(load)
    load.ours.add(name)
    return name


def _knowing_ours(load: Any) -> Any:
    """Transformers' loader, which finds our functions under our names and everything else as before."""

    def lazy_imports(implementation: str | None, *arguments: Any, **named: Any) -> Any:
        if implementation not in lazy_imports.ours:  # type: ignore[attr-defined]
            return load(implementation, *arguments, **named)
        own = (getattr(flash_attn, f"flash_attn_{name}") for name in ("func", "varlen_func", "with_kvcache"))
        return (*own, bert_padding.pad_input, bert_padding.unpad_input)

    lazy_imports.ours = set()  # type: ignore[attr-defined]
    return lazy_imports


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query (1, heads, tokens, head_dim) of all requests -> o (1, tokens, heads, head_dim_v); `transformers.attention`
    for calls without the cache of continuous batching.

    key, value (1, heads_kv, keys, head_dim): with a block_table those of the new tokens, one for each request, which
    are appended to k_cache and v_cache (pages, page, heads_kv, head_dim); else all keys, as cu_seq_lens_k divides them.
    A request's last query stands at its last key. cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k,
    sliding_window, softcap, s_aux: as for Transformers' flash attention.
    """
    if others.get("write_index") is None:  # where continuous batching has written, or will write, the new keys
        return transformers.attention(module, query, key, value, attention_mask, dropout, scaling, **others)
    if attention_mask is not None or dropout or others.get("output_attentions"):
        raise NotImplementedError(
            "attention_mask, dropout and output_attentions are not taken with the cache of continuous batching"
        )
    size = others.get("sliding_window")
    window = (None if size is None else size - 1, 0)
    options: dict[str, Any] = dict(
        scale=scaling, window=window, softcap=others.get("softcap"), sinks=others.get("s_aux")
    )
    q, k, v = (autocast(x).transpose(1, 2) for x in (query, key, value))
    if others.get("block_table") is not None:
        return _one_token_each(q, k, v, others, options), None
    return packed.attention(q, k, v, **options, **packed.of_arguments(others)), None


@torch.compiler.disable
def _one_token_each(q: Any, k: Any, v: Any, given: dict[str, Any], options: dict[str, Any]) -> torch.Tensor:
    """Requests whose only new token is one query: (1, requests, heads, head_dim) -> the same of o.

    Rows of padding have a length of 0 with their token, and so -1 without it.
    """
    rows = [x.transpose(0, 1) for x in (q, k, v)]
    count = q.shape[1]
    o = kvcache.attention_kvcache(
        rows[0],
        given["k_cache"],
        given["v_cache"],
        k_new=rows[1],
        v_new=rows[2],
        layout="bshd",
        seqlens_k=given["cu_seq_lens_k"][: count + 1].diff() - 1,
        page_table=given["block_table"][:count],
        **options,
    )
    return o.transpose(0, 1)
