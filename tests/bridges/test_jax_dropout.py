"""dropout_p and seed under jit, grad and vmap of JAX, against the same calls outside of them, bit for bit."""

import ctypes
import functools

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX")
pytest.importorskip("jax.experimental.buffer_callback", reason="needs a JAX with jax.experimental.buffer_callback")

import jax.numpy as jnp  # noqa: E402

import numba_flash  # noqa: E402
from numba_flash.bridges import jax as bridge, jax_seed  # noqa: E402


@pytest.fixture(autouse=True)
def float64():
    """JAX has float64 only when asked."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


Q, K, V, O = (2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 4), (2, 4, 5, 4)  # grouped heads, lengths and head_dims apart
P = 0.4
LONG = 2**63 + 11  # both words of it count


def arrays(*shapes, dtype="float64", seed=0):
    generator = np.random.default_rng(seed)
    return [jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes]


def dropping(q, k, v, seed, **options):
    return numba_flash.attention(q, k, v, dropout_p=P, seed=seed, **options)


def loss_of(attention):
    (do,) = arrays(O, seed=1)
    return lambda *given, **options: (attention(*given, **options) * do).sum()


def same(found, expected):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype and jnp.array_equal(one, other)


def sloped(score, b, h, q_pos, k_pos, slopes):
    return score + slopes[h] * (k_pos - b)


SETS = {
    "plain": dict,
    "causal": lambda: dict(causal=True, scale=0.7, softcap=2.0, seqlens_k=jnp.array([6, 4], jnp.int32)),
    "bias and slopes": lambda: dict(zip(("bias", "alibi_slopes"), arrays((1, 4, 1, 6), (4,), seed=2), strict=True)),
    "sinks": lambda: dict(sinks=arrays((4,), seed=2)[0], causal=True, q_offset=jnp.array([1, -2], jnp.int32)),
    "functions": lambda: dict(score_mod=sloped, aux=tuple(arrays((4,), seed=2))),
    "bshd": lambda: dict(layout="bshd"),
}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", SETS)
def test_traced_is_the_same_as_not(name, jitted):
    """o and lse, and the gradients of both with respect to all that has one."""
    options, inputs = SETS[name](), arrays(Q, K, V)
    (do,), (dlse,) = arrays(O, seed=3), arrays(O[:3], seed=4)
    if name == "bshd":
        inputs, do = [x.swapaxes(1, 2) for x in inputs], do.swapaxes(1, 2)
    floats = {key: options.pop(key) for key in ("bias", "alibi_slopes", "sinks", "aux") if key in options}

    def attention(seed, inputs, floats):
        return dropping(*inputs, seed, return_lse=True, **floats, **options)

    def all_of(seed, inputs, floats):
        found, pull = jax.vjp(functools.partial(attention, seed), inputs, floats)
        return found, pull(numba_flash.AttentionOutput(do, dlse))

    found = (jax.jit(all_of, static_argnums=0) if jitted else all_of)(LONG, inputs, floats)
    expected = attention(LONG, inputs, floats)
    wanted = ("dq", "dk", "dv", *("daux[0]" if key == "aux" else f"d{key}" for key in floats))
    gradients = numba_flash.attention_backward(
        do, *inputs, *expected, dlse=dlse, wanted=wanted, dropout_p=P, seed=LONG, **floats, **options
    )
    same(found, (expected, (gradients[:3], {key: getattr(gradients, f"d{key}") for key in floats})))


def test_something_is_left_out():
    q, k, v = arrays(Q, K, V)
    without = jax.jit(numba_flash.attention)(q, k, v)
    one, other = (jax.jit(dropping)(q, k, v, seed) for seed in (1, 2))
    assert not jnp.allclose(one, without) and not jnp.allclose(one, other)


NUMBERS = [
    (7, 7),
    (np.uint64(LONG), LONG),
    (np.int32(2**31 - 1), 2**31 - 1),
    (np.uint32(2**32 - 1), 2**32 - 1),
    (np.int64(2**33 + 1), 2**33 + 1),
]


@pytest.mark.parametrize(("seed", "number"), NUMBERS)
def test_a_seed_may_be_traced(seed, number):
    """A number of Python's is then int64 or, where JAX has no 64 bits, int32."""
    q, k, v = arrays(Q, K, V)
    expected = numba_flash.attention(q, k, v, dropout_p=P, seed=number)
    same(jax.jit(dropping)(q, k, v, seed), expected)
    same(jax.jit(lambda seed: dropping(q, k, v, seed))(seed), expected)  # arrays that are there
    same(jax.jit(lambda q: dropping(q, k, v, jnp.asarray(seed)))(q), expected)
    kept = jax.device_put(seed)
    same(jax.jit(lambda q: dropping(q, k, v, kept))(q), expected)
    same(jax.jit(jax.grad(loss_of(dropping)))(q, k, v, seed), jax.grad(loss_of(dropping))(q, k, v, number))


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**32, 2**64 - 1])
def test_a_number_has_64_bits_where_jax_has_32(seed):
    jax.config.update("jax_enable_x64", False)
    q, k, v = arrays(Q, K, V, dtype="float32")
    expected = numba_flash.attention(q, k, v, dropout_p=P, seed=seed)
    same(jax.jit(lambda q: dropping(q, k, v, seed))(q), expected)
    same(jax.vjp(lambda q: dropping(q, k, v, seed), q)[0], expected)


