"""debug.trace: each number that it read from a kernel, against the oracle over the keys up to there."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from helpers.instructions import compiled

import numba_flash
from numba_flash import debug, testing
from numba_flash.kernels.simt import v2
from numba_flash.machine import toolchain
from numba_flash.ptx.sim import now

pytestmark = pytest.mark.skipif(not toolchain.simulated(), reason="set NUMBA_ENABLE_CUDASIM=1")

rng = np.random.default_rng(0)
# Two query tiles and two key tiles of 16 in the simulator.
q, k, v = (rng.standard_normal((1, 1, 24, 4), dtype=np.float32) for _ in range(3))
FEATURES = ("causal", "window", "seqlens_k", "softcap", "bias", "mask")
CASES = [
    case
    for case in testing.random_cases(60, seed=7, features=FEATURES, max_seqlen=40, head_dims=(1, 7, 16), max_batch=2)
    if case.q.size and case.k.size and case.v.size
][:16]


def scores_of(case, b, h, row):
    """(seqlen_k,): the oracle's lse over one key is that key's score."""
    keys, mask = seqlen_k(case), case.options.get("mask", np.ones((1, 1, 1, 1), bool))
    found = []
    for key in range(keys):
        only = np.arange(keys) == key
        found.append(
            testing.oracle(dataclasses.replace(case, options=case.options | dict(mask=mask & only)))[1][b, h, row]
        )
    return np.array(found)


def heads_first(case, x):
    return x if case.options["layout"] == "bhsd" else x.transpose(0, 2, 1, 3)


def seqlen_k(case):
    return heads_first(case, case.k).shape[2]


def score_error(case, b, h, row):
    """How far a score can be off: a rounding for each product and each sum, and a few for what follows."""
    own_q, keys = heads_first(case, case.q)[b, h, row], heads_first(case, case.k)[b]
    group = case_heads(case) // keys.shape[0]
    own_q, keys = own_q.astype(np.float64), keys[h // group].astype(np.float64)
    size = np.max(np.abs(keys) @ np.abs(own_q)) / math.sqrt(len(own_q))
    bias = np.abs(np.asarray(case.options.get("bias", 0), np.float64)).max(initial=0)
    return eps(case) * (len(own_q) + 8) * (size + bias)


def case_heads(case):
    return heads_first(case, case.q).shape[1]


def eps(case):
    return testing.EPS["float64" if case.dtype == "float64" else "float32"]


@pytest.mark.parametrize("kernel", ["v1", "v2"])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_was_read_is_what_the_oracle_says(kernel, number):
    case = CASES[number]
    b, h, row = (number % n for n in heads_first(case, case.q).shape[:3])
    tile = (8, 4) if number % 2 else None
    seen = debug.trace(**case.arguments(), batch=b, head=h, row=row, kernel=kernel, tile=tile)
    s, off = scores_of(case, b, h, row), score_error(case, b, h, row)
    values = heads_first(case, case.v)[b].astype(np.float64)
    values = values[h // (case_heads(case) // values.shape[0])]  # (seqlen_k, head_dim_v)
    rounding = eps(case) * (seqlen_k(case) + 8 * (len(seen.tiles) + 1))
    relative = math.expm1(2 * off) + rounding  # of e^(s - m), of sums of them, and of one that is multiplied on
    end, before = 0, -math.inf
    for one in seen.tiles:
        assert np.all(s[end : one.keys.start] == -np.inf), "a tile with visible keys was left out"
        end = one.keys.stop
        own, so_far = s[one.keys.start : end], s[:end]
        np.testing.assert_array_equal(one.S == -np.inf, own == -np.inf)
        finite = own != -np.inf
        np.testing.assert_allclose(one.S[finite], own[finite], rtol=0, atol=off)
        m = so_far.max()
        if m == -np.inf:
            assert one.m == -np.inf and one.l == 0 and not one.P.any() and not one.O.any()
            continue
        np.testing.assert_allclose(one.m, m, rtol=0, atol=off)
        weights = np.exp(so_far - m)
        total = weights.sum()
        if finite.any():
            np.testing.assert_allclose(one.alpha, np.exp(before - m), rtol=relative, atol=0)
            top = own.max() if kernel == "v1" else m
            np.testing.assert_allclose(one.P, np.exp(own - top), rtol=relative, atol=np.finfo(np.float32).tiny)
        else:
            assert one.alpha == 1 and not one.P.any() and not one.variables
        np.testing.assert_allclose(one.l, total, rtol=relative, atol=0)
        scale = total if seen.divided else 1.0
        expected, size = weights @ values[:end] / scale, weights @ np.abs(values[:end]) / scale
        assert np.all(np.abs(one.O - expected) <= 2 * relative * size), (one.O, expected)
        before = m
    assert np.all(s[end:] == -np.inf), "a tile with visible keys was left out"


@pytest.mark.parametrize("kernel", ["v1", "v2"])
def test_the_end_is_what_attention_returns(kernel):
    seen = debug.trace(q, k, v, causal=True, row=range(24), kernel=kernel)
    o, lse = numba_flash.attention(q, k, v, causal=True, kernel=kernel, return_lse=True)
    np.testing.assert_array_equal(seen.o, o[0, 0])
    np.testing.assert_array_equal(seen.lse, lse[0, 0])
    last = seen.tiles[-1]
    ends = last.O if seen.divided else last.O / last.l[:, None]
    np.testing.assert_allclose(ends, o[0, 0], rtol=2e-7)
    np.testing.assert_allclose(last.m + np.log(last.l), lse[0, 0], rtol=1e-6)


def test_it_reads_the_kernel_and_computes_nothing(monkeypatch):
    """A kernel that computes something else is seen to."""
    monkeypatch.setattr(v2, "make", edited("alpha = math.exp(m - m_new)", "alpha = compute(0.25)"))
    assert [tile.alpha for tile in debug.trace(q, k, v, row=3).tiles] == [0.25, 0.25]
    monkeypatch.setattr(v2, "make", edited("l = alpha * l + sum_tmp", "l = alpha * l + sum_tmp + 100"))
    assert debug.trace(q, k, v, row=3).tiles[0].l > 100


def edited(line, instead):
    text, names = Path(v2.__file__).read_text(), dict(v2.__dict__)
    assert text.count(line) == 1
    compiled(text.replace(line, instead), names, v2.__file__)
    return names["make"]


def test_a_range_of_rows_is_the_rows_one_by_one():
    """Also those of several query tiles, of which v2's causal ones visit different key tiles."""
    for kernel in ("v1", "v2"):
        together = debug.trace(q, k, v, causal=True, row=range(14, 18), kernel=kernel)
        assert together.tiles[0].S.shape == (4, 16) and together.tiles[1].S.shape == (4, 8)
        assert together.tiles[0].m.shape == (4,) and together.tiles[0].O.shape == (4, 4)
        for row in range(14, 18):
            alone, one = debug.trace(q, k, v, causal=True, row=row, kernel=kernel), together.of_row(row)
            assert one.row == alone.row == row
            np.testing.assert_array_equal(one.o, alone.o)
            by_number = {tile.number: tile for tile in one.tiles}
            for tile in alone.tiles:
                for name in ("S", "P", "m", "alpha", "l", "O"):
                    np.testing.assert_array_equal(getattr(by_number[tile.number], name), getattr(tile, name))
                assert by_number[tile.number].variables == tile.variables
    with pytest.raises(ValueError, match="row must be one of range"):
        together.of_row(18)


