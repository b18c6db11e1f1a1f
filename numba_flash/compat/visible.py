"""Visible: which keys each query sees, as the models of Transformers carry it to their layers."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import packed

Window = tuple[int | None, int | None]
Options = dict[str, Any]


class Visible:
    """Which keys each query sees: `attention` takes it from the options, and a model can read it as an additive mask.

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
        starts: torch.Tensor | None = None,
    ) -> None:
        self._make_whole = make_whole
        self._whole: torch.Tensor | None = None
        self._version: int | None = None
        self.shape, self.ndim = torch.Size(shape), 4
        self.dtype, self.device = dtype, device  # dtype and device of the mask
        self.options = options  # keyword arguments for attention() or attention_varlen()
        self.start = start  # int32 (batch,): options count keys from key start[b]; None = from key 0
        # In a traced program: the options that hold if proof, a bool on the host, is False at run time.
        self.masked, self.proof = masked, proof
        self.starts = starts  # bool (1, seqlen_q), where packed sequences start, in a traced program
        self.sequences = None if starts is None else packed.Sequences.of(starts)
        self._positions: torch.Tensor | None = None
        self._anew: Visible | None = None  # not self: a cycle would keep masks in memory

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
        """Whether no model has changed the mask, and its shape fits q and k."""
        return self.unchanged() and self.shape == (q.shape[0], 1, q.shape[2], k.shape[2])

    def is_window(self, sliding_window: int | None = None) -> bool:
        """Whether this is only a window, in one sequence or in several.

        A compiled program cannot inspect a mask. There a window unknown to the layer is taken for chunked attention.
        """
        plain = self.start is None and not {"mask", "seqlens_k"} & {*self.options}
        return plain and (self.proof is None or (self.options["window"][0] is None) == (sliding_window is None))

    def of_positions(self, positions: torch.Tensor) -> "Visible":
        """This mask for position_ids that may restart: with a cache, Transformers ignores them when it makes a mask.
        They are read once for all layers, and in a compiled program in each run."""
        if positions is not self._positions:
            self._positions, self._anew = positions, None
            made = functools.partial(Visible, packed.no_matrix, tuple(self.shape), self.dtype, self.device)
            starts = packed.starts_of_positions(positions)
            if torch.compiler.is_compiling():
                holds = torch.ones((), dtype=torch.bool) if self.proof is None else self.proof
                starts = starts if self.starts is None else starts | self.starts
                self._anew = made(self.options, None, self.masked or {}, holds, starts)
            elif (sequences := packed.Sequences.of(starts)).counts[0] > 1:
                self._anew = made(dict(window=self.options["window"], **sequences.table()))
        return self if self._anew is None else self._anew

    def contiguous(self) -> "Visible":  # generate() of some versions asks this of masks that it makes ahead
        return self

    def to(self, *arguments: Any, **named: Any) -> Any:
        """This mask with another dtype or on another device, like torch.Tensor.to. accelerate's hooks call it."""
        if not self.unchanged():
            return self.whole().to(*arguments, **named)
        before = torch.empty(0, dtype=self.dtype, device=self.device)
        after = before.to(*arguments, **named)
        if after is before:
            return self
        return Visible(
            lambda: self._make_whole().to(*arguments, **named),
            tuple(self.shape),
            after.dtype,
            after.device,
            _moved(self.options, after.device),
            None if self.start is None else self.start.to(after.device),
            _moved(self.masked, after.device),
            self.proof,
            None if self.starts is None else self.starts.to(after.device),
        )

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
    """torch's count of writes to mask; None if torch does not count."""
    return None if torch.compiler.is_compiling() or mask.is_inference() else mask._version


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *others: getattr(self.whole(), name)(*_read(others))


# Python looks these up in the class, past __getattr__; == would else answer False for all of them.
for _name in (
    "add radd sub rsub mul rmul truediv rtruediv matmul rmatmul pow neg abs and rand or ror xor rxor invert "
    "eq ne lt le gt ge getitem setitem len iter bool"
).split():
    setattr(Visible, f"__{_name}__", _operator(f"__{_name}__"))
