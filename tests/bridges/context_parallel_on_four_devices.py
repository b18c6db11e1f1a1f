"""Context parallelism inside jax.shard_map. test_jax_sharding.py runs this in a process that has four devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import numba_flash
from numba_flash.distributed import Layout, context_parallel_attention, shard, unshard

SEQLEN = 400
DIMS = {"bhsd": 2, "bshd": 1}


def arrays(dims, heads=8, heads_kv=4, dtype="float32"):
    generator = np.random.default_rng(0)
    shapes = [(2, h, SEQLEN, 8) for h in (heads, heads_kv, heads_kv, heads)]
    made = [jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes]
    return [x.swapaxes(1, 2) if dims == "bshd" else x for x in made]


def mesh(size):
    return jax.make_mesh((size,), ("cp",), devices=jax.devices()[:size])


def on_devices(size, dims, layout, options, **how):
    """-> function(q, k, v, do, *arrays of options) on the whole: o, lse and gradients."""
    dim = DIMS[dims]

    def local(q, k, v, do, named):
        given = [shard(x, "cp", dim, layout) for x in (q, k, v, do)]

        def loss(q, k, v, named):
            every = dict(options, layout=layout, dims=dims, return_lse=True, **how, **named)
            o, lse = context_parallel_attention(q, k, v, "cp", **every)
            return (o * given[3]).astype("float32").sum() + jnp.cos(lse).sum(), (o, lse)

        gradients, (o, lse) = jax.grad(loss, (0, 1, 2, 3), has_aux=True)(*given[:3], named)
        whole = [unshard(x, "cp", dim, layout) for x in (o, *gradients[:3])]
        return (whole[0], unshard(lse, "cp", 2, layout), *whole[1:]), {n: x[None] for n, x in gradients[3].items()}

    specs = dict(in_specs=P(), out_specs=(P(), P("cp")), check_vma=False)
    return jax.jit(jax.shard_map(local, mesh=mesh(size), **specs))


def alone(q, k, v, do, options, dims):
    def loss(q, k, v):
        o, lse = numba_flash.attention(q, k, v, q_offset=0, layout=dims, return_lse=True, **options)
        return (o * do).astype("float32").sum() + jnp.cos(lse).sum(), (o, lse)

    gradients, (o, lse) = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return o, lse, *gradients


OPTIONS = {
    "causal": (dict(causal=True), {}),
    "window": (dict(window=(60, 10)), {}),
    "sinks": (dict(causal=True), dict(sinks=np.linspace(-1, 2, 8).astype("float32"))),
    "alibi": (dict(causal=True, softcap=4.0), dict(alibi_slopes=np.linspace(0.01, 0.3, 8).astype("float32"))),
}
FUNCTION = dict(score_mod=lambda s, b, h, i, j: s - 0.01 * h * abs(i - j))


@pytest.mark.parametrize(("size", "name"), [(2, "causal"), *((4, name) for name in OPTIONS)])
@pytest.mark.parametrize(("how", "dims", "layout"), [("gather", "bhsd", "zigzag"), ("heads", "bshd", "contiguous")])
def test_bits_of_one_device(name, size, how, dims, layout):
    options, named = OPTIONS[name]
    given = arrays(dims)
    found, _ = on_devices(size, dims, layout, options, method=how)(*given, named)
    expected = alone(*given, options | named, dims)
    for n, (one, other) in enumerate(zip(found, expected, strict=True)):
        if n < 3 or how == "heads":
            np.testing.assert_array_equal(one, other)
        else:
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_functions_are_told_positions_of_the_whole():
    given = arrays("bhsd")
    found, _ = on_devices(4, "bhsd", "zigzag", FUNCTION | dict(causal=True))(*given, {})
    for one, other in zip(found, alone(*given, FUNCTION | dict(causal=True), "bhsd"), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_shares_are_summed_in_float32():
    """Four bfloat16 shares, rounded once: closer to float32's sum than sums of rounded numbers are."""
    given = arrays("bhsd", dtype="bfloat16")
    found, _ = on_devices(4, "bhsd", "zigzag", {}, method="gather")(*given, {})
    exact = alone(*(x.astype("float32") for x in given), {}, "bhsd")
    for one, other in zip(found[3:], exact[3:], strict=True):
        error = jnp.abs(one.astype("float32") - other).max() / jnp.abs(other).max()
        assert one.dtype == jnp.bfloat16 and error < 2**-7


@pytest.mark.parametrize(
    ("more", "error", "match"),
    [
        (dict(method="ring"), NotImplementedError, "use method='gather'"),
        (dict(cu_seqlens=(0, 9)), NotImplementedError, "use mask_mod"),
        (FUNCTION | dict(method="heads"), NotImplementedError, "score_mod.*use method='gather'"),
        (dict(seqlen=7), ValueError, "seqlen must be 400"),
    ],
)
def test_what_is_refused(more, error, match):
    with pytest.raises(error, match=match):
        on_devices(4, "bhsd", "zigzag", more)(*arrays("bhsd"), {})


def test_devices_have_equal_runs():
    x = jnp.zeros((6,))
    for layout in ("zigzag", Layout.contiguous(6, 4)):
        cut = functools.partial(shard, group="cp", dim=0, layout=layout)
        with pytest.raises(ValueError, match="runs of equal lengths"):
            jax.shard_map(cut, mesh=mesh(4), in_specs=P(), out_specs=P("cp"))(x)
