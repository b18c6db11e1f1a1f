"""attention() in the programs that people write with JAX."""

import concurrent.futures
import functools

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX")

import jax.numpy as jnp  # noqa: E402

import numba_flash  # noqa: E402

TRACED = pytest.param(True, id="jit")
try:
    import jax.experimental.buffer_callback  # noqa: F401
except ImportError:
    TRACED = pytest.param(True, id="jit", marks=pytest.mark.skip(reason="needs a JAX with buffer_callback"))
needs_tracing = pytest.mark.parametrize("jitted", [TRACED])
eager_and_traced = pytest.mark.parametrize("jitted", [pytest.param(False, id="eager"), TRACED])

BATCH, HEADS, LENGTH = 2, 4, 12


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def arrays(*shapes, dtype="float32", seed=0):
    generator = np.random.default_rng(seed)
    return [jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes]


def inputs(head_dim=8, batch=BATCH):
    return arrays(*[(batch, HEADS, LENGTH, head_dim)] * 3)


def same(found, expected):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)


def plainly(q, k, v, mask=None, bias=0.0):
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5 + bias
    return jax.nn.softmax(s if mask is None else jnp.where(mask, s, -jnp.inf)) @ v


NUMPY = {  # of NumPy's own dtypes, which JAX makes those of 32 bits
    "mask": lambda: dict(mask=np.tril(np.ones((LENGTH, LENGTH), bool))),
    "bias": lambda: dict(bias=np.linspace(-1, 1, LENGTH)),
    "lengths and offsets": lambda: dict(seqlens_k=np.array([5, 12]), q_offset=np.array([0, 3])),
    "slopes and sinks": lambda: dict(alibi_slopes=np.array([0.5, 0.25, 0.1, 0]), sinks=np.ones((BATCH, HEADS))),
    "aux": lambda: dict(score_mod=lambda s, b, h, i, j, x: s + x[j], aux=(np.arange(LENGTH),)),
}


@eager_and_traced
@pytest.mark.parametrize("name", NUMPY)
def test_options_may_be_of_numpy(name, jitted):
    given, options = inputs(), NUMPY[name]()
    of_jax = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, options)
    attention = functools.partial(numba_flash.attention, return_lse=True)
    expected = attention(*given, **of_jax)
    same(jax.jit(lambda *x: attention(*x, **options))(*given) if jitted else attention(*given, **options), expected)
    backward = functools.partial(numba_flash.attention_backward, expected.o, *given, *expected)
    same(backward(**options)[:3], backward(**of_jax)[:3])


def test_a_block_mask_may_have_arrays_of_numpy():
    q, k, v = inputs()
    documents = np.repeat(np.arange(3), 4)[None].repeat(BATCH, 0)
    blocks = numba_flash.block_mask(numba_flash.mods.document, BATCH, HEADS, LENGTH, LENGTH, aux=(documents,))
    mask = (documents[:, :, None] == documents[:, None, :])[:, None]
    np.testing.assert_allclose(numba_flash.attention(q, k, v, block_mask=blocks), plainly(q, k, v, mask), atol=1e-6)


@eager_and_traced
def test_q_k_and_v_are_of_one_kind(jitted):
    """What is computed with, and where the result lies, is not for attention() to choose."""
    q, k, v = inputs()
    function = lambda q: numba_flash.attention(q, np.asarray(k), v)  # noqa: E731
    with pytest.raises(TypeError, match="all arrays must be of one kind.*k is"):
        (jax.jit(function) if jitted else function)(q)


@eager_and_traced
def test_a_scale_that_is_an_array(jitted):
    """The message has what is to be written instead, and that is right."""
    q, k, v = inputs()
    function = lambda q: numba_flash.attention(q, k, v, scale=1 / jnp.sqrt(q.shape[-1]))  # noqa: E731
    with pytest.raises(TypeError, match=r"scale must be .*head_dim \*\* -0.5" if jitted else r"write scale=float\("):
        (jax.jit(function) if jitted else function)(q)
    expected = plainly(q, k, v)
    for written in (
        numba_flash.attention(q, k, v, scale=q.shape[-1] ** -0.5),
        numba_flash.attention(q, k, v, scale=float(1 / jnp.sqrt(q.shape[-1]))),
        numba_flash.attention(q * (1 / jnp.sqrt(q.shape[-1])), k, v, scale=1.0),
    ):
        np.testing.assert_allclose(written, expected, atol=1e-6)


