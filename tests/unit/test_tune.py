"""scripts/tune: its candidates are rows of the tables, column for column."""

import runpy
from pathlib import Path

import pytest
from helpers.machines import HOPPER, empty

from numba_flash.dispatch import forward as dispatch
from numba_flash.select import tiles

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
ROWS = [(kernel, row) for kernel in ("mma", "wgmma") for row in tiles.TABLES[kernel]]


@pytest.fixture
def tune(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(dispatch.Target, "of", lambda device: HOPPER)
    return runpy.run_path(str(SCRIPTS / "tune"))


def config_of(tune, kernel, row, head_dim, head_dim_v=None):
    # as many heads as keep a whole GPU busy, or its tiles would be smaller than its row's
    q, v = (
        empty(1, 64, 4096, columns, strides=(2**28, 2**22, 2**10, 1)) for columns in (head_dim, head_dim_v or head_dim)
    )
    read = dict(mask=empty(4096, 4096, dtype="bool")) if row.when.masked else {}
    read |= dict(alibi_slopes=empty(64, dtype="float32")) if row.when.sloped else {}
    found = tune["prepare"](kernel, row, q, q, v, dict(kernel=kernel) | read)
    return found and found[1].choice.config


@pytest.mark.parametrize(("kernel", "row"), ROWS)
def test_rows_become_what_their_columns_say(tune, kernel, row):
    before, widest = dict(tiles.TABLES), row.when.head_dim
    config = config_of(tune, kernel, row, widest) or config_of(tune, kernel, row, widest, widest - 64)
    assert list(tune["CHOICES"][kernel]) == list(row.names)
    for column, value in row.tile.items():
        assert getattr(config, column) == value, column
    assert before == tiles.TABLES
    assert config_of(tune, kernel, row, widest + 8) is None


def test_candidates_differ_in_what_is_varied(tune):
    present = tiles.TABLES["wgmma"][-1]
    rows = tune["candidates"]("wgmma", present, ["tile_n", "rescale_threshold"])
    assert rows[0] == present and len(rows) == len(set(rows)) == 8 * 2
    assert {(row.when, *row.values[:1], *row.values[2:3]) for row in rows} == {(present.when, 128, 1)}
    fitting = [config for row in rows if (config := config_of(tune, "wgmma", row, 256))]
    assert {(config.tile_n, config.rescale_threshold) for config in fitting} == {
        (n, rescale_threshold) for n in (64, 80) for rescale_threshold in (0, 8)
    }
    everything = tune["candidates"]("mma", tiles.TABLES["mma"][0], list(tune["CHOICES"]["mma"]))
    assert len(everything) == 2 * 5 * 2 * 2 * 3 * 2
