"""BlockMask: a mask_mod for problems of one shape, and what was computed about its tiles, kept for the next call."""

import copy
import threading
from collections.abc import Hashable
from typing import Any, final

from .. import arrays
from ..arrays import Array
from ..functions.function import Function
from ..problem.forward import Problem, check_bool
from ..problem.option_checks import MAX_EXTENT, check_arguments, q_offset_of, window_sides

EXTENTS = ("batch", "heads", "seqlen_q", "seqlen_k")
SAME = "leave it out beside block_mask, which says it already, or make another block_mask"
# The arguments of a block_mask, and their values if they were left out.
RANGES: dict[str, Any] = dict(causal=False, window=None, q_offset=None, seqlens_k=None)
OPTIONS = RANGES | dict(mask_mod=None, aux=())
MOST = 64  # the number of streams and tile sizes for which states are kept


@final
class BlockMask:
    """Result of `numba_flash.block_mask`. Its attributes are that function's arguments and do not change."""

    __slots__ = (
        "_kept",
        "_lock",
        "aux",
        "batch",
        "causal",
        "function",
        "heads",
        "mask_mod",
        "q_offset",
        "seqlen_k",
        "seqlen_q",
        "seqlens_k",
        "window",
    )
    function: Function
    aux: tuple[Any, ...]
    _kept: dict[Hashable, Array]
    _lock: Any

    def __init__(
        self,
        mask_mod: Any,
        batch: Any,
        heads: Any,
        seqlen_q: Any,
        seqlen_k: Any,
        aux: Any,
        causal: Any,
        window: Any,
        q_offset: Any,
        seqlens_k: Any,
    ) -> None:
        extents = dict(zip(EXTENTS, (batch, heads, seqlen_q, seqlen_k), strict=True))
        for name, extent in extents.items():
            if not isinstance(extent, int) or isinstance(extent, bool):
                raise TypeError(f"{name} must be a whole number, not {extent!r}")
            if not 0 <= extent <= MAX_EXTENT:
                raise ValueError(f"{name} must be from 0 to {MAX_EXTENT}, not {extent}")
        if not isinstance(aux, tuple):
            raise TypeError(f"aux must be a tuple of arrays, not {type(aux).__name__}")
        check_bool("causal", causal)
        window_sides(window)
        if q_offset is not None and not arrays.is_array(q_offset):
            q_offset_of(q_offset, seqlen_q, seqlen_k, seqlens_k is not None)
        function = Function.of("mask_mod", mask_mod)
        check_arguments("mask_mod", function, len(aux))
        given = extents | dict(mask_mod=mask_mod, function=function, aux=aux, causal=causal, window=window)
        given |= dict(q_offset=q_offset, seqlens_k=seqlens_k, _kept={}, _lock=threading.Lock())
        for name, value in given.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a block_mask does not change; make another one to have another {name}")

    def __repr__(self) -> str:
        extents = ", ".join(f"{name}={getattr(self, name)}" for name in EXTENTS)
        return f"<BlockMask of {self.function.name}, {extents}>"

    def _arguments(self) -> tuple[Any, ...]:
        """The arguments of __init__."""
        return tuple(getattr(self, name) for name in ("mask_mod", *EXTENTS, "aux", *RANGES))

    def __reduce__(self) -> Any:
        """Pickles the arguments only, not the kept arrays. pickle stores mask_mod by name; loading reads it again."""
        return BlockMask, self._arguments()

    def __copy__(self) -> "BlockMask":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlockMask":
        """Copies the arrays. Shares the function as it was read, since variables that it captures may have changed."""
        mask_mod, *others = self._arguments()
        made = BlockMask(self.function, *copy.deepcopy(others, memo))
        object.__setattr__(made, "mask_mod", mask_mod)
        return made

    def check(self, problem: Problem) -> None:
        """Checks that the problem has this shape."""
        mine, its = ([getattr(x, name) for name in EXTENTS] for x in (self, problem))
        if mine != its:
            raise ValueError(
                f"block_mask is of ({', '.join(EXTENTS)}) = ({', '.join(map(str, mine))}), and q and k have "
                f"({', '.join(map(str, its))})"
            )

    def find(self, key: Hashable) -> Array | None:
        """The array kept under this key; None if there is none."""
        return self._kept.get(key)

    def keep(self, key: Hashable, made: Array) -> None:
        """Keeps an array for the next call with this key. The kernel that computes it has been enqueued."""
        with self._lock:
            if len(self._kept) >= MOST:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = made


def expanded(
    block_mask: Any, causal: Any, window: Any, q_offset: Any, seqlens_k: Any, mask_mod: Any, aux: Any
) -> tuple[Any, ...]:
    """The options completed by a block_mask's, which itself takes the place of mask_mod. The call may repeat the
    block_mask's options or leave them out."""
    if type(block_mask) is not BlockMask:
        raise TypeError(
            f"block_mask must be what numba_flash.block_mask returns, or None, not {type(block_mask).__name__}"
        )
    if mask_mod is not None and Function.of("mask_mod", mask_mod) != block_mask.function:
        raise ValueError(
            f"mask_mod must be that of block_mask, {block_mask.function.name}, not another function: {SAME}"
        )
    if aux and (len(aux) != len(block_mask.aux) or any(x is not y for x, y in zip(aux, block_mask.aux, strict=True))):
        raise ValueError(f"aux must be the arrays of block_mask: {SAME}")
    given = dict(causal=causal, window=window, q_offset=q_offset, seqlens_k=seqlens_k)
    for name, value in given.items():
        own, default = getattr(block_mask, name), RANGES[name]
        if value is default or value is own:
            continue
        array = arrays.is_array(value) or arrays.is_array(own)
        if array or value != own:
            raise ValueError(
                f"{name} must be that of block_mask, {'its array' if array else own}, not "
                f"{'another array' if array else value}: {SAME}"
            )
    ranges = tuple(getattr(block_mask, name) for name in given)
    return (*ranges, block_mask, block_mask.aux)


def in_options(block_mask: Any, named: dict[str, Any]) -> dict[str, Any]:
    """A block_mask's options by name, together with the call's own."""
    given = [named.get(name, default) for name, default in OPTIONS.items()]
    return dict(zip(OPTIONS, expanded(block_mask, *given), strict=True))
