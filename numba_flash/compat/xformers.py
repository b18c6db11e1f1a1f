"""The signature of xFormers' memory_efficient_attention, and its mask classes.

xFormers' own masks are taken too; they are recognised by the names of their classes.
"""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..api import forward as api, varlen
from .arguments import described, number, probability, renamed
from .torch_settings import drawn_seed

NAMES = dict(q="query", k="key", v="value", bias="attn_bias", dropout_p="p")


class LowerTriangularMask:
    """Causal; query 0 stands at key 0."""


class LowerTriangularFromBottomRightMask:
    """Causal; the last query stands at the last key."""


@dataclass(frozen=True)
class BlockDiagonalMask:
    """Packed sequences in tensors of batch 1. causal: "" = not causal; "top-left": query 0 of a sequence stands at its
    first key; "bottom-right": its last query stands at its last key."""

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    causal: str = ""

    @staticmethod
    def from_seqlens(q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None) -> "BlockDiagonalMask":
        """The mask of sequences of these lengths. kv_seqlen: None = q_seqlen."""
        of_q = _lengths("q_seqlen", q_seqlen)
        lengths = of_q, of_q if kv_seqlen is None else _lengths("kv_seqlen", kv_seqlen)
        if len(lengths[0]) != len(lengths[1]):
            raise ValueError(f"kv_seqlen must have {len(lengths[0])} lengths, as q_seqlen has, not {len(lengths[1])}")
        return BlockDiagonalMask(*lengths)

    @staticmethod
    def from_tensor_list(tensors: Sequence[Tensor]) -> tuple["BlockDiagonalMask", Tensor]:
        """Concatenates tensors (1, seqlen, ...). -> the mask, and one tensor (1, total, ...)"""
        if any(x.shape[0] != 1 for x in tensors):
            raise NotImplementedError("tensors must have batch 1 each: split those of a larger batch first")
        return BlockDiagonalMask.from_seqlens([x.shape[1] for x in tensors]), torch.cat(list(tensors), 1)

    def make_causal(self) -> "BlockDiagonalMask":
        return replace(self, causal="top-left")

    def make_causal_from_bottomright(self) -> "BlockDiagonalMask":
        return replace(self, causal="bottom-right")

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Splits a tensor (1, total, ...) into the sequences, the reverse of from_tensor_list."""
        if tensor.shape[1] != sum(self.q_lengths):
            raise ValueError(f"tensor must have {sum(self.q_lengths)} rows, not {tensor.shape[1]}")
        return list(tensor.split(list(self.q_lengths), 1))


def _lengths(name: str, given: Sequence[int]) -> tuple[int, ...]:
    try:
        lengths = tuple(operator.index(length) for length in given)
    except TypeError:
        raise TypeError(f"{name} must have whole numbers, not {given!r}") from None
    if min(lengths, default=0) < 0:
        raise ValueError(f"{name} must have numbers from 0, not {given!r}")
    return lengths


CAUSAL = dict(LowerTriangularMask="top-left", LowerTriangularFromBottomRightMask="bottom-right")
CAUSAL_BLOCKS = dict(
    BlockDiagonalMask="", BlockDiagonalCausalMask="top-left", BlockDiagonalCausalFromBottomRightMask="bottom-right"
)  # xFormers' own


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
) -> Tensor:
    """xformers.ops.memory_efficient_attention, on CPUs and GPUs, in every dtype and for any head_dim.

    >>> o = memory_efficient_attention(query, key, value, attn_bias=LowerTriangularMask())

    query: (batch, seqlen_q, heads, head_dim); key: (batch, seqlen_k, heads, head_dim); value: likewise with head_dim_v.
    With 3 dimensions there is one head: (batch, seqlen, head_dim). With 5, heads are (groups, heads of a group), and a
    key that is expanded over the heads of a group is read once.
    attn_bias: a tensor (batch, heads, seqlen_q, seqlen_k), or without heads where the others have none, in float32 or
    query's dtype, broadcastable, with a gradient; LowerTriangularMask, LowerTriangularFromBottomRightMask or
    BlockDiagonalMask of this module or of xFormers.
    p: the probability of dropout; the seed is drawn from torch's generator in host memory. scale: None = head_dim **
    -0.5. op: ignored, as `explain` of `numba_flash` tells which kernel runs.

    Raises NotImplementedError for other masks; TypeError and ValueError as `numba_flash.attention` does, with the names
    of these arguments.
    """
    p = probability("p", p)
    more: dict[str, Any] = dict(dropout_p=p, seed=drawn_seed()) if p else {}
    more["scale"] = None if scale is None else number("scale", scale)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch tensor, not {type(x).__name__}")
    heads = query.shape[2:-1]
    q, k, v = (_with_heads(name, x, query) for name, x in (("query", query), ("key", key), ("value", value)))
    try:
        o = _attend(q, k, v, attn_bias, query.ndim, more)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise renamed(error, NAMES)  # noqa: B904 - the same error
    return o.unflatten(2, heads) if query.ndim == 5 else o[:, :, 0] if query.ndim == 3 else o


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, dimensions: int, more: dict[str, Any]) -> Tensor:
    name = type(mask).__name__
    if mask is None or isinstance(mask, Tensor):
        bias = mask[:, None] if dimensions == 3 and mask is not None and mask.ndim == 3 else mask
        return api.attention(q, k, v, bias=bias, layout="bshd", **more)
    if name in CAUSAL:
        return api.attention(q, k, v, layout="bshd", **_causal(CAUSAL[name]), **more)
    if name not in CAUSAL_BLOCKS:
        taken = ", ".join(("None", "a tensor", *CAUSAL, *CAUSAL_BLOCKS))
        raise NotImplementedError(f"attn_bias must be one of {taken}, not {described(mask)}")
    if q.shape[0] != 1:
        raise ValueError(f"with {name} query must have batch 1, not {q.shape[0]}")
    (of_q, of_k), (most_q, most_k) = _ends(mask, q.device), _longest(mask)
    more |= _causal(getattr(mask, "causal", CAUSAL_BLOCKS[name])) | dict(max_seqlen_q=most_q, max_seqlen_k=most_k)
    o: Tensor = varlen.attention_varlen(q[0], k[0], v[0], of_q, of_k, **more)
    return o[None]


def _causal(where: str) -> dict[str, Any]:
    return dict(causal=bool(where)) | (dict(q_offset=0) if where == "top-left" else {})


def _ends(mask: Any, device: torch.device) -> list[Tensor]:
    """cu_seqlens of queries and of keys."""
    if isinstance(mask, BlockDiagonalMask):
        every = [[0, *itertools.accumulate(lengths)] for lengths in (mask.q_lengths, mask.k_lengths)]
        return [torch.tensor(ends, dtype=torch.int32, device=device) for ends in every]
    return [of.seqstart.to(device) for of in (mask.q_seqinfo, mask.k_seqinfo)]


def _longest(mask: Any) -> tuple[int, int]:
    if isinstance(mask, BlockDiagonalMask):
        return max(mask.q_lengths, default=0), max(mask.k_lengths, default=0)
    return int(mask.q_seqinfo.max_seqlen), int(mask.k_seqinfo.max_seqlen)


def _with_heads(name: str, x: Tensor, query: Tensor) -> Tensor:
    """x as (batch, seqlen, heads, dim)."""
    if x.ndim != query.ndim or x.ndim not in (3, 4, 5):
        raise ValueError(
            f"{name} must have 3, 4 or 5 dimensions, as many as query has, not shape {tuple(x.shape)} beside "
            f"{tuple(query.shape)}"
        )
    if x.ndim == 3:
        return x[:, :, None]
    if x.ndim == 4:
        return x
    repeats = name != "query" and x.stride(3) == 0
    return x[:, :, :, 0] if repeats else x.flatten(2, 3)
