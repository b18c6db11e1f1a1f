"""Random problems: arrays of every kind, and options in every combination."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..problem.options import (
    SEEDED as SEEDED,  # a feature only tested if named: only our functions drop these weights
)
from . import functions

DTYPES = ("float16", "bfloat16", "float32", "float64")
FEATURES = ("causal", "window", "q_offset", "seqlens_k", "softcap", "alibi_slopes", "bias", "mask", "sinks")
FUNCTIONS = ("score_mod", "mask_mod")  # features with a function of the caller: only tested if named
STRIDES = ("plain", "transposed", "sliced", "negative", "broadcast", "fortran")


@dataclass
class Case:
    """One problem: arrays in `layout` order and the keyword arguments of attention()."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self, move: Callable[[np.ndarray], Any] = lambda x: x) -> dict[str, Any]:
        """The arguments of attention(); `move` turns each NumPy array into the caller's kind."""
        moved = {name: move(x) if isinstance(x, np.ndarray) else x for name, x in self.options.items()}
        if "aux" in moved:
            moved["aux"] = tuple(map(move, moved["aux"]))
        return dict(q=move(self.q), k=move(self.k), v=move(self.v), **moved)

    @property
    def dtype(self) -> str:
        return self.q.dtype.name

    def __repr__(self) -> str:
        def about(x: Any) -> str:
            if isinstance(x, tuple):
                return f"({', '.join(map(about, x))})"
            if callable(x):
                return str(getattr(x, "__name__", x))
            return f"{x.dtype}{list(x.shape)} strides {x.strides}" if isinstance(x, np.ndarray) else repr(x)

        options = "".join(f", {name}={about(x)}" for name, x in self.options.items())
        return f"Case(q={about(self.q)}, k={about(self.k)}, v={about(self.v)}{options})"


class Numbers:
    """The three kinds of random choice that make a case, by NumPy's generator. hypothesis offers them, too."""

    def __init__(self, seed: int):
        self._generator = np.random.default_rng(seed)

    def integer(self, low: int, high: int) -> int:
        return int(self._generator.integers(low, high + 1))

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.integer(0, len(options) - 1)]

    def subset(self, options: Sequence[Any]) -> list[Any]:
        return [x for x in options if self.integer(0, 3) == 0]


def random_cases(count: int, seed: int, **limits: Any) -> Iterator[Case]:
    """Yields `count` cases from a seed; limits are those of `make_case`."""
    for number in range(count):
        yield make_case(Numbers(seed * 1_000_003 + number), **limits)


def cases(**limits: Any) -> Any:
    """A hypothesis strategy of cases; limits are those of `make_case`."""
    from hypothesis import strategies as st

    class Drawn:
        def __init__(self, draw: Any):
            self._draw = draw

        def integer(self, low: int, high: int) -> int:
            return self._draw(st.integers(low, high))

        def choice(self, options: Sequence[Any]) -> Any:
            return self._draw(st.sampled_from(list(options)))

        def subset(self, options: Sequence[Any]) -> list[Any]:
            return self._draw(st.lists(st.sampled_from(list(options)), unique=True)) if options else []

    return st.composite(lambda draw: make_case(Drawn(draw), **limits))()


