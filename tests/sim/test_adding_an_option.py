"""The stage that docs/adding_an_option.md shows is a stage: it runs in v2, forward and backward, in softcap's place."""

import re
from pathlib import Path

import numpy as np
import pytest
from helpers.instructions import compiled

import numba_flash
from numba_flash.kernels import score
from numba_flash.kernels.score import softcap

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding_an_option.md"
STAGE = re.compile(r'^```python\n(""".*?)^```$', re.MULTILINE | re.DOTALL)
LIMIT = 0.5


@pytest.fixture
def clip(monkeypatch):
    """softcap= is the page's clip= for the time of a test."""
    (code,) = STAGE.findall(PAGE.read_text())
    code = code.replace('has("clip")', 'has("softcap")').replace("score.clip", "score.softcap")
    stage = {"__name__": "numba_flash.kernels.score.clip", "__package__": "numba_flash.kernels.score"}
    compiled(code, stage)
    monkeypatch.setattr(softcap, "make", stage["make"])
    score.make.cache_clear()
    yield
    score.make.cache_clear()


def clipped(q, k, v, do):
    """o and dv, dq by the page's oracle."""
    scale = q.shape[3] ** -0.5
    product = scale * np.einsum("bhid,bhjd->bhij", q, k)
    s, through = np.clip(product, -LIMIT, LIMIT), np.abs(product) < LIMIT
    assert 0.1 < through.mean() < 0.9, "the limit must matter, and not everywhere"
    p = np.exp(s)
    p /= p.sum(axis=-1, keepdims=True)
    o, dp = p @ v, do @ v.swapaxes(2, 3)
    ds = p * (dp - (do * o).sum(axis=-1, keepdims=True)) * through
    return o, scale * ds @ k, p.swapaxes(2, 3) @ do


def test_the_stage_of_the_page_runs(clip):
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((1, 1, 20, 8), dtype=np.float32) for _ in range(4))
    o, lse = numba_flash.attention(q, k, v, softcap=LIMIT, return_lse=True, kernel="v2")
    dq, _, dv, *_ = numba_flash.attention_backward(do, q, k, v, o, lse, softcap=LIMIT, kernel="v2")
    for got, right in zip((o, dq, dv), clipped(*(x.astype(np.float64) for x in (q, k, v, do))), strict=True):
        # Twenty sums in float32 of numbers up to about 10: a hundred roundings of 2**-24 each are far below this.
        np.testing.assert_allclose(got, right, atol=100 * 2.0**-24 * 10)
