"""torch's registry of flash attention: numba_flash in place of torch's own kernels.

    torch.nn.attention.activate_flash_attention_impl(register())

After that, what torch computes with flash attention on CUDA tensors runs here, forward and backward:
scaled_dot_product_attention where it takes its flash backend, torch.nn.attention.varlen, nested tensors, and all that
is built on them. torch.nn.attention.restore_flash_attention_impl() undoes it.

Each function here implements one of torch's operations, with its arguments and results. "dense" tensors are (batch,
seqlen, heads, head_dim); packed ones come with cum_seq_q.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..api import backward as api_backward, forward as api, varlen
from ..bridges.torch_call import fetchable
from .arguments import refuse_pages, renamed, window_sides
from .torch_settings import drawn_seed

NAMES = dict(
    q="query",
    k="key",
    v="value",
    cu_seqlens_q="cum_seq_q",
    cu_seqlens_k="cum_seq_k",
    max_seqlen_q="max_q",
    max_seqlen_k="max_k",
    seqlens_k="seqused_k",
    causal="is_causal",
)
STEP = 0x9E3779B97F4A7C15  # odd: each offset of a generator gives another seed


def register(name: str = "NUMBA") -> str:
    """Make numba_flash known to torch's registry under `name`, which is returned. Nothing else changes.

    >>> torch.nn.attention.activate_flash_attention_impl(register())
    >>> torch.nn.attention.restore_flash_attention_impl()  # torch's own kernels again

    What is not computed raises NotImplementedError with the argument's name: block_table, num_splits above 1, a debug
    mask, float64, dropout in a CUDA graph, and gradients with alibi_slopes or seqused_k, which torch's backward does
    not hand over.

    Raises NotImplementedError where torch has no such registry.
    """
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        raise NotImplementedError(
            "torch.nn.attention.restore_flash_attention_impl and its registry are needed, which torch "
            f"{torch.__version__} does not have; torch 2.13 has them. Meanwhile call "
            "numba_flash.compat.torch.scaled_dot_product_attention"
        )
    torch.nn.attention.register_flash_attention_impl(name, register_fn=InPlaceOfTorch)
    return name


class InPlaceOfTorch:
    """The handle that torch's registry holds while it is active."""

    def __init__(self, device: str = "CUDA"):
        """device: torch's dispatch key of the operations that are replaced."""
        self.library: Any = torch.library.Library("aten", "IMPL", device)
        with warnings.catch_warnings():  # torch warns that it had another kernel; replacing it is intended
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
            for name, function in OPERATIONS.items():
                if hasattr(torch.ops.aten, name):
                    self.library.impl(name, function, device)

    def remove(self) -> None:
        """Restores torch's kernels: torch does that when the library is deleted."""
        self.library = None


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    layout: str = "bshd",
) -> tuple[Tensor, ...]:
    """o, lse, rng_state, an unused tensor, and the debug mask, which is empty.

    lse: (batch, heads, seqlen_q), for packed sequences (heads, total_q). rng_state: with dropout its first number is
    the seed, in host memory, so that the backward need not wait for a GPU; else it has no meaning."""
    refuse_pages(block_table, num_splits)
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask must be False: weights are not stored; see testing.dropout_mask")
    if query.dtype is torch.float64:
        raise NotImplementedError(
            "query is float64, for which torch's operation would give lse in float32: call numba_flash.attention"
        )
    if value.shape[-1] != query.shape[-1]:
        own = query.shape[-1]
        raise ValueError(f"value must have query's head_dim, {own}, as torch's operation has it, not {value.shape[-1]}")
    beyond = dict(alibi_slopes=alibi_slopes, seqused_k=seqused_k)
    for name, x in beyond.items():
        if x is not None and torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            raise NotImplementedError(
                f"{name}: there are no gradients with it, as torch does not hand it to the backward; call "
                "numba_flash.attention or numba_flash.attention_varlen"
            )
    seed = _drawn(query.device) if dropout_p else None
    attend, _ = _functions(cum_seq_q, cum_seq_k, max_q, max_k, layout)
    options = _options(scale, dropout_p, is_causal, window_size_left, window_size_right, seed)
    if out is None and not query.is_contiguous():
        out = torch.empty_like(query)  # in query's order, as torch's compilers expect it
    o, lse = _run(
        attend, query, key, value, alibi_slopes=alibi_slopes, seqlens_k=seqused_k, out=out, return_lse=True, **options
    )
    unused = query.new_empty((), dtype=torch.uint64)
    if seed is None:
        rng_state = query.new_empty(2, dtype=torch.uint64)
    else:
        rng_state = torch.tensor([seed, 0], dtype=torch.uint64, device="cpu")
    return o, lse, rng_state, unused, query.new_empty(0)


