"""Problem: one attention problem, checked. Every mistake a caller can make in it is named here."""

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..arrays import AUX_DTYPES, DTYPES, ITEM_SIZE, Array, Layout, host_view
from ..functions.function import Function
from .options import ARRAYS, BY_NAME, FUNCTIONS, NUMBERS, Operands, Option, Options, Uses, uses

Strides = tuple[int, int, int, int]
Window = tuple[int | None, int | None]
LAYOUTS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3)}  # where batch, head, seqlen and dim stand in the shape
MAX_EXTENT = 2**31 - 1
FLOAT32 = np.finfo(np.float32)
OPERAND_NAMES = [
    {"o": "out", "lse": "the lse of out"}.get(name, name) for name in Operands._fields
]  # as callers know them


class OptionArray(NamedTuple):
    """An array given as an option of attention()."""

    name: str
    dtype: str
    strides: tuple[int, ...]  # in elements; 0 in dimensions that it is broadcast in
    pairs: bool = False  # of bias: keys 2 i and 2 i + 1 are one read, side by side at a multiple of their size


class AuxArray(NamedTuple):
    """One of the arrays that functions read."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements


@dataclass(frozen=True)
class Problem:
    """What to compute, never how or where. Frozen and hashable; `Problem.of` makes and checks it.

    Strides are in elements of their own array and always in the order (batch, head, seqlen, dim),
    whatever the caller's layout was; broadcast dimensions have stride 0; negative ones are allowed.
    """

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str  # of q, k, v and o: "float16", "bfloat16", "float32" or "float64"
    layout: str  # "bhsd" or "bshd"; only the outputs' shape depends on it
    q_strides: Strides
    k_strides: Strides
    v_strides: Strides
    o_strides: Strides
    scale: float
    left: int | None  # causal and window folded into one; None = unbounded
    right: int | None
    q_offset: int  # where query 0 stands, the part known on the host
    q_offset_source: str  # added to it per batch: "number" nothing, "seqlens_k" seqlens_k[b], "array" q_offset[b]
    numbers: tuple[tuple[str, float], ...]  # other numbers of the score, as (option, value)
    arrays: tuple["OptionArray", ...]  # arrays given as options
    functions: tuple[tuple[str, Function], ...]  # the caller's own, as (option, function)
    aux: tuple[AuxArray, ...]  # what they read
    return_lse: bool
    aligned: bool  # q, k, v and out begin at multiples of 16 bytes
    o_shape: tuple[int, ...] = field(init=False, repr=False, compare=False)  # the output's, in the caller's layout
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Both are asked for in every call.
        extents = (self.batch, self.heads, self.seqlen_q, self.head_dim_v)
        object.__setattr__(self, "o_shape", tuple(extents[axis] for axis in LAYOUTS[self.layout]))
        facts = [getattr(self, name) for name, about in self.__dataclass_fields__.items() if about.compare]
        object.__setattr__(self, "_hash", hash(tuple(facts)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def compute_dtype(self) -> str:
        """What is accumulated in, and the dtype of lse."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return (self.batch, self.heads, self.seqlen_q)

    def number(self, name: str) -> float | None:
        """The value of a number of the score; None where it was not given."""
        return self.scale if name == "scale" else dict(self.numbers).get(name)

    def array(self, name: str) -> "OptionArray | None":
        """An array given as an option, or None."""
        return next((array for array in self.arrays if array.name == name), None)

    def function(self, name: str) -> Function | None:
        """A function given as an option, or None."""
        return dict(self.functions).get(name)

    @property
    def uses(self) -> Uses:
        """What a kernel is compiled for; scale, which every problem has, is not named."""
        given: dict[str, Any] = {array.name: array.dtype for array in self.arrays} | dict(self.functions)
        if self.aux:
            given["aux"] = tuple((array.dtype, len(array.shape)) for array in self.aux)
        return uses(**given, **dict.fromkeys(dict(self.numbers), True))

    @staticmethod
    def of(
        q: Layout, k: Layout, v: Layout, options: Options, out: Layout | None = None, out_lse: Layout | None = None,
        return_lse: Any = False, aligned: bool = True, bias_aligned: bool = False,
    ) -> "Problem":  # fmt: skip
        """Check a problem. options: with layouts and Functions. bias_aligned: bias begins at a multiple of 8 bytes."""
        causal, layout = options.causal, options.layout
        if not isinstance(layout, str) or layout not in LAYOUTS:
            raise ValueError(f'layout must be "bhsd" or "bshd", not {layout!r}')
        check_bool("causal", causal)
        check_bool("return_lse", return_lse)
        *own, aux = options.functions or (None, ())
        named = {"q": q, "k": k, "v": v, "out": out, "the lse of out": out_lse}
        named |= {option.name: options.array(option.name) for option in ARRAYS}
        named |= {f"aux[{number}]": array for number, array in enumerate(aux)}
        given = {name: array for name, array in named.items() if isinstance(array, Layout)}
        check_one_place(given)
        for name, array in given.items():
            check_strides(name, array)

        if q.dtype not in DTYPES:
            raise TypeError(
                f"q must be float16, bfloat16, float32 or float64, not {q.dtype}; convert it first, as with "
                + ("q.float()" if q.family == "torch" else "q.astype('float32')")
            )
        for name, other in (("k", k), ("v", v)):
            if other.dtype != q.dtype:
                raise TypeError(
                    f"q, k and v must have one dtype, but q is {q.dtype} and {name} is {other.dtype}; "
                    "convert one of them"
                )
        order = LAYOUTS[layout]
        batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v = _sizes(q, k, v, layout)
        left, right = window_sides(options.window)
        if causal:
            right = 0  # no window reaches less far
        number, source = 0, "array"
        if "q_offset" not in given:
            number, source = _q_offset(options.q_offset, seqlen_q, seqlen_k, "seqlens_k" in given)
        o_shape = tuple((batch, heads, seqlen_q, head_dim_v)[axis] for axis in order)
        contiguous = contiguous_strides(o_shape)
        o_strides = (contiguous[order[0]], contiguous[order[1]], contiguous[order[2]], contiguous[order[3]])
        if out is not None:
            _check_output("out", out, o_shape, q.dtype, f"(layout {layout!r})")
            o_strides = ordered_strides(out, order)
        if out_lse is not None:
            lse_shape = (batch, heads, seqlen_q)
            _check_output("the lse of out", out_lse, lse_shape, "float64" if q.dtype == "float64" else "float32", "")
            if 0 not in lse_shape and element_strides(out_lse) != contiguous_strides(lse_shape):
                raise ValueError(f"the lse of out must be contiguous, but its strides are {out_lse.strides}")
        sizes = (batch, heads, seqlen_q, seqlen_k)
        arrays = tuple(
            _option_array(option, given[option.name], q.dtype, sizes, bias_aligned)
            for option in ARRAYS
            if option.name in given
        )
        numbers = dict(zip(NUMBERS, options.numbers, strict=True))
        scale = _number("scale", numbers.pop("scale"), q.dtype)
        functions = tuple((name, x) for name, x in zip(FUNCTIONS, own, strict=False) if x is not None)
        return Problem(
            batch,
            heads,
            heads_kv,
            seqlen_q,
            seqlen_k,
            head_dim,
            head_dim_v,
            q.dtype,
            layout,
            ordered_strides(q, order),
            ordered_strides(k, order),
            ordered_strides(v, order),
            o_strides,
            scale=head_dim**-0.5 if scale is None else scale,
            left=left,
            right=right,
            q_offset=number,
            q_offset_source=source,
            numbers=tuple(
                (name, value) for name, x in numbers.items() if (value := _number(name, x, q.dtype)) is not None
            ),
            arrays=arrays,
            functions=functions,
            aux=_aux(aux, functions),
            return_lse=bool(return_lse),
            aligned=aligned,
        )


