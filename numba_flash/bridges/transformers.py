"""numba_flash for the models of Hugging Face's Transformers.

    from numba_flash.bridges import transformers

    transformers.register()
    model.set_attn_implementation("numba_attention")  # or from_pretrained(..., attn_implementation="numba_attention")

Two functions are registered under that name: what attends, and what describes which keys are seen. Transformers drops
padding in silence where the second is missing, and takes a name with "flash" in it for a kernel to be downloaded.
"""

import inspect
from typing import Any, NamedTuple

import torch
import transformers

from .. import api
from .torch import autocast

try:
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError
except ImportError:
    raise NotImplementedError(
        f"Transformers {transformers.__version__} has no masks by the functions that this needs; 5.17 has them"
    ) from None

NAME = "numba_attention"


class Visible(NamedTuple):
    """Which keys a query sees, the last query standing at the last key."""

    left: int | None  # how many keys before its position, as in window= of attention()
    right: int | None
    lengths: torch.Tensor | None = None  # int32 (batch,): the keys that are not padding come first
    padding: torch.Tensor | None = None  # bool (batch, seqlen_k), where they do not: False = padding
    ndim: int = 0  # this and the next: generate() makes masks ahead, and asks this of them

    def contiguous(self) -> "Visible":
        return self

    def __getattr__(self, name: str) -> Any:
        # Models whose decoder reads the mask say so, in the newest Transformers, and get a tensor.
        raise AttributeError(
            f"the attention mask's {name!r} was asked for: this model reads its mask itself, but was given "
            "numba_flash's description of one. Take a newer Transformers, in which it asks for a whole mask, or "
            "another attention"
        )


def register(name: str = NAME) -> str:
    """Make numba_flash known to Transformers under `name`, which is returned.

    Forward and backward, on the CPU and on GPUs; grouped heads, sliding windows, softcap, additive masks, position
    bias, padding on either side, and decoding with a cache. What is not built raises NotImplementedError and is
    named: dropout, attention sinks, paged caches, keys that a model chooses by their indices, and attention weights
    as a result. In a model that torch.compile traces as a whole, a window becomes a mask of seqlen_q x seqlen_k.
    """
    if "flash" in name:
        raise ValueError(f'name must not contain "flash", by which Transformers knows its own kernels, but is {name!r}')
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, visible)
    return name


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query (batch, heads, seqlen_q, head_dim), key and value with heads_kv -> o (batch, seqlen_q, heads, head_dim_v).

    attention_mask: what `visible` made; None = everything, or everything before if the module is causal; or a
    tensor (batch, 1 or heads, seqlen_q, seqlen_k) that says all there is to say, bool or added to the scores.
    Under autocast tensors are cast as for torch's own attention.
    """
    _refuse(attention_mask, key.shape[2], dropout, others)
    options: dict[str, Any] = dict(bias=position_bias)
    if isinstance(attention_mask, Visible):
        left, right, lengths, padding, _ = attention_mask
        options |= dict(window=(left, right), seqlens_k=lengths, q_offset=key.shape[2] - query.shape[2])
        options |= dict(mask=None if padding is None else padding[:, None, None])
    elif attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        options |= dict(causal=bool(causal) and query.shape[2] > 1)
    elif attention_mask.dtype == torch.bool:
        options |= dict(mask=attention_mask)
    else:
        options |= dict(bias=attention_mask if position_bias is None else attention_mask + position_bias)
    q, k, v = (autocast(x).transpose(1, 2) for x in (query, key, value))  # as they lie in memory
    return api.attention(q, k, v, scale=scaling, softcap=softcap, layout="bshd", **options), None


def _refuse(attention_mask: Any, seqlen_k: int, dropout: float, others: dict[str, Any]) -> None:
    asked = dict(dropout=dropout != 0.0, output_attentions=bool(others.get("output_attentions")))
    # Attention sinks under both their names, a paged cache, and the keys that a sparse attention has chosen.
    chosen = ("s_aux", "sinks", "cache", "indices", "block_indices")
    asked |= {name: others.get(name) is not None for name in chosen}
    names = [name for name, wanted in asked.items() if wanted]
    if names:
        raise NotImplementedError(f"{', '.join(names)}: not implemented yet; leave out, or take another attention")
    if attention_mask is None and (others.get("sliding_window") or seqlen_k) < seqlen_k:
        raise NotImplementedError(
            "sliding_window came without a mask that says on which side it lies; masks are made where the model is "
            f"given a name under which {__name__}.register() has registered both functions"
        )
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim != 4:
        raise NotImplementedError(
            f"attention_mask must have shape (batch, heads or 1, seqlen_q, seqlen_k), not {tuple(attention_mask.shape)}"
        )


def visible(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: Any = None,
    local_size: int | None = None,
    **others: Any,
) -> Any:
    """What Transformers asks for once in a model's forward: which keys are seen, without a matrix wherever that can be.

    Returns None for all keys or all before; Visible for windows and padding; and for every other mask_function, for
    queries that do not stand at the end of the keys, and where allow_is_causal_skip is refused, the whole mask in
    bool, as for torch's attention.
    Padding on the right becomes lengths, which every kernel takes; to see that, one number is read from the device.
    """
    if isinstance(attention_mask, Visible):  # made ahead
        return attention_mask
    sides = _sides(mask_function, local_size)
    at_the_end = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    # Some models read the mask themselves, and say that there must be one.
    read = sides == (None, 0) and not others.get("allow_is_causal_skip", True)
    if sides is None or read or not (at_the_end or sides == (None, None)):
        others |= dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size, **others
        )
    whole = None if local_size is None or local_size >= kv_length else Visible(*sides)
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is None:
        return whole
    padding = padding[:, kv_offset : kv_offset + kv_length]
    if torch.compiler.is_compiling():  # what is in it is not known
        return Visible(*sides, padding=padding)
    lengths = padding.sum(-1, dtype=torch.int32)
    on_the_right = padding == (torch.arange(kv_length, device=padding.device) < lengths[:, None])
    nothing, right = torch.stack([padding.all(), on_the_right.all()]).tolist()
    if nothing:
        return whole
    return Visible(*sides, lengths=lengths) if right else Visible(*sides, padding=padding)


def _sides(mask_function: Any, local_size: int | None) -> tuple[int | None, int | None] | None:
    """(left, right) of the window that mask_function is, or None where it is more than that."""
    made: list[tuple[Any, tuple[int | None, int | None]]] = [
        (masking_utils.bidirectional_mask_function, (None, None)),
        (masking_utils.causal_mask_function, (None, 0)),
    ]
    if local_size is not None:
        made = [
            (masking_utils.sliding_window_bidirectional_mask_function(local_size), (local_size, local_size)),
            (masking_utils.sliding_window_causal_mask_function(local_size), (local_size - 1, 0)),
        ]
    return next((sides for function, sides in made if _same(function, mask_function)), None)


def _same(one: Any, other: Any) -> bool:
    """Whether two functions, or what they close over, are made by the same code from the same numbers."""
    if one is other or torch.compiler.is_compiling():  # which does not let one look into a closure
        return one is other
    if inspect.isfunction(one) and inspect.isfunction(other):
        cells = [tuple(cell.cell_contents for cell in function.__closure__ or ()) for function in (one, other)]
        return one.__code__ is other.__code__ and _same(*cells)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, int) and isinstance(other, int) and one == other
