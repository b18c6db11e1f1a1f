"""scripts/tune: its candidates are rows of select/forward.py's tables, column for column."""

import runpy
from pathlib import Path

import pytest
from machines import HOPPER, empty

from numba_flash.dispatch import forward as dispatch
from numba_flash.select import forward as select

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
ROWS = [("mma", row) for row in select.MMA_TILES] + [("wgmma", row) for row in select.WGMMA_TILES]


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
    found = tune["prepare"](kernel, row, q, q, v, dict(kernel=kernel))
    return found and found[1].choice.config


@pytest.mark.parametrize(("kernel", "row"), ROWS)
def test_rows_become_what_their_columns_say(tune, kernel, row):
    before = {name: getattr(select, f"{name.upper()}_TILES") for name in ("mma", "wgmma")}
    config = config_of(tune, kernel, row, row[0]) or config_of(tune, kernel, row, row[0], row[0] - 64)
    for value, column in zip(row[1:], tune["CHOICES"][kernel], strict=True):
        assert getattr(config, column) == value, column
    assert {name: getattr(select, f"{name.upper()}_TILES") for name in before} == before
    assert config_of(tune, kernel, row, row[0] + 8) is None


def test_candidates_differ_in_what_is_varied(tune):
    present = select.WGMMA_TILES[-1]
    rows = tune["candidates"]("wgmma", present, ["tile_n", "lag"])
    assert rows[0] == present and len(rows) == len(set(rows)) == 8 * 2
    assert {(row[0], row[1], *row[3:5]) for row in rows} == {(256, 128, True, 1)}
    fitting = [config for row in rows if (config := config_of(tune, "wgmma", row, 256))]
    assert {(config.tile_n, config.lag) for config in fitting} == {(n, lag) for n in (64, 80) for lag in (0, 8)}
    everything = tune["candidates"]("mma", select.MMA_TILES[0], list(tune["CHOICES"]["mma"]))
    assert len(everything) == 2 * 5 * 2 * 2 * 3 * 2
