"""A row of attention tile by tile: copies of the kernel's own variables while it runs.

    NUMBA_ENABLE_CUDASIM=1 python

    >>> seen = numba_flash.debug.trace(q, k, v, causal=True, row=22)
    >>> seen                   # a table, a line for each tile
    >>> seen.tiles[1].alpha    # the factor of the sums so far
    >>> seen.html("row.html")  # the same to move through with a slider

Nothing is computed here. A trace function waits in the simulated thread that owns the row, at lines of the kernel with
the comments that `LOOKS` names, and copies what the variables hold there.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import arrays
from ..api.forward import prepare_call
from ..arrays import host_view
from ..config.simt_forward import SimtConfig
from ..dispatch.for_reference import heads_first
from ..dispatch.forward import LSE, O
from ..dispatch.launch import make_launch
from ..machine.target import Target
from ..problem.forward import Problem
from .places import Follow, Index3, check_simulated, find_line, make_of, watching

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Names = dict[str, Any]  # the kernel's variables


@dataclasses.dataclass(frozen=True)
class Tile:
    """The kernel's variables after one tile of keys. If several rows were traced, the first axis of each is the row.

    If a row sees no key of the tile, nothing changes for that row: it has alpha 1 and P 0.
    """

    number: int  # j of the listing
    keys: range
    S: np.ndarray  # (keys,) the scores, -inf where the row does not see the key
    P: np.ndarray  # (keys,) e^(S - m); in v1 e^(S - the tile's own maximum)
    m: Any  # the largest score so far
    alpha: Any  # e^(m_old - m), by which the sums so far are multiplied
    l: Any  # the sum of e^(score - m) so far  # noqa: E741 - the papers' name
    O: np.ndarray  # (head_dim_v,) the output so far: the sum of e^(score - m) * v; in v1 already divided by l  # noqa: E741
    variables: Any  # the kernel's own numbers at the line where P is there, by name; of several rows a tuple


@dataclasses.dataclass(frozen=True)
class Trace:
    """The record of `trace`. repr() is a table; `plot` and `html` are pictures, and Jupyter shows that of `html`."""

    kernel: str
    about: str  # the problem in words
    batch: int
    head: int
    row: int | range
    tiles: tuple[Tile, ...]
    o: np.ndarray  # (head_dim_v,) what the kernel stored at the end
    lse: Any  # m + log(l) at the end, as the kernel stored it
    divided: bool  # O is divided by l in each step, as v1 does
    tile_sizes: tuple[int, int]  # queries and keys of a tile
    seqlen_k: int
    sees: np.ndarray  # (seqlen_q, 2) the first key that each query's position leaves it, and the end of its keys

    @property
    def rows(self) -> range:
        return self.row if isinstance(self.row, range) else range(self.row, self.row + 1)

    def of_row(self, number: int) -> "Trace":
        """One of several rows, as if it had been traced alone."""
        if number not in self.rows:
            raise ValueError(f"row must be one of {self.rows}, not {number!r}")
        if not isinstance(self.row, range):
            return self
        at = self.row.index(number)
        fields = ("S", "P", "m", "alpha", "l", "O", "variables")
        tiles = [dataclasses.replace(t, **{name: getattr(t, name)[at] for name in fields}) for t in self.tiles]
        return dataclasses.replace(self, row=number, tiles=tuple(tiles), o=self.o[at], lse=self.lse[at])

    def plot(self) -> "Figure":
        """The scores, the maximum, the sum and the output over the tiles, as a matplotlib Figure of one row."""
        from .trace_plot import plot  # matplotlib comes in with it

        return plot(self.of_row(self.rows[-1]))

    def html(self, path: Any = None) -> str:
        """One page, with nothing to load from elsewhere, in which a slider moves through the tiles.

        Returns its text, and writes it to `path` where one is given.
        """
        from .trace_page import page

        text = page(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _repr_html_(self) -> str:
        from .trace_page import frame

        return frame(self)

    def __repr__(self) -> str:
        from .trace_text import table

        return table(self)


def trace(
    q: Any,
    k: Any,
    v: Any,
    *,
    row: int | range,
    batch: int = 0,
    head: int = 0,
    kernel: str = "v2",
    tile: tuple[int, int] | None = None,
    **options: Any,
) -> Trace:
    """Run attention(q, k, v, **options) in the simulator and return what one query saw of each tile of keys.

    >>> numba_flash.debug.trace(q, k, v, causal=True, row=22)

    row: the number of the query in its head, or a range of them, such as a query tile. batch, head: which.
    kernel: "v1" or "v2", which give a row to one thread. tile: (queries, keys) of a tile instead of what `explain`
    shows, such as (16, 4); the keys a multiple of 4.
    options: those of `attention`; o and lse are in what is returned.

    Raises what attention raises; NotImplementedError for another kernel, RuntimeError where the simulator is off.
    """
    looks = _looks(kernel)
    check_simulated("trace")
    for name in ("return_lse", "out", "stream"):
        if name in options:
            raise TypeError(f"trace takes no {name}=: o and lse are in what it returns")
    given, plan = prepare_call(q, k, v, dict(options, kernel=kernel, return_lse=True))
    problem, target, choice = plan.problem, plan.target, plan.choice
    rows = _rows(row, problem)
    _inside("batch", batch, problem.batch)
    _inside("head", head, problem.heads)
    config: Any = choice.config
    if tile is not None:
        config = _with_tile(tile, target, config)
        choice = choice._replace(config=config)
    given[O] = arrays.empty(given[0], problem.o_shape, problem.dtype)
    given[LSE] = arrays.empty(given[0], problem.lse_shape, problem.compute_dtype)

    make = make_of(kernel, "trace")
    lines = {find_line(make, text): look for text, look in looks.items()}
    seen = {r: _Row(config, problem, r) for r in rows}

    def attach(thread: Index3, block: Index3, frame: types.FrameType) -> Follow | None:
        mine = [seen[r] for r in rows if _place(config, problem, batch, head, r) == (thread[0], block[0])]
        return _follow(mine, lines) if mine else None

    with watching(make.co_filename, attach):
        make_launch(choice, problem, target).run(given, 0)
    o = heads_first(problem, given[O])[batch, head].astype(problem.compute_dtype)
    lse = host_view(given[LSE])[batch, head]
    tiles = _joined(seen, rows, problem)
    sees = np.array([problem.keys_seen(query) for query in range(problem.seqlen_q)])
    sizes, about = (config.tile_m, config.tile_n), _about(problem, config)
    whole = Trace(
        kernel, about, batch, head, rows, tiles, o[rows], lse[rows], kernel == "v1", sizes, problem.seqlen_k, sees
    )
    return whole if isinstance(row, range) else whole.of_row(row)


# Where to look: the comment of a line -> what to do when the line is about to run.


class _Row:
    """The record of one row so far. The methods are given the kernel's variables at the lines that LOOKS names."""

    def __init__(self, config: SimtConfig, problem: Problem, row: int) -> None:
        self.config, self.problem, self.row = config, problem, row
        self.tiles: list[Names] = []
        self.open: Names | None = None

    def begin(self, now: Names) -> None:
        if int(now["q_index"]) == self.row:
            keys = range(int(now["first_y"]), min(int(now["first_y"]) + self.config.tile_n, self.problem.seqlen_k))
            self.open = dict(number=int(now["j"]), keys=keys)

    def scores(self, now: Names) -> None:
        if self.open is not None:
            self.open |= dict(S=self._own(now), P=np.zeros_like(self._own(now)), alpha=1.0, variables={})

    def weights_v2(self, now: Names) -> None:
        if self.open is not None:
            names = ("max_tmp", "m", "m_new", "alpha", "sum_tmp", "l")
            self.open |= dict(P=self._own(now), alpha=float(now["alpha"]), variables=_numbers(now, names))

    def weights_v1(self, now: Names) -> None:
        if self.open is not None:
            names = ("max_tmp", "sum_tmp", "max_prev", "sum_prev", "max_new", "old", "new")
            variables = _numbers(now, names)
            # listing 4 has the product: old = sum_prev * e^(max_prev - max_new)
            alpha = variables["old"] / variables["sum_prev"] if variables["sum_prev"] else 0.0
            self.open |= dict(P=self._own(now), alpha=alpha, variables=variables)

    def end_v2(self, now: Names) -> None:
        if self.open is not None:
            self._close(now["m"], now["l"], now["o_k"])

    def end_v1(self, now: Names) -> None:
        if self.open is not None:
            at, dim, own = now["lm_base"] + self.row, self.config.head_dim_v, now["arrays"]
            o = [own.acc_o[at * dim + x] for x in range(dim)]
            self._close(own.row_max[at], own.row_sum[at], np.array(o, self.problem.compute_dtype))

    def _own(self, now: Names) -> np.ndarray:
        """A copy of the thread's row of the tile S, as it stands."""
        assert self.open is not None
        return np.array(now["s_smem"][now["s_k"] : now["s_k"] + len(self.open["keys"])])

    def _close(self, m: Any, l: Any, o: Any) -> None:  # noqa: E741
        assert self.open is not None
        self.tiles.append(self.open | dict(m=float(m), l=float(l), O=np.array(o[: self.config.head_dim_v])))
        self.open = None


