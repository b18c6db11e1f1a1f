"""attention() under jit, grad and vmap."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

jax = pytest.importorskip("jax", reason="needs JAX")
pytest.importorskip("jax.experimental.buffer_callback", reason="needs a JAX with jax.experimental.buffer_callback")

import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402
from jax.experimental import jet  # noqa: E402
from jax.experimental.buffer_callback import buffer_callback  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import numba_flash  # noqa: E402
from numba_flash.bridges import jax as bridge  # noqa: E402
from numba_flash.dispatch import backward as gradients  # noqa: E402


@pytest.fixture(autouse=True)
def float64():
    """JAX has float64 only when asked."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def arrays(*shapes, dtype="float64", seed=0):
    generator = np.random.default_rng(seed)
    return [jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes]


Q, K, V = (2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 4)  # grouped heads, lengths and head_dims apart
LENGTHS, OFFSETS = np.array([6, 4], np.int32), np.array([1, 3], np.int32)
MASK = np.array([[1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 0]], bool)[:, None, None]
SETS = {
    "plain": ({}, None, None),
    "causal": (dict(causal=True, scale=0.7), None, None),
    "window and softcap": (dict(window=(2, 1), softcap=1.5, q_offset=OFFSETS), None, None),
    "bias and slopes": (dict(causal=True, q_offset=1), (1, 4, 1, 6), (4,)),
    "sinks": (dict(causal=True, q_offset=-2), None, None),
    "mask": (dict(mask=MASK), (6,), None),
    "lengths": (dict(seqlens_k=LENGTHS), None, (2, 4)),
    "bshd": (dict(layout="bshd", causal=True), None, None),
}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", SETS)
def test_check_grads(name, jitted):
    """Gradients of o and of lse, by finite differences in float64, with respect to all that has one."""
    options, bias, slopes = SETS[name]
    inputs = arrays(Q, K, V)
    if options.get("layout") == "bshd":
        inputs = [x.transpose(0, 2, 1, 3) for x in inputs]
    given = dict(bias=bias, alibi_slopes=slopes, sinks=(4,) if name == "sinks" else None)
    extra = {key: shape for key, shape in given.items() if shape is not None}

    def function(q, k, v, *more):
        q, k, v, *more = map(jnp.asarray, (q, k, v, *more))  # check_grads hands over NumPy's
        known = {key: jnp.asarray(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
        o, lse = numba_flash.attention(q, k, v, return_lse=True, **dict(zip(extra, more, strict=True)), **known)
        return jnp.sin(o).sum() + jnp.cos(jnp.where(jnp.isfinite(lse), lse, 0)).sum()

    function = jax.jit(function) if jitted else function
    check_grads(function, (*inputs, *arrays(*extra.values(), seed=1)), order=1, modes=["rev"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_traced_is_the_same_as_not(dtype):
    q, k, v = arrays((2, 4, 40, 32), (2, 2, 50, 32), (2, 2, 50, 32), dtype=dtype)
    expected = numba_flash.attention(q, k, v, causal=True, return_lse=True)
    found = jax.jit(lambda *x: numba_flash.attention(*x, causal=True, return_lse=True))(q, k, v)
    assert isinstance(found, numba_flash.AttentionOutput)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and jnp.array_equal(ours, theirs)
    (do,) = arrays((2, 4, 40, 32), dtype=dtype, seed=2)
    _, pull = jax.vjp(lambda *x: numba_flash.attention(*x, causal=True), q, k, v)
    wanted = numba_flash.attention_backward(do, q, k, v, *expected, causal=True)
    for ours, theirs in zip(pull(do), wanted, strict=False):
        assert ours.dtype == theirs.dtype and jnp.array_equal(ours, theirs)


def test_subnormal_numbers_are_kept():
    q, k, v = arrays(Q, K, V, dtype="float16")
    v = v * jnp.float16(1e-6)
    o = jax.jit(numba_flash.attention)(q, k, v)
    assert jnp.array_equal(o, numba_flash.attention(q, k, v)) and (o != 0).mean() > 0.5


OPERANDS = dict(
    q=Q, k=K, v=V, bias=(2, 4, 5, 6), mask=(2, 1, 5, 6), alibi_slopes=(2, 4), sinks=(2, 4), seqlens_k=(2,),
    q_offset=(2,),
)  # fmt: skip
# Other shapes that broadcast, which have no batch of their own.
WITHOUT_BATCH = dict(bias=(4, 1, 6), mask=(5, 6), alibi_slopes=(4,), sinks=(4,))


def operand(name, lead, shape, batch, generator):
    shape = (*lead, *((batch, *shape[1:]) if shape == OPERANDS[name] else shape))
    if name == "mask":
        return jnp.asarray(generator.random(shape) < 0.7)
    if name in ("seqlens_k", "q_offset"):
        return jnp.asarray(generator.integers(0, 7, shape), jnp.int32)
    return jnp.asarray(generator.standard_normal(shape))


@st.composite
def mapped_problems(draw):
    """(operands, in_axes of each level from the outside, sizes): each operand mapped at any axis, or not."""
    batch, generator = draw(st.sampled_from([1, 1, 2, 0])), np.random.default_rng(draw(st.integers(0, 1000)))
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 3]), min_size=1, max_size=2))
    others = draw(st.sets(st.sampled_from(list(OPERANDS)[3:])))
    operands, axes = {}, [{} for _ in sizes]
    for name in [name for name in OPERANDS if name in ("q", "k", "v") or name in others]:
        shape = WITHOUT_BATCH[name] if name in WITHOUT_BATCH and draw(st.booleans()) else OPERANDS[name]
        maps = [name == "q" or draw(st.booleans()) for _ in sizes]
        array = operand(
            name, [n for n, is_mapped in zip(sizes, maps, strict=True) if is_mapped], shape, batch, generator
        )
        for level in reversed(range(len(sizes))):  # the innermost stands first among the axes that are left to it
            axes[level][name] = None
        front = 0
        for level, is_mapped in enumerate(maps):
            if is_mapped:
                axis = draw(st.integers(front, array.ndim - 1)) if level == len(sizes) - 1 else front
                array = jnp.moveaxis(array, front, axis)
                axes[level][name] = axis - front if level == len(sizes) - 1 else 0
                front += axis == front and level < len(sizes) - 1
        operands[name] = array
    return operands, axes, sizes