def test_layers_and_steps_draw_theirs_from_a_key():
    """Scanned over and computed again in the backward, each layer with a seed of its own."""
    (q,), layers = arrays((1, 2, 5, 4)), 3

    def layer(x, seed):
        return dropping(x, x, x, seed), None

    def loss(x, key, layer=layer):
        seeds = jax.random.bits(key, (layers,), "uint32")
        return (jax.lax.scan(layer, x, seeds)[0] ** 2).sum()

    def unrolled(x, seeds):
        for seed in seeds:
            x = dropping(x, x, x, int(seed))
        return (x**2).sum()

    for step in range(2):
        key = jax.random.fold_in(jax.random.key(3), step)
        expected = jax.grad(unrolled)(q, np.asarray(jax.random.bits(key, (layers,), "uint32")))
        for again in (layer, jax.checkpoint(layer)):
            found = jax.jit(jax.grad(functools.partial(loss, layer=again)))(q, key)
            assert jnp.allclose(found, expected, rtol=1e-12, atol=1e-12)  # XLA multiplies x**2 out in another order


def test_a_seed_has_no_gradient():
    q, k, v = arrays(Q, K, V)
    _, pull = jax.vjp(dropping, q, k, v, jnp.uint32(3))
    *_, of_seed = pull(jnp.ones(O))
    assert of_seed.dtype == jax.dtypes.float0


# What is mapped: all arrays, which without dropout would be one batch; q; q, v and the seed; the seed; all.
MAPS = [(1, 0, 2, None), (0, None, None, None), (0, None, 0, 0), (None, None, None, 0), (1, 0, 2, 0)]


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(("axes", "known"), [*((axes, False) for axes in MAPS), (MAPS[0], True)])
def test_vmap_is_a_loop(axes, known, jitted):
    """b is the entry of each problem's own batch, so that each is what it is alone. known: a seed of Python's."""
    inputs = [
        jnp.stack(arrays(*[shape] * 3, seed=n), 0 if axis is None else axis)
        for n, (shape, axis) in enumerate(zip((Q, K, V), axes, strict=False))
    ]
    inputs = [x[0] if axis is None else x for x, axis in zip(inputs, axes, strict=False)]
    numbers = [5, LONG, 7] if axes[3] is not None else [LONG] * 3
    seeds = jnp.array(numbers, "uint64") if axes[3] is not None else jnp.uint64(LONG)
    if known:
        call = lambda f: jax.vmap(lambda *x: f(*x, LONG), axes[:3])(*inputs)  # noqa: E731
    else:
        call = lambda f: jax.vmap(f, axes)(*inputs, seeds)  # noqa: E731
    for function in (dropping, jax.grad(loss_of(dropping), (0, 1, 2))):
        alone = [
            function(
                *(x if axis is None else jnp.take(x, n, axis) for x, axis in zip(inputs, axes, strict=False)), number
            )
            for n, number in enumerate(numbers)
        ]
        found = jax.jit(call, static_argnums=0)(function) if jitted else call(function)
        same(found, jax.tree.map(lambda *x: jnp.stack(x), *alone))


