"""Rows of tile tables, for tests that want tiles that no table has."""

from numba_flash.select.tiles import SIMULATOR, Row, When


def row(head_dim, apart=False, **fields):
    """A row for problems up to this head_dim; fields: those of When, and those of a Config that it sets."""
    when = {name: fields.pop(name) for name in When._fields if name in fields}
    return Row(When(head_dim, **when), tuple(fields.values()), apart, tuple(fields))


def in_simulator(row):
    return row._replace(when=row.when._replace(gpu=SIMULATOR))


# Keys of a chunk of decode in the simulator: two tiles, in place of four. Only its time depends on how many there are.
CHUNK = 128
