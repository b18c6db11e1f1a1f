"""The page of a trace, in a real browser: the slider moves, and what is shown follows."""

import re

import numpy as np
import pytest
from helpers import browser

from numba_flash import debug
from numba_flash.machine import toolchain

pytestmark = pytest.mark.skipif(not toolchain.simulated(), reason="set NUMBA_ENABLE_CUDASIM=1")

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 1, 24, 4), dtype=np.float32) for _ in range(3))


@pytest.fixture(scope="module")
def seen():
    return debug.trace(q, k, v, causal=True, row=range(16, 24), tile=(16, 4))


@pytest.fixture(scope="module")
def page(seen, tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    seen.html(folder / "trace.html")
    with browser.browser(folder / "profile") as page:
        page.open((folder / "trace.html").as_uri())
        yield page


@pytest.fixture(autouse=True)
def at_the_first_tile_of_the_first_row(request):
    if "page" in request.fixturenames:
        page = request.getfixturevalue("page")
        page.press("#row", browser.HOME)
        page.press("#tile", browser.HOME)


def number(x):
    """As the page writes it."""
    return "-inf" if x == -np.inf else str(int(x)) if x == int(x) else f"{x:.4f}"


def shown(page, name):
    """The cells before and after of a line of the table."""
    return page.run(f"[...document.querySelectorAll('#n-{name} td')].slice(1, 3).map(cell => cell.textContent)")


def test_nothing_is_loaded_from_elsewhere(seen, page):
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|fetch\(|import\(", seen.html())
    assert page.run("performance.getEntriesByType('resource').length") == 0
    assert page.complaints() == []


def test_the_slider_moves_through_the_tiles(seen, page):
    row = seen.of_row(16)
    before_m, before_l, before_o, pictures = -np.inf, 0, np.zeros(4), set()
    for at, tile in enumerate(row.tiles):
        assert page.text("#tile-name") == f"{at + 1} of {len(row.tiles)}"
        assert f"Tile {tile.number} holds keys {tile.keys.start} to {tile.keys.stop - 1}" in page.text("#story")
        assert shown(page, "m") == [number(before_m), number(tile.m)]
        assert shown(page, "l") == [number(before_l), number(tile.l)]
        assert shown(page, "alpha")[1] == number(tile.alpha)
        here = page.run("document.querySelectorAll('#scores .here').length")
        assert here == np.count_nonzero(np.isfinite(tile.S))
        # the outputs drawn are as long as what was traced, in one scale
        heights = np.array(
            page.run("[...document.querySelectorAll('#output .o')].map(x => Number(x.getAttribute('height')))")
        )
        output = tile.O / tile.l
        np.testing.assert_allclose(heights / heights.max(), np.abs(output) / np.abs(output).max(), atol=0.02)
        np.testing.assert_allclose(float(shown(page, "output")[1]), np.abs(output - before_o).max(), atol=6e-5)
        pictures.add(page.run("document.querySelector('#sum').innerHTML"))
        before_m, before_l, before_o = tile.m, tile.l, output
        page.press("#tile", browser.RIGHT)
    assert page.text("#tile-name") == f"{len(row.tiles)} of {len(row.tiles)}", "it stays at the last one"
    assert len(pictures) == len(row.tiles), "each tile is drawn anew"


def test_it_says_when_sums_are_rescaled(seen, page):
    row = seen.of_row(17)
    page.press("#row", browser.RIGHT)
    assert "query 17" in page.text("#title")
    said = []
    for _ in row.tiles:
        said.append(page.text("#story"))
        page.press("#tile", browser.RIGHT)
    for at, tile in enumerate(row.tiles):
        grew = at > 0 and tile.alpha < 1
        assert (f"alpha = e^(m_old - m_new) = {tile.alpha:.4f}" in said[at]) == grew
        assert ("sees none of them" in said[at]) == (not tile.P.any())
    assert any("grows" in one for one in said) and any("stays" in one for one in said)


def test_the_kernels_variables_are_shown(seen, page):
    assert f"max_tmp = {seen.of_row(16).tiles[0].variables['max_tmp']:.4f}" in page.text("#variables")


def test_the_page_in_a_notebook(seen, page, tmp_path):
    (tmp_path / "notebook.html").write_text(f"<!doctype html><body>{seen._repr_html_()}</body>", encoding="utf-8")
    inside = page.run("location.href")
    page.open((tmp_path / "notebook.html").as_uri())
    try:
        title = "document.querySelector('iframe').contentDocument.querySelector('#title').textContent"
        assert page.run(title) == page.run(title) == "What query 16 saw of each tile of keys"
        frame = "document.querySelector('iframe')"
        assert page.run(f"{frame}.clientHeight >= {frame}.contentDocument.documentElement.scrollHeight")
    finally:
        page.open(inside)


def test_text_of_the_page_cannot_end_its_script(seen):
    import dataclasses

    nasty = dataclasses.replace(seen, about="</script><b>").html()
    assert "</script><b>" not in nasty and "\\u003c/script>" in nasty
