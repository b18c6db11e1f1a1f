"""The page of a trace, in a real browser: the slider moves, and what is shown follows."""

import re
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import browser

from numba_flash import debug
from numba_flash.debug import trace_page
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


def test_the_arrow_keys_go_through_the_parts_of_a_tile(seen, page):
    """Each lights its lines of the listing, and shows what the kernel has by then."""
    tile = seen.of_row(16).tiles[1]
    page.run("document.activeElement.blur()")
    visited = []
    for _ in range(6):
        page.press("body", browser.RIGHT)
        lit = page.run("[...document.querySelectorAll('#listing .now')].map(line => line.value)")
        after = [bool(shown(page, name)[1]) for name in ("m", "sum-of-P", "l", "output")]
        visited.append((page.run("document.querySelector('#listing').dataset.part"), lit, after))
    assert visited == [
        ("load", [5, 6], [False] * 4),
        ("scores", [7, 8, 9, 10, 11], [False] * 4),
        ("max", [13, 14], [True, False, False, False]),
        ("weights", [15, 16], [True, True, False, False]),
        ("sum", [17], [True, True, True, False]),
        ("output", [18], [True] * 4),
    ]
    assert page.text("#tile-name").startswith("2 of") and shown(page, "l")[1] == number(tile.l)
    page.press("body", browser.LEFT)
    assert page.run("document.querySelector('#listing').dataset.part") == "sum"


def test_the_weights_of_earlier_tiles_shrink_by_alpha(seen, page):
    """What is drawn of a tile is what the kernel made of it, times each alpha since; the sum of all is l."""
    row = seen.of_row(17)
    page.press("#row", browser.RIGHT)
    for at, tile in enumerate(row.tiles):
        drawn = page.run("[...document.querySelectorAll('#weights .p')].map(bar => Number(bar.dataset.p))")
        since = np.cumprod([1, *(later.alpha for later in row.tiles[at:0:-1])])[::-1]
        expected = np.concatenate([one.P * factor for one, factor in zip(row.tiles, since, strict=False)])
        np.testing.assert_allclose(drawn[: len(expected)], expected, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(sum(drawn), tile.l, rtol=1e-5)
        ghosts = page.run(
            "[...document.querySelectorAll('#weights .ghost')].map(x => Number(x.getAttribute('height')))"
        )
        assert bool(sum(ghosts)) == (at > 0 and tile.alpha < 1), "outlined is what alpha shrank"
        page.press("#tile", browser.RIGHT)


def test_the_map_has_the_tiles_that_some_query_visits(seen, page):
    """16 x 4 tiles of 24 x 24 scores, causal: 4 for the first 16 queries, 6 for the others."""
    assert page.run("document.querySelectorAll('#map rect').length") == 4 + 6
    assert page.run("document.querySelectorAll('#map .now').length") == 1


@pytest.mark.parametrize("kernel", ["v1", "v2"])
def test_the_listing_is_that_of_the_page(kernel):
    number, first, text = trace_page.LISTINGS[kernel]
    document = Path(__file__).resolve().parents[2] / "docs" / "first_kernels.md"
    listing = re.search(rf"^Listing {number}: .*?^```$", document.read_text(), re.MULTILINE | re.DOTALL)[0]
    lines = dict(re.findall(r"^ ?(\d+)  (.*)$", listing, re.MULTILINE))
    shown = [lines[str(first + at)].rstrip() for at in range(len(text.splitlines()))]
    outside = len(shown[0]) - len(shown[0].lstrip())
    assert [line[outside:] for line in shown] == text.splitlines()


def test_play_goes_on_by_itself(page):
    page.run("document.querySelector('#play').click()")
    assert page.text("#play") == "pause" and page.text("#tile-name").startswith("2 of")
    begin = page.run("document.querySelector('#listing').dataset.part")
    deadline = time.monotonic() + 20
    while page.run("document.querySelector('#listing').dataset.part") == begin and time.monotonic() < deadline:
        time.sleep(0.1)
    assert page.run("document.querySelector('#listing').dataset.part") != begin
    page.press("#tile", browser.RIGHT)
    assert page.text("#play") == "play", "a reader who moves a slider has the word"


def test_another_problem_is_computed_in_the_page(page):
    try:
        page.run(
            "[byId('length').value = 12, byId('size').value = 5, byId('length').dispatchEvent(new Event('input'))]"
        )
        assert "12 random queries and keys in tiles of 5. Computed in this page" in page.text("#about")
        assert page.text("#tile-name") == "1 of 3" and "query 11" in page.text("#title")
        for causal in ("true", "false"):
            one, other = (page.run(f"computed(13, {size}, 3, {causal}).rows") for size in (4, 16))
            for row, same in zip(one, other, strict=True):
                np.testing.assert_allclose(row["o"], same["o"], rtol=1e-9)
                scores = np.array([x for tile in row["tiles"] for x in tile["S"] if x is not None])  # JSON has no -inf
                assert len(scores) == (row["row"] + 1 if causal == "true" else 13)
                np.testing.assert_allclose(row["tiles"][-1]["l"], np.exp(scores - scores.max()).sum(), rtol=1e-9)
    finally:
        page.run("byId('traced').click()")
    assert "Read from the kernel's variables" in page.text("#about")


@pytest.mark.parametrize("dark", [False, True])
def test_it_can_be_read_on_a_phone_and_in_the_dark(page, dark):
    page.resize(390, 800)
    page.dark(dark)
    try:
        assert page.run("document.documentElement.scrollWidth") <= 390
        for name in ("map", "scores", "weights", "sum", "output"):
            wide = page.run(f"[byId('{name}').viewBox.baseVal.width, byId('{name}').clientWidth]")
            assert abs(wide[0] - wide[1]) <= 1, "letters of 12 pixels are 12 pixels"
        styles = (
            "[...document.querySelectorAll('#story, figcaption, #listing .now')].map(x => getComputedStyle(x).color)"
        )
        paper = luminance(page.run("getComputedStyle(document.body).backgroundColor"))
        assert (paper < 0.1) == dark
        for style in page.run(styles):
            low, high = sorted((luminance(style), paper))
            assert (high + 0.05) / (low + 0.05) >= 4.5  # of the guidelines for accessible pages (WCAG 2, 1.4.3)
    finally:
        page.dark(False)
        page.resize(1000, 800)


def luminance(style):
    """As WCAG 2 defines it, of rgb(r, g, b)."""
    parts = np.array([int(x) / 255 for x in re.findall(r"\d+", style)[:3]])
    return np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ (0.2126, 0.7152, 0.0722)


def test_text_of_the_page_cannot_end_its_script(seen):
    import dataclasses

    nasty = dataclasses.replace(seen, about="</script><b>").html()
    assert "</script><b>" not in nasty and "\\u003c/script>" in nasty