def test_vmap_of_vmap_and_grad_of_vmap():
    q, k, v = arrays((2, 3, *Q), (2, *K), V)
    seeds = jnp.arange(6, dtype="uint32").reshape(2, 3)
    twice = jax.vmap(jax.vmap(dropping, (0, None, None, 0)), (0, 0, None, 0))
    alone = jnp.stack([jnp.stack([dropping(q[i, j], k[i], v, int(seeds[i, j])) for j in range(3)]) for i in range(2)])
    same(twice(q, k, v, seeds), alone)
    across = jax.vmap(jax.vmap(dropping, (0, None, None, None)), (0, 0, None, 0))  # a seed of the outer map
    same(across(q, k, v, seeds[:, 1])[:, 1], alone[:, 1])
    (do,) = arrays(alone.shape, seed=5)
    found = jax.jit(jax.grad(lambda q: (twice(q, k, v, seeds) * do).sum()))(q)
    one = jax.grad(lambda q, n: (dropping(q, k[n[0]], v, int(seeds[n])) * do[n]).sum())
    same(found[1, 2], one(q[1, 2], (1, 2)))


def test_vmap_over_nothing():
    q, k, v = arrays((0, *Q), K, V)
    found = jax.vmap(dropping, (0, None, None, 0))(q, k, v, jnp.zeros(0, "uint32"))
    assert found.shape == (0, *O)


def test_vmap_is_one_callback(monkeypatch):
    """In which the seeds are read once, and the problems run one after the other."""
    callbacks, reads, runs = [], [], []
    real_call, real_read, real_run = bridge._Callback.__call__, jax_seed.read, bridge._run
    monkeypatch.setattr(bridge._Callback, "__call__", lambda *x: (callbacks.append(1), real_call(*x))[1])
    monkeypatch.setattr(jax_seed, "read", lambda *x: (reads.append(1), real_read(*x))[1])
    monkeypatch.setattr(bridge, "_run", lambda *x: (runs.append(1), real_run(*x))[1])
    seeds = jnp.arange(3, dtype="uint32")
    for mapped in ((0, 0, 0, 0), (0, 0, 0, None)):
        given = (*arrays((3, *Q), (3, *K), (3, *V)), seeds if mapped[3] == 0 else 3)
        jax.block_until_ready(jax.jit(jax.vmap(dropping, mapped))(*given))
        assert (len(callbacks), len(reads), len(runs)) == (1, 1, 3)
        callbacks.clear(), reads.clear(), runs.clear()
    jax.block_until_ready(jax.jit(jax.vmap(numba_flash.attention))(*given[:3]))
    assert (len(callbacks), len(reads), len(runs)) == (1, 0, 1)


compiled = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
TRANSFORMED = {
    "grad": lambda f: jax.grad(lambda q: f(q).sum()),
    "vmap": lambda f: lambda q: jax.vmap(f)(jnp.stack([q] * 3)),
    "vmap of grad": lambda f: lambda q: jax.vmap(jax.grad(lambda q: f(q).sum()))(jnp.stack([q] * 3)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda q: f(q).sum())),
}


def compilations(call):
    compiled.clear()
    jax.block_until_ready(call())
    return len([event for event in compiled if "backend_compile" in event])


@pytest.mark.parametrize("name", TRANSFORMED)
def test_another_seed_compiles_nothing(name):
    q, k, v = arrays(Q, K, V)
    call = lambda seed: TRANSFORMED[name](lambda q: dropping(q, k, v, seed))(q)  # noqa: E731
    before = call(LONG)
    call(LONG + 1)
    assert compilations(lambda: call(LONG + 2)) == 0
    assert not jnp.allclose(before, call(LONG + 2))
    assert compilations(lambda: jax.jit(lambda x: x * len(compiled) + 1.25)(q)) > 0  # what is counted exists


def test_another_traced_seed_compiles_nothing():
    q, k, v = arrays(Q, K, V)
    step = jax.jit(jax.grad(loss_of(dropping)))
    assert compilations(lambda: step(q, k, v, 3)) > 0
    bridge._plan.cache_clear()
    assert compilations(lambda: [step(q, k, v, seed) for seed in range(4, 9)]) == 0
    assert bridge._plan.cache_info().misses == 2  # forward and backward, planned once for all seeds