def _sizes(q: Layout, k: Layout, v: Layout, layout: str) -> tuple[int, int, int, int, int, int, int]:
    """batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v of arrays that fit together."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if len(array.shape) != 4:
            names = "(batch, heads, seqlen, head_dim)" if layout == "bhsd" else "(batch, seqlen, heads, head_dim)"
            raise ValueError(f"{name} must have 4 dimensions {names} in layout {layout!r}, not shape {array.shape}")
    order = LAYOUTS[layout]
    batch, heads, seqlen_q, head_dim = (q.shape[axis] for axis in order)
    batch_k, heads_kv, seqlen_k, head_dim_k = (k.shape[axis] for axis in order)
    batch_v, heads_v, seqlen_v, head_dim_v = (v.shape[axis] for axis in order)
    shapes = f"q has shape {q.shape}, k {k.shape}, v {v.shape} in layout {layout!r}"
    for what, of_q, of_k, of_v in (
        ("batch of q, k and v", batch, batch_k, batch_v),
        ("head_dim of q and k", head_dim, head_dim_k, head_dim),
        ("heads of k and v", heads_kv, heads_kv, heads_v),
        ("seqlen of k and v", seqlen_k, seqlen_k, seqlen_v),
    ):
        if not of_q == of_k == of_v:
            raise ValueError(f"{what} must be the same, but {shapes}")
    if heads % heads_kv if heads_kv else heads:
        raise ValueError(
            f"the heads of q must be a multiple of those of k and v, but {heads} is not of {heads_kv}: {shapes}"
        )
    if head_dim == 0 or head_dim_v == 0:
        raise ValueError(f"head_dim must be at least 1, but {shapes}")
    if max(seqlen_q, seqlen_k, batch * heads) > MAX_EXTENT:
        raise ValueError(f"seqlen and batch * heads must stay below 2**31, but {shapes}")
    return batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def check_one_place(given: dict[str, Layout]) -> None:
    """All arrays of one family and in one memory; nothing is copied across in silence."""
    (first, one), *others = given.items()
    for name, array in others:
        if array.family != one.family:
            raise TypeError(f"all arrays must be of one kind, but {first} is {one.family} and {name} is {array.family}")
        if array.device != one.device:
            place = ["host memory" if x.device is None else f"CUDA device {x.device}" for x in (one, array)]
            raise ValueError(f"all arrays must be in one place, but {first} is in {place[0]} and {name} in {place[1]}")


def check_strides(name: str, array: Layout) -> None:
    size = ITEM_SIZE.get(array.dtype, 1)
    if any(s * array.unit % size for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        strides = tuple(s * array.unit for s in array.strides)
        raise ValueError(f"{name} has strides {strides} in bytes, which are not multiples of its {size}-byte elements")


def element_strides(array: Layout) -> tuple[int, ...]:
    """Strides in elements. A dimension of one element is never stepped along: its stride is 0."""
    size = ITEM_SIZE[array.dtype]
    return tuple(s * array.unit // size if n > 1 else 0 for s, n in zip(array.strides, array.shape, strict=True))


def ordered_strides(array: Layout, order: tuple[int, ...]) -> Strides:
    strides = element_strides(array)
    return (strides[order[0]], strides[order[1]], strides[order[2]], strides[order[3]])


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous array, by the same rule as `element_strides`."""
    return tuple(math.prod(shape[axis + 1 :]) if extent > 1 else 0 for axis, extent in enumerate(shape))


