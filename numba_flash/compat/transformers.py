"""numba_flash for the models of Hugging Face's Transformers.

    from numba_flash.compat import transformers

    transformers.register()
    model.set_attn_implementation("numba_attention")  # or from_pretrained(..., attn_implementation="numba_attention")

Two functions are registered under that name: `attention` computes attention, and `visible` describes which keys each
query sees. Without the second one Transformers drops padding in silence. A name that contains "flash" would be taken
for a kernel to download.
"""

import functools
import inspect
from typing import Any

import torch
import transformers

from ..api import forward as api
from . import packed, proven
from .torch_settings import autocast, drawn_seed
from .visible import Visible, Window

try:
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError
except ImportError:
    raise NotImplementedError(
        f"Transformers {transformers.__version__} has no masks by the functions that this needs; 5.17 has them"
    ) from None

NAME = "numba_attention"
# Models that lengthen their mask only if it is a tensor. They get a tensor.
MAKE_LONGER = ("deepseek_v4",)


def register(name: str = NAME) -> str:
    """Make numba_flash known to Transformers under `name`, which is returned.

    What runs: forward and backward, on the CPU and on GPUs; grouped heads, sliding windows, softcap, additive masks,
    position bias, attention sinks, dropout, padding on either side, packed sequences, and decoding with a cache.
    Continuous batching, with its paged cache, runs under the name of transformers_paged.py. Not built, and refused by
    name with NotImplementedError: keys that a model chooses by their indices, and attention weights as a result.

    Keys that are padded on the left are copied to the front in each layer, so that kernels without masks can run;
    a decoding step of one token copies nothing.
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
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query (batch, heads, seqlen_q, head_dim), key and value with heads_kv -> o (batch, seqlen_q, heads, head_dim_v).

    attention_mask: what `visible` made; or a tensor (batch, 1 or heads, seqlen_q, seqlen_k), bool or added to the
    scores; or None, from models that make no masks: every key before the query if the module is causal, else all.
    Under autocast tensors are cast as for torch's own attention. s_aux: attention sinks, (heads,), as gpt-oss hands
    them over, or one for each query, (batch, heads, seqlen_q, 1), as Inkling2 does; some models call them sinks.

    cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences (packed.py), as for Transformers' flash
    attention; so are those of position_ids that begin anew.
    """
    _refuse(attention_mask, query, key, others)
    sinks = others.get("sinks") if s_aux is None else s_aux
    given: dict[str, Any] = dict(scale=scaling, softcap=softcap, sinks=sinks)
    given |= dict(dropout_p=dropout, seed=drawn_seed()) if dropout else {}
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    arrays = (query, key, value, _seen(attention_mask, query, key, causal, others), position_bias, causal)
    if sinks is None or sinks.ndim == 1:
        return _attend(*arrays, given), None
    if sinks.shape != (*query.shape[:3], 1):
        raise ValueError(
            f"sinks (s_aux) must have shape (heads,) = ({query.shape[1]},) or (batch, heads, seqlen_q, 1) = "
            f"{(*query.shape[:3], 1)}, not {tuple(sinks.shape)}"
        )
    # A sink scales its row: o l / (l + e^sink).
    o, lse = _attend(*arrays, given | dict(sinks=None, return_lse=True))
    return o * torch.sigmoid(lse - sinks[..., 0]).transpose(1, 2).unsqueeze(-1).to(o.dtype), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    bias: Any,
    causal: bool,
    given: dict[str, Any],
) -> Any:
    """The result of api.attention. mask: a mask, or for packed sequences a dict of attention_varlen's options. given:
    all other options but bias and causal."""
    q, k, v = (autocast(x).transpose(1, 2) for x in (query, key, value))  # as they lie in memory
    if isinstance(mask, dict):
        return packed.attention(q, k, v, bias=bias, **given, **mask)
    if isinstance(mask, Visible):
        if mask.holds_for(query, key) and (bias is None or "cu_seqlens_q" not in mask.options):
            return _attend_visible(q, k, v, bias, mask, given)
        mask = mask.whole()
    compute: Any = functools.partial(api.attention, q, k, v, layout="bshd", **given)
    if mask is None:
        return compute(causal=causal and q.shape[1] > 1, bias=bias)
    if mask.dtype == torch.bool:
        return compute(mask=mask, bias=bias)
    return compute(bias=mask if bias is None else mask + bias)