@eager_and_traced
@pytest.mark.parametrize("name", ["q_offset", "seqlens_k"])
def test_one_position_for_all(name, jitted):
    q, k, v = inputs()
    function = lambda at: numba_flash.attention(q, k, v, causal=True, **{name: at})  # noqa: E731
    with pytest.raises(ValueError, match=rf"{name} must be int32 of .*jax\.numpy\.full\(\(2,\), {name}\)"):
        (jax.jit(function) if jitted else function)(jnp.int32(3))
    expected = function(jnp.array([3, 3], "int32"))
    repeated = lambda at: function(jnp.full((BATCH,), at))  # noqa: E731
    same((jax.jit(repeated) if jitted else repeated)(jnp.int32(3)), expected)


@eager_and_traced
@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey], ids=["key", "PRNGKey"])
def test_a_key_as_seed(key, jitted):
    q, k, v = inputs()
    function = lambda key: numba_flash.attention(q, k, v, dropout_p=0.3, seed=key)  # noqa: E731
    with pytest.raises(TypeError, match=r"seed must be a whole number.*jax\.random\.bits\(key, dtype=\"uint32\"\)"):
        (jax.jit(function) if jitted else function)(key(0))
    bits = lambda key: function(jax.random.bits(key, dtype="uint32"))  # noqa: E731
    same((jax.jit(bits) if jitted else bits)(key(0)), bits(key(0)))


def test_an_array_that_was_deleted_is_named():
    q, k, v = inputs()
    k.delete()
    with pytest.raises(RuntimeError, match="^k: .*deleted"):
        numba_flash.attention(q, k, v)


def test_an_eager_result_is_not_copied():
    """JAX takes over the memory that the kernel wrote."""
    q, k, v = arrays(*[(1, 1, 256, 64)] * 3)
    made = []
    real = numba_flash.arrays.making.aligned_memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba_flash.arrays.making, "aligned_memory", lambda *x: made.append(real(*x)) or made[-1])
        o, lse = numba_flash.attention(q, k, v, return_lse=True)
    assert [x.ctypes.data for x in made] == [o.unsafe_buffer_pointer(), lse.unsafe_buffer_pointer()]


@needs_tracing
def test_decoding_in_a_loop(jitted):
    """A cache in a fori_loop, whose position is traced, gives what one causal call gives."""
    q, k, v = inputs()

    def step(i, state):
        keys, values, o = state
        at = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=i, slice_size=1, axis=2)
        put = lambda whole, x: jax.lax.dynamic_update_slice_in_dim(whole, x, i, 2)  # noqa: E731
        keys, values = put(keys, at(k)), put(values, at(v))
        return keys, values, put(o, numba_flash.attention(at(q), keys, values, causal=True, q_offset=position(i)))

    position = lambda i: jnp.full((BATCH,), i)  # noqa: E731
    start = (jnp.full_like(k, jnp.nan), jnp.full_like(v, jnp.nan), jnp.zeros_like(q))
    _, _, o = jax.jit(lambda: jax.lax.fori_loop(0, LENGTH, step, start))()
    np.testing.assert_allclose(o, numba_flash.attention(q, k, v, causal=True), rtol=1e-6, atol=1e-6)


@needs_tracing
def test_branches_and_layers(jitted):
    """cond and scan, with gradients."""
    q, k, v = inputs()

    def layer(x, causal):
        run = lambda causal: lambda x: numba_flash.attention(x, k, v, causal=causal)  # noqa: E731
        return jax.lax.cond(causal, run(True), run(False), x), None

    loss = lambda q: jnp.sin(jax.lax.scan(layer, q, jnp.array([True, False, True]))[0]).sum()  # noqa: E731

    def unrolled(x):
        for causal in (True, False, True):
            x = numba_flash.attention(x, k, v, causal=causal)
        return jnp.sin(x).sum()

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(q), jax.grad(unrolled)(q), rtol=1e-5, atol=1e-6)


