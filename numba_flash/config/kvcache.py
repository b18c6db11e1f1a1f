"""Configs of the kernels for caches: append (kernels/simt/append.py) and v2 over pages (kernels/simt/paged.py)."""

import functools
from typing import Any

from ..abi import parameters as abi
from .forward import LaunchFacts, fields_of
from .simt_forward import SimtConfig, V2Config


class AppendConfig(LaunchFacts, kernel="append", module="simt.append"):
    """All arrays are aux, in the order of `arrays`. pages: how a sequence's pages are found ("table", "csr",
    "entries", or "own" for a contiguous cache). Its launch says the grid: a block for each row and each sequence."""

    dtype: str
    arrays: tuple[tuple[str, str, int], ...]  # (name, dtype, dimensions)
    pages: str
    rotary_interleaved: bool = False
    from_lengths: bool = True  # query 0 stands at the valid keys less the queries
    threads: int = 128

    takes = abi.Parameters(
        (),
        (),
        abi.words(
            "batch rows row_step total_q new queries heads heads_kv head_dim head_dim_v page pages capacity q_offset"
        ),
    )

    @property
    def aux(self) -> tuple[tuple[str, int], ...]:
        return tuple((dtype, dims) for _, dtype, dims in self.arrays)

    @property
    def at(self) -> dict[str, int]:
        """The index of each array that there is."""
        return {name: n for n, (name, _, _) in enumerate(self.arrays)}


class PagedConfig(SimtConfig, kernel="paged", module="simt.v2"):
    """v2 for keys in pages. Its first arrays of aux say where pages are: a table; or, with csr, the numbers of all
    pages, and where those of each sequence begin."""

    pages: str = "table"  # type: ignore[misc]

    takes = abi.forward("mask").plus(sizes="page pages")
    reads_states = False

    @staticmethod
    def of(config: Any, pages: str) -> "PagedConfig":
        return PagedConfig(**fields_of(config, V2Config), pages=pages)

    @property
    def aux(self) -> tuple[tuple[str, int], ...]:
        return (*page_arrays(self.pages), *self.scores.aux)

    @functools.cached_property
    def scores(self) -> V2Config:  # type: ignore[override]
        """The Config that the stages of a score read: its aux lacks the arrays that say where pages are."""
        return V2Config(**fields_of(self, V2Config))

    def own_sizes(self, problem: Any) -> dict[str, Any]:
        return dict(page=max(problem.pages.size, 1), pages=problem.pages.total)


def page_arrays(pages: str) -> tuple[tuple[str, int], ...]:
    """(dtype, dimensions) of the arrays that say where pages are."""
    return dict(table=(("int32", 2),), csr=(("int32", 1), ("int32", 1)), entries=(("int32", 1),), own=())[pages]
