"""Rotary position embedding (Su et al., 2021), with the signatures of flash-attn, in torch's operations."""

import functools
from typing import Any

import torch
from torch import Tensor


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """flash_attn.layers.rotary.apply_rotary_emb: rotates pairs of columns of x by the angles of their positions.

    x: (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim) with cu_seqlens (batch + 1,). cos, sin:
    (positions, rotary_dim / 2); columns from rotary_dim on stay. interleaved: pairs are columns 2i and 2i + 1, and
    otherwise i and i + rotary_dim / 2. seqlen_offsets: the position of each sequence's first row, a number or (batch,).
    inplace: write the result into x, too. max_seqlen: not needed here.

    Differentiable in x, cos and sin. Raises ValueError where cos and sin have no row for a position, as far as that can
    be told without reading from a GPU, or fewer columns than they turn.
    """
    half = cos.shape[-1]
    if cos.shape != sin.shape or cos.ndim != 2:
        raise ValueError(f"cos and sin must have one shape (positions, rotary_dim / 2), not {cos.shape}, {sin.shape}")
    if 2 * half > x.shape[-1]:
        raise ValueError(f"cos has {half} columns for pairs, and x only {x.shape[-1]} columns")
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    if positions.device.type == "cpu" and positions.numel():
        first, last = int(positions.min()), int(positions.max())
        if first < 0 or last >= len(cos):
            wrong = first if first < 0 else last
            raise ValueError(f"cos has rows for {len(cos)} positions from 0, and x reaches position {wrong}")
    cos, sin = (table[positions].unsqueeze(-2) for table in (cos, sin))  # (..., 1, half), for all heads
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        one, other = turned[..., 0::2], turned[..., 1::2]
    else:
        one, other = turned.chunk(2, dim=-1)
    pair = one * cos - other * sin, one * sin + other * cos
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    result = torch.cat([joined.to(x.dtype), rest], -1)
    return x.copy_(result) if inplace else result


apply_rotary_emb_func = apply_rotary_emb  # its older name


def _positions(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """(batch, seqlen), or (total,) of packed sequences."""
    if cu_seqlens is None:
        of_sequence = offsets[:, None] if isinstance(offsets, Tensor) else offsets
        return torch.arange(x.shape[1], device=x.device).expand(len(x), -1) + of_sequence
    rows = torch.arange(len(x), device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:], rows, right=True)
    return rows - cu_seqlens[sequence] + (offsets[sequence] if isinstance(offsets, Tensor) else offsets)


class RotaryEmbedding(torch.nn.Module):
    """flash_attn.layers.rotary.RotaryEmbedding: turns q and k of a projection by their positions.

    dim: rotary_dim, even. base: the frequencies are base ** (-2i / dim). interleaved: as in `apply_rotary_emb`.
    scale_base: the base of XPos' decay (Sun et al., 2022); None = no decay. It has no parameters and no buffers: it
    works on its input's device, and ignores `device`. Raises NotImplementedError for pos_idx_in_fp32=False.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
        pos_idx_in_fp32: bool = True,
    ) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"dim must be even and at least 2, not {dim}")
        if not pos_idx_in_fp32:
            raise NotImplementedError("pos_idx_in_fp32=False is not implemented: angles are always computed in float32")
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base

    def tables(self, positions: int, device: Any, dtype: torch.dtype, middle: int | None = None) -> tuple[Tensor, ...]:
        """-> cos and sin of q, and those of k, each (positions, dim / 2). Computed in float32, whatever the module's
        dtype. middle: the position where XPos' scale is 1; None = that of the tables."""
        even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        rows = torch.arange(positions, device=device, dtype=torch.float32)
        angles = torch.outer(rows, self.base ** (-even / self.dim))
        cos, sin = angles.cos(), angles.sin()
        if self.scale_base is None:
            cos, sin = cos.to(dtype), sin.to(dtype)
            return cos, sin, cos, sin
        decay = (even / self.dim + 0.4) / 1.4
        scale = decay ** ((rows - (positions // 2 if middle is None else middle)) / self.scale_base)[:, None]
        return tuple(x.to(dtype) for x in (cos * scale, sin * scale, cos / scale, sin / scale))

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Any:
        """-> qkv with its q and k turned; with kv (q, kv).

        qkv: (batch, seqlen, 3, heads, head_dim), or with num_heads_q (batch, seqlen, num_heads_q + 2 * heads_kv,
        head_dim), or with kv q alone, (batch, seqlen, heads, head_dim). kv: (batch, seqlen_k, 2, heads_kv, head_dim).
        cu_seqlens: (batch + 1,), where qkv and kv are packed and have no batch. max_seqlen: how many positions the
        tables have; None = as many as rows and seqlen_offset, a number then, ask for.
        """
        axis = 1 if cu_seqlens is None else 0  # the axis of the rows
        if isinstance(seqlen_offset, Tensor):
            if max_seqlen is None:
                raise ValueError(
                    "max_seqlen must be given where seqlen_offset is a tensor, which the host does not read"
                )
            positions = max_seqlen
        else:
            positions = max(qkv.shape[axis], 0 if kv is None else kv.shape[axis], max_seqlen or 0) + seqlen_offset
        # Packed sequences have more rows than positions; XPos' scales would overflow around the middle of all rows.
        middle = positions // 2 if cu_seqlens is None or max_seqlen is None else max_seqlen // 2
        cos_q, sin_q, cos_k, sin_k = self.tables(positions, qkv.device, qkv.dtype, middle)
        turn = functools.partial(
            apply_rotary_emb, interleaved=self.interleaved, seqlen_offsets=seqlen_offset, cu_seqlens=cu_seqlens
        )
        if kv is not None:
            k, v = kv.unbind(-3)
            return turn(qkv, cos_q, sin_q), torch.stack([turn(k, cos_k, sin_k), v], -3)
        if num_heads_q is None:
            q, k, v = qkv.unbind(-3)
        else:
            heads_kv = (qkv.shape[-2] - num_heads_q) // 2
            q, k, v = qkv.split([num_heads_q, heads_kv, heads_kv], -2)
        parts = turn(q, cos_q, sin_q), turn(k, cos_k, sin_k), v
        return torch.stack(parts, -3) if num_heads_q is None else torch.cat(parts, -2)
