"""The built pages as a reader sees them, in a real browser, on a desk and on a phone; scripts/docs runs this.

Pictures of some of them are left in build/screenshots.
"""

import re
from pathlib import Path

import pytest
from helpers import browser

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "docs"
OF_SPHINX = ("_static/", "genindex", "py-modindex", "search")  # the only ones that we have not written
PAGES = sorted(path.relative_to(BUILT).with_suffix("").as_posix() for path in BUILT.rglob("*.html"))
PAGES = [name for name in PAGES if not name.startswith(OF_SPHINX)]
PHOTOGRAPHED = ("index", "algorithm", "stepping", "tensor_cores", "hopper", "examples/running_maximum")
DESK, PHONE = 1280, 400
OF_THEME = "Got invalid theme mode"  # it says so where the browser has not kept the mode of the page before yet

pytestmark = pytest.mark.skipif(not PAGES, reason="no pages are built: sh scripts/docs")

# What may be wider than a line of text. Its box is what scrolls sideways, or else the article.
BLOCKS = """(onlyBoxesScroll => {
  const wide = [], tags = ["pre", "table", "math", "img", "iframe"];
  for (const block of document.querySelectorAll(tags.map(tag => `article ${tag}`).join())) {
    let box = block;
    while (box.tagName !== "ARTICLE" && !/auto|scroll/.test(getComputedStyle(box).overflowX)) box = box.parentElement;
    const inside = box.tagName !== "ARTICLE", right = box.getBoundingClientRect().right;
    const cut = inside ? box.scrollWidth > box.clientWidth + 1 : block.getBoundingClientRect().right > right + 1;
    if (inside && onlyBoxesScroll ? right > innerWidth : cut)
      wide.push(`${block.tagName}: ${(block.textContent.trim() || block.src || "").slice(0, 60)}`);
  }
  return wide;
})(arguments[0])"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser.browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wider_than_its_box(page, name):
    """On a desk nothing has to be scrolled sideways; on a phone only what is in a box of its own."""
    page.resize(DESK, 900)
    page.open((BUILT / f"{name}.html").as_uri())
    for width in (DESK, PHONE):
        page.resize(width, 900)
        if name in PHOTOGRAPHED:
            folder = ROOT / "build" / "screenshots"
            folder.mkdir(exist_ok=True)
            (folder / f"{name.replace('/', '_')}_{width}.png").write_bytes(page.screenshot())
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run(BLOCKS, width == PHONE) == [], width
    assert [text for text in page.complaints() if OF_THEME not in text] == []


@pytest.mark.parametrize("name", PAGES)
def test_formulas_and_figures_are_drawn(name):
    """No TeX that nobody converted, and no figure that is only the name of its class."""
    text = (BUILT / f"{name}.html").read_text(encoding="utf-8")
    shown = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    assert not re.search(r"\\\(|\\\[|\\(?:frac|text|tilde|begin|sum)\b", shown)
    assert "&lt;Figure" not in shown


@pytest.mark.parametrize("name", PAGES)
def test_a_page_asks_for_nothing_from_elsewhere(name):
    text = (BUILT / f"{name}.html").read_text(encoding="utf-8")
    assert re.findall(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"', text) == []


def test_the_sidebar_has_every_page_of_the_path(page):
    page.resize(DESK, 900)
    page.open((BUILT / "index.html").as_uri())
    shown = page.run(
        "[...document.querySelectorAll('.bd-sidebar-primary .path a')].map(link => link.getAttribute('href'))"
    )
    assert {link.partition("#")[0].removesuffix(".html") for link in shown} >= {*PAGES} - {"index"}
