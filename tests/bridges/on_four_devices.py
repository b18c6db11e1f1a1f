"""attention() on arrays that lie on several devices. test_jax_sharding.py runs these tests in a process that has four.

"split" is what XLA compiled: no array is gathered, and the results are as they should lie.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import numba_flash

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
BATCH, HEADS = 4, 4
PARTLY = jax.__version_info__ >= (0, 7)  # before, XLA ends the process where shard_map leaves out an axis


MESHES = ("shardy", "gspmd", "explicit")


@pytest.fixture(params=MESHES)
def mesh(request):
    """With both of XLA's partitioners, and with axes that JAX's types know."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", request.param != "gspmd")
    yield mesh_of("explicit" if request.param == "explicit" else "auto")
    jax.config.update("jax_use_shardy_partitioner", before)


def all_with_one_mesh(every, few):
    """(mesh, case) for parametrize: all cases with the first mesh, and with the others those few that differ most."""
    return [(MESHES[0], case) for case in every] + [(other, case) for other in MESHES[1:] for case in few]


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("d", "e"), axis_types=(KINDS[kind],) * 2)


@pytest.fixture
def auto():
    return mesh_of("auto")


def arrays(*shapes, dtype="float32"):
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes]


def inputs(heads_kv=HEADS, batch=BATCH, layout="bhsd", head_dim=8):
    shapes = ((batch, HEADS, 16, head_dim), (batch, heads_kv, 20, head_dim), (batch, heads_kv, 20, head_dim))
    return [x.swapaxes(1, 2) if layout == "bshd" else x for x in arrays(*shapes)]


def put(mesh, given, *specs):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given, specs, strict=True)]


def gradients_of(function, count):
    def loss(*given):
        o, lse = function(*given, return_lse=True)
        return jnp.sin(o).sum() + jnp.cos(jnp.where(jnp.isfinite(lse), lse, 0)).sum()

    return jax.grad(loss, tuple(range(count)))


def split(function, given, specs, reduced=0):
    """-> the results. specs: how they are to lie; reduced: over how many sums of devices they come."""
    found = function(*given)
    for x, spec in zip(jax.tree.leaves(found), specs, strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(x.sharding.mesh, spec), x.ndim), (x.sharding, spec)
    text = function.lower(*given).compile().as_text()
    assert [text.count(f" {name}(") for name in ("all-gather", "all-to-all", "collective-permute")] == [0, 0, 0]
    assert bool(text.count(" all-reduce(")) == bool(reduced)
    return found


def same(found, expected):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)


OVER = {"batch": P("d"), "heads": P(None, "e"), "both": P("d", "e"), "batch over both": P(("d", "e"))}


SPLITS = [(over, layout) for over in OVER for layout in ("bhsd", "bshd")]


@pytest.mark.parametrize(
    ("mesh", "case"), all_with_one_mesh(SPLITS, [("both", "bhsd"), ("batch over both", "bshd")]), indirect=["mesh"]
)
def test_batch_and_heads_are_split(mesh, case):
    """Each device computes its own; bits are those of one device."""
    over, layout = case
    given = inputs(heads_kv=2, layout=layout)
    entry, *head = (*OVER[over], None)[:2]
    spec = P(entry, None, *head) if layout == "bshd" else P(entry, *head)
    placed = put(mesh, given, spec, spec, spec)
    attention = functools.partial(numba_flash.attention, causal=True, layout=layout)
    forward = jax.jit(functools.partial(attention, return_lse=True))
    same(split(forward, placed, (spec, OVER[over])), forward(*given))
    backward = jax.jit(gradients_of(attention, 3))
    same(split(backward, placed, (spec, spec, spec)), backward(*given))


