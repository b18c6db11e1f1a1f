"""check_kernel: anybody's attention function against the contract, promise by promise."""

import html
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .cases import FEATURES, Case, Numbers, make_case, strided
from .checks import check

HELD, FAILED, RAISED, LEFT_OUT = "held", "FAILED", "RAISED", "not tried"
WIDTH = 43  # characters of the longest promise
HEADER = f"{'promise':<{WIDTH}}  {'outcome':<9} {'of':>4}"
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129)  # around the tiles that kernels are made of


FULL: dict[str, Any] = dict(head_dims=(1, 7, 16, 32, 64), max_seqlen=130, count=12)
# 20 keys are two tiles of 16, of which the second is not full.
QUICK: dict[str, Any] = dict(head_dims=(4, 7), max_seqlen=20, count=2)


class Line(NamedTuple):
    promise: str
    outcome: str  # HELD, FAILED, RAISED or LEFT_OUT
    problems: int  # how many were tried
    note: str = ""  # the first failure, or why no problem was tried


@dataclass(frozen=True, repr=False)
class Report:
    """Which promises of the contract held. str() is a table; bool() is True if no tried promise failed."""

    lines: tuple[Line, ...]

    def __bool__(self) -> bool:
        return not any(line.outcome in (FAILED, RAISED) for line in self.lines)

    def __str__(self) -> str:
        return "\n".join([HEADER, *map(_row, self.lines), repr(self)])

    def __repr__(self) -> str:
        counts = [(outcome, sum(line.outcome == outcome for line in self.lines)) for outcome in (HELD, FAILED, RAISED)]
        found = ", ".join(f"{count} {outcome}" for outcome, count in counts if count)
        return f"<{found} of {len(self.lines)} promises>"

    def _repr_html_(self) -> str:
        cells = ["".join(f"<td>{html.escape(str(cell))}</td>" for cell in line) for line in self.lines]
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def check_kernel(
    function: Callable[..., Any],
    *,
    layouts: Sequence[str] = ("bhsd", "bshd"),
    dtypes: Sequence[str] = ("float32",),
    features: Sequence[str] = FEATURES,
    grouped: bool = True,
    strange_strides: bool = True,
    move: Callable[[np.ndarray], Any] = lambda x: x,
    back: Callable[[Any], np.ndarray] = np.asarray,
    quick: bool = False,
    seed: int = 0,
    **sizes: Any,
) -> Report:
    """Run the contract's problems against any attention function, print each promise's outcome, and return a Report.

    >>> testing.check_kernel(my_attention, layouts=("bhsd",), features=("causal",))

    function: called with q, k, v and the options of the problem by name, as in `attention`; with more than one layout
    also with layout=. It returns o, or (o, lse).
    layouts, dtypes, features: those that the function claims to support; features are names of testing.FEATURES.
    grouped: K and V may have fewer heads. strange_strides: arrays may be transposed, sliced, reversed or broadcast.
    move, back: convert a NumPy array to the function's kind and back, such as torch.from_numpy and torch.Tensor.numpy.
    sizes: head_dims, those that it claims; max_seqlen, no sequence is longer; count, random problems for each promise
    about numbers. The defaults are (1, 7, 16, 32, 64), 130 and 12.
    quick: the defaults are (4, 7), 20 and 2, so that every promise is tried on few and small problems. For a slow
    function, such as a kernel in the simulator.

    A feature that is not claimed is not tried, and the table says so. `check` compares results with float64, with a
    tolerance derived from the problem. A promise that does not hold raises nothing: see the report.
    """
    if set(sizes) - set(FULL):
        raise TypeError(f"check_kernel takes the sizes {', '.join(FULL)}, not {', '.join(set(sizes) - set(FULL))}")
    head_dims, max_seqlen, count = ((QUICK if quick else FULL) | sizes).values()
    unknown = set(features) - set(FEATURES)
    if unknown:
        raise ValueError(f"features must be some of {', '.join(FEATURES)}, not {', '.join(sorted(unknown))}")
    for name, value in dict(layouts=layouts, dtypes=dtypes, head_dims=head_dims).items():
        if isinstance(value, str) or not value:
            raise ValueError(f"{name} must be a sequence with something in it, not {value!r}")
    claimed = tuple(layouts), tuple(dtypes), tuple(features), grouped, strange_strides, tuple(head_dims)
    if max_seqlen < 6:
        raise ValueError(f"max_seqlen must be at least 6, which is what the shortest problems have, not {max_seqlen}")
    tried = _Tried(function, *claimed, max_seqlen, move, back, count, seed)
    found: list[Line] = []
    print(HEADER)
    for line in tried.lines():
        found.append(line)
        print(_row(line), flush=True)
    report = Report(tuple(found))
    print(repr(report))
    return report