def _check_output(name: str, out: Layout, shape: tuple[int, ...], dtype: str, where: str) -> None:
    if out.shape != shape:
        raise ValueError(f"{name} must have shape {shape} {where}, not {out.shape}")
    if out.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, not {out.dtype}")
    if out.readonly:
        reason = "JAX arrays cannot be written; leave it out" if out.family == "jax" else "pass one that can be written"
        raise ValueError(f"{name} is read-only: {reason}")
    if 0 in shape:
        return  # no element to hit twice; what strides an empty array has is its library's affair
    reach = 1  # how far the smaller dimensions reach; a stride below that would hit an element twice
    for stride, extent in sorted((abs(s), n) for s, n in zip(out.strides, out.shape, strict=True) if n > 1):
        if stride * out.unit < reach:
            raise ValueError(f"{name} has strides {out.strides}, by which several results share one element")
        reach += stride * out.unit * (extent - 1)


def window_sides(window: Any) -> Window:
    """(left, right) as Python ints or None."""
    if window is None:
        return None, None
    if isinstance(window, int | np.integer | float):
        raise ValueError(
            f"window must be a pair (left, right), not {window!r}: a bare number means different things elsewhere. A "
            "query at position p sees keys p - left to p + right, both included; None is unbounded. The last "
            f"{window} keys with its own, Mistral's sliding_window, are window=({window} - 1, 0); {window} before its "
            f"own, flash-attn's ({window}, 0), are ({window}, 0); {window} on either side, JAX's local_window_size, "
            f"are ({window}, {window})"
        )
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(f"window must be a pair (left, right), not {window!r}")
    return _window_side("left", window[0]), _window_side("right", window[1])


def _window_side(name: str, side: Any) -> int | None:
    if side is None:
        return None
    try:
        if isinstance(side, bool):
            raise TypeError
        value = operator.index(side)
    except TypeError:
        raise TypeError(f"window: {name} must be a whole number or None, not {side!r}") from None
    if value < 0:
        raise ValueError(f"window: {name} must be at least 0, not {value}; unbounded is None (flash-attn's -1)")
    return value if value <= 4 * MAX_EXTENT else None  # no two positions lie that far apart