def one_by_one(function, operands, axes, sizes):
    """What jax.vmap computes, by a loop."""
    if not sizes:
        return function(operands)
    parts = []
    for index in range(sizes[0]):
        chosen = {
            name: x if axes[0][name] is None else jnp.take(x, index, axes[0][name]) for name, x in operands.items()
        }
        parts.append(one_by_one(function, chosen, axes[1:], sizes[1:]))
    return jax.tree.map(lambda *x: jnp.stack(x), *parts)


@pytest.mark.slow
@settings(deadline=None, max_examples=5, derandomize=True)
@given(mapped_problems())
def test_vmap_is_a_loop(problem):
    """Bit for bit, forward and gradients: a row's bits do not depend on its batch neighbours."""
    operands, axes, sizes = problem

    def forward(operands):
        return numba_flash.attention(causal=True, return_lse=True, **operands)

    def loss(floats, others):
        o, lse = forward({**floats, **others})
        return jnp.sin(o).sum() + jnp.cos(jnp.where(jnp.isfinite(lse), lse, 0)).sum()

    def gradient(operands):
        floats = {name: x for name, x in operands.items() if x.dtype == jnp.float64}
        return jax.grad(loss)(floats, {name: x for name, x in operands.items() if name not in floats})

    for function in (lambda operands: tuple(forward(operands)), gradient):
        mapped = function
        for axis in reversed(axes):
            mapped = jax.vmap(mapped, in_axes=(axis,))
        found = mapped(operands)
        for result in jax.tree.leaves(found):
            assert result.shape[: len(sizes)] == tuple(sizes)
        if 0 not in sizes:
            expected = one_by_one(function, operands, axes, sizes)
            assert jax.tree.all(jax.tree.map(jnp.array_equal, found, expected))


def test_vmap_and_grad_in_both_orders():
    q, k, v = arrays((3, *Q), K, (3, *V))
    mapped = jax.vmap(numba_flash.attention, in_axes=(0, None, 0))
    of_mapped = jax.grad(lambda k: jnp.sin(mapped(q, k, v)).sum())
    mapped_of = jax.vmap(jax.grad(lambda k, q, v: jnp.sin(numba_flash.attention(q, k, v)).sum()), (None, 0, 0))
    expected = mapped_of(k, q, v).sum(0)
    for found in (of_mapped(k), jax.jit(of_mapped)(k), jax.jit(mapped_of)(k, q, v).sum(0)):
        assert jnp.allclose(found, expected, rtol=1e-12, atol=1e-12)
    jacobian = jax.jacrev(lambda k: numba_flash.attention(q[0], k, v[0]).sum((0, 1, 2)))(k)
    for column in range(V[-1]):
        alone = jax.grad(lambda k, at=column: numba_flash.attention(q[0], k, v[0]).sum((0, 1, 2))[at])(k)
        assert jnp.array_equal(jacobian[column], alone)