def _seen(mask: Any, query: torch.Tensor, key: torch.Tensor, causal: bool, others: dict[str, Any]) -> Any:
    """Which keys each query sees: the given mask, or for packed sequences, whose rows follow each other in query, the
    options of attention_varlen or a Visible with them."""
    plain, size = None, others.get("sliding_window")
    if isinstance(mask, Visible) and mask.holds_for(query, key) and mask.is_window(size):
        plain = mask
    as_many, positions = query.shape[2] == key.shape[2], others.get("position_ids")
    if others.get("cu_seq_lens_q") is not None:
        if not as_many or mask is not None and plain is None:
            raise NotImplementedError(
                "cu_seq_lens_q is taken beside a causal mask or a window, and without keys of an earlier call: leave "
                "attention_mask out and begin with an empty cache, or pad the sequences"
            )
        window = (None, 0 if causal else None) if plain is None else plain.options["window"]
        return dict(window=window, **packed.of_arguments(others))
    if plain is None or positions is None or not as_many or "cu_seqlens_q" in plain.options:
        return mask
    rows = query.shape[2]
    anew = query.shape[0] == 1 < rows and positions.shape == (1, rows) and plain.options["window"][1] == 0
    return plain.of_positions(positions) if anew else mask


def _attend_visible(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, seen: Visible, given: dict[str, Any]
) -> Any:
    if "cu_seqlens_q" in seen.options:
        return packed.attention(q, k, v, **given, **seen.options)
    if bias is not None and seen.start is not None:
        bias = bias.expand(k.shape[0], -1, -1, k.shape[1])
    if seen.proof is not None and seen.masked is not None:
        both = given | dict(bias=bias)
        return proven.attention(q, k, v, seen, **both)
    k, v, bias = (proven.moved(seen.start, x, axis) for x, axis in ((k, 1), (v, 1), (bias, 3)))
    return api.attention(q, k, v, bias=bias, layout="bshd", **given, **seen.options)


def _refuse(attention_mask: Any, query: torch.Tensor, key: torch.Tensor, others: dict[str, Any]) -> None:
    asked = dict(output_attentions=bool(others.get("output_attentions")))
    # Refused: a paged cache, and keys chosen by a sparse attention.
    chosen = ("cache", "indices", "block_indices")
    asked |= {name: others.get(name) is not None for name in chosen}
    names = [name for name, wanted in asked.items() if wanted]
    if names:
        raise NotImplementedError(f"{', '.join(names)}: not implemented yet; leave out, or take another attention")
    seqlen_k = key.shape[2]
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
) -> Visible | torch.Tensor:
    """Mask function for Transformers, called once in a model's forward. It avoids a mask matrix where it can.

    Padding that leaves one stretch of keys, on the left, on the right or on both sides, becomes its start and length,
    which every kernel takes; to see whether it does, three numbers are read from the device. Other padding, and every
    mask_function that is more than a window, becomes a mask.

    While torch.compile traces, neither numbers nor mask functions can be looked at. Then the program finds out, once
    in each run, whether the mask says no more than a window and one stretch of keys.
    """
    if isinstance(attention_mask, Visible):  # made in advance
        return attention_mask
    given = others | dict(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
    )
    shape = (batch_size, 1, q_length, kv_length)
    make_whole = functools.partial(masking_utils.eager_mask, **given)
    if getattr(others.get("config"), "model_type", None) in MAKE_LONGER:
        return make_whole()
    tracing = torch.compiler.is_compiling()
    dtype, device = others.get("dtype", torch.float32), torch.device(others.get("device", "cpu"))
    described = functools.partial(Visible, make_whole, shape, dtype, device)
    window, several = _window(mask_function, local_size)
    if several and attention_mask is None and q_length == kv_length:
        starts = packed.starts_of_mask(mask_function, batch_size, q_length, device)
        return described(dict(window=window, **packed.Sequences.of(starts).table()))
    if several or window is None and not tracing:
        return described(dict(mask=masking_utils.sdpa_mask(**given)))
    offset = q_offset - kv_offset  # the position of query 0 among these keys
    if isinstance(offset, torch.Tensor):
        offset = offset.to(torch.int32).expand(batch_size)
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:batch_size, kv_offset : kv_offset + kv_length].bool()
    if window is None:
        likely = _likely_window(local_size, "allow_is_bidirectional_skip" in others)
        return described(**_traced(likely, offset, padding, given))
    if padding is None:
        return described(dict(window=window, q_offset=offset))
    return described(**_padded(window, offset, padding, q_length))


def _padded(window: Window, offset: Any, padding: torch.Tensor, q_length: int) -> dict[str, Any]:
    """The arguments of Visible for a window and padding."""
    start, length, within = _stretch(padding)
    masked = dict(window=window, q_offset=offset, mask=padding[:, None, None])
    if torch.compiler.is_compiling():
        stretch = _of_stretch(window, offset, start, length, within, q_length)
        return stretch | dict(masked=masked, proof=(padding == within).all().to("cpu"))
    every, one, front = torch.stack([padding.all(), (padding == within).all(), ~start.any()]).tolist()
    # A position on the device is that of a static cache. All its steps are described alike, whatever the padding is:
    # one compiled program, or CUDA graph, serves them.
    static = isinstance(offset, torch.Tensor)
    if every and not static:
        return dict(options=dict(window=window, q_offset=offset))
    if one:
        front &= not (static and q_length == 1)
        return _of_stretch(window, offset, None if front else start, length, within, q_length)
    return dict(options=masked)


