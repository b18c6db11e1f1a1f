"""Random problems of packed sequences, and checks of each sequence's results against the oracle."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..api.backward import AttentionGradients
from ..problem.options import OF_HEADS, OF_PAIRS, SCORE_NUMBERS
from .cases import FEATURES as OF_CASES, Case, Numbers, strided
from .checks import check, check_gradients

FEATURES = tuple(name for name in OF_CASES if name not in OF_PAIRS)


@dataclass(repr=False)
class PackedCase:
    """One problem: arrays (total, heads, dim) and the keyword arguments of attention_varlen()."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    cu_seqlens_q: np.ndarray
    cu_seqlens_k: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self, move: Callable[[np.ndarray], Any] = lambda x: x) -> dict[str, Any]:
        """The arguments of attention_varlen(); `move` turns each NumPy array into the caller's kind."""
        given = dict(cu_seqlens_q=self.cu_seqlens_q, cu_seqlens_k=self.cu_seqlens_k) | self.options
        moved = {name: move(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
        return dict(q=move(self.q), k=move(self.k), v=move(self.v), **moved)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {getattr(self, name).shape}" for name in "qkv")
        ends = f"cu_seqlens_q {self.cu_seqlens_q.tolist()}, cu_seqlens_k {self.cu_seqlens_k.tolist()}"
        return f"PackedCase({shapes} of {self.q.dtype.name}, {ends}, {self.options})"

    @property
    def batch(self) -> int:
        return len(self.cu_seqlens_q) - 1

    def queries(self, b: int) -> slice:
        """The rows of sequence b in q."""
        return slice(int(self.cu_seqlens_q[b]), int(self.cu_seqlens_q[b + 1]))

    def keys(self, b: int) -> slice:
        """The rows of sequence b's valid keys in k and v."""
        begin, end = int(self.cu_seqlens_k[b]), int(self.cu_seqlens_k[b + 1])
        lengths = self.options.get("seqlens_k")
        return slice(begin, end if lengths is None else begin + int(lengths[b]))

    def sequence(self, b: int) -> Case:
        """Sequence b as a problem of its own."""
        options = {name: x for name, x in self.options.items() if not name.startswith(("max_", "seqlens"))}
        if isinstance(offset := options.get("q_offset"), np.ndarray):
            options["q_offset"] = int(offset[b])
        for name in OF_HEADS:
            if name in options and options[name].ndim == 2:
                options[name] = options[name][b]
        return Case(
            one_entry(self.q[self.queries(b)]),
            one_entry(self.k[self.keys(b)]),
            one_entry(self.v[self.keys(b)]),
            options,
        )

    def outside(self, side: str) -> np.ndarray:
        """True for rows of q (or k) that belong to no sequence; for k, also for keys that are not valid."""
        rows = np.ones(len(self.q if side == "q" else self.k), bool)
        for b in range(self.batch):
            rows[self.queries(b) if side == "q" else self.keys(b)] = False
        return rows


def one_entry(x: np.ndarray) -> np.ndarray:
    """Rows (rows, heads, ...) as (1, heads, rows, ...)."""
    return np.ascontiguousarray(x.swapaxes(0, 1))[None]


def make_packed(
    numbers: Any,
    *,
    tile: int = 16,
    dtypes: Sequence[str] = ("float32",),
    features: Sequence[str] = FEATURES,
    head_dims: Sequence[int] = (1, 7, 8, 16, 32),
    max_batch: int = 4,
    tiles: int = 2,
    max_heads_kv: int = 2,
) -> PackedCase:
    """One case. numbers: an object with the methods of cases.Numbers. Lengths are 0, 1, around `tile`, and up to
    `tiles` tiles. Rows of no sequence hold NaN."""
    lengths = (0, 1, tile - 1, tile, tile + 1, tiles * tile - 3)
    batch, heads_kv, group = numbers.integer(0, max_batch), numbers.integer(1, max_heads_kv), numbers.integer(1, 3)
    heads, dtype = heads_kv * group, numbers.choice(dtypes)
    head_dim, head_dim_v = numbers.choice(head_dims), numbers.choice(head_dims)
    generator = np.random.default_rng(numbers.integer(0, 2**32 - 1))

    def ends() -> tuple[np.ndarray, int]:
        found = np.cumsum([numbers.choice((0, 3)), *(numbers.choice(lengths) for _ in range(batch))])
        return found.astype(np.int32), int(found[-1]) + numbers.choice((0, 5))

    def rows(count: int, of_heads: int, dim: int) -> np.ndarray:
        return strided(generator.standard_normal((1, count, of_heads, dim)), dtype, "plain")[0]

    (of_q, total_q), (of_k, total_k) = ends(), ends()
    chosen = numbers.subset(features)
    options: dict[str, Any] = {}
    if "causal" in chosen:
        options["causal"] = True
    if "window" in chosen:
        options["window"] = tuple(numbers.choice((None, 0, 1, 5, 40)) for _ in range(2))
    if "seqlens_k" in chosen:
        options["seqlens_k"] = generator.integers(0, np.diff(of_k) + 1).astype(np.int32)
    if "q_offset" in chosen:
        number = numbers.integer(-20, 20)
        options["q_offset"] = (number + np.arange(batch)).astype(np.int32) if numbers.integer(0, 1) else number
    options |= {name: numbers.choice((0.5, 5.0)) for name in SCORE_NUMBERS if name in chosen}
    for name in OF_HEADS:
        if name in chosen:
            shape = (heads,) if numbers.integer(0, 1) else (batch, heads)
            options[name] = generator.random(shape).astype(np.float32)
    if numbers.integer(0, 1):
        options["max_seqlen_q"] = int(max(np.diff(of_q), default=0))
        options["max_seqlen_k"] = int(max(np.diff(of_k), default=0))
    q, k, v = rows(total_q, heads, head_dim), rows(total_k, heads_kv, head_dim), rows(total_k, heads_kv, head_dim_v)
    case = PackedCase(q, k, v, of_q, of_k, options)
    q[case.outside("q")], k[case.outside("k")], v[case.outside("k")] = np.nan, np.nan, np.nan
    return case


def packed_case(seed: int, **limits: Any) -> PackedCase:
    """The case of a seed; limits are those of `make_packed`."""
    return make_packed(Numbers(seed), **limits)


def check_packed(case: PackedCase, o: np.ndarray, lse: np.ndarray, what: str = "attention_varlen") -> None:
    """Raise AssertionError unless each sequence's o and lse agree with the oracle, and other rows have 0 and -inf."""
    out = case.outside("q")
    assert not o[out].astype(np.float64).any() and (lse[:, out] == -np.inf).all(), f"{what}: outside, in {case}"
    for b in range(case.batch):
        rows = case.queries(b)
        check(case.sequence(b), one_entry(o[rows]), lse[None, :, rows], f"{what}: sequence {b}")


def outer_packed(case: PackedCase, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random do and dlse, with NaN in rows of no sequence."""
    generator = np.random.default_rng(seed)
    do = generator.standard_normal((*case.q.shape[:2], case.v.shape[2])).astype(case.q.dtype)
    dlse = generator.standard_normal(case.q.shape[1::-1])
    do[case.outside("q")] = np.nan
    return do, dlse.astype(np.float64 if case.q.dtype == np.float64 else np.float32)


def check_packed_gradients(
    case: PackedCase,
    gradients: AttentionGradients,
    do: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    dlse: np.ndarray,
    what: str = "attention_varlen_backward",
) -> None:
    """check_packed for the gradients dq, dk and dv made from do, o, lse and dlse."""
    for name, side in (("dq", "q"), ("dk", "k"), ("dv", "k")):
        nothing = getattr(gradients, name)[case.outside(side)]
        assert not nothing.astype(np.float64).any(), f"{what}: {name} outside, in {case}"
    for b in range(case.batch):
        rows, keys = case.queries(b), case.keys(b)
        own = AttentionGradients(
            one_entry(gradients.dq[rows]), one_entry(gradients.dk[keys]), one_entry(gradients.dv[keys])
        )
        of_all = [np.ascontiguousarray(x[None, :, rows]) for x in (lse, dlse)]
        of_rows = one_entry(do[rows]), one_entry(o[rows])
        check_gradients(case.sequence(b), own, *of_rows, of_all[0], of_all[1], f"{what}: sequence {b}")
