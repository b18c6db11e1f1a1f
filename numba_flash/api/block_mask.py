"""block_mask(): signature and contract. What it makes is in dispatch/."""

from typing import Any

from ..dispatch.block_mask import BlockMask as BlockMask
from .forward import NO_AUX


def block_mask(
    mask_mod: Any,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    aux: tuple[Any, ...] = NO_AUX,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: Any = None,
    seqlens_k: Any = None,
) -> BlockMask:
    """A mask_mod for many calls of one shape: which tiles it leaves empty, and which full, is found once and kept.

    >>> blocks = numba_flash.block_mask(mods.document, batch, heads, seqlen, seqlen, aux=(segments,), causal=True)
    >>> for layer in layers:
    ...     o = numba_flash.attention(q, k, v, block_mask=blocks)

    `attention(mask_mod=...)` finds the same in each call: kernels leave empty tiles out, and do not ask mask_mod in
    full ones. With a block_mask it is found in the first call, for the tiles of the kernel that runs, and reused in the
    next ones: by kernels on the same stream and device, in the forward, and in the backward for its own tiles. Results
    are the same bits. There is no matrix (seqlen_q, seqlen_k): a tile takes 2 bits, once for all batch entries or heads
    where nothing that is seen differs between them.

    mask_mod: mask(b, h, q_pos, k_pos, *aux) -> True or False, as for `attention`.
    batch, heads, seqlen_q, seqlen_k: those of q and k, whole numbers; heads are those of q.
    aux, causal, window, q_offset, seqlens_k: as for `attention`, which takes them from the block_mask. Beside
        block_mask= they are left out, or the very same ones.

    What aux, seqlens_k and q_offset contain must not change as long as the block_mask is used: make another one then.

    Raises TypeError or ValueError for arguments that make no sense, naming the argument, what came and what is allowed;
    `attention` raises ValueError for q and k of another shape. Nothing is computed here.
    """
    return BlockMask(mask_mod, batch, heads, seqlen_q, seqlen_k, aux, causal, window, q_offset, seqlens_k)
