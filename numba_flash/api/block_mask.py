"""block_mask(): signature and contract. The implementation is in dispatch/."""

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
    """A mask_mod for many calls of one shape: the empty and the full tiles are found once and kept.

    >>> blocks = numba_flash.block_mask(mods.document, batch, heads, seqlen, seqlen, aux=(segments,), causal=True)
    >>> for layer in layers:
    ...     o = numba_flash.attention(q, k, v, block_mask=blocks)

    `attention(mask_mod=...)` finds these tiles in each call: kernels skip empty tiles, and do not call mask_mod in full
    tiles. With a block_mask the first call finds them for the tiles of its kernel, and later calls reuse them on the
    same stream and device, in the forward, and in the backward for its own tiles. The results have the same bits.
    A tile takes 2 bits, once for all batch entries or heads if the visible keys do not differ between them. On Hopper
    with 16-bit elements a bit for each pair of query and key is kept, too, if these take at most 32 MiB.

    mask_mod: mask(b, h, q_pos, k_pos, *aux) -> True or False, as for `attention`, also with a parameter q_index.
    batch, heads, seqlen_q, seqlen_k: those of q and k, integers; heads are those of q.
    aux, causal, window, q_offset, seqlens_k: as for `attention`, which takes them from the block_mask. In a call with
        block_mask=, leave them out or pass the same objects.

    The contents of aux, seqlens_k and q_offset must not change while the block_mask is in use.

    Raises TypeError or ValueError for invalid arguments; the message names the argument, what was given and what is
    allowed. `attention` raises ValueError for q and k of another shape. Nothing is computed here.
    """
    return BlockMask(mask_mod, batch, heads, seqlen_q, seqlen_k, aux, causal, window, q_offset, seqlens_k)