@pytest.mark.parametrize(
    ("batch", "in_axes", "problems"),
    [(2, (0, 0, 0), 1), (1, (0, None, None), 1), (1, (None, 0, 0), 1), (2, (0, None, 0), 3)],
)
def test_vmap_is_one_call(batch, in_axes, problems, monkeypatch):
    """One callback, and one problem in it unless an array with several batch entries is not mapped over."""
    callbacks, runs = [], []
    real_call, real_run = bridge._Callback.__call__, bridge._run
    monkeypatch.setattr(bridge._Callback, "__call__", lambda *x: (callbacks.append(1), real_call(*x))[1])
    monkeypatch.setattr(bridge, "_run", lambda *x: (runs.append(1), real_run(*x))[1])
    shapes = [
        (batch, *shape[1:]) if axis is None else (3, batch, *shape[1:])
        for axis, shape in zip(in_axes, (Q, K, V), strict=True)
    ]
    jax.block_until_ready(jax.jit(jax.vmap(numba_flash.attention, in_axes))(*arrays(*shapes)))
    assert (len(callbacks), len(runs)) == (1, problems)


def test_only_what_is_asked_for_is_computed(monkeypatch):
    asked = []
    real = gradients.plan

    def spy(key):
        asked.append((key.wanted, key.operands[-1] is None))  # the last one is dlse
        return real(key)

    monkeypatch.setattr(gradients, "plan", spy)
    bridge._plan.cache_clear()
    q, k, v = arrays(Q, K, V)
    dq = jax.grad(lambda q: numba_flash.attention(q, k, v).sum())(q)
    _, dv = jax.grad(lambda k, v: numba_flash.attention(q, k, v, return_lse=True).lse.sum(), (0, 1))(k, v)
    jax.block_until_ready((dq, dv))
    assert asked == [(("dq",), True), (("dk", "dv"), False)]
    assert not dv.any()  # lse does not depend on v


TRANSFORMED = {
    "grad": (lambda f: jax.grad(lambda q: f(q).sum()), Q),
    "vmap": (jax.vmap, (3, *Q)),
    "vmap of grad": (lambda f: jax.vmap(jax.grad(lambda q: f(q).sum())), (3, *Q)),
    "grad of vmap": (lambda f: jax.grad(lambda q: jax.vmap(f)(q).sum()), (3, *Q)),
    "checkpoint": (lambda f: jax.grad(jax.checkpoint(lambda q: f(q).sum())), Q),
}
compiled = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_call_seen_before_compiles_nothing(name):
    transform, shape = TRANSFORMED[name]
    (q,), (k, v) = arrays(shape), arrays(K, V)
    once = lambda: jax.block_until_ready(transform(lambda q: numba_flash.attention(q, k, v))(q))  # noqa: E731
    once()
    once()
    compiled.clear()
    once()
    assert not [event for event in compiled if "compile" in event and "trace" not in event]
    jax.block_until_ready(jax.jit(lambda x: x * len(compiled) + 1.25)(q))
    assert [event for event in compiled if "backend_compile" in event]  # what is counted exists


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the memory of a process from Linux")
@pytest.mark.parametrize("name", ["grad", "vmap"])
def test_memory_stays_flat(name):
    """A program that is compiled anew stays in JAX's memory: 3.0 MB a call of grad and 1.9 MB of vmap."""
    transform, shape = TRANSFORMED[name]
    (q,), (k, v) = arrays(shape), arrays(K, V)
    once = lambda: jax.block_until_ready(transform(lambda q: numba_flash.attention(q, k, v))(q))  # noqa: E731
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")  # noqa: E731
    for _ in range(10):
        once()
    before, calls = resident(), 30
    for _ in range(calls):
        once()
    assert resident() - before < calls * 1.9e6 / 4