@pytest.mark.parametrize(("heads_kv", "spec", "kv"), [(1, P("d", "e"), P("d")), (2, P(None, ("d", "e")), P())])
def test_grouped_heads(mesh, heads_kv, spec, kv):
    """One KV head is whole on every device, which sees a part of its query heads; two cannot be split over four
    devices, so the heads are not."""
    given = inputs(heads_kv)
    placed = put(mesh, given, spec, kv, kv)
    forward, backward = jax.jit(numba_flash.attention), jax.jit(gradients_of(numba_flash.attention, 3))
    same(forward(*placed), forward(*given))
    for one, other in zip(backward(*placed), backward(*given), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    if heads_kv == 1:
        split(forward, placed, (spec,))
        split(backward, placed, (spec, kv, kv), reduced=1)


OPTIONS = {  # shape, how it lies beside q of P("d", "e"), and whether its gradient is a sum over devices
    "bias": ((BATCH, HEADS, 16, 20), P("d", "e"), False),
    "a bias for all": ((16, 20), P(), True),
    "a bias of heads": ((1, HEADS, 1, 20), P(None, "e"), True),
    "a bias of entries": ((BATCH, 1, 16, 1), P("d"), True),
    "alibi_slopes": ((HEADS,), P("e"), True),
    "sinks": ((BATCH, HEADS), P("d", "e"), False),
}


@pytest.mark.parametrize(("mesh", "name"), all_with_one_mesh(OPTIONS, ["a bias of heads", "sinks"]), indirect=["mesh"])
def test_options_are_split_or_whole(mesh, name):
    shape, spec, summed = OPTIONS[name]
    given, option = inputs(), name if name in ("alibi_slopes", "sinks") else "bias"
    mask = jnp.asarray(np.random.default_rng(1).random((BATCH, 1, 16, 20)) < 0.7)
    lengths, offsets = jnp.array([20, 3, 0, 7], "int32"), jnp.array([4, 0, -3, 9], "int32")

    def attention(q, k, v, x, return_lse=True):
        more = {option: x, "mask": mask, "seqlens_k": lengths, "q_offset": offsets, "causal": True}
        return numba_flash.attention(q, k, v, return_lse=return_lse, **more)

    q_spec = P("d", "e")
    given = (*given, *arrays(shape))
    placed = put(mesh, given, q_spec, q_spec, q_spec, P())  # the option lies whole on every device
    same(split(jax.jit(attention), placed, (q_spec, q_spec)), attention(*given))
    backward = jax.jit(gradients_of(attention, 4))
    found = split(backward, placed[:3] + put(mesh, given[3:], spec), (q_spec, q_spec, q_spec, spec), reduced=summed)
    expected = backward(*given)
    same(found[:3], expected[:3])
    np.testing.assert_allclose(found[3], expected[3], rtol=1e-5, atol=1e-5)


def test_mapped_dimensions_are_split(mesh):
    """The batch of jax.vmap, also with an array that is not mapped over."""
    q, _, _ = arrays((4, 2, HEADS, 16, 8), (), ())
    k, v = arrays((2, HEADS, 20, 8), (4, 2, HEADS, 20, 8))
    mapped = jax.vmap(functools.partial(numba_flash.attention, causal=True), (0, None, 0))
    spec = P("d", None, "e")
    placed = put(mesh, (q, k, v), spec, P(None, "e"), spec)
    same(split(jax.jit(mapped), placed, (spec,)), mapped(q, k, v))


@pytest.mark.parametrize("name", ["plain", "aux"])
def test_functions_that_do_not_read_what_is_split(mesh, name):
    """b and h are not read, or their dimension is whole."""
    given, (slopes,) = inputs(), arrays((HEADS,))
    functions = {
        "plain": (dict(score_mod=lambda s, b, h, i, j: s * 0.5, mask_mod=lambda b, h, i, j: i >= j), P("d", "e")),
        "aux": (dict(score_mod=lambda s, b, h, i, j, x: s * x[h], aux=(slopes,)), P("d")),
    }
    options, spec = functions[name]
    attention = functools.partial(numba_flash.attention, **options)
    placed = put(mesh, given, spec, spec, spec)
    same(split(jax.jit(attention), placed, (spec,)), attention(*given))
    same(split(jax.jit(gradients_of(attention, 3)), placed, (spec,) * 3), gradients_of(attention, 3)(*given))


def test_gradients_of_aux_are_summed(mesh):
    given, (slopes,) = inputs(), arrays((3,))
    spec = P("d", "e")

    def attention(q, k, v, x, return_lse):
        score_mod = lambda s, b, h, i, j, x: s * x[i % 3]  # noqa: E731
        return numba_flash.attention(q, k, v, score_mod=score_mod, aux=(x,), return_lse=return_lse)

    backward = jax.jit(gradients_of(attention, 4))
    placed = put(mesh, (*given, slopes), spec, spec, spec, P())
    found = split(backward, placed, (spec, spec, spec, P()), reduced=1)
    np.testing.assert_allclose(found[3], backward(*given, slopes)[3], rtol=1e-5, atol=1e-5)


# What follows from the number of a batch entry or head, and over which of them arrays must not be split.
NUMBERED = {
    "dropout_p": (dict(dropout_p=0.5, seed=3), (P("d"), P(None, "e")), ()),
    "score_mod": (dict(score_mod=lambda s, b, h, i, j: s * h), (P(None, "e"),), (P("d"),)),
    "mask_mod": (dict(mask_mod=lambda b, h, i, j: i >= j + b), (P("d"),), (P(None, "e"),)),
}


@pytest.mark.parametrize("name", NUMBERED)
def test_what_follows_from_a_number_is_refused_where_it_is_split(mesh, name):
    """No device knows that of its first batch entry or head. Where it is whole, all is computed as on one device."""
    options, refused, allowed = NUMBERED[name]
    given, attention = inputs(), functools.partial(numba_flash.attention, **options)
    for spec in refused:
        placed = put(mesh, given, spec, spec, spec)
        for function in (jax.jit(attention), attention):
            with pytest.raises((NotImplementedError, jax.errors.JaxRuntimeError), match=rf"{name}.*jax\.shard_map"):
                jax.block_until_ready(function(*placed))
    for spec in (*allowed, P()):
        placed = put(mesh, given, spec, spec, spec)
        same(split(jax.jit(attention), placed, (spec,)), attention(*given))
    with pytest.raises((NotImplementedError, jax.errors.JaxRuntimeError), match=rf"{name}.*jax\.shard_map"):
        placed = put(mesh, given, refused[0], refused[0], refused[0])
        jax.block_until_ready(jax.jit(gradients_of(attention, 3))(*placed))


@pytest.mark.parametrize("options", [{}, NUMBERED["dropout_p"][0]], ids=["plain", "dropout"])
def test_how_a_result_is_to_lie(auto, options):
    """It splits what can be split, and refuses nothing."""
    given, spec = inputs(), P("d", "e")
    attention = functools.partial(numba_flash.attention, **options)
    found = jax.jit(attention, out_shardings=NamedSharding(auto, spec))(*put(auto, given, P(), P(), P()))
    same(found, attention(*given))
    assert found.sharding.spec == spec


@pytest.mark.parametrize(("mesh", "dtype"), all_with_one_mesh(["float16", "bfloat16"], ["bfloat16"]), indirect=["mesh"])
def test_sums_over_devices_are_rounded_once(mesh, dtype):
    """The gradients of one KV head whose four query heads are on four devices. The sum in float32 is exact."""
    q, k, v = (x.astype(dtype) for x in inputs(heads_kv=1))
    backward = jax.jit(gradients_of(numba_flash.attention, 3))
    alone = [backward(q[:, head : head + 1], k, v) for head in range(HEADS)]
    _, *found = backward(*put(mesh, (q, k, v), P(None, ("d", "e")), P(), P()))
    for gradient, parts in zip(found, list(zip(*alone, strict=True))[1:], strict=True):
        expected = sum(np.asarray(part, "float32") for part in parts)
        same(gradient, jnp.asarray(expected, dtype))


def test_sequences_are_gathered(mesh):
    """A query needs all keys: what lies split along the lengths or head_dim is made whole, as XLA does."""
    given = inputs()
    for spec in (P(None, None, "d"), P(None, None, None, "d"), P("e", None, "d")):
        found = jax.jit(numba_flash.attention)(*put(mesh, given, spec, spec, spec))
        same(found, numba_flash.attention(*given))


def test_the_heads_of_packed_sequences_are_split(mesh):
    """Their rows are not: a device would have to know which sequences are its own. They are gathered."""
    q, k, v = (x[0] for x in inputs(heads_kv=2, batch=1, layout="bshd"))
    of_q, of_k = jnp.array([0, 5, 5, 16], "int32"), jnp.array([2, 9, 11, 20], "int32")
    (sinks,) = arrays((3, HEADS))

    def attention(q, k, v, sinks, return_lse=True):
        lengths = jnp.array([7, 0, 5], "int32")
        return numba_flash.attention_varlen(
            q, k, v, of_q, of_k, causal=True, seqlens_k=lengths, sinks=sinks, return_lse=return_lse
        )

    forward, backward, given = jax.jit(attention), jax.jit(gradients_of(attention, 4)), (q, k, v, sinks)
    heads = P(None, "e")
    placed = put(mesh, given, heads, heads, heads, heads)
    same(split(forward, placed, (heads, P("e"))), forward(*given))
    same(split(backward, placed, (heads,) * 4), backward(*given))
    same(attention(*placed), forward(*given))
    same(forward(*put(mesh, given, P("d"), P("d"), P("d"), P())), forward(*given))
    with pytest.raises((NotImplementedError, jax.errors.JaxRuntimeError), match=r"score_mod.*jax\.shard_map"):
        numbered = functools.partial(numba_flash.attention_varlen, score_mod=lambda s, b, h, i, j: s * h)
        jax.block_until_ready(jax.jit(numbered)(*placed[:3], of_q, of_k))


def test_packed_sequences_of_each_device(auto):
    """The rows are split, and each device has a table of its own."""
    shapes = ((4 * 16, HEADS, 8), (4 * 16, 2, 8), (4 * 16, 2, 8))
    given, ends = arrays(*shapes), jnp.array([[0, 5, 16], [0, 0, 16], [3, 9, 9], [0, 15, 16]], "int32")

    def attention(q, k, v, ends, return_lse=True):
        return tuple(numba_flash.attention_varlen(q, k, v, ends[0], causal=True, return_lse=return_lse))

    rows, specs = P(("d", "e")), (P(("d", "e")), P(None, ("d", "e")))
    split_by_hand = jax.shard_map(attention, mesh=auto, in_specs=(rows,) * 4, out_specs=specs)
    placed = put(auto, (*given, ends), rows, rows, rows, rows)
    parts = [attention(*(x[16 * n : 16 * n + 16] for x in given), ends[n : n + 1]) for n in range(4)]
    expected = [jnp.concatenate(x, axis) for axis, x in enumerate(zip(*parts, strict=True))]
    same(jax.jit(split_by_hand)(*placed), expected)
    found = jax.jit(gradients_of(lambda *x, return_lse: split_by_hand(*x), 3))(*placed)
    alone = [gradients_of(attention, 3)(*(x[16 * n : 16 * n + 16] for x in given), ends[n : n + 1]) for n in range(4)]
    same(found, [jnp.concatenate(x) for x in zip(*alone, strict=True)])


def test_a_batch_of_one(mesh):
    given, spec = inputs(batch=1), P(None, "e")
    placed = put(mesh, given, spec, spec, spec)
    same(split(jax.jit(numba_flash.attention), placed, (spec,)), numba_flash.attention(*given))


def test_in_a_program(auto):
    """Scanned layers, computed again in the backward, between operations of JAX's."""
    (x, w), spec = arrays((BATCH, 16, HEADS * 8), (3, HEADS * 8, 3 * HEADS * 8)), P("d")

    def layer(x, w):
        q, k, v = (x @ w).reshape(*x.shape[:2], 3, HEADS, 8).transpose(2, 0, 3, 1, 4)
        return x + numba_flash.attention(q, k, v, causal=True).swapaxes(1, 2).reshape(x.shape), None

    def loss(w, x):
        return jnp.square(jax.lax.scan(jax.checkpoint(layer), x, w)[0]).mean()

    w = w / 20  # scores stay small
    step = jax.jit(jax.value_and_grad(loss))
    placed = put(auto, (w, x), P(), spec)
    found, expected = step(*placed), step(w, x)
    assert step.lower(*placed).compile().as_text().count(" all-gather(") == 0
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_inside_shard_map(auto):
    """Of a mesh whose other axis is XLA's, too."""
    given = inputs()
    for axes in ({"d"}, {"d", "e"}) if PARTLY else ({"d", "e"},):
        split_by_hand = jax.shard_map(
            numba_flash.attention, mesh=auto, in_specs=P("d"), out_specs=P("d"), axis_names=axes
        )
        same(jax.jit(split_by_hand)(*put(auto, given, P("d"), P("d"), P("d"))), numba_flash.attention(*given))


def test_inside_shard_map_without_jit(auto):
    given, every = inputs(), P(("d", "e"))
    split_by_hand = jax.shard_map(numba_flash.attention, mesh=auto, in_specs=every, out_specs=every)
    same(split_by_hand(*given), numba_flash.attention(*given))
    found, right = ((lambda *x, f=f: f(*x).sum()) for f in (split_by_hand, numba_flash.attention))
    same(jax.grad(found, (0, 1, 2))(*given), jax.grad(right, (0, 1, 2))(*given))


def test_pmap():
    given = [x[:, None] for x in inputs()]
    same(jax.pmap(numba_flash.attention)(*given), jax.vmap(numba_flash.attention)(*given))


@pytest.mark.parametrize("committed", [False, True])
def test_an_eager_result_is_where_q_is(committed):
    given, device = inputs(), jax.devices()[1]
    with jax.default_device(device):
        placed = [jax.device_put(np.asarray(x), device if committed else None) for x in given]
        assert placed[0].committed == committed
    found = numba_flash.attention(*placed, return_lse=True)
    gradients = numba_flash.attention_backward(found.o, *placed, *found)
    for x in (*found, *gradients[:3]):
        assert x.sharding == SingleDeviceSharding(device) and x.committed == committed
    same(found, numba_flash.attention(*given, return_lse=True))


def test_eager_arrays_on_several_devices(auto):
    """They are computed as under jax.jit; what has no rule says so."""
    given, spec = inputs(), P("d", "e")
    placed = put(auto, given, spec, spec, spec)
    found, expected = (numba_flash.attention(*x, return_lse=True) for x in (placed, given))
    same(found, expected)
    same(jax.grad(lambda q: numba_flash.attention(q, *placed[1:]).sum())(placed[0]),
         jax.grad(lambda q: numba_flash.attention(q, *given[1:]).sum())(given[0]))  # fmt: skip
    for x in found:
        assert x.sharding.is_equivalent_to(NamedSharding(auto, spec), x.ndim)
    with pytest.raises(NotImplementedError, match=r"q: .*several devices.*jax\.shard_map"):
        numba_flash.attention_backward(found.o, *placed, *found)
    with pytest.raises(NotImplementedError, match="out cannot be given"):
        numba_flash.attention(*placed, out=np.empty(given[0].shape, "float32"))


def test_there_are_four_devices():
    assert len(jax.devices()) == 4 and os.environ["JAX_PLATFORMS"] == "cpu"
