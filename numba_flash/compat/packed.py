"""Padding-free training: the sequences of a batch follow each other in its rows, and attention_varlen takes them.

Transformers tells in three ways where sequences begin: by the arguments of its flash attention (cu_seq_lens_q and so
on), by a mask that keeps them apart, and by positions that restart.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import varlen
from .arguments import renamed

NAMES = dict(
    cu_seqlens_q="cu_seq_lens_q",
    cu_seqlens_k="cu_seq_lens_k",
)
NAMES |= dict(max_seqlen_q="max_length_q", max_seqlen_k="max_length_k")
NO_BIAS = "position_bias is not taken for packed sequences, which have no matrix of scores: pad them instead"


def no_matrix() -> Any:
    raise NotImplementedError(NO_BIAS)


def attention(q: Tensor, k: Tensor, v: Tensor, *, bias: Any = None, return_lse: bool = False, **options: Any) -> Any:
    """Calls attention_varlen, and returns o and lse in the shapes of api.attention with layout="bshd".

    options: those of attention_varlen. Batch entries are flattened into rows; torch copies where strides require it.
    """
    if bias is not None:
        no_matrix()
    try:
        rows = (x.flatten(0, 1) for x in (q, k, v))
        found = varlen.attention_varlen(*rows, return_lse=return_lse, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise renamed(error, NAMES)  # noqa: B904 - the same error
    o, lse = found if return_lse else (found, None)
    o = o.unflatten(0, q.shape[:2])
    return o if lse is None else (o, lse.unflatten(1, q.shape[:2]).transpose(0, 1))


class Sequences(NamedTuple):
    """The bounds of sequences in tensors of fixed shape, so that a traced program need not read them."""

    ends: Tensor  # int32 (rows + 1,): cu_seqlens, and behind it the number of rows again and again
    counts: Tensor  # on the host: the number of sequences, and the longest length

    @staticmethod
    def of(starts: Tensor) -> "Sequences":
        """The Sequences that start where starts, bool (batch, rows), is True."""
        rows = starts.numel()
        found = torch.where(starts.flatten(), torch.arange(rows, device=starts.device), rows).sort().values
        ends = torch.cat([found, found.new_full((1,), rows)]).int()
        return Sequences(ends, torch.stack([starts.sum(), ends.diff().max()]).to("cpu"))

    def table(self) -> dict[str, Any]:
        """The arguments of attention_varlen, which the host reads."""
        count, longest = self.counts.tolist()
        return dict(cu_seqlens_q=self.ends[: count + 1], max_seqlen_q=longest, max_seqlen_k=longest)


def of_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """`table` from flash attention's arguments. Drops a maximum that is a tensor: it is only a bound."""
    most = {name: given.get(NAMES[name]) for name in ("max_seqlen_q", "max_seqlen_k")}
    most = {name: None if isinstance(x, Tensor) else x for name, x in most.items()}
    return dict(cu_seqlens_q=given["cu_seq_lens_q"], cu_seqlens_k=given.get("cu_seq_lens_k"), **most)


def starts_of_mask(mask_function: Any, batch: int, rows: int, device: Any) -> Tensor:
    """Where sequences start, from a mask that keeps them apart: at rows that do not see the key before them."""
    b, row = torch.arange(batch, device=device)[:, None], torch.arange(rows, device=device)
    before = mask_function(b, torch.zeros_like(b), row[None], (row[None] - 1).clamp(min=0))
    return ~before.expand(batch, rows) | (row == 0)


def starts_of_positions(positions: Tensor) -> Tensor:
    """Where sequences start, from position_ids (batch, rows): where the lowest one is, as in Transformers."""
    first = torch.arange(positions.shape[1], device=positions.device) == 0
    return (positions == positions.min()) | first
