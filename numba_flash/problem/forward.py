"""Problem: one attention problem, checked. Every mistake that a caller can make in it is reported here."""

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..arrays import DTYPES, Layout
from ..arrays.dtypes import COMPUTE_DTYPE, conversion
from ..functions import NARROW
from .option_checks import (
    MAX_EXTENT,
    AuxArray,
    OptionArray,
    aux_arrays,
    number_of,
    option_array,
    q_offset_of,
    window_sides,
)
from .options import ARRAYS, FUNCTIONS, NUMBERS, SEEDED, Options, Packed, Uses, uses
from .ranges import UNBOUNDED, row_keys
from .strides import Strides, axes_strides, check_strides, contiguous_strides, element_strides

if TYPE_CHECKING:
    from ..functions.function import Function
    from .pages import Pages

LAYOUTS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3)}  # the indices of batch, head, seqlen and dim in the shape

AUTOCAST = " (compat.torch.scaled_dot_product_attention casts as torch.autocast says)"


@dataclass(frozen=True)
class Problem:
    """Says what to compute, never how or where. Frozen and hashable; `Problem.of` creates and checks it.

    Strides are in elements of their own array and always in the order (batch, head, seqlen, dim), whatever the caller's
    layout was. Broadcast dimensions have stride 0; negative strides are allowed.
    """

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str  # of q, k, v and o: "float16", "bfloat16", "float32" or "float64"
    layout: str  # "bhsd" or "bshd", or "packed"; it affects only the shape of the outputs
    q_strides: Strides
    k_strides: Strides
    v_strides: Strides
    o_strides: Strides
    scale: float
    left: int | None  # causal and window combined; None: unbounded
    right: int | None
    q_offset: int  # the position of query 0, as far as the host knows it
    q_offset_source: str  # added to it per batch: "number" nothing, "seqlens_k" seqlens_k[b], "array" q_offset[b],
    # "sequence" the sequence's valid keys less its queries
    numbers: tuple[tuple[str, float], ...]  # other numbers of the score, as (option, value)
    arrays: tuple[OptionArray, ...]  # arrays given as options
    functions: tuple[tuple[str, "Function"], ...]  # the caller's own, as (option, function)
    aux: tuple[AuxArray, ...]  # the arrays that they read
    return_lse: bool
    alignment: int  # q, k, v and out begin at multiples of so many bytes: 16 or a lower power of two
    packed: tuple[int, int] | None = None  # packed sequences: the rows of q and of k (packed.py)
    pages: "Pages | None" = None  # the pages in which k and v lie (kvcache.py)
    kept: bool = False  # a BlockMask keeps what is found about mask_mod
    as_nodes: bool = False  # for a cache: a node of each row instead of o and lse (dispatch/kvcache_nodes.py)
    o_shape: tuple[int, ...] = field(init=False, repr=False, compare=False)  # of the output, in the caller's layout
    _hash: int = field(init=False, repr=False, compare=False)

    wanted: ClassVar[None] = None  # no gradients, other than of a BackwardProblem

    def __post_init__(self) -> None:
        # Every call needs both.
        if self.packed is None:
            extents = (self.batch, self.heads, self.seqlen_q, self.head_dim_v)
            object.__setattr__(self, "o_shape", tuple(extents[axis] for axis in LAYOUTS[self.layout]))
        else:
            object.__setattr__(self, "o_shape", (self.packed[0], self.heads, self.head_dim_v))
        facts = [getattr(self, name) for name, about in self.__dataclass_fields__.items() if about.compare]
        object.__setattr__(self, "_hash", hash(tuple(facts)))

    def __hash__(self) -> int:
        return self._hash

    def if_kept(self, kept: bool) -> "Problem":
        return dataclasses.replace(self, kept=True) if kept else self

    @property
    def forward(self) -> "Problem":
        """The problem itself: a BackwardProblem has one, too, and a kernel's facts follow from either."""
        return self

    @property
    def compute_dtype(self) -> str:
        """The dtype of accumulators and of lse."""
        return COMPUTE_DTYPE[self.dtype]

    @property
    def widest(self) -> int:
        """The larger head_dim, of q and of v."""
        return max(self.head_dim, self.head_dim_v)

    @property
    def group(self) -> int:
        """How many query heads share a KV head."""
        return self.heads // max(self.heads_kv, 1)

    @property
    def every_key(self) -> bool:
        """Whether positions remove no key: there is neither causal nor a window."""
        return self.left is None and self.right is None

    @property
    def most_keys(self) -> bool:
        """Whether there are more keys than queries, and no window: so most keys are seen by all queries, as far as
        positions are known."""
        return self.left is None and self.seqlen_k > self.seqlen_q

    @property
    def lse_shape(self) -> tuple[int, ...]:
        if self.packed is not None:
            return (self.heads, self.packed[0])
        return (self.batch, self.heads, self.seqlen_q)

    @property
    def nodes_shape(self) -> tuple[int, ...]:
        """For each row O before its division by l, then m and l."""
        return (*self.lse_shape, self.head_dim_v + 2)

    @property
    def sides(self) -> tuple[int, int]:
        """left and right as `ranges` takes them."""
        return UNBOUNDED if self.left is None else self.left, UNBOUNDED if self.right is None else self.right

    def keys_seen(self, query: int) -> tuple[int, int]:
        """The keys [first, end) that a query sees by its position, as far as is known without reading q_offset= or
        seqlens_k=: else all keys are valid, and the last query has the position of the last key."""
        known = self.q_offset_source == "number"
        start = self.q_offset if known else self.seqlen_k - self.seqlen_q
        return row_keys(start + query, *self.sides, self.seqlen_k)

    def number(self, name: str) -> float | None:
        """The value of a number of the score; None if it was not given."""
        return self.scale if name == "scale" else dict(self.numbers).get(name)

    @property
    def narrow(self) -> bool:
        """Whether functions get only numbers from 0 to NARROW, as far as is known without reading q_offset= or
        seqlens_k=, and read nothing farther than NARROW elements from an array's first. False without functions."""
        last = self.q_offset + self.seqlen_q + (self.seqlen_k if self.q_offset_source == "seqlens_k" else 0)
        known = bool(self.functions) and self.q_offset_source in ("number", "seqlens_k") and self.q_offset >= 0
        reach = [sum(n * abs(by) for n, by in zip(x.shape, x.strides, strict=True)) for x in self.aux]
        return known and max(last, self.seqlen_k, self.heads, self.batch, *reach) <= NARROW

    @property
    def seeded(self) -> bool:
        """Whether each call needs a seed."""
        return self.number(SEEDED) is not None

    def array(self, name: str) -> OptionArray | None:
        """An array option, or None."""
        return next((array for array in self.arrays if array.name == name), None)

    def function(self, name: str) -> "Function | None":
        """A function option, or None."""
        return dict(self.functions).get(name)

    @functools.cached_property
    def uses(self) -> Uses:
        """The options that a kernel is compiled for. scale is left out, because every problem has it."""
        given: dict[str, Any] = {array.name: array.dtype for array in self.arrays} | dict(self.functions)
        if self.aux:
            given["aux"] = tuple((array.dtype, len(array.shape)) for array in self.aux)
        return uses(**given, **dict.fromkeys(dict(self.numbers), True))

    @staticmethod
    def of(
        q: Layout, k: Layout, v: Layout, options: Options, out: Layout | None = None, out_lse: Layout | None = None,
        return_lse: Any = False, alignment: int = 16, bias_aligned: bool = False,
    ) -> "Problem":  # fmt: skip
        """Checks a problem. options: with layouts and Functions. bias_aligned: bias begins at a multiple of 16
        bytes."""
        causal, layout, packed = options.causal, options.layout, None
        if isinstance(layout, Packed):
            from . import packed as packing  # a plain call does not load it

            layout = "packed"
        elif not isinstance(layout, str) or layout not in LAYOUTS:
            raise ValueError(f'layout must be "bhsd" or "bshd", not {layout!r}')
        check_bool("causal", causal)
        check_bool("return_lse", return_lse)
        *own, aux = options.functions or (None, ())
        given = _given({"q": q, "k": k, "v": v, "out": out, "the lse of out": out_lse}, options, aux)
        _check_dtypes(q, k, v)
        order = LAYOUTS.get(layout, LAYOUTS["bshd"])
        if layout == "packed":
            q, k, v = packing.one_entry("q", q), packing.one_entry("k", k), packing.one_entry("v", v)
        batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v = _sizes(q, k, v, layout)
        if layout == "packed":
            packed = seqlen_q, seqlen_k
            batch, seqlen_q, seqlen_k = packing.sizes(options, *packed)
            _check_extents(seqlen_q, seqlen_k, batch * heads, f"there are {batch} sequences and {heads} heads")
        left, right = window_sides(options.window)
        if causal:
            right = 0  # no window reaches less far
        number, source = 0, "array" if "q_offset" in given else "sequence"
        if "q_offset" not in given and not (packed and options.q_offset is None):
            number, source = q_offset_of(options.q_offset, seqlen_q, seqlen_k, "seqlens_k" in given)
        o_shape = tuple((batch, heads, seqlen_q, head_dim_v)[axis] for axis in order)
        lse_shape: tuple[int, ...] = (batch, heads, seqlen_q)
        if packed:
            o_shape, lse_shape = (packed[0], heads, head_dim_v), (heads, packed[0])
        o_strides = contiguous_strides(o_shape)
        if out is not None:
            check_result("out", out, o_shape, q.dtype, f"(layout {layout!r})")
            o_strides = element_strides(out)
        if out_lse is not None:
            _check_lse(out_lse, lse_shape, q.dtype)
        sizes = (batch, heads, seqlen_q, seqlen_k)
        arrays = tuple(
            option_array(option, given[option.name], q.dtype, sizes, bias_aligned)
            for option in ARRAYS
            if option.name in given
        )
        numbers = {name: number_of(name, x, q.dtype) for name, x in zip(NUMBERS, options.numbers, strict=True)}
        scale = numbers.pop("scale")
        functions = tuple((name, x) for name, x in zip(FUNCTIONS, own, strict=False) if x is not None)
        problem = Problem(
            batch,
            heads,
            heads_kv,
            seqlen_q,
            seqlen_k,
            head_dim,
            head_dim_v,
            q.dtype,
            layout,
            axes_strides(element_strides(q), order),
            axes_strides(element_strides(k), order),
            axes_strides(element_strides(v), order),
            axes_strides(o_strides, order),
            scale=head_dim**-0.5 if scale is None else scale,
            left=left,
            right=right,
            q_offset=number,
            q_offset_source=source,
            numbers=tuple([(name, x) for name, x in numbers.items() if x is not None]),
            arrays=arrays,
            functions=functions,
            aux=aux_arrays(aux, functions),
            return_lse=bool(return_lse),
            alignment=alignment,
            packed=packed,
        )
        if aux:
            check_reads(problem)
        return problem