def _q_offset(q_offset: Any, seqlen_q: int, seqlen_k: int, has_seqlens_k: bool) -> tuple[int, str]:
    if q_offset is None:  # bottom-right: the last query stands at the last valid key
        return (-seqlen_q, "seqlens_k") if has_seqlens_k else (seqlen_k - seqlen_q, "number")
    if isinstance(q_offset, bool | np.bool_):
        raise TypeError(f"q_offset must be a whole number, an int32 array (batch,) or None, not {q_offset!r}")
    try:
        number = operator.index(q_offset)
    except TypeError:
        raise TypeError(f"q_offset must be a whole number, an int32 array (batch,) or None, not {q_offset!r}") from None
    if abs(number) > MAX_EXTENT:
        raise ValueError(f"q_offset must stay below 2**31, not {number}")
    return number, "number"


def _number(name: str, value: Any, dtype: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a number or None, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {number}")
    if dtype != "float64" and abs(number) > float(FLOAT32.max):
        raise ValueError(f"{name} must fit into float32, in which {dtype} is computed, not {number}")
    least = 0.0 if dtype == "float64" else float(FLOAT32.tiny)  # below it float32 would divide by zero
    if BY_NAME[name].positive and number <= least:
        raise ValueError(f"{name} must be above {least:.3g} (None = none), not {number}")
    return number


def _option_array(
    option: Option, array: Layout, q_dtype: str, sizes: tuple[int, int, int, int], bias_aligned: bool
) -> OptionArray:
    strides = _strides(option, array, q_dtype, sizes)
    pairs = option.name == "bias" and bias_aligned and sizes[3] % 2 == 0 and strides[3] == 1
    return OptionArray(option.name, array.dtype, strides, pairs and not any(stride % 2 for stride in strides[:3]))


def _strides(option: Option, array: Layout, q_dtype: str, sizes: tuple[int, int, int, int]) -> tuple[int, ...]:
    """The strides by which kernels read an array that was given as an option. Checks its dtype and shape."""
    name, dtypes = option.name, tuple(dict.fromkeys(q_dtype if dtype == "q" else dtype for dtype in option.dtypes))
    if array.dtype not in dtypes and option.shape != "batch":
        if dtypes == ("bool",):
            raise TypeError(f"{name} must be bool (True = attend), not {array.dtype}; an additive one goes to bias=")
        raise TypeError(f"{name} must be {' or '.join(dtypes)} beside q of {q_dtype}, not {array.dtype}")
    if option.shape == "scores":
        return _broadcast_strides(name, array, sizes)
    return _by_head(name, array, *sizes[:2]) if option.shape == "heads" else _by_batch(name, array, sizes[0])


ARGUMENTS = dict(score_mod="score, b, h, q_pos, k_pos", mask_mod="b, h, q_pos, k_pos")  # of the caller's functions


def _aux(aux: tuple[Layout, ...], functions: tuple[tuple[str, Function], ...]) -> tuple[AuxArray, ...]:
    """The arrays that functions read. Checks that each function takes what it will be called with."""
    if aux and not functions:
        raise ValueError("aux is what score_mod and mask_mod read, and neither was given")
    for number, array in enumerate(aux):
        if array.dtype not in AUX_DTYPES:
            raise TypeError(f"aux[{number}] must be {', '.join(AUX_DTYPES)}, not {array.dtype}")
    for name, function in functions:
        wrong = function.takes(len(ARGUMENTS[name].split(", ")) + len(aux))
        if wrong:
            each = "".join(f", aux[{number}]" for number in range(len(aux)))
            raise TypeError(f"{name} is called with ({ARGUMENTS[name]}{each}), and of {function.where} {wrong}")
    return tuple(AuxArray(array.dtype, array.shape, element_strides(array)) for array in aux)


def _by_batch(name: str, array: Layout, batch: int) -> tuple[int, ...]:
    if array.dtype != "int32" or array.shape != (batch,):
        raise (TypeError if array.dtype != "int32" else ValueError)(
            f"{name} must be int32 of shape (batch,) = ({batch},), not {array.dtype} of shape {array.shape}"
        )
    return element_strides(array)


def _by_head(name: str, array: Layout, batch: int, heads: int) -> tuple[int, int]:
    strides = element_strides(array)
    if array.shape == (heads,):
        return (0, strides[0])
    if array.shape == (batch, heads):
        return (strides[0], strides[1])
    raise ValueError(
        f"{name} must have shape (heads,) = ({heads},) or (batch, heads) = ({batch}, {heads}), not {array.shape}"
    )


def _broadcast_strides(name: str, array: Layout, shape: tuple[int, ...]) -> Strides:
    """Strides that read `array` as if it had `shape`, by NumPy's rule: missing and 1-long axes repeat."""
    missing = len(shape) - len(array.shape)
    extents = (1,) * missing + array.shape
    if missing < 0 or any(have not in (1, want) for have, want in zip(extents, shape, strict=True)):
        raise ValueError(
            f"{name} must be broadcastable to (batch, heads, seqlen_q, seqlen_k) = {shape}, not shape {array.shape}"
        )
    strides = (0,) * missing + element_strides(array)
    return (strides[0], strides[1], strides[2], strides[3])


def check_memory(given: list[Any], problem: Problem) -> None:
    """What cannot be told from shapes: where the arrays lie, and lengths in host memory.

    given: an Array or None for each field of Operands. Calls that have more than q, k and v come here, so it hurries.
    """
    _, _, _, o, lse, *_ = given
    arrays = [array for array in given if array is not None]
    names = [*OPERAND_NAMES, *(f"aux[{number}]" for number in range(len(problem.aux)))]
    check_alignments(arrays, names, given)
    for written in (o, lse):
        if written is not None and _anything_near(written, arrays):
            check_overlap("out", written, zip(names, given, strict=True))
    if problem.array("seqlens_k") is not None:
        check_lengths(given[Operands._fields.index("seqlens_k")], problem)


def check_alignments(arrays: list[Array], names: Iterable[str], given: Iterable[Array | None]) -> None:
    """arrays: those of `given` that are there. Nearly always none of them is to be looked at by itself."""
    addresses = 0
    for array in arrays:
        addresses |= array.pointer
    if addresses & 7:  # no element is larger than 8 bytes
        for name, one in zip(names, given, strict=True):
            if one is not None:
                check_alignment(name, one)


def check_lengths(seqlens_k: Array | None, problem: Problem) -> None:
    """Lengths in host memory; on a device the kernels clamp them, because reading them would mean waiting."""
    if seqlens_k is not None and seqlens_k.layout.device is None and problem.batch:
        values = host_view(seqlens_k)
        if values.min() < 0 or values.max() > problem.seqlen_k:
            raise ValueError(f"seqlens_k must lie in 0 to seqlen_k = {problem.seqlen_k}, not {values.tolist()}")


def check_alignment(name: str, array: Array) -> None:
    """An element lies at a multiple of its size: a GPU stops the whole process otherwise."""
    size = ITEM_SIZE.get(array.layout.dtype, 1)
    if array.pointer % size:
        raise ValueError(f"{name} starts at address {array.pointer:#x}, not a multiple of its {size}-byte elements")


def _anything_near(written: Array, arrays: list[Array]) -> bool:
    """Whether another array's first and last byte are not both on one side of `written`: nearly never."""
    low, high = written.layout.byte_bounds
    low, high = written.pointer + low, written.pointer + high
    for array in arrays:
        if array is not written:
            other_low, other_high = array.layout.byte_bounds
            if low < array.pointer + other_high and array.pointer + other_low < high:
                return True
    return False


def check_overlap(name: str, written: Array, others: Iterable[tuple[str, Array | None]]) -> None:
    """An output shares no element with an input: tiles are read after others were written."""
    for other, array in others:
        if array is not None and array is not written and _share_elements(written, array):
            raise ValueError(f"{name} shares memory with {other}; nothing is computed in place")


def check_output(name: str, out: Array, like: Array) -> None:
    """An output for a function whose result has its input's shape, dtype and place."""
    check_one_place({"x": like.layout, name: out.layout})
    check_strides(name, out.layout)
    _check_output(name, out.layout, like.layout.shape, like.layout.dtype, "like x")
    check_alignment(name, out)
    check_overlap(name, out, [("x", like)])


def _share_elements(one: Array, other: Array) -> bool:
    try:
        return np.shares_memory(_address_view(one), _address_view(other), max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _address_view(array: Array) -> np.ndarray:
    """A NumPy array with the same addresses that is never read: only its extent matters."""

    class Interface:
        __array_interface__ = {
            "version": 3,
            "data": (array.pointer, True),
            "shape": array.layout.shape,
            "strides": tuple(s * array.layout.unit for s in array.layout.strides),
            "typestr": f"|V{ITEM_SIZE[array.layout.dtype]}",
        }

    return np.asarray(Interface())