def test_callbacks_know_nothing_of_the_seed():
    q, k, v = arrays(Q, K, V)
    of = lambda seed: str(jax.make_jaxpr(lambda q: dropping(q, k, v, seed))(q))  # noqa: E731
    assert of(3) == of(LONG)


INSTEAD = r'not {}.*jax\.random\.bits\(key, dtype="uint32"\)'
WRONG = [
    (1.5, TypeError, "seed must be a whole number"),
    (True, TypeError, "seed must be a whole number"),
    (None, ValueError, "dropout_p needs seed="),
    (-1, ValueError, "seed must be from 0 to below"),
    (2**64, ValueError, "seed must be from 0 to below"),
]
WRONG_ARRAYS = [
    (lambda: jnp.float32(1.5), INSTEAD.format("float32")),
    (lambda: jnp.bool_(True), INSTEAD.format("bool")),
    (lambda: jnp.int16(3), INSTEAD.format("int16")),
    (lambda: jax.random.key(0), INSTEAD.format("key")),
    (lambda: jax.random.PRNGKey(0), INSTEAD.format(r"uint32 of shape \(2,\)")),
]


@pytest.mark.parametrize(("seed", "error", "words"), WRONG)
def test_a_wrong_number_is_named_when_jax_traces(seed, error, words):
    q, k, v = arrays(Q, K, V)
    for transform in (jax.make_jaxpr, lambda f: jax.grad(lambda q: f(q).sum())):
        with pytest.raises(error, match=words):
            transform(lambda q: dropping(q, k, v, seed))(q)


@pytest.mark.parametrize("dropout_p", [P, 0.0])
@pytest.mark.parametrize(("seed", "words"), WRONG_ARRAYS)
def test_a_wrong_array_is_named_when_jax_traces(seed, words, dropout_p):
    q, k, v = arrays(Q, K, V)
    function = functools.partial(numba_flash.attention, k=k, v=v, dropout_p=dropout_p)
    with pytest.raises(TypeError, match=words):
        jax.make_jaxpr(lambda q, seed: function(q, seed=seed))(q, seed())
    with pytest.raises(TypeError, match=words):
        jax.grad(lambda q: function(q, seed=seed()).sum())(q)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_a_negative_seed_is_named_when_it_runs(dtype):
    q, k, v = arrays(Q, K, V)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="seed must be from 0 to below 2.*not -1"):
        jax.block_until_ready(jax.jit(dropping)(q, k, v, jnp.asarray(-1, dtype)))


def test_a_seed_without_dropout_is_not_read(monkeypatch):
    monkeypatch.setattr(jax_seed, "read", None)
    q, k, v = arrays(Q, K, V)
    function = lambda q, seed: numba_flash.attention(q, k, v, dropout_p=0.0, seed=seed)  # noqa: E731
    same(jax.jit(function)(q, 3), numba_flash.attention(q, k, v))
    with pytest.raises(ValueError, match="seed must be from 0"):
        jax.make_jaxpr(lambda q: function(q, -1))(q)


def test_attention_backward_takes_no_traced_seed():
    q, k, v, o = arrays(Q, K, V, O)
    (lse,) = arrays(O[:3])
    function = functools.partial(numba_flash.attention_backward, o, q, k, v, o, lse, dropout_p=P)
    with pytest.raises(NotImplementedError, match=r"traced.*outside jax\.jit"):
        jax.jit(lambda seed: function(seed=seed).dq)(3)


def test_the_seeds_of_a_gpu_are_copied_on_its_stream(monkeypatch):
    """With memory of the host in the place of the GPU's."""
    seeds, seen = np.array([[[3, 1]], [[5, 2]]], np.uint32), []

    def move(destination, origin, size, stream):
        ctypes.memmove(destination, origin, size)
        seen.append((origin, size, stream))

    monkeypatch.setattr(jax_seed.context, "ensure", seen.append)
    monkeypatch.setattr(jax_seed.arrays, "core_stream", lambda address: f"stream {address}")
    monkeypatch.setattr(jax_seed.arrays, "move", move)
    layout = jax_seed.arrays.jax_layout(1, (2,), (1,), "uint32", readonly=True)
    address = seeds.ctypes.data
    assert jax_seed.read(address, seeds.shape, layout, [8, 0, 8], 77) == [2**33 + 5, 2**32 + 3, 2**33 + 5]
    assert seen == [1, (address, 16, "stream 77")]