def test_tiles_of_another_size():
    seen = debug.trace(q, k, v, row=5, tile=(4, 8))
    assert [tile.keys for tile in seen.tiles] == [range(8), range(8, 16), range(16, 24)]
    np.testing.assert_allclose(seen.o, numba_flash.attention(q, k, v, kernel="reference")[0, 0, 5], rtol=1e-5)


def test_a_row_without_keys():
    for kernel in ("v1", "v2"):
        seen = debug.trace(q, k, v, seqlens_k=np.zeros(1, np.int32), row=5, kernel=kernel)
        assert not seen.tiles and seen.lse == -np.inf and not seen.o.any()
        assert "lse -inf" in repr(seen) and seen.plot() and "sees no key" in seen.html()


def test_the_hook_is_as_before():
    debug.trace(q, k, v, row=1)
    with pytest.raises(ValueError, match="scale"):
        debug.trace(q, k, v, row=1, scale=np.inf)
    assert now.follow is None


def test_repr_is_a_table():
    seen = debug.trace(q, k, v, causal=True, row=22)
    text = repr(seen)
    assert "kernel 'v2'" in text and "query 22 of head 0" in text
    assert f"{seen.tiles[1].alpha:.4f}" in text and "16 to 23" in text and f"lse {seen.lse:.4f}" in text
    assert max(map(len, text.splitlines())) <= 100
    many = repr(debug.trace(q, k, v, row=range(10)))
    assert many.count("query ") == 4 and "6 queries more" in many