Look = Callable[[_Row, Names], None]
# The lines have these comments, so that a kernel can be traced whose code was changed.
LOOKS: dict[str, dict[str, Look]] = {
    kernel: {
        "trace: begins": _Row.begin,
        "trace: scores": _Row.scores,
        "trace: weights": weights,
        "trace: ends": end,
    }
    for kernel, weights, end in (("v1", _Row.weights_v1, _Row.end_v1), ("v2", _Row.weights_v2, _Row.end_v2))
}


def _looks(kernel: str) -> dict[str, Look]:
    if kernel not in LOOKS:
        raise NotImplementedError(
            f"trace reads kernel='v1' and 'v2', which give a row to one thread, not {kernel!r}; "
            "numba_flash.debug.stop_at looks into the others"
        )
    return LOOKS[kernel]


def _follow(rows: Sequence[_Row], lines: dict[int, Look]) -> Follow:
    def follow(frame: types.FrameType, event: str, arg: Any) -> Any:
        look = lines.get(frame.f_lineno) if event == "line" else None
        if look is not None:
            for row in rows:
                look(row, frame.f_locals)
        return follow

    return follow


def _place(config: SimtConfig, problem: Problem, batch: int, head: int, row: int) -> tuple[int, int]:
    """(thread, block) that owns a row."""
    of_head, tile = batch * problem.heads + head, row // config.tile_m
    tiles = -(-problem.seqlen_q // config.tile_m)
    return row % config.tile_m, of_head if config.kernel == "v1" else of_head * tiles + tile


def _numbers(now: Names, names: Sequence[str]) -> dict[str, float]:
    return {name: float(now[name]) for name in names}


def _joined(seen: dict[int, _Row], rows: range, problem: Problem) -> tuple[Tile, ...]:
    """The tiles that at least one row visited, with the values of all rows."""
    keys = {tile["number"]: tile["keys"] for row in rows for tile in seen[row].tiles}
    of_row = {row: {tile["number"]: tile for tile in seen[row].tiles} for row in rows}
    state = {row: dict(m=-math.inf, l=0.0, O=np.zeros(problem.head_dim_v, problem.compute_dtype)) for row in rows}
    made = []
    in_order = all(list(of) == sorted(of) for of in of_row.values())
    for number in sorted(keys) if in_order else keys:  # else in the order of visits, by an edited loop
        columns: dict[str, list[Any]] = {}
        for row in rows:
            unseen = np.full(len(keys[number]), -math.inf, problem.compute_dtype)
            nothing = dict(S=unseen, P=np.zeros_like(unseen), alpha=1.0, variables={}) | state[row]
            tile = of_row[row].get(number, nothing)
            state[row] = {name: tile[name] for name in ("m", "l", "O")}
            for name in nothing:
                columns.setdefault(name, []).append(tile[name])
        joined: Names = {name: tuple(c) if name == "variables" else np.array(c) for name, c in columns.items()}
        made.append(Tile(number, keys[number], **joined))
    return tuple(made)


# Arguments.


def _rows(row: int | range, problem: Problem) -> range:
    if isinstance(row, range):
        if not row or row.step != 1 or row[0] < 0 or row[-1] >= problem.seqlen_q:
            raise ValueError(
                f"row must be a range of neighbouring queries within 0 to {problem.seqlen_q - 1}, not {row}"
            )
        return row
    _inside("row", row, problem.seqlen_q)
    return range(row, row + 1)


def _inside(name: str, value: Any, count: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be a whole number{' or a range' if name == 'row' else ''}, not {value!r}")
    if not 0 <= value < count:
        raise ValueError(f"{name} must be from 0 to {count - 1}, not {value}")


def _with_tile(tile: tuple[int, int], target: Target, config: SimtConfig) -> SimtConfig:
    if not isinstance(tile, tuple) or len(tile) != 2 or not all(isinstance(x, int) for x in tile):
        raise TypeError(f"tile must be a pair (queries, keys), not {tile!r}")
    try:
        made = dataclasses.replace(config, tile_m=tile[0], tile_n=tile[1])
    except ValueError as error:
        raise ValueError(f"tile={tile}: {error}") from None
    if made.shared_bytes > target.shared_bytes:
        raise ValueError(
            f"tile={tile} takes {made.shared_bytes} bytes of shared memory, of which there are {target.shared_bytes}"
        )
    return made


def _about(problem: Problem, config: SimtConfig) -> str:
    tiles = f"tiles of {config.tile_m} queries x {config.tile_n} keys"
    return f"{problem.seqlen_q} queries, {problem.seqlen_k} keys, {problem.dtype}, {tiles}"
