"""flash-attn's functions between padded and packed sequences."""

from typing import Any

import torch
from torch import Tensor


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """unpad_input of flash-attn: the rows of padded sequences that a mask keeps, one behind the other.

    hidden_states: (batch, seqlen, ...). attention_mask: (batch, seqlen), True or 1 = a token. unused_mask: likewise, of
    rows that are kept too, but are no tokens.

    -> rows (total, ...), their places in batch * seqlen, cu_seqlens (batch + 1,), the longest length, and the tokens of
    each sequence (batch,). The longest length is a number, for which the host waits for a GPU.
    """
    if attention_mask.shape != hidden_states.shape[:2]:
        given = tuple(attention_mask.shape)
        raise ValueError(f"attention_mask must have shape {tuple(hidden_states.shape[:2])}, not {given}")
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths, used = kept.sum(-1, dtype=torch.int32), attention_mask.sum(-1, dtype=torch.int32)
    indices = torch.nonzero(kept.flatten()).flatten()
    cu_seqlens = torch.nn.functional.pad(torch.cumsum(lengths, 0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Any:
    """pad_input of flash-attn, the reverse of unpad_input: (batch, seqlen, ...), with 0 where no row was kept.

    hidden_states: (total, ...). indices: the places that unpad_input returned."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def index_first_axis(hidden_states: Tensor, indices: Tensor) -> Tensor:
    """index_first_axis of flash-attn: the rows (total, ...) with these places. indices: int64."""
    return hidden_states[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """index_put_first_axis of flash-attn: values (total, ...) at these places of first_axis_dim rows, 0 elsewhere."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)