def test_a_loop_that_was_changed_is_traced_as_it_goes(monkeypatch, tmp_path):
    """The last tile first: the trace has the tiles in the order of their visits, and its numbers fit together."""
    file = tmp_path / "v2.py"
    text = Path(v2.__file__).read_text()
    file.write_text(text.replace("for j in range(begin, end):", "for j in range(end - 1, begin - 1, -1):"))
    names = dict(v2.__dict__)
    exec(compile(file.read_text(), str(file), "exec"), names)
    monkeypatch.setattr(v2, "make", names["make"])
    seen = debug.trace(q, k, v, causal=True, row=22)
    assert [tile.number for tile in seen.tiles] == [1, 0]
    first, second = seen.tiles
    assert np.isclose(second.l, first.l * second.alpha + second.P.sum(), rtol=1e-6)
    o = numba_flash.attention(q, k, v, causal=True, kernel="reference")
    assert np.allclose(seen.o, o[0, 0, 22], rtol=1e-5)


def test_plot_draws_what_was_seen():
    pytest.importorskip("matplotlib")
    seen = debug.trace(q, k, v, causal=True, row=22)
    assert seen.plot()._repr_png_().startswith(b"\x89PNG")
    scores, sums, outputs = seen.plot().axes
    heights = [bar.get_height() for bar in scores.patches]
    np.testing.assert_allclose(heights, np.concatenate([tile.S[np.isfinite(tile.S)] for tile in seen.tiles]))
    tops = [bar.get_y() + bar.get_height() for bar in sums.patches[1::2]]
    np.testing.assert_allclose(tops, [tile.l for tile in seen.tiles])
    ends = outputs.lines[0].get_ydata()[-1], outputs.lines[1].get_ydata()[-1]
    assert all(np.isclose(end, seen.o, rtol=1e-6).any() for end in ends)
    assert "alpha" in " ".join(text.get_text() for text in scores.texts)


@pytest.mark.parametrize("kernel", ["mma", "wgmma", "cpu", "reference", "online", "nonsense"])
def test_other_kernels(kernel):
    with pytest.raises(NotImplementedError, match=f"'v1' and 'v2'.*not {kernel!r}; .*stop_at looks into the others"):
        debug.trace(q, k, v, row=0, kernel=kernel)


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (ValueError, dict(row=24), "row must be from 0 to 23, not 24"),
        (ValueError, dict(row=-1), "row must be from 0 to 23"),
        (ValueError, dict(row=range(20, 25)), "row must be a range .* 0 to 23"),
        (ValueError, dict(row=range(0, 8, 2)), "neighbouring"),
        (TypeError, dict(row=1.0), "row must be a whole number or a range"),
        (ValueError, dict(row=0, head=1), "head must be from 0 to 0"),
        (ValueError, dict(row=0, batch=1), "batch must be from 0 to 0"),
        (TypeError, dict(row=0, head=None), "head must be a whole number, not None"),
        (TypeError, dict(row=0, out=np.zeros(1)), "trace takes no out="),
        (TypeError, dict(row=0, return_lse=True), "trace takes no return_lse="),
        (ValueError, dict(row=0, tile=(16, 5)), r"tile=\(16, 5\): tile_n must be a multiple of 4"),
        (TypeError, dict(row=0, tile=4), "tile must be a pair"),
        (ValueError, dict(row=0, tile=(1024, 1024)), "bytes of shared memory"),
    ],
)
def test_errors(error, options, message):
    with pytest.raises(error, match=message):
        debug.trace(q, k, v, **options)


def test_without_the_simulator(monkeypatch):
    monkeypatch.setattr(toolchain, "simulated", lambda: False)
    with pytest.raises(RuntimeError, match="trace needs Numba's CUDA simulator.*NUMBA_ENABLE_CUDASIM=1"):
        debug.trace(q, k, v, row=0)
