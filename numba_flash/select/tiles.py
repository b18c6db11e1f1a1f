"""The tiles that each kernel of a forward uses: a table of rows for each kernel, the best first.

select takes the first row that is for the problem and whose shared memory fits. docs/adding_a_tile_row.md explains the
columns, has the measurements behind the rows, and shows how to add one for another GPU.
"""

from typing import Any, NamedTuple

from ..machine.target import Target
from ..problem.options import SEEDED

MEASURED = "H200"  # the GPU of a row that names none
SIMULATOR = "simulator"  # small blocks, whose barriers are cheap, and few wasted rows: all threads run in Python
ANY = 2**31  # the head_dim of a row for every head_dim

# Options that act on each score or weight on its own in wgmma's backward. Each entry takes more registers than the one
# before: a mask_mod alone; a bias alone that TMA loads, a mask alone, or dropped weights; one kind of these, or
# functions, beside options of the score; several kinds, or a bias beside another option of the score. A row of its own
# for a mask_mod alone gains 13 % at head_dim 64 and 9 % at 128 (4 x 2k documents, H200).
PER_SCORE = ("mask_mod", "mask or dropped weights", "one kind", "several kinds")


class Facts(NamedTuple):
    """The facts of a problem that decide which rows of a table are for it."""

    head_dim: int  # the larger of q's and v's
    least: int  # the smaller of the two
    rows: tuple[int, int]  # queries and keys of a head
    keys: int  # the keys of all heads of a batch entry together
    words: frozenset[str]  # the names of the conditions of When that hold
    per_score: str = ""  # one of PER_SCORE; "" if no option acts on single scores


class When(NamedTuple):
    """The problems that a row is for. A condition that is True must hold."""

    head_dim: int  # up to this one
    above: int = 0  # head_dim of q and k and that of v are both above this
    least_keys: int = 0
    least_rows: tuple[int, int] = 0, 0  # queries and keys of a head: with fewer, most of a tile would be past the last
    unread: bool = False  # no bias, mask or function; in a forward no dropped weights, either
    plain: bool = False  # no option changes, reads or drops scores
    masked: bool = False  # a mask is read for each score, and nothing else
    sloped: bool = False  # ALiBi alone changes scores
    linear: bool = False  # the derivative of a score by the product is 1
    functions: bool = False  # the caller's functions change or hide scores, and nothing else
    per_score: str = ""  # also for problems with an entry of PER_SCORE up to this one, whatever else holds
    gpu: str = MEASURED

    def holds(self, facts: Facts) -> bool:
        if facts.head_dim > self.head_dim or facts.least <= self.above or facts.keys < self.least_keys:
            return False
        if facts.rows[0] < self.least_rows[0] or facts.rows[1] < self.least_rows[1]:
            return False
        if facts.per_score:
            return self.per_score in PER_SCORE[PER_SCORE.index(facts.per_score) :]
        return all(name in facts.words for name, asked in zip(self._fields, self, strict=True) if asked is True)


class Row(NamedTuple):
    """names, values: the fields of a Config that the row sets. apart: dK and dV have a kernel each."""

    when: When
    values: tuple[Any, ...]
    apart: bool = False
    names: tuple[str, ...] = ()

    @property
    def tile(self) -> dict[str, Any]:
        return dict(zip(self.names, self.values, strict=True))

    def changed(self, **values: Any) -> "Row":
        """The row with other values."""
        return self._replace(values=tuple((self.tile | values).values()))


def at(head_dim: int, *values: Any, apart: bool = False, **when: Any) -> Row:
    return Row(When(head_dim, **when), values, apart)


def table(names: str, *rows: Row, **same: Any) -> tuple[Row, ...]:
    """A table whose columns have these names, the best row first. same: columns that are alike in all rows."""
    columns = (*names.split(), *same)
    return tuple(row._replace(names=columns, values=(*row.values, *same.values())) for row in rows)


def rows_of(tables: dict[str, tuple[Row, ...]], kernel: str, dtype: str, target: Target) -> tuple[Row, ...]:
    """The rows of a kernel's table, or of its table for this dtype if there is one, for this machine: its GPU's own, or
    else those of the GPU that was measured."""
    found = tables[name if (name := f"{kernel}_{dtype}") in tables else kernel]
    gpu = SIMULATOR if target.simulated else next((row.when.gpu for row in found if row.when.gpu in target.name), "")
    return tuple(row for row in found if row.when.gpu == gpu) or tuple(row for row in found if row.when.gpu == MEASURED)