class NoColumns(ValueError):
    """v has a head_dim_v of 0, which no kernel has: lse is all that there is to compute."""


def _given(own: dict[str, Layout | None], options: Options, aux: tuple[Any, ...]) -> dict[str, Layout]:
    """All arrays of a call by name. They are on one device and of one kind, and their strides can be used."""
    named: dict[str, Any] = own | {option.name: options.array(option.name) for option in ARRAYS}
    named |= {f"aux[{number}]": array for number, array in enumerate(aux)}
    given = {name: array for name, array in named.items() if isinstance(array, Layout)}
    check_one_place(given)
    for name, array in given.items():
        check_strides(name, array)
    return given


def _check_dtypes(q: Layout, k: Layout, v: Layout) -> None:
    if q.dtype not in DTYPES:
        raise TypeError(f"q must be float16, bfloat16, float32 or float64, not {q.dtype}; {_conversion(q)}")
    for name, other in (("k", k), ("v", v)):
        if other.dtype != q.dtype:
            raise TypeError(
                f"q, k and v must have one dtype, but q is {q.dtype} and {name} is {other.dtype}; "
                f"convert one of them{AUTOCAST if q.family == 'torch' else ''}"
            )


def _check_lse(lse: Layout, shape: tuple[int, ...], dtype: str) -> None:
    check_result("the lse of out", lse, shape, COMPUTE_DTYPE[dtype], "")
    if 0 not in shape and element_strides(lse) != contiguous_strides(shape):
        raise ValueError(f"the lse of out must be contiguous, but its strides are {lse.strides}")