def test_lengths_and_offsets_may_be_traced_too():
    q, k, v = arrays(Q, K, V)
    function = jax.jit(lambda lengths, offsets: numba_flash.attention(q, k, v, seqlens_k=lengths, q_offset=offsets))
    lengths, offsets = jnp.asarray(LENGTHS), jnp.asarray(OFFSETS)
    expected = numba_flash.attention(q, k, v, seqlens_k=lengths, q_offset=offsets)
    assert jnp.array_equal(function(lengths, offsets), expected)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(out=np.empty(Q)), NotImplementedError, "out"),
        (dict(stream=0), NotImplementedError, "stream"),
        (dict(dropout_p=0.1), ValueError, "dropout_p needs seed="),
        (dict(softcap=-1.0), ValueError, "softcap"),
        (dict(window=4), ValueError, "window"),
        (dict(kernel="v3"), ValueError, "kernel must be one of"),
        (dict(kernel="mma"), jax.errors.JaxRuntimeError, "cannot run this problem here"),
    ],
)
def test_mistakes_are_named(options, error, words):
    q, k, v = arrays(Q, K, V)
    with pytest.raises(error, match=words):
        jax.block_until_ready(jax.jit(lambda q: numba_flash.attention(q, k, v, **options))(q))


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p", "causal", "window"])
def test_options_are_not_traced(name):
    q, k, v = arrays(Q, K, V)

    def function(q, value):
        return numba_flash.attention(q, k, v, **{name: (value, None) if name == "window" else value})

    with pytest.raises(TypeError, match=f"{name} must be known when JAX traces"):
        jax.jit(function)(q, 1)
    words = (
        f"{name} must be known when" if name in ("scale", "softcap", "dropout_p") else f"{name}.* must be .*Trace[dr]"
    )
    with pytest.raises(TypeError, match=words):  # an array that is there, an option that is not
        jax.jit(functools.partial(function, q))(1)


REFUSED = {
    "jvp": lambda f, q: jax.jvp(f, (q,), (q,)),
    "jvp in jit": lambda f, q: jax.jit(lambda q: jax.jvp(f, (q,), (q,)))(q),
    "jacfwd": lambda f, q: jax.jacfwd(f)(q),
    "jacfwd in jit": lambda f, q: jax.jit(jax.jacfwd(f))(q),
    "linearize": lambda f, q: jax.linearize(f, q)[1](q),
    "hessian": lambda f, q: jax.hessian(lambda q: f(q).sum())(q),
    "hessian in jit": lambda f, q: jax.jit(jax.hessian(lambda q: f(q).sum()))(q),
    "grad of grad": lambda f, q: jax.grad(lambda q: jax.grad(lambda q: f(q).sum())(q).sum())(q),
    "grad of grad in jit": lambda f, q: jax.jit(jax.grad(lambda q: jax.grad(lambda q: f(q).sum())(q).sum()))(q),
    "grad of vmap of grad": lambda f, q: jax.grad(
        lambda q: jax.vmap(jax.grad(lambda q: f(q).sum()))(jnp.stack([q] * 2)).sum()
    )(q),
}


@pytest.mark.parametrize("name", REFUSED)
def test_forward_mode_and_second_derivatives_are_refused(name):
    q, k, v = arrays(Q, K, V)
    with pytest.raises(NotImplementedError, match="derivative of attention|of attention is not there.*jax.grad"):
        jax.block_until_ready(REFUSED[name](lambda q: numba_flash.attention(q, k, v), q))


TAYLOR = {
    "jet": lambda f, q: jet.jet(f, (q,), ((q, q),)),
    "jet of jit": lambda f, q: jet.jet(jax.jit(f), (q,), ((q, q),)),
    "jit of jet": lambda f, q: jax.jit(lambda q: jet.jet(f, (q,), ((q, q),)))(q),
}


@pytest.mark.parametrize("name", TAYLOR)
def test_taylor_mode_is_refused(name):
    q, k, v = arrays(Q, K, V)
    with pytest.raises(NotImplementedError, match=r"Taylor mode.*of attention is not there.*jax\.grad"):
        TAYLOR[name](lambda q: numba_flash.attention(q, k, v), q)


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad, jax.vmap], ids=["forward", "grad", "vmap"])
def test_export_is_refused(transform):
    q, k, v = arrays((3, *Q) if transform is jax.vmap else Q, K, V)
    function = jax.jit(transform(lambda q: numba_flash.attention(q, k, v).sum()))
    with pytest.raises(NotImplementedError, match=r"jax\.export cannot write down.*dot_product_attention"):
        export.export(function)(q)
    assert jax.block_until_ready(function(q)) is not None  # after the refusal


