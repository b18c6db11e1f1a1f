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
from collections.abc import Callable
from typing import Any

import torch
import transformers

from ..api import forward as api
from . import proven
from .torch_settings import autocast, drawn_seed

try:
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError
except ImportError:
    raise NotImplementedError(
        f"Transformers {transformers.__version__} has no masks by the functions that this needs; 5.17 has them"
    ) from None

NAME = "numba_attention"
# Models that make their mask longer where it is a tensor, and otherwise forget to. They get a tensor.
MAKE_LONGER = ("deepseek_v4",)
Window = tuple[int | None, int | None]
Options = dict[str, Any]


class Visible:
    """Which keys each query sees: for `attention` in its options, and for a model that reads its mask as that mask.

    A model may add its mask to scores or join it with another one. It then gets the additive mask of shape (batch, 1,
    seqlen_q, seqlen_k) that eager attention would give it: each model can read that one. It is made when its numbers
    are first asked for. Its shape, dtype and device are known without it, and `to` makes none.

    It is no tensor to isinstance: torch.compile, and hooks that move or cast tensors, would take it for one.
    """

    def __init__(
        self,
        make_whole: Callable[[], torch.Tensor],
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        options: Options,
        start: torch.Tensor | None = None,
        masked: Options | None = None,
        proof: torch.Tensor | None = None,
    ) -> None:
        self._make_whole = make_whole
        self._whole: torch.Tensor | None = None
        self._version: int | None = None
        self.shape, self.ndim = torch.Size(shape), 4
        self.dtype, self.device = dtype, device  # of the mask
        self.options = options  # of attention()
        self.start = start  # int32 (batch,): key start[b] is the first one that they mean. None = key 0
        # In a traced program: what holds where proof, a bool on the host, turns out to be False.
        self.masked, self.proof = masked, proof

    def whole(self) -> torch.Tensor:
        """The additive mask of eager attention."""
        if self._whole is None:
            self._whole = self._make_whole()
            self._version = _version(self._whole)
        return self._whole

    def unchanged(self) -> bool:
        """Whether no model has written to the mask."""
        return self._whole is None or _version(self._whole) == self._version is not None

    def holds_for(self, q: torch.Tensor, k: torch.Tensor) -> bool:
        """Whether this describes what q sees of k."""
        return self.unchanged() and self.shape == (q.shape[0], 1, q.shape[2], k.shape[2])

    def contiguous(self) -> "Visible":  # generate() of some versions asks this of masks that it makes ahead
        return self

    def to(self, *arguments: Any, **named: Any) -> Any:
        """The same for a mask of another dtype or on another device, as torch.Tensor.to. accelerate's hooks call it."""
        if not self.unchanged():
            return self.whole().to(*arguments, **named)
        before = torch.empty(0, dtype=self.dtype, device=self.device)
        after = before.to(*arguments, **named)
        if after is before:
            return self
        return Visible(
            lambda: self._make_whole().to(*arguments, **named), tuple(self.shape), after.dtype, after.device,
            _moved(self.options, after.device), None if self.start is None else self.start.to(after.device),
            _moved(self.masked, after.device), self.proof,
        )  # fmt: skip

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*_read(args), **_read(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.whole(), name)


def _moved(options: Options | None, device: torch.device) -> Any:
    return options and {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


def _read(arguments: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Visible, Visible.whole, arguments)


def _version(mask: torch.Tensor) -> int | None:
    """How often mask was written to; None where nobody counts that."""
    return None if torch.compiler.is_compiling() or mask.is_inference() else mask._version


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *others: getattr(self.whole(), name)(*_read(others))


# Python looks these up in the class, past __getattr__; == would else answer False for all of them.
for _name in (
    "add radd sub rsub mul rmul truediv rtruediv matmul rmatmul pow neg abs and rand or ror xor rxor invert "
    "eq ne lt le gt ge getitem setitem len iter bool"
).split():
    setattr(Visible, f"__{_name}__", _operator(f"__{_name}__"))


def register(name: str = NAME) -> str:
    """Make numba_flash known to Transformers under `name`, which is returned.

    What runs: forward and backward, on the CPU and on GPUs; grouped heads, sliding windows, softcap, additive masks,
    position bias, attention sinks, dropout, padding on either side, and decoding with a cache. Not built, and refused
    by name with NotImplementedError: paged caches, keys that a model chooses by their indices, and attention weights as
    a result.

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
    """
    _refuse(attention_mask, query, key, others)
    sinks = others.get("sinks") if s_aux is None else s_aux
    given: dict[str, Any] = dict(scale=scaling, softcap=softcap, sinks=sinks)
    given |= dict(dropout_p=dropout, seed=drawn_seed()) if dropout else {}
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    arrays = (query, key, value, attention_mask, position_bias, causal)
    if sinks is None or sinks.ndim == 1:
        return _attend(*arrays, given), None
    if sinks.shape != (*query.shape[:3], 1):
        raise ValueError(
            f"sinks (s_aux) must have shape (heads,) = ({query.shape[1]},) or (batch, heads, seqlen_q, 1) = "
            f"{(*query.shape[:3], 1)}, not {tuple(sinks.shape)}"
        )
    # What a sink takes of a row: o l / (l + e^sink).
    o, lse = _attend(*arrays, given | dict(sinks=None, return_lse=True))
    return o * torch.sigmoid(lse - sinks[..., 0]).transpose(1, 2).unsqueeze(-1).to(o.dtype), None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, bias: Any, causal: bool,
    given: dict[str, Any],
) -> Any:  # fmt: skip
    """What api.attention returns. given: the options besides bias and which keys are seen."""
    q, k, v = (autocast(x).transpose(1, 2) for x in (query, key, value))  # as they lie in memory
    if isinstance(mask, Visible):
        if mask.holds_for(query, key):
            return _attend_visible(q, k, v, bias, mask, given)
        mask = mask.whole()
    compute: Any = functools.partial(api.attention, q, k, v, layout="bshd", **given)
    if mask is None:
        return compute(causal=causal and q.shape[1] > 1, bias=bias)
    if mask.dtype == torch.bool:
        return compute(mask=mask, bias=bias)
    return compute(bias=mask if bias is None else mask + bias)