def _conversion(q: Layout) -> str:
    """Says how to convert q to a dtype that is taken, without a loss of digits."""
    if q.dtype.startswith("complex"):
        return "attention of complex numbers is not defined here"
    if q.dtype.startswith(">"):  # of another byte order
        return conversion("q", q.family, q.dtype[1:])
    wide = "int32", "uint32", "int64", "uint64", "float80", "float96", "float128", "longdouble"
    return conversion("q", q.family, "float64" if q.dtype in wide else "float32")


def _sizes(q: Layout, k: Layout, v: Layout, layout: str) -> tuple[int, int, int, int, int, int, int]:
    """batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v of arrays that fit together."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if len(array.shape) != 4:
            names = "(batch, heads, seqlen, head_dim)" if layout == "bhsd" else "(batch, seqlen, heads, head_dim)"
            raise ValueError(f"{name} must have 4 dimensions {names} in layout {layout!r}, not shape {array.shape}")
    order = LAYOUTS.get(layout, LAYOUTS["bshd"])
    batch, heads, seqlen_q, head_dim = (q.shape[axis] for axis in order)
    batch_k, heads_kv, seqlen_k, head_dim_k = (k.shape[axis] for axis in order)
    batch_v, heads_v, seqlen_v, head_dim_v = (v.shape[axis] for axis in order)
    begin = 1 if layout == "packed" else 0
    shapes = f"q has shape {q.shape[begin:]}, k {k.shape[begin:]}, v {v.shape[begin:]} in layout {layout!r}"
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
    if head_dim == 0:
        raise ValueError(f"head_dim must be at least 1, but {shapes}")
    if head_dim_v == 0:
        raise NoColumns(f"head_dim_v must be at least 1 here, but {shapes}; attention() and attention_lse() take 0")
    _check_extents(seqlen_q, seqlen_k, batch * heads, shapes)
    return batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v


def _check_extents(seqlen_q: int, seqlen_k: int, heads: int, shapes: str) -> None:
    if max(seqlen_q, seqlen_k, heads) > MAX_EXTENT:
        raise ValueError(f"seqlen and batch * heads must be at most 2**31 - 2**16, but {shapes}")


def check_reads(p: Problem) -> None:
    """Raises IndexError for a read outside an array of aux that follows from the shapes."""
    from ..functions import reads

    if 0 in (p.batch, p.heads, p.seqlen_q, p.seqlen_k):
        return
    first, last = p.q_offset, p.q_offset + p.seqlen_q - 1  # positions of queries, and of those that see a key
    low = first if p.right is None else max(first, -p.right)
    high = last if p.left is None else min(last, p.seqlen_k - 1 + p.left)
    decided = p.array("seqlens_k") or p.array("mask") or p.packed or p.q_offset_source != "number"
    if not decided and low > high:
        return  # no query sees a key
    everywhere: dict[str, tuple[int, int] | None] = dict(
        b=(0, p.batch - 1),
        h=(0, p.heads - 1),
        q_pos=(low, high),
        k_pos=(
            0 if p.left is None else max(0, low - p.left),
            p.seqlen_k - 1 if p.right is None else min(p.seqlen_k - 1, high + p.right),
        ),
        q_index=(low - first, high - first),
    )
    arrays = {f"aux[{number}]": array.shape for number, array in enumerate(p.aux)}
    for option, function in p.functions:
        known = not decided and (option == "mask_mod" or p.function("mask_mod") is None)
        reads.check(option, function, everywhere if known else dict.fromkeys(everywhere), arrays)


def check_bool(name: str, value: Any) -> None:
    if type(value) is not bool and not isinstance(value, np.bool_):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def check_one_place(given: dict[str, Layout]) -> None:
    """Checks that all arrays are of one family and in one memory; nothing is copied silently."""
    (first, one), *others = given.items()
    for name, array in others:
        if array.family != one.family:
            raise TypeError(f"all arrays must be of one kind, but {first} is {one.family} and {name} is {array.family}")
        if array.device != one.device:
            place = ["host memory" if x.device is None else f"CUDA device {x.device}" for x in (one, array)]
            raise ValueError(f"all arrays must be in one place, but {first} is in {place[0]} and {name} in {place[1]}")


def check_result(name: str, out: Layout, shape: tuple[int, ...], dtype: str, where: str) -> None:
    """Checks an array to write to."""
    if out.shape != shape:
        raise ValueError(f"{name} must have shape {shape} {where}, not {out.shape}")
    if out.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, not {out.dtype}")
    if out.readonly:
        reason = "JAX arrays cannot be written; leave it out" if out.family == "jax" else "pass one that can be written"
        raise ValueError(f"{name} is read-only: {reason}")
    check_rows_apart(name, out)


def check_rows_apart(name: str, out: Layout) -> None:
    """Checks that no element of an array to write to is at the address of another one."""
    if 0 in out.shape:
        return  # no element to write twice; a library may give an empty array any strides
    reach = 1  # extent of the smaller dimensions; a smaller stride would write an element twice
    for stride, extent in sorted((abs(s), n) for s, n in zip(out.strides, out.shape, strict=True) if n > 1):
        if stride * out.unit < reach:
            raise ValueError(f"{name} has strides {out.strides}, by which several results share one element")
        reach += stride * out.unit * (extent - 1)