# Two devices, over which the batch is split; the bias is whole on both, so its gradient is summed over them. Results
# and gradients are those of one device, inside and outside of the map, and JAX knows what differs where.
ON_TWO_DEVICES = """
import jax, numpy as np, numba_flash
from functools import partial
from jax.sharding import NamedSharding, PartitionSpec as P

jax.config.update("jax_enable_x64", True)
mesh = jax.make_mesh((2,), ("batch",))
specs = (P("batch"), P("batch"), P("batch"), P())
generator = np.random.default_rng(0)
values = [generator.standard_normal(shape) for shape in ((4, 2, 5, 3), (4, 2, 6, 3), (4, 2, 6, 3), (1, 2, 1, 6))]
given = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(values, specs)]
split = lambda f, out: jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, check_vma=True)
numbers = tuple(range(4))

def attention(q, k, v, bias):
    o, lse = numba_flash.attention(q, k, v, bias=bias, causal=True, q_offset=1, return_lse=True)
    return o * lse[..., None]

def dropping(q, k, v, seed):
    return numba_flash.attention(q, k, v, dropout_p=0.4, seed=seed[0] if seed.ndim else seed)

# Each device counts b from 0: with one seed for both, the same weights count on both.
half = [[jax.numpy.asarray(x[n : n + 2]) for x in values[:3]] for n in (0, 2)]
for seeds, spec in ((np.array([5, 6], np.uint32), P("batch")), (np.uint32(5), P())):
    seed = jax.device_put(seeds, NamedSharding(mesh, spec))
    whole = jax.jit(
        jax.shard_map(dropping, mesh=mesh, in_specs=(*specs[:3], spec), out_specs=P("batch"), check_vma=True)
    )
    alone = [partial(dropping, seed=x) for x in (seeds.reshape(-1)[0], seeds.reshape(-1)[-1])]
    pairs = [(whole(*given[:3], seed), [f(*x) for f, x in zip(alone, half)])]
    of_whole = jax.jit(jax.grad(lambda *x: (whole(*x) ** 2).sum(), (0, 1, 2)))(*given[:3], seed)
    of_alone = [jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2))(*x) for f, x in zip(alone, half)]
    for ours, theirs in (*pairs, *zip(of_whole, zip(*of_alone))):
        np.testing.assert_allclose(ours, np.concatenate(theirs), rtol=1e-12, atol=1e-12)

loss = lambda *x: (attention(*x) ** 2).sum()
expected = jax.grad(loss, numbers)(*map(jax.numpy.asarray, values))
outside = jax.jit(jax.grad(lambda *x: (split(attention, P("batch"))(*x) ** 2).sum(), numbers))(*given)
inside = jax.jit(split(jax.grad(loss, numbers), specs))(*given)
for found in (outside, inside):
    for ours, theirs in zip(found, expected):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)
np.testing.assert_allclose(jax.jit(split(attention, P("batch")))(*given), attention(*values), rtol=1e-12, atol=1e-12)
try:
    jax.jit(split(attention, P()))(*given)
except ValueError as error:
    assert "out_specs" in str(error), error
else:
    raise AssertionError("o of one device passed for that of both")
"""


def test_what_differs_over_devices_is_known():
    environment = os.environ | dict(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=2")
    run = subprocess.run([sys.executable, "-c", ON_TWO_DEVICES], env=environment, capture_output=True, text=True)
    assert not run.returncode, run.stderr


def test_a_gradient_may_be_a_constant_of_the_next():
    """First-order meta-learning: jax.grad passes by a gradient that stop_gradient holds."""
    q, k, v = arrays(Q, K, V)
    inner = jax.grad(lambda q: numba_flash.attention(q, k, v).sum())
    function = lambda q: jnp.sum(q * jax.lax.stop_gradient(inner(q)))  # noqa: E731
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        assert jnp.array_equal(transform(function)(q), inner(q))


def test_a_callback_of_the_users_own():
    """The buffers that JAX hands to any callback are arrays for attention()."""
    q, k, v = arrays(Q, K, V)
    run = lambda context, o, q, k, v: numba_flash.attention(q, k, v, out=o) and None  # noqa: E731
    o = jax.jit(buffer_callback(run, jax.ShapeDtypeStruct((*Q[:3], V[3]), q.dtype)))(q, k, v)
    assert jnp.array_equal(o, numba_flash.attention(q, k, v))


def test_a_jax_without_buffer_callback_is_told_so(monkeypatch):
    q, k, v = arrays(Q, K, V)
    monkeypatch.setattr(numba_flash.api.forward, "_bridges", {})
    monkeypatch.setitem(sys.modules, "jax.experimental.buffer_callback", None)
    for name in ("jax", "jax_sharding"):
        monkeypatch.delitem(sys.modules, f"numba_flash.bridges.{name}", raising=False)
        monkeypatch.delattr(f"numba_flash.bridges.{name}", raising=False)
    with pytest.raises(NotImplementedError, match="buffer_callback"):
        jax.jit(lambda q: numba_flash.attention(q, k, v))(q)  # that no other test has had traced