def _attend_visible(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, seen: Visible, given: dict[str, Any]
) -> Any:
    if bias is not None and seen.start is not None:
        bias = bias.expand(k.shape[0], -1, -1, k.shape[1])
    if seen.proof is not None and seen.masked is not None:
        both = given | dict(bias=bias)
        return proven.attention(q, k, v, seen.proof, seen.start, seen.options, seen.masked, **both)
    k, v, bias = (proven.moved(seen.start, x, axis) for x, axis in ((k, 1), (v, 1), (bias, 3)))
    return api.attention(q, k, v, bias=bias, layout="bshd", **given, **seen.options)


def _refuse(attention_mask: Any, query: torch.Tensor, key: torch.Tensor, others: dict[str, Any]) -> None:
    asked = dict(output_attentions=bool(others.get("output_attentions")))
    # A paged cache, and the keys that a sparse attention has chosen.
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
    """What Transformers asks for once in a model's forward: which keys are seen, without a matrix wherever that can be.

    Padding that leaves one stretch of keys, on the left, on the right or on both sides, becomes its start and length,
    which every kernel takes; to see whether it does, three numbers are read from the device. Other padding, and every
    mask_function that is more than a window, becomes a mask.

    While torch.compile traces, neither numbers nor mask functions can be looked at. Then the program finds out, once
    in each run, whether the mask says no more than a window and one stretch of keys.
    """
    if isinstance(attention_mask, Visible):  # made ahead
        return attention_mask
    given = others | dict(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
    )  # fmt: skip
    shape = (batch_size, 1, q_length, kv_length)
    make_whole = functools.partial(masking_utils.eager_mask, **given)
    if getattr(others.get("config"), "model_type", None) in MAKE_LONGER:
        return make_whole()
    tracing = torch.compiler.is_compiling()
    dtype, device = others.get("dtype", torch.float32), torch.device(others.get("device", "cpu"))
    described = functools.partial(Visible, make_whole, shape, dtype, device)
    window = _window(mask_function, local_size)
    if window is None and not tracing:
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
    """The arguments of Visible for a mask function that cannot be looked at, but is likely this window."""
    mask = masking_utils.sdpa_mask(**given)
    q_length, kv_length = mask.shape[2:]
    expected = _matrix(window, offset, q_length, kv_length, mask.device)
    stretch: dict[str, Any] = dict(options=dict(window=window, q_offset=offset))
    if padding is not None:
        start, length, within = _stretch(padding)
        expected = expected & within[:, None, None]
        stretch = _of_stretch(window, offset, start, length, within, q_length)
    return stretch | dict(masked=dict(mask=mask), proof=(mask == expected).all().to("cpu"))


def _stretch(padding: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first key of each batch entry, how many there are, and what padding would be if they followed one another."""
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


def _window(mask_function: Any, local_size: int | None) -> Window | None:
    """The window that mask_function is, as attention() takes it; None where it is more than that."""
    made: list[tuple[Any, Window]] = [
        (masking_utils.bidirectional_mask_function, (None, None)),
        (masking_utils.causal_mask_function, (None, 0)),
    ]
    if local_size is not None:
        if torch.compiler.is_compiling():  # torch 2.11 stops at a comparison of functions that have closures
            return None
        made = [
            (masking_utils.sliding_window_bidirectional_mask_function(local_size), (local_size, local_size)),
            (masking_utils.sliding_window_causal_mask_function(local_size), (local_size - 1, 0)),
        ]
    return next((window for function, window in made if _same(function, mask_function)), None)


def _likely_window(local_size: int | None, bidirectional: bool) -> Window:
    """The window of the masks that models make with these arguments, packed sequences and chunks aside."""
    if bidirectional:
        return local_size, local_size
    return None if local_size is None else local_size - 1, 0


def _matrix(window: Window, offset: Any, q_length: int, kv_length: int, device: Any) -> torch.Tensor:
    """(batch or 1, 1, q_length, kv_length), True = seen."""
    q = torch.arange(q_length, device=device) + (offset[:, None] if isinstance(offset, torch.Tensor) else offset)
    distance = torch.arange(kv_length, device=device) - q[..., None]
    left, right = window
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen = seen if left is None else seen & (distance >= -left)
    seen = seen if right is None else seen & (distance <= right)
    return seen.view(-1, 1, q_length, kv_length)


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