@needs_tracing
@pytest.mark.parametrize("policy", ["dots_saveable", "nothing_saveable", "everything_saveable"])
def test_checkpoint_with_a_policy(policy, jitted):
    """What is computed again drops the same weights."""
    q, k, v = inputs()
    layer = lambda q: numba_flash.attention(q, k, v, dropout_p=0.3, seed=5)  # noqa: E731
    again = jax.checkpoint(layer, policy=getattr(jax.checkpoint_policies, policy))
    found, expected = (jax.jit(jax.grad(lambda q, f=f: jnp.sin(f(jnp.cos(q))).sum()))(q) for f in (again, layer))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@needs_tracing
def test_compiled_ahead_and_with_given_memory(jitted):
    given = inputs()
    expected = numba_flash.attention(*given)
    compiled = jax.jit(numba_flash.attention).lower(*given).compile()
    same(compiled(*given), expected)
    donated = jax.jit(lambda q, k, v: numba_flash.attention(q, k, v), donate_argnums=0)
    same(donated(jnp.copy(given[0]), *given[1:]), expected)


@needs_tracing
def test_without_jit_where_jit_is_written(jitted):
    given = inputs()
    with jax.disable_jit():
        same(jax.jit(jax.grad(lambda q: numba_flash.attention(q, *given[1:]).sum()))(given[0]),
             jax.grad(lambda q: numba_flash.attention(q, *given[1:]).sum())(given[0]))  # fmt: skip


@eager_and_traced
def test_threads(jitted):
    given = inputs()
    function = jax.jit(numba_flash.attention) if jitted else numba_flash.attention
    expected = function(*given)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for found in [pool.submit(function, *given) for _ in range(40)]:
            same(found.result(), expected)


@needs_tracing
def test_an_ensemble(jitted):
    """vmap over parameters inside of a loss, and over samples outside of its gradient."""
    (x,), (w,) = arrays((3, BATCH, LENGTH, 8)), arrays((5, 8, 3 * 8), seed=1)

    def loss(w, x, attention):
        q, k, v = jnp.split((x @ w).reshape(BATCH, LENGTH, 3, 8), 3, 2)
        return jnp.sin(attention(*(y.swapaxes(1, 2) for y in (q, k, v)))).mean()

    each = lambda attention: jax.vmap(  # noqa: E731
        jax.vmap(jax.grad(functools.partial(loss, attention=attention)), (None, 0)), (0, None)
    )
    found = jax.jit(each(numba_flash.attention))(w, x)
    np.testing.assert_allclose(found, each(plainly)(w, x), rtol=1e-4, atol=1e-5)


@needs_tracing
def test_flax_by_an_adapter(jitted):
    """flax.linen's attention_fn, whose arrays are (batch, length, heads, head_dim) and whose masks are numbers."""
    linen = pytest.importorskip("flax.linen", reason="needs flax")

    def attention_fn(query, key, value, bias=None, mask=None, **_):
        mask = None if mask is None else mask.astype(bool)
        return numba_flash.attention(query, key, value, bias=bias, mask=mask, layout="bshd")

    (x,) = arrays((BATCH, LENGTH, 16))
    mask = linen.make_causal_mask(jnp.ones((BATCH, LENGTH)))
    usual, ours = (
        linen.MultiHeadDotProductAttention(num_heads=HEADS, **more) for more in ({}, {"attention_fn": attention_fn})
    )
    weights = usual.init(jax.random.key(0), x, mask=mask)
    gradients = [
        jax.jit(jax.grad(lambda w, m=m: jnp.sin(m.apply(w, x, mask=mask)).sum()))(weights) for m in (usual, ours)
    ]
    for one, other in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