def _traced(window: Window, offset: Any, padding: torch.Tensor | None, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of Visible for a mask function that cannot be inspected, but is likely this window."""
    mask = masking_utils.sdpa_mask(**given)
    q_length, kv_length = mask.shape[2:]
    expected = _matrix(window, offset, q_length, kv_length, mask.device)
    stretch: dict[str, Any] = dict(options=dict(window=window, q_offset=offset))
    if padding is None and len(mask) == 1 and q_length == kv_length:
        starts = packed.starts_of_mask(given["mask_function"], 1, q_length, mask.device)
        number = starts.cumsum(1)
        expected = expected & (number[:, :, None] == number[:, None, :])
        stretch["starts"] = starts
    if padding is not None:
        start, length, within = _stretch(padding)
        expected = expected & within[:, None, None]
        stretch = _of_stretch(window, offset, start, length, within, q_length)
    return stretch | dict(masked=dict(mask=mask), proof=(mask == expected).all().to("cpu"))


def _stretch(padding: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> each entry's first key and number of keys, and the padding mask of one stretch with these."""
    start, length = padding.int().argmax(-1).int(), padding.sum(-1, dtype=torch.int32)
    keys = torch.arange(padding.shape[-1], device=padding.device)
    return start, length, (keys >= start[:, None]) & (keys < (start + length)[:, None])


def _of_stretch(
    window: Window, offset: Any, start: torch.Tensor | None, length: torch.Tensor, within: torch.Tensor, q_length: int
) -> dict[str, Any]:
    if start is None:
        return dict(options=dict(window=window, q_offset=offset, seqlens_k=length))
    if q_length > 1:
        return dict(options=dict(window=window, q_offset=offset - start, seqlens_k=length), start=start)
    # One query sees one stretch of keys. A window of its own says which, and no key has to be moved.
    (left, right), kv_length = window, within.shape[1]
    first = start if left is None else start.clamp(min=offset - left)
    end = start + length if right is None else (start + length).clamp(max=offset + right + 1)
    return dict(options=dict(window=(kv_length, None), q_offset=first + kv_length, seqlens_k=end.clamp(min=0)))


def _window(mask_function: Any, local_size: int | None) -> tuple[Window | None, bool]:
    """-> mask_function as a window for attention(), None if it is more than a window; and whether it keeps packed
    sequences apart."""
    if local_size is None:
        made: list[tuple[Any, Window]] = [
            (masking_utils.bidirectional_mask_function, (None, None)),
            (masking_utils.causal_mask_function, (None, 0)),
        ]
    elif torch.compiler.is_compiling():  # torch 2.11 stops at a comparison of functions that have closures
        made = []
    else:
        made = [
            (masking_utils.sliding_window_bidirectional_mask_function(local_size), (local_size, local_size)),
            (masking_utils.sliding_window_causal_mask_function(local_size), (local_size - 1, 0)),
        ]
    for function, window in made:
        if _same(function, mask_function):
            return window, False
        if not torch.compiler.is_compiling() and _same(_kept_apart(function), mask_function):
            return window, True
    return None, False


def _kept_apart(function: Any) -> Any:
    """The mask function that Transformers makes from this one for packed sequences, for any positions."""
    anywhere = torch.empty(0)
    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # 5.17 takes positions in the batch
    inside = function if remap is None else remap(function, anywhere)
    return masking_utils.and_masks(inside, masking_utils.packed_sequence_mask_function(anywhere))


def _likely_window(local_size: int | None, bidirectional: bool) -> Window:
    """The window of the masks that models make with these arguments, packed sequences and chunks aside."""
    if bidirectional:
        return local_size, local_size
    return None if local_size is None else local_size - 1, 0


def _matrix(window: Window, offset: Any, q_length: int, kv_length: int, device: Any) -> torch.Tensor:
    """The window as a mask, (batch or 1, 1, q_length, kv_length), True = seen."""
    q = torch.arange(q_length, device=device) + (offset[:, None] if isinstance(offset, torch.Tensor) else offset)
    distance = torch.arange(kv_length, device=device) - q[..., None]
    left, right = window
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen = seen if left is None else seen & (distance >= -left)
    seen = seen if right is None else seen & (distance <= right)
    return seen.view(-1, 1, q_length, kv_length)


def _same(one: Any, other: Any) -> bool:
    """Whether two functions, with the functions that they capture, have the same code and captured numbers. Tensors may
    differ."""
    if one is other or torch.compiler.is_compiling():  # a traced closure cannot be inspected
        return one is other
    if inspect.isfunction(one) and inspect.isfunction(other):
        cells = [tuple(cell.cell_contents for cell in function.__closure__ or ()) for function in (one, other)]
        return one.__code__ is other.__code__ and _same(*cells)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return True
    return isinstance(one, int) and isinstance(other, int) and one == other
