"""testing.check_kernel: what holds is said to hold, and each broken promise is found by its own line."""

import re
from pathlib import Path

import numpy as np
import pytest

import numba_flash
from numba_flash import testing
from numba_flash.testing.kernels import FAILED, HELD, LEFT_OUT, RAISED, Report


def ours(**arguments):
    return numba_flash.attention(**arguments, kernel="reference", return_lse=True)


def plain(q, k, v, causal=False):
    """float32, (batch, heads, seqlen, dim), no grouped heads."""
    s = q.shape[3] ** np.float32(-0.5) * np.einsum("bhid,bhjd->bhij", q, k)
    if causal:
        s = np.where(np.tri(*s.shape[2:], s.shape[3] - s.shape[2], dtype=bool), s, -np.inf)
    m = s.max(axis=-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(m == -np.inf, 0, m))
    total = p.sum(axis=-1, keepdims=True)
    p = np.divide(p, total, where=total != 0, out=np.zeros_like(p))
    return np.einsum("bhij,bhjd->bhid", p, np.where(np.isfinite(v), v, 0)).astype(q.dtype)


LIMITS = dict(layouts=("bhsd",), features=("causal",), grouped=False, strange_strides=False, count=4)


def lines(function, **limits):
    return {line.promise: line for line in testing.check_kernel(function, **LIMITS | limits).lines}


def broken(function, **limits):
    return {name for name, line in lines(function, **limits).items() if line.outcome in (FAILED, RAISED)}


def test_ours_keeps_everything(capsys):
    report = testing.check_kernel(ours, dtypes=testing.DTYPES, count=3)
    assert report and {line.outcome for line in report.lines} == {HELD}
    assert all(line.problems for line in report.lines)
    printed = capsys.readouterr().out
    assert str(report) in printed and printed.count("held") == len(report.lines) + 1
    assert max(map(len, printed.splitlines())) < 180
    page = (Path(__file__).resolve().parents[2] / "docs" / "testing_your_kernel.md").read_text()
    table = page.partition("| promise | usual cause |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| (\w.*?) \|", table, re.MULTILINE)
    assert len(named) > 5 and set(named) <= {line.promise for line in report.lines}


def test_what_is_found_is_printed_at_once_and_problems_can_be_small(capsys):
    printed, lengths = [], set()

    def function(q, k, v, **options):
        printed.append(capsys.readouterr().out)
        lengths.update((q.shape[2], k.shape[2]))
        return numba_flash.attention(q, k, v, kernel="cpu", **options)

    report = testing.check_kernel(function, layouts=("bhsd",), features=("causal",), max_seqlen=17, count=2)
    assert report and max(lengths) == 17
    assert sum("held" in text for text in printed) == sum(line.outcome == HELD for line in report.lines) - 1
    with pytest.raises(ValueError, match="max_seqlen must be at least 6, .* not 3"):
        testing.check_kernel(function, max_seqlen=3)
    with pytest.raises(TypeError, match="takes the sizes head_dims, max_seqlen, count, not max_batch"):
        testing.check_kernel(function, max_batch=3)


def test_nan_that_is_dropped_is_found_by_a_promise_about_nan():
    """The promise said that NaN reaches no result, and failed for a kernel whose results it did not reach."""

    def drops(q, k, v, causal=False):
        return np.nan_to_num(plain(q, k, v, causal))

    assert "NaN goes where it is seen, and nowhere else" in broken(drops)


def test_a_function_with_limits(capsys):
    found = lines(plain)
    assert {line.outcome for line in found.values()} == {HELD, LEFT_OUT}
    assert found["mask"].outcome == LEFT_OUT and "not among features" in capsys.readouterr().out
    assert found["query heads share the heads of K and V"].note == "grouped=False"


EXACT = "float32 is as exact as its formula"


@pytest.mark.parametrize(
    ("function", "promises"),
    [
        (lambda q, k, v, causal=False: plain(q, k, v), {"causal means what the contract says"}),
        (lambda q, k, v, causal=False: plain(q, k, v, causal) * np.float32(1.001), {EXACT, "scores may be large"}),
        (lambda q, k, v, causal=False: plain(q.astype(np.float16), k, v, causal), {EXACT}),  # and float16 comes out
    ],
)
def test_what_is_wrong_is_found(function, promises):
    assert promises <= broken(function)


def top_left(q, k, v, causal=False):
    n = min(q.shape[2], k.shape[2])
    return np.concatenate([plain(q[:, :, :n], k[:, :, :n], v[:, :, :n], causal), plain(q[:, :, n:], k, v)], 2)


def test_a_mask_from_the_other_corner_is_found():
    def other(q, k, v, causal=False):
        return top_left(q, k, v, causal) if causal else plain(q, k, v)

    assert "causal means what the contract says" in broken(other)


def overflows(q, k, v, causal=False):
    s = q.shape[3] ** np.float32(-0.5) * np.einsum("bhid,bhjd->bhij", q, k)
    with np.errstate(all="ignore"):
        p = np.exp(np.where(np.tri(*s.shape[2:], s.shape[3] - s.shape[2], dtype=bool), s, -np.inf) if causal else s)
        return np.einsum("bhij,bhjd->bhid", p / p.sum(-1, keepdims=True), v)


def test_overflow_and_nan_are_found():
    assert {"scores may be large", "NaN goes where it is seen, and nowhere else"} <= broken(overflows)


