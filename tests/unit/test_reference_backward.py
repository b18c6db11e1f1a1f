"""The oracle's gradients against finite differences of its forward: float64, one option at a time and all at once."""

import numpy as np
import pytest

import numba_flash
from numba_flash.problem.backward import GRADIENTS

STEP = 1e-5
INPUTS = dict(zip(GRADIENTS, ("q", "k", "v", "bias", "alibi_slopes", "sinks"), strict=True))


def options():
    g = np.random.default_rng(4)
    lengths, offsets = np.array([7, 4], np.int32), np.array([3, -2], np.int32)
    mask = g.random((2, 1, 5, 7)) < 0.6
    slopes, sinks = g.random((2, 4)), g.standard_normal((2, 4))
    single = {
        "plain": {},
        "causal": dict(causal=True),
        "window": dict(window=(2, 1)),
        "q_offset": dict(causal=True, q_offset=-2),
        "q_offset of each": dict(causal=True, q_offset=offsets),
        "seqlens_k": dict(seqlens_k=lengths),
        "no keys": dict(seqlens_k=np.array([0, 7], np.int32)),
        "scale": dict(scale=-0.7),
        "softcap": dict(softcap=1.5),
        "alibi": dict(alibi_slopes=slopes[0]),
        "alibi of each": dict(alibi_slopes=slopes),
        "sinks": dict(sinks=sinks[0]),
        "sinks of each": dict(sinks=sinks),
        "sinks without keys": dict(sinks=sinks, seqlens_k=np.array([0, 7], np.int32)),
        "mask": dict(mask=mask),
        "layout": dict(layout="bshd"),
    }
    for shape in ((2, 4, 5, 7), (4, 1, 7), (5, 1), (2, 1, 1, 7), ()):
        single[f"bias {shape}"] = dict(bias=np.asarray(g.standard_normal(shape)))
    together = ("causal", "seqlens_k", "softcap", "alibi", "sinks", "mask", "bias (4, 1, 7)")
    single["all"] = {name: value for which in together for name, value in single[which].items()}
    return single


OPTIONS = options()


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("which", OPTIONS)
def test_finite_differences(which, with_dlse):
    g, given = np.random.default_rng(0), OPTIONS[which]
    swapped = given.get("layout") == "bshd"

    def random(*shape):
        x = g.standard_normal(shape)
        return x.swapaxes(1, 2) if swapped else x

    inputs = dict(q=random(2, 4, 5, 6), k=random(2, 2, 7, 6), v=random(2, 2, 7, 3)) | given
    do, dlse = random(2, 4, 5, 3), g.standard_normal((2, 4, 5)) if with_dlse else None

    def value(**changed):
        o, lse = numba_flash.attention(**inputs | changed, kernel="reference", return_lse=True)
        # a row without keys has no finite lse, and it stays what it is
        return np.sum(do * o) + (np.sum(dlse * np.where(np.isfinite(lse), lse, 0)) if with_dlse else 0)

    o, lse = numba_flash.attention(**inputs, kernel="reference", return_lse=True)
    wanted = tuple(name for name in GRADIENTS if INPUTS[name] in inputs)
    gradients = numba_flash.attention_backward(do, o=o, lse=lse, dlse=dlse, wanted=wanted, kernel="reference", **inputs)
    for name in GRADIENTS:
        gradient = getattr(gradients, name)
        assert (gradient is None) == (name not in wanted)
        if gradient is not None:
            x = inputs[INPUTS[name]]
            assert gradient.shape == x.shape and gradient.dtype == x.dtype and gradient.flags.c_contiguous
            direction = g.standard_normal(x.shape)
            up, down = (value(**{INPUTS[name]: np.asarray(x + sign * STEP * direction)}) for sign in (1, -1))
            # the third derivative times STEP**2, and the cancellation of two values of about 100
            assert abs((up - down) / (2 * STEP) - np.sum(gradient * direction)) < 1e-7, name


# From an lse as a forward in float32 rounds it: by up to 512 at 1e10.
@pytest.mark.parametrize("size", [1e5, 1e7, 1e10])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_large_scores(size, with_sinks):
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 4, 1, 16, 8)).astype(np.float32)
    options = dict(scale=size / 10) | (dict(sinks=np.array([size / 5], np.float32)) if with_sinks else {})
    o, lse = numba_flash.attention(q, k, v, **options, return_lse=True, kernel="reference")
    found = numba_flash.attention_backward(
        do, q, k, v, o, lse, **options, wanted=("dq", "dv", *(["dsinks"] if with_sinks else [])), kernel="reference"
    )
    q, k, v, do = (x.astype(np.float64) for x in (q, k, v, do))
    s = size / 10 * q @ k.swapaxes(2, 3)
    assert np.abs(s).max() > size / 2
    s = np.concatenate([s, np.full((4, 1, 16, 1), size / 5 if with_sinks else -np.inf)], 3)
    p = np.exp(s - s.max(-1, keepdims=True))
    p, of_sink = np.split(p / p.sum(-1, keepdims=True), [16], 3)
    delta = (do * o).sum(-1, keepdims=True)
    dq = size / 10 * (p * (do @ v.swapaxes(2, 3) - delta)) @ k
    # each product of float64 in dS is rounded, and scale times that may be all of dq
    rights = (found.dv, p.swapaxes(2, 3) @ do, 0), (found.dq, dq, 1e-12 * size), (found.dsinks, -of_sink * delta, 0)
    for got, right, rounding in rights[: 3 if with_sinks else 2]:
        right = right.sum() if got is found.dsinks else right
        assert np.abs(got - right).max() <= 1e-6 * np.abs(right).max() + rounding + 1e-30