def make_case(
    numbers: Any,
    *,
    dtypes: Sequence[str] = DTYPES,
    features: Sequence[str] = FEATURES,
    head_dims: Sequence[int] = (1, 7, 8, 16, 32, 59, 64),
    max_batch: int = 3,
    max_heads_kv: int = 2,
    max_seqlen: int = 70,
    layouts: Sequence[str] = ("bhsd", "bshd"),
    strange_strides: bool = True,
) -> Case:
    """One case. numbers: an object with the methods of Numbers, which makes all random choices."""
    dtype, layout = numbers.choice(dtypes), numbers.choice(layouts)
    batch, heads_kv, group = numbers.integer(0, max_batch), numbers.integer(1, max_heads_kv), numbers.integer(1, 3)
    seqlen_q, seqlen_k = numbers.integer(0, max_seqlen), numbers.integer(0, max_seqlen)
    head_dim, head_dim_v = numbers.choice(head_dims), numbers.choice(head_dims)
    heads = heads_kv * group
    generator = np.random.default_rng(numbers.integer(0, 2**32 - 1))
    size = 1.0 if numbers.integer(0, 3) else 8.0  # sometimes scores so large that one key has all the weight

    def array(heads: int, seqlen: int, dim: int) -> np.ndarray:
        shape = (batch, heads, seqlen, dim) if layout == "bhsd" else (batch, seqlen, heads, dim)
        how = numbers.choice(STRIDES) if strange_strides else "plain"
        return strided(generator.standard_normal(shape) * size, dtype, how)

    q, k, v = (
        array(heads, seqlen_q, head_dim),
        array(heads_kv, seqlen_k, head_dim),
        array(heads_kv, seqlen_k, head_dim_v),
    )
    chosen = numbers.subset(features)
    options: dict[str, Any] = dict(layout=layout)
    scores = (batch, heads, seqlen_q, seqlen_k)
    if "causal" in chosen:
        options["causal"] = True
    if "window" in chosen:
        options["window"] = tuple(numbers.choice((None, 0, 1, 5, 40, 1000)) for _ in range(2))
    if "seqlens_k" in chosen:
        options["seqlens_k"] = generator.integers(0, seqlen_k + 1, batch).astype(np.int32)
    if "q_offset" in chosen:
        number = numbers.integer(-80, 80)
        per_batch = numbers.integer(0, 1) == 1
        options["q_offset"] = (number + np.arange(batch)).astype(np.int32) if per_batch else number
    if "softcap" in chosen:
        options["softcap"] = numbers.choice((0.5, 5.0, 50.0))
    if "alibi_slopes" in chosen:
        shape = (heads,) if numbers.integer(0, 1) else (batch, heads)
        options["alibi_slopes"] = generator.random(shape).astype(np.float32)
    if "bias" in chosen:
        shape = tuple(numbers.choice((1, n)) for n in scores)
        options["bias"] = generator.standard_normal(shape).astype(numbers.choice(("float32", dtype)))
    if "mask" in chosen:
        shape = tuple(numbers.choice((1, n)) for n in scores)
        options["mask"] = generator.random(shape) < numbers.choice((0.1, 0.5, 0.9))
    if "sinks" in chosen:
        shape = (heads,) if numbers.integer(0, 1) else (batch, heads)
        values = generator.standard_normal(shape) * 3
        values[generator.random(shape) < 0.1] = -np.inf
        options["sinks"] = values.astype(numbers.choice(("float32", dtype)))
    if SEEDED in chosen:
        options |= {SEEDED: numbers.choice((1e-9, 0.1, 0.5, 0.9)), "seed": numbers.integer(0, 2**63 - 1)}
    for name, known in (("score_mod", functions.SCORES), ("mask_mod", functions.MASKS)):
        if name in chosen:
            options[name] = numbers.choice(known)
    if "score_mod" in options or "mask_mod" in options:
        options["aux"] = functions.aux_for(batch, heads, seqlen_q, seqlen_k, generator, dtype)
    return Case(q, k, v, options)


def strided(values: np.ndarray, dtype: str, how: str) -> np.ndarray:
    """The values as an array with unusual strides. how: one of STRIDES."""
    values = values.astype(dtype)
    if how == "transposed":
        return np.ascontiguousarray(values.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    if how == "sliced":  # every second element of a larger array; a wrong read gives a wrong value
        larger = np.full(tuple(2 * n + 1 for n in values.shape), np.nan, values.dtype)
        view = larger[tuple(slice(1, None, 2) for _ in values.shape)]
        view[...] = values
        return view
    if how == "negative":
        return np.ascontiguousarray(values[:, :, ::-1, ::-1])[:, :, ::-1, ::-1]
    if how == "broadcast" and values.shape[0]:
        return np.broadcast_to(values[:1], values.shape)
    if how == "fortran":
        return np.asfortranarray(values)
    return values


def rows_padded(x: np.ndarray) -> np.ndarray:
    """A copy whose rows begin at multiples of 16 bytes, as tensor core kernels require, with NaN between the rows.

    The axes keep their order in memory. An array whose rows are aligned, or not contiguous along dim, stays as it is.
    """
    size = x.itemsize
    if x.ndim != 4 or not x.size or x.strides[3] != size or not any(s % 16 for s in x.strides[:3]):
        return x
    axes = [int(axis) for axis in np.argsort([-abs(s) for s in x.strides[:3]], kind="stable")]
    columns = -(-x.shape[3] * size // 16) * 16 // size
    larger = np.full([*(x.shape[axis] for axis in axes), columns], np.nan, x.dtype)
    view = larger.transpose(*np.argsort(axes), 3)[..., : x.shape[3]]
    view[...] = x
    return view


def bfloat16(values: Any) -> np.ndarray:
    """values as a bfloat16 NumPy array."""
    import ml_dtypes

    return np.asarray(values).astype(ml_dtypes.bfloat16)


def heads_first(case: Case, x: np.ndarray) -> np.ndarray:
    return x if case.options.get("layout", "bhsd") == "bhsd" else x.transpose(0, 2, 1, 3)