TABLES: dict[str, tuple[Row, ...]] = {
    # For v1 and v2.
    "simt": table(
        "tile_m tile_n",
        *(at(ANY, tile_m, 16, least_rows=(tile_m // 2 + 1, 0)) for tile_m in (256, 128, 64)),
        *(at(ANY, *sizes) for sizes in ((32, 16), (32, 8), (16, 8), (8, 8), (8, 4), (4, 4), (1, 4))),
        *(at(ANY, *sizes, gpu=SIMULATOR) for sizes in ((16, 16), (16, 8), (8, 8), (8, 4), (4, 4), (1, 4))),
    ),
    # A bias or a mask takes registers, so a warp then has one strip of 16 rows.
    "mma": table(
        "tile_m tile_n warp_rows q_registers blocks_per_sm rescale_threshold",
        at(64, 128, 64, 32, True, 2, 0, unread=True),
        at(64, 64, 64, 16, True, 2, 0),
        at(128, 128, 64, 32, False, 2, 8, unread=True),
        at(256, 64, 64, 16, False, 2, 0),
        at(512, 64, 32, 16, False, 1, 0),
        at(512, 32, 32, 16, False, 1, 0),
    ),
    # One tile has all queries and keys of a head and shrinks to the lengths (forward_kernels.short).
    "mma_short": table(
        "tile_m tile_n warp_rows q_registers blocks_per_sm rescale_threshold",
        at(64, 64, 64, 16, False, 4, 0),
        at(128, 64, 64, 16, False, 2, 0),
        only_tile=True,
    ),
    "mma_float32": table(
        "tile_m tile_n column_groups blocks_per_sm",
        at(64, 64, 64, 1, 2),
        at(128, 64, 32, 1, 2),
        at(256, 64, 64, 2, 1, plain=True),
        at(256, 128, 32, 1, 1, unread=True),
        at(256, 64, 32, 2, 1),
        at(512, 32, 16, 1, 1),
        at(512, 16, 16, 1, 1),
        warp_rows=16,
        rescale_threshold=8,
    ),
    "mma_float64": table(
        "tile_m tile_n column_groups blocks_per_sm",
        at(64, 64, 16, 1, 3),
        at(128, 128, 32, 1, 1, plain=True),
        at(128, 128, 16, 1, 1),
        at(192, 64, 32, 2, 1, plain=True),
        at(256, 64, 16, 2, 1),
        at(256, 32, 16, 1, 1),
        at(512, 16, 16, 1, 1),
        warp_rows=16,
        rescale_threshold=8,
    ),
    # tile_m is the largest; TILE_COST chooses up to it.
    "wgmma": table(
        "tile_m tile_n q_buffers",
        at(64, 192, 128, 2, plain=True),
        at(64, 192, 112, 2, unread=True, sloped=True),
        at(64, 192, 96, 2, unread=True),
        at(64, 192, 112, 2, masked=True),
        at(128, 128, 128, 2),
        at(192, 128, 128, 1),
        at(192, 128, 96, 1),
        at(256, 128, 64, 1),
        rescale_threshold=8,
    ),
    # tile_m is the largest; few queries halve it.
    "wgmma_float32": table(
        "tile_m tile_n stages",
        at(64, 128, 64, 2),
        at(128, 128, 64, 1, plain=True),
        at(128, 128, 32, 2),
        at(192, 128, 32, 1, plain=True),
        at(192, 64, 32, 1),
        at(256, 64, 32, 1),
        rescale_threshold=8,
    ),
}

# The relative cost of a key tile in wgmma, by query rows. The cost model takes the fastest number of rows up to a row's
# tile_m (cost_model.py).
TILE_COST = {64: 0.75, 128: 1.0, 192: 1.3}

# The most keys of a tile of wgmma, by the option that acts on each score, because it takes registers:
# ((up to head_dim, keys), ...). "alone": nothing else changes or hides scores. One product can be 256 keys wide.
MOST_KEYS = {
    "": ((256, 256),),
    "score_mod": ((64, 128), (128, 80), (256, 32)),
    "mask_mod": ((128, 128), (256, 64)),  # called for few tiles
    SEEDED: ((128, 256), (192, 64), (256, 32)),
    "mask alone": ((128, 128), (192, 80), (256, 64)),
    "mask": ((64, 128), (128, 112), (192, 80), (256, 64)),
    "bias of 2 bytes alone": ((128, 128), (256, 64)),
    "bias of 2 bytes": ((128, 96), (256, 48)),
    "bias of 4 bytes alone": ((64, 128), (128, 112), (256, 64)),
    "bias of 4 bytes": ((128, 96), (256, 32)),
}
