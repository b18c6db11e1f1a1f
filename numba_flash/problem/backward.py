"""BackwardProblem: one problem of gradients, checked: the forward's Problem and what the gradients add."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..arrays import Layout
from ..arrays.dtypes import ITEM_SIZE, conversion
from .forward import LAYOUTS, Problem, check_one_place
from .options import GRADIENT_OF, OPTION_ARRAYS, RANKS, Options, daux_name
from .strides import Strides, axes_strides, check_strides, contiguous_strides, element_strides

GRADIENTS = tuple(GRADIENT_OF)


SPLIT_TILE = 64  # rows of a tile of dbias, about
SPLIT_BLOCKS = 1024  # blocks that keep any GPU busy
SPLIT_BLOCKS_16BIT = 396  # as many as an H200 runs at a time, three on a multiprocessor
LEAST_TILES = 4  # tiles of scores for a block: the cost of its own sum is small beside them


@dataclass(frozen=True)
class BackwardProblem:
    """Says what to compute, never how or where. Frozen and hashable; `BackwardProblem.of` creates and checks it.

    Strides as in Problem. The gradients are contiguous: dq, dk and dv in the caller's layout, those of options in the
    options' own shapes, with stride 0 where these are broadcast.
    """

    forward: Problem  # with the strides of the given o
    wanted: tuple[str, ...]  # some of GRADIENTS, in that order
    wanted_aux: tuple[int, ...]  # indices of the aux arrays whose gradients are also wanted
    do_strides: Strides
    has_dlse: bool
    dlse_strides: tuple[int, int, int]  # (batch, head, query)
    strides: tuple[tuple[int, ...], ...]  # for each of GRADIENTS, as many as options.RANKS says
    shapes: tuple[tuple[int, ...], ...]  # for each of GRADIENTS, as the caller gets it; () if it is not wanted

    def if_kept(self, kept: bool) -> "BackwardProblem":
        return dataclasses.replace(self, forward=self.forward.if_kept(True)) if kept else self

    def strides_of(self, name: str) -> tuple[int, ...]:
        """The strides of one of GRADIENTS."""
        return self.strides[GRADIENTS.index(name)]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of one of GRADIENTS."""
        return self.shapes[GRADIENTS.index(name)]

    @property
    def dbias_shape(self) -> tuple[int, ...]:
        """(batch, head, query, key), with 1 where bias is broadcast."""
        return (1,) * (4 - len(self.shape_of("dbias"))) + self.shape_of("dbias")

    @property
    def dbias_splits(self) -> int:
        """How many blocks share the sum of an element of dbias: so many that the GPU is busy, as far as each has some
        tiles of scores. It follows from the shapes alone, and so do the bits of the sum."""
        batch, heads, rows, keys = self.dbias_shape
        owned = batch * heads * -(-rows // SPLIT_TILE) * -(-keys // SPLIT_TILE)
        forward = self.forward
        units = (forward.batch if batch == 1 else 1) * (forward.heads if heads == 1 else 1)
        units *= -(-forward.seqlen_q // SPLIT_TILE) if rows == 1 else 1
        tiles = units * (-(-forward.seqlen_k // SPLIT_TILE) if keys == 1 else 1)
        blocks = SPLIT_BLOCKS_16BIT if ITEM_SIZE[forward.dtype] == 2 else SPLIT_BLOCKS
        return max(min(blocks // max(owned, 1), tiles // LEAST_TILES, units), 1)

    @staticmethod
    def of(
        do: Layout, q: Layout, k: Layout, v: Layout, o: Layout, lse: Layout, dlse: Layout | None, options: Options,
        wanted: Any, alignment: int = 16, bias_aligned: bool = False,
    ) -> "BackwardProblem":  # fmt: skip
        """Checks a problem; the arguments are those of `Problem.of` and of `attention_backward`."""
        forward = Problem.of(q, k, v, options, None, None, True, alignment, bias_aligned)
        of = dict(q=q, k=k, v=v) | {name: options.array(name) for name in OPTION_ARRAYS}
        aux = {daux_name(number): array.dtype for number, array in enumerate(forward.aux)}
        wanted = _wanted(wanted, of, aux)
        wanted_aux = tuple(number for number, name in enumerate(aux) if name in wanted)
        wanted = tuple(name for name in GRADIENTS if name in wanted)
        if q.family == "foreign":
            raise TypeError(
                "q is an array of a bare protocol, of which numba_flash cannot make new ones for the gradients; "
                "pass arrays of NumPy, CuPy, torch, JAX or Numba"
            )
        _check_input("do", do, q, forward.o_shape, forward.dtype)
        _check_input("o", o, q, forward.o_shape, forward.dtype)
        _check_input("lse", lse, q, forward.lse_shape, forward.compute_dtype)
        if 0 not in forward.lse_shape and element_strides(lse) != contiguous_strides(forward.lse_shape):
            raise ValueError(f"lse must be contiguous, but its strides are {lse.strides}")
        if dlse is not None:
            _check_input("dlse", dlse, q, forward.lse_shape, forward.compute_dtype)
        order = LAYOUTS.get(forward.layout, LAYOUTS["bshd"])
        shapes = {name: () if of[array] is None else of[array].shape for name, array in GRADIENT_OF.items()}
        of_dlse = () if dlse is None else element_strides(dlse)
        batch, head, query = (0,) * (3 - len(of_dlse)) + of_dlse
        return BackwardProblem(
            dataclasses.replace(forward, o_strides=axes_strides(element_strides(o), order)),
            wanted,
            wanted_aux,
            axes_strides(element_strides(do), order),
            dlse is not None,
            (batch, head, query),
            strides=tuple(_strides(name, shapes[name], order) for name in GRADIENTS),
            shapes=tuple(shapes[name] if name in wanted else () for name in GRADIENTS),
        )


def _wanted(wanted: Any, arrays: dict[str, Layout | None], aux: dict[str, str]) -> tuple[str, ...]:
    """arrays: by name, those that have gradients. aux: the dtype of each, by the name of its gradient."""
    names = ", ".join((*GRADIENTS, *aux))
    if not isinstance(wanted, tuple) or not all(isinstance(name, str) for name in wanted):
        raise TypeError(f"wanted must be a tuple of names of {names}, not {wanted!r}")
    unknown = [name for name in wanted if name not in GRADIENTS and name not in aux]
    if unknown and unknown[0].startswith("daux[") and not aux:
        raise ValueError(f"wanted names {unknown[0]}, but no aux is given")
    if unknown or not wanted:
        raise ValueError(f"wanted must name some of {names}, not {wanted!r}")
    for name, dtype in aux.items():
        if name in wanted and "float" not in dtype:
            raise TypeError(f"wanted names {name}, but {name[1:]} is {dtype}, and real numbers alone have a gradient")
    for name, of in GRADIENT_OF.items():
        if name in wanted and arrays[of] is None:
            raise ValueError(f"wanted names {name}, but no {of} was given")
    return wanted


def _check_input(name: str, array: Layout, q: Layout, shape: tuple[int, ...], dtype: str) -> None:
    """Checks an array that only the backward takes; it may be read-only and have any strides."""
    check_one_place({"q": q, name: array})
    check_strides(name, array)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, not {array.shape}")
    if array.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, not {array.dtype}; {conversion(name, array.family, dtype)}")


def _strides(name: str, shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a gradient, which is contiguous. order: that of the dimensions of dq, dk and dv."""
    strides = contiguous_strides(shape)
    if name in ("dq", "dk", "dv"):
        return axes_strides(strides, order)
    return (0,) * (RANKS[name] - len(strides)) + strides