def test_a_wrong_rescaling_is_found_where_the_maximum_moves():
    def forgets(q, k, v, causal=False):
        """The first tile's maximum stands for all of them, and what is above it is cut off."""
        if k.shape[2] <= 64 or causal:
            return plain(q, k, v, causal)
        s = q.shape[3] ** np.float32(-0.5) * np.einsum("bhid,bhjd->bhij", q, k)
        p = np.exp(np.minimum(s - s[..., :64].max(-1, keepdims=True), 0))
        return np.einsum("bhij,bhjd->bhid", p / p.sum(-1, keepdims=True), v)

    found = lines(forgets)
    assert found["the maximum may move from tile to tile"].outcome == FAILED
    assert "off by" in found["the maximum may move from tile to tile"].note


def test_side_effects_other_bits_and_neighbours_are_found():
    calls = []

    def writes(q, k, v, causal=False):
        o = plain(q, k, v, causal)
        q += 1
        return o

    def wavers(q, k, v, causal=False):
        calls.append(1)
        return np.nextafter(plain(q, k, v, causal), np.float32(len(calls) % 2))

    def mixes(q, k, v, causal=False):
        return np.nextafter(plain(q, k, v, causal), np.float32(q.shape[0]))

    assert "inputs stay as they are" in broken(writes)
    again, alone = "the same call gives the same bits", "bits do not depend on the batch"
    assert {again, alone} <= broken(wavers) and EXACT not in broken(wavers)
    assert alone in broken(mixes) and not {again, EXACT} & broken(mixes)


def test_what_it_raises_is_told():
    def refuses(q, k, v, causal=False):
        if q.shape[2] != k.shape[2]:
            raise NotImplementedError("square only")
        return plain(q, k, v, causal)

    found = lines(refuses)["lengths around the ends of tiles"]
    assert found.outcome == RAISED and found.note.startswith("11 of 11: NotImplementedError: square only in Case(")


def test_layouts_and_moves():
    seen = set()

    def function(q, k, v, layout, causal=False):
        seen.add((type(q), layout))
        return ours(q=q[0], k=k[0], v=v[0], layout=layout, causal=causal)

    limits = dict(layouts=("bhsd", "bshd"), move=lambda x: (x,), back=lambda x: x)
    assert not broken(function, **limits)
    assert seen == {(tuple, "bhsd"), (tuple, "bshd")}


def test_the_report():
    report = testing.check_kernel(lambda q, k, v, causal=False: q[:, :, :0], **LIMITS)
    assert not report and repr(report).startswith("<") and "FAILED" in repr(report)
    assert report._repr_html_().count("<tr>") == len(report.lines) and "<0" not in report._repr_html_()
    assert bool(Report(()))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (dict(features=("causal", "dropout")), "features must be some of causal, .*, not dropout"),
        (dict(dtypes="float32"), "dtypes must be a sequence"),
        (dict(layouts=()), "layouts must be a sequence"),
    ],
)
def test_errors(limits, message):
    with pytest.raises(ValueError, match=message):
        testing.check_kernel(ours, **limits)


def in_tiles(line, instead):
    """A kernel with tiles of 16 keys, of which one piece of text is another."""
    text = """
def attention(q, k, v, causal=False):
    m, l, o = np.full(q.shape[:3], -np.inf), np.zeros(q.shape[:3]), np.zeros((*q.shape[:3], v.shape[3]))
    for first in range(0, k.shape[2], 16):
        tile = np.s_[:, :, first : first + 16]
        s = np.einsum("bhid,bhjd->bhij", q, k[tile]) / q.shape[3] ** 0.5
        if causal:
            n, j = np.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2], first + np.arange(s.shape[3])
            s = np.where(j <= n, s, -np.inf)
        m_new = np.maximum(m, s.max(axis=3))
        at = np.where(m_new == -np.inf, 0, m_new)
        alpha, p = np.exp(m - at), np.exp(s - at[..., None])
        l, m = alpha * l + p.sum(3), m_new
        values = np.where(p[..., None] > 0, v[tile][:, :, None], 0) if causal else v[tile][:, :, None]
        o = alpha[..., None] * o + (p[..., None] * values).sum(3)
    return np.divide(o, l[..., None], where=l[..., None] != 0, out=np.zeros_like(o)).astype(q.dtype)
"""
    names = dict(np=np)
    assert line in text
    exec(text.replace(line, instead), names)
    return names["attention"]


@pytest.mark.parametrize(
    ("line", "instead", "promise"),
    [
        ("alpha, p = np.exp(m - at)", "alpha, p = np.ones_like(m)", "the maximum may move from tile to tile"),
        ("np.where(m_new == -np.inf, 0, m_new)", "m_new", "causal means what the contract says"),
        ("np.maximum(m, s.max(axis=3))", "np.zeros_like(m)", "scores may be large"),
        ("range(0, k.shape[2], 16)", "range(0, k.shape[2] - 15, 16)", "lengths around the ends of tiles"),
    ],
)
def test_quick_finds_what_small_problems_show(line, instead, promise):
    limits = dict(layouts=("bhsd",), features=("causal",), grouped=False, strange_strides=False, quick=True)
    report = testing.check_kernel(in_tiles(line, line), **limits)
    assert report and max(one.problems for one in report.lines) == 5
    wrong = testing.check_kernel(in_tiles(line, instead), **limits)
    assert promise in {one.promise for one in wrong.lines if one.outcome in (FAILED, RAISED)}