def flash_attention_forward_inplace(out: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """`flash_attention_forward` into `out`. -> lse"""
    return flash_attention_forward(*arguments, **named, out=out)[1]


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    layout: str = "bshd",
) -> tuple[Tensor, ...]:
    """-> dq, dk, dv."""
    seed = int(rng_state[0]) if dropout_p else None
    tensors = [fetchable(grad_out), query, key, value, out]
    # Computed in the order that query has in memory, so that the results need no copy.
    turned = cum_seq_q is None and query.stride(1) < query.stride(2)
    if turned:
        tensors, layout = [x.transpose(1, 2) for x in tensors], "bhsd" if layout == "bshd" else "bshd"
    _, differentiate = _functions(cum_seq_q, cum_seq_k, max_q, max_k, layout)
    options = _options(scale, dropout_p, is_causal, window_size_left, window_size_right, seed)
    found = _run(differentiate, *tensors, logsumexp.contiguous(), **options)[:3]
    return tuple(map(_laid_out, [x.transpose(1, 2) for x in found] if turned else found, (query, key, value)))


def scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """`flash_attention_forward` for tensors (batch, heads, seqlen, head_dim)."""
    lengths = query.shape[2], key.shape[2]
    o, lse, *others = flash_attention_forward(
        query, key, value, None, None, *lengths, dropout_p, is_causal, return_debug_mask, scale=scale, layout="bhsd"
    )
    return o, lse, None, None, *lengths, *others


def scaled_dot_product_flash_attention_backward(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    """`flash_attention_backward` for tensors (batch, heads, seqlen, head_dim)."""
    return flash_attention_backward(*arguments, **named, layout="bhsd")


OPERATIONS: dict[str, Callable[..., Any]] = dict(
    _flash_attention_forward=flash_attention_forward,
    _flash_attention_forward_no_dropout_inplace=flash_attention_forward_inplace,
    _flash_attention_backward=flash_attention_backward,
    _scaled_dot_product_flash_attention=scaled_dot_product_flash_attention,
    _scaled_dot_product_flash_attention_backward=scaled_dot_product_flash_attention_backward,
)


def _functions(
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, layout: str
) -> list[Callable[..., Any]]:
    """attention and attention_backward for dense or packed tensors."""
    if (cum_seq_q is None) != (cum_seq_k is None):
        raise TypeError("cum_seq_q and cum_seq_k must both be int32 tensors (batch + 1,), or both None")
    if cum_seq_q is None:
        return [functools.partial(f, layout=layout) for f in (api.attention, api_backward.attention_backward)]
    spans: dict[str, Any] = dict(cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k, max_seqlen_q=max_q, max_seqlen_k=max_k)
    return [functools.partial(f, **spans) for f in (varlen.attention_varlen, varlen.attention_varlen_backward)]


def _options(scale: Any, dropout_p: Any, is_causal: Any, left: Any, right: Any, seed: Any) -> dict[str, Any]:
    window = None if left is right is None else window_sides((left, right))
    return dict(scale=scale, dropout_p=dropout_p, causal=is_causal, window=window, seed=seed)


def _run(function: Callable[..., Any], *tensors: Tensor, **options: Any) -> Any:
    """Runs under no_grad: autograd already records torch's operation, but the tensors still require grad."""
    try:
        with torch.no_grad():
            return function(*tensors, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise renamed(error, NAMES)  # noqa: B904 - the same error


def _drawn(device: torch.device) -> int:
    """A seed from the generator that torch's own kernel would draw from, without waiting for the device."""
    if device.type != "cuda":
        return int(drawn_seed())
    if torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "dropout_p in a CUDA graph: each replay would drop the same weights. Capture without dropout"
        )
    generator = torch.cuda.default_generators[device.index]
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # torch requires a multiple of 4
    return (generator.initial_seed() + offset * STEP) % 2**63


def _laid_out(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient with the strides of `like`, which torch's compilers assume; a copy if it has others."""
    expected = torch.empty_like(like)
    same = all(n == 1 or a == b for n, a, b in zip(like.shape, gradient.stride(), expected.stride(), strict=True))
    return gradient if same else expected.copy_(gradient)