@dataclass(frozen=True)
class _Tried:
    """A function with its claims."""

    function: Callable[..., Any]
    layouts: tuple[str, ...]
    dtypes: tuple[str, ...]
    features: tuple[str, ...]
    grouped: bool
    strange_strides: bool
    head_dims: tuple[int, ...]
    max_seqlen: int
    move: Callable[[np.ndarray], Any]
    back: Callable[[Any], np.ndarray]
    count: int
    seed: int

    def lines(self) -> Iterator[Line]:
        for dtype in self.dtypes:
            yield self._compared(f"{dtype} is as exact as its formula", self._random(dtypes=(dtype,)))
        for name in FEATURES:
            if name in self.features:
                yield self._compared(f"{name} means what the contract says", self._random(always=(name,)))
            else:
                yield Line(name, LEFT_OUT, 0, "not among features")
        several = self._random(max_heads_kv=2, grouped=True) if self.grouped else None
        yield self._compared("query heads share the heads of K and V", several, "grouped=False")
        strided_ones = self._random(strange_strides=True) if self.strange_strides else None
        yield self._compared("arrays may lie in memory in any way", strided_ones, "strange_strides=False")
        yield self._compared("lengths around the ends of tiles", [self._plain(*lengths) for lengths in self._lengths()])
        yield self._compared("no keys: o is 0, lse is -inf", [self._plain(5, 0), self._plain(0, 5)])
        yield self._compared("scores may be large", [self._plain(20, 70, size=size) for size in (1e-3, 10, 30)])
        yield self._compared("the maximum may move from tile to tile", [self._rising(1), self._rising(-1)])
        takes_causal, why_not = "causal" in self.features, "causal is not among features"
        blind = [self._plain(20, 6, causal=True), self._plain(6, 1, causal=True)] if takes_causal else None
        yield self._compared("a query that sees no key gives 0", blind, why_not)
        nans = [self._with_nan(n) for n in (20, 70)] if takes_causal else None
        yield self._compared("NaN goes where it is seen, and nowhere else", nans, why_not)
        yield self._each("inputs stay as they are", [self._plain(20, 30)], self._writes_nothing)
        yield self._each("the same call gives the same bits", [self._plain(70, 130)], self._repeats)
        yield self._each("bits do not depend on the batch", [self._plain(33, 70, batch=3)], self._alone)

    # Problems.

    def _random(
        self, always: tuple[str, ...] = (), grouped: bool = False, strange_strides: bool = False, **limits: Any
    ) -> list[Case]:
        """Problems with something to compute, with these features and no others."""

        class All(Numbers):
            def subset(self, options: Sequence[Any]) -> list[Any]:
                return list(options)

        limits |= dict(max_seqlen=min(self.max_seqlen, 70))
        limits = dict(dtypes=self.dtypes, head_dims=self.head_dims, layouts=self.layouts) | limits
        seeds = itertools.count(self.seed * 1_000_003)
        made = (make_case(All(n), features=always, strange_strides=strange_strides, **limits) for n in seeds)
        fitting = (case for case in made if case.q.size and case.k.size and _is_grouped(case) == grouped)
        return list(itertools.islice(fitting, self.count))

    def _plain(self, seqlen_q: int, seqlen_k: int, batch: int = 2, size: float = 1.0, **options: Any) -> Case:
        """Two heads, contiguous, of the first layout and dtype; a length above max_seqlen becomes that."""
        seqlen_q, seqlen_k = (min(seqlen, self.max_seqlen) for seqlen in (seqlen_q, seqlen_k))
        layout, dtype, dim = self.layouts[0], self.dtypes[0], self.head_dims[-1]
        generator = np.random.default_rng(self.seed)

        def array(seqlen: int) -> np.ndarray:
            shape = (batch, 2, seqlen, dim) if layout == "bhsd" else (batch, seqlen, 2, dim)
            return strided(generator.standard_normal(shape) * size, dtype, "plain")

        return Case(array(seqlen_q), array(seqlen_k), array(seqlen_k), dict(layout=layout, **options))

    def _lengths(self) -> list[tuple[int, int]]:
        """Each length of queries with another one of keys."""
        lengths = [n for n in LENGTHS if n <= self.max_seqlen]
        return [(n, lengths[(i + 3) % len(lengths)]) for i, n in enumerate(lengths)]

    def _rising(self, sign: int) -> Case:
        """Each key matches every query more than the one before, or less."""
        case = self._plain(20, 130)
        seqlen_k = case.k.shape[2 if self.layouts[0] == "bhsd" else 1]
        keys = np.linspace(0, 4 * sign, seqlen_k)[:, None] * np.ones(case.k.shape[3])
        case.q[...], across = np.abs(case.q), (2, 3) if self.layouts[0] == "bhsd" else (1, 3)
        case.k[...] = np.expand_dims(keys, tuple({0, 1, 2, 3} - set(across))).astype(case.k.dtype)
        return case

    def _with_nan(self, seqlen: int) -> Case:
        """Square and causal: only the last query sees the last key, which is NaN."""
        case = self._plain(seqlen, seqlen, causal=True)
        for x in (case.k, case.v):
            (x if self.layouts[0] == "bhsd" else x.swapaxes(1, 2))[:, :, -1] = np.nan
        return case

    # Promises.

    def _compared(self, promise: str, cases: list[Case] | None, why_not: str = "") -> Line:
        if cases is None:
            return Line(promise, LEFT_OUT, 0, why_not)
        return self._each(promise, cases, self._is_exact)

    def _each(self, promise: str, cases: list[Case], holds: Callable[[Case], None]) -> Line:
        """Tries all cases; the line reports the first one that does not hold."""
        bad: list[tuple[str, str]] = []
        for case in cases:
            try:
                holds(case)
            except AssertionError as error:
                bad.append((FAILED, str(error)))
            except Exception as error:  # whatever it raises, it did not compute
                bad.append((RAISED, f"{type(error).__name__}: {error} in {case}"))
        if not bad:
            return Line(promise, HELD, len(cases))
        outcome, note = bad[0]
        return Line(promise, outcome, len(cases), f"{len(bad)} of {len(cases)}: {note}")

    def __call__(self, case: Case) -> Any:
        """o, or (o, lse), as NumPy arrays."""
        arguments = case.arguments(self.move)
        if len(self.layouts) == 1:
            del arguments["layout"]
        made = self.function(**arguments)
        return tuple(self.back(x) for x in made) if isinstance(made, tuple) else self.back(made)

    def _o(self, case: Case) -> np.ndarray:
        made = self(case)
        return np.array(made[0] if isinstance(made, tuple) else made)

    def _is_exact(self, case: Case) -> None:
        made = self(case)
        o, lse = made if isinstance(made, tuple) else (made, None)
        check(case, o, lse, "")

    def _writes_nothing(self, case: Case) -> None:
        before = [x.copy() for x in (case.q, case.k, case.v)]
        self(case)
        for name, x, old in zip("qkv", (case.q, case.k, case.v), before, strict=True):
            assert np.array_equal(x, old), f"it changed {name}"

    def _repeats(self, case: Case) -> None:
        first = self._o(case)
        assert all(np.array_equal(first, self._o(case)) for _ in range(3)), f"other bits for {case}"

    def _alone(self, case: Case) -> None:
        together = self._o(case)
        for b in range(case.q.shape[0]):
            q, k, v = (x[b : b + 1] for x in (case.q, case.k, case.v))
            one = Case(q, k, v, case.options)
            assert np.array_equal(together[b : b + 1], self._o(one)), f"batch entry {b} alone has other bits, in {case}"


def _is_grouped(case: Case) -> bool:
    axis = 1 if case.options["layout"] == "bhsd" else 2
    return case.q.shape[axis] != case.k.shape[axis]


def _row(line: Line) -> str:
    promise, outcome, problems, note = line
    return f"{promise:<{WIDTH}}  {outcome:<9} {problems or '':>4}  {_short(note)}".rstrip()


def _short(note: str) -> str:
    line = " ".join(note.split())
    return line if len(line) <= 100 else line[:97] + "..."
