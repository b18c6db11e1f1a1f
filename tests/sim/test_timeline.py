"""debug.timeline: what it says of the roles of a wgmma block is what their barriers demand; its page in a browser."""

import re

import numpy as np
import pytest
from helpers import browser

from numba_flash import debug
from numba_flash.machine import toolchain

pytestmark = pytest.mark.skipif(not toolchain.simulated(), reason="set NUMBA_ENABLE_CUDASIM=1")

rng = np.random.default_rng(0)
# One query tile, and more key tiles than there are places.
q, k, v = (rng.standard_normal((1, 1, n, 16)).astype(np.float16) for n in (100, 300, 300))


@pytest.fixture(scope="module")
def seen():
    return debug.timeline(q, k, v, causal=True)


def spans(seen, role, what, of):
    return {span.tile: span for span in seen.spans if (span.role, span.what, span.of) == (role, what, of)}


def tiles_of(seen):
    return len(spans(seen, "consumer 0", "PV", "products"))


def test_the_roles_and_the_order_of_the_loads(seen):
    assert seen.roles == ("scheduler", "producer", "consumer 0", "consumer 1")
    count = tiles_of(seen)
    assert seen.places["K"] == seen.places["V"] < count
    loads = [f"{span.of} {span.tile}" for span in seen.spans if (span.role, span.what) == ("producer", "load")]
    # The next K comes before this V, but for the last: then it is that of the next query tile, which is not there.
    pairs = [name for tile in range(count - 1) for name in (f"K {tile + 1}", f"V {tile}")]
    assert loads == ["K 0", *pairs, f"V {count - 1}", f"K {count}"]


@pytest.mark.parametrize("of", ["K", "V"])
def test_a_place_is_filled_when_it_is_free_and_read_when_it_is_full(seen, of):
    loads, waits = (spans(seen, "producer", what, of) for what in ("load", "wait"))
    for consumer in ("consumer 0", "consumer 1"):
        came, gone = (spans(seen, consumer, what, of) for what in ("wait", "release"))
        for tile in range(tiles_of(seen)):
            assert came[tile].end > loads[tile].end, "full: after the copy was started"
            assert gone[tile].begin > came[tile].end
            following = tile + seen.places[of]
            if following in waits:
                assert waits[following].end > gone[tile].begin, "empty: after the consumer has released it"


def test_consumers_take_turns_and_weigh_each_tile_once(seen):
    """In a turn one consumer issues S of a tile and P V of the one before."""
    turns = {}
    for consumer in ("consumer 0", "consumer 1"):
        scores, outputs = (spans(seen, consumer, what, "products") for what in ("S", "PV"))
        assert sorted(outputs) == sorted(spans(seen, consumer, "softmax", "scores")) == list(range(tiles_of(seen)))
        turns[consumer] = [(scores[tile].begin, outputs[tile - 1].end) for tile in range(1, tiles_of(seen))]
    for one, other in zip(turns["consumer 0"], turns["consumer 1"], strict=True):
        assert one[1] < other[0]


def test_repr_is_a_line_for_each_step(seen):
    lines = repr(seen).splitlines()
    assert len(lines) == 1 + len(seen.spans) and "100 queries, 300 keys" in lines[0]
    assert sum("consumer 1  softmax" in line for line in lines) == tiles_of(seen)


@pytest.mark.parametrize(
    ("error", "dtype", "options", "message"),
    [
        (TypeError, np.float16, dict(kernel="mma"), "timeline takes no kernel=: it is about 'wgmma'"),
        (NotImplementedError, np.float32, {}, "timeline follows the roles of 'wgmma' in 16 bits"),
        (ValueError, np.float16, dict(scale=np.inf), "scale"),
    ],
)
def test_errors(error, dtype, options, message):
    with pytest.raises(error, match=message):
        debug.timeline(q.astype(dtype), k.astype(dtype), v.astype(dtype), **options)


def test_without_the_simulator(monkeypatch):
    monkeypatch.setattr(toolchain, "simulated", lambda: False)
    with pytest.raises(RuntimeError, match="timeline needs Numba's CUDA simulator.*NUMBA_ENABLE_CUDASIM=1"):
        debug.timeline(q, k, v)


@pytest.fixture(scope="module")
def page(seen, tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    seen.html(folder / "block.html")
    with browser.browser(folder / "profile") as page:
        page.open((folder / "block.html").as_uri())
        yield page


def cells(page, table):
    return dict(
        page.run(f"[...document.querySelectorAll('#{table} tr')].map(tr => [...tr.children].map(x => x.textContent))")
    )


def at(page, moment):
    page.run("[slider.value = arguments[0], update()]", moment)
    return cells(page, "roles"), cells(page, "places")


def test_the_page_says_who_does_what(seen, page):
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|fetch\(|import\(", seen.html())
    assert page.complaints() == []
    count, stages = tiles_of(seen), seen.places["K"]
    wait = spans(seen, "producer", "wait", "K")[stages]
    roles, places = at(page, wait.end - 1)
    assert roles["producer"] == f"waits until the place for K {stages} is free (empty)"
    came = spans(seen, "consumer 0", "wait", "K")[0]
    assert at(page, came.end - 1)[1]["place 0 of K"] == "K 0, on its way"
    assert at(page, came.end)[1]["place 0 of K"].startswith("K 0, in use by consumer 0")
    roles, places = at(page, max(spans(seen, f"consumer {one}", "release", "V")[count - 1].end for one in (0, 1)))
    assert places[f"place {(count - 1) % stages} of V"] == "empty"
    softmax = spans(seen, "consumer 1", "softmax", "scores")[count - 1]
    assert at(page, softmax.begin)[0]["consumer 1"] == f"computes the softmax of key tile {count - 1}"


def test_arrow_keys_go_from_step_to_step(page):
    at(page, 10)
    page.run("document.activeElement.blur()")
    page.press("body", browser.RIGHT)
    assert page.text("#moment-name").startswith("11 of")
    page.press("body", browser.LEFT)
    page.press("body", browser.LEFT)
    assert page.text("#moment-name").startswith("9 of")


def test_it_fits_on_a_phone(page):
    page.resize(390, 800)
    assert page.run("document.documentElement.scrollWidth") <= 390
