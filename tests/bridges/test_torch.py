"""attention() under torch's autograd, compiler and tracers."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import numba_flash  # noqa: E402
from numba_flash import testing  # noqa: E402
from numba_flash.bridges import torch_operations as operations  # noqa: E402
from numba_flash.dispatch import backward as gradients, forward as dispatch  # noqa: E402
from numba_flash.select import rungs  # noqa: E402


def tensors(*shapes, device="cpu", dtype=torch.float64, requires_grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(device, dtype).requires_grad_(requires_grad) for x in made]


Q, K, V = (2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 4)  # grouped heads, lengths and head_dims apart


def options_of(name, device):
    """Named sets of options, and the shapes of bias and slopes where they are to be differentiated too."""
    mask = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 0]], dtype=torch.bool, device=device)[:, None, None]
    lengths = torch.tensor([6, 2], dtype=torch.int32, device=device)
    offsets = torch.tensor([1, 3], dtype=torch.int32, device=device)
    return {
        "plain": ({}, None, None),
        "causal": (dict(causal=True, scale=0.7), None, None),
        "window and softcap": (dict(window=(2, 1), softcap=1.5, q_offset=offsets), None, None),
        "bias and slopes": (dict(causal=True, q_offset=1), (1, 4, 1, 6), (4,)),
        "bias over softcap": (dict(softcap=2.0), (2, 1, 5, 1), (2, 4)),
        "sinks": (dict(causal=True, q_offset=-2), None, None),
        "mask": (dict(mask=mask), (6,), None),
        "lengths": (dict(seqlens_k=lengths, causal=True), None, (4,)),
        "bshd": (dict(layout="bshd", causal=True), None, None),
    }[name]


SETS = (
    "plain", "causal", "window and softcap", "bias and slopes", "bias over softcap", "sinks", "mask", "lengths", "bshd",
)  # fmt: skip


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_gradcheck(name, kernel, device):
    """Gradients of o and of lse, by finite differences in float64, with respect to all that has one."""
    if device == "cuda" and kernel == "reference":
        pytest.skip("the oracle computes in host memory")
    options, bias, slopes = options_of(name, device)
    inputs = tensors(Q, K, V, device=device)
    if options.get("layout") == "bshd":
        inputs = [x.detach().transpose(1, 2).requires_grad_() for x in inputs]
    extra = {"bias": bias, "alibi_slopes": slopes, "sinks": (4,) if name == "sinks" else None}
    names = [key for key, shape in extra.items() if shape is not None]
    more = tensors(*(extra[key] for key in names), device=device, seed=1)

    def function(q, k, v, *more):
        named = dict(zip(names, more, strict=True))
        o, lse = numba_flash.attention(q, k, v, return_lse=True, kernel=kernel, **named, **options)
        return o, lse.masked_fill(lse.isneginf(), 0)  # whose differences would be NaN

    assert torch.autograd.gradcheck(function, (*inputs, *more), fast_mode=device == "cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_results_and_gradients_are_those_of_the_two_functions(dtype, device):
    q, k, v = tensors((2, 4, 40, 32), (2, 2, 50, 32), (2, 2, 50, 32), device=device, dtype=dtype)
    (do,) = tensors((2, 4, 40, 32), device=device, dtype=dtype, requires_grad=False, seed=2)
    o, lse = numba_flash.attention(q, k, v, causal=True, return_lse=True)
    found = torch.autograd.grad((o, lse), (q, k, v), (do, lse.detach()))
    with torch.no_grad():
        again = numba_flash.attention(q, k, v, causal=True, return_lse=True)
        expected = numba_flash.attention_backward(do, q, k, v, *again, dlse=again.lse, causal=True)
    assert torch.equal(o, again.o) and torch.equal(lse, again.lse)
    for ours, theirs, of in zip(found, expected, (q, k, v), strict=False):
        assert torch.equal(ours, theirs) and ours.dtype == of.dtype and ours.shape == of.shape


def test_only_what_is_asked_for_is_computed(monkeypatch):
    asked = []
    real = gradients.plan

    def spy(key):
        asked.append((key.wanted, key.operands[-1] is None))  # the last one is dlse
        return real(key)

    monkeypatch.setattr(gradients, "plan", spy)
    monkeypatch.setattr(gradients, "_plans", {})  # nothing planned before
    q, k, v = tensors(Q, K, V)
    numba_flash.attention(q, k.detach(), v.detach()).sum().backward()
    numba_flash.attention(q.detach(), k, v, return_lse=True).lse.sum().backward()
    assert asked == [(("dq",), True), (("dk", "dv"), False)]
    assert not v.grad.any()  # lse does not depend on v


def test_gradients_of_leaves_in_strange_layouts():
    q, k, v = tensors((2, 5, 4, 3), K, V)
    numba_flash.attention(q.transpose(1, 2), k[:, :, ::2], v.flip(2)[:, :, ::2]).square().sum().backward()
    plain = [q.detach().transpose(1, 2).contiguous(), k.detach()[:, :, ::2].contiguous()]
    plain = [x.requires_grad_() for x in (*plain, v.detach().flip(2)[:, :, ::2].contiguous())]
    numba_flash.attention(*plain).square().sum().backward()
    assert torch.equal(q.grad, plain[0].grad.transpose(1, 2))
    assert torch.equal(k.grad[:, :, ::2], plain[1].grad) and not k.grad[:, :, 1::2].any()


def test_nothing_is_recorded_where_nothing_is_asked_for(monkeypatch):
    monkeypatch.setattr(numba_flash.api.forward, "bridge", lambda framework: pytest.fail("the bridge was asked"))
    q, k, v = tensors(Q, K, V)
    with torch.no_grad():
        assert numba_flash.attention(q, k, v).grad_fn is None
    with torch.inference_mode():
        assert numba_flash.attention(q, k, v).grad_fn is None
    assert numba_flash.attention(q.detach(), k.detach(), v.detach()).grad_fn is None


def test_autograd_is_asked_before_anything_is_read(monkeypatch):
    """So that a recorded call is prepared once, in the forward of the autograd.Function."""
    q, k, v = tensors(Q, K, V)
    numba_flash.attention(q, k, v)  # the first tensor makes the question known
    prepared, real = [], dispatch.prepare
    monkeypatch.setattr(dispatch, "find", lambda *x: None)  # a call like one before is prepared no more
    monkeypatch.setattr(numba_flash.api.forward, "find", lambda *x: None)
    monkeypatch.setattr(dispatch, "prepare", lambda *x: prepared.append(torch.is_grad_enabled()) or real(*x))
    for inputs in ((q, k, v), (q.detach(), k, v.detach()), (q.detach(), k.detach(), v)):
        assert numba_flash.attention(*inputs).requires_grad
    assert prepared == [False] * 3


def test_gradients_of_gradients_are_refused():
    q, k, v = tensors(Q, K, V)
    (dq,) = torch.autograd.grad(numba_flash.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no gradients themselves"):
        dq.sum().backward()


def operation(**given):
    """The operation's arguments between v and layout, in its schema's order; what is not given is None."""
    names = [x.name for x in torch.ops.numba_flash.attention.default._schema.arguments]
    numbers = dict(q_offset=1, causal=True, left=3, scale=0.5, softcap=2.0)
    return tuple((numbers | given).get(name) for name in names[names.index("v") + 1 : names.index("layout")])


ITS_OWN = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of opcheck 2.15


@ITS_OWN
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(layout, dtype, device):
    """What torch demands of an operation: its schema is true, autograd is registered, fakes are like the real thing."""
    q, k, v = tensors(Q, K, V, device=device, dtype=dtype)
    contiguous = (q, k, v) if layout == "bhsd" else tuple(x.detach().transpose(1, 2).contiguous() for x in (q, k, v))
    transposed = tuple(x.detach().transpose(2, 3).contiguous().transpose(2, 3) for x in contiguous)
    for arrays in (contiguous, transposed):
        arrays = tuple(x.detach().requires_grad_() for x in arrays)
        torch.library.opcheck(operations.forward, (*arrays, *operation(), layout, None, None, "auto"))
        o, lse = operations.forward(*arrays, *operation(), layout, None, None, "auto")
        arguments = (torch.ones_like(o), None, o.detach(), lse.detach(), *(x.detach() for x in arrays), *operation())
        torch.library.opcheck(operations.backward, ("dq dv", *arguments, layout, None, None, "auto"))


@pytest.mark.slow
@ITS_OWN
def test_opcheck_with_every_array(device):
    q, k, v, bias, slopes, sinks = tensors(Q, K, V, (1, 4, 1, 6), (4,), (4,), device=device, dtype=torch.float32)
    mask = torch.ones(6, dtype=torch.bool, device=device)
    lengths, offsets = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([6, 2], [1, 3]))
    arrays = dict(bias=bias, mask=mask, alibi_slopes=slopes, sinks=sinks, seqlens_k=lengths, q_offsets=offsets)
    torch.library.opcheck(
        operations.forward, (q, k, v, *operation(**arrays, q_offset=None), "bhsd", None, None, "auto")
    )


def test_dropout_has_the_gradients_of_the_formula_with_its_mask(device):
    q, k, v = tensors(Q, K, V, device=device)
    bias = torch.zeros(1, 4, 1, 6, dtype=torch.float64, device=device, requires_grad=True)
    mask = torch.from_numpy(testing.dropout_mask((2, 4, 5, 6), 0.375, seed=2**62 + 3)).to(device)

    def formula(q, k, v, bias):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        p = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + bias, -1)
        return (p * mask / 0.625) @ v

    def attend(q, k, v, bias):
        return numba_flash.attention(q, k, v, bias=bias, dropout_p=0.375, seed=2**62 + 3)

    for function in (attend, compiled(attend, device)):
        found, expected = function(q, k, v, bias), formula(q, k, v, bias)
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
        do = torch.ones_like(expected).cumsum(1)
        gradients = (torch.autograd.grad(x, (q, k, v, bias), do) for x in (found, expected))
        for one, other in zip(*gradients, strict=True):
            assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)


def test_a_kernel_without_a_backward_takes_another():
    q, k, v = tensors(Q, K, V)
    assert not rungs.RUNGS["v1"].has_backward
    o, lse = (x.detach() for x in numba_flash.attention(q, k, v, return_lse=True))
    found = [
        operations.backward("dq", torch.ones_like(o), None, o, lse, q, k, v, *operation(), "bhsd", None, None, kernel)[
            0
        ]
        for kernel in ("auto", "v1")
    ]
    assert torch.equal(*found)


def compiled(function, device="cpu", **options):
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"  # which needs no C++ compiler
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def test_compiled_without_a_break(device):
    """numba_flash.attention itself, in one graph, forward and backward, and where nothing requires grad."""
    q, k, v, bias = tensors(Q, K, V, (1, 4, 1, 6), device=device, dtype=torch.float32)

    def step(q, k, v, bias):
        o, lse = numba_flash.attention(q * 2, k, v, causal=True, window=(3, None), bias=bias, return_lse=True)
        return o.square().sum() + lse.sum()

    expected = step(q, k, v, bias)
    gradients = torch.autograd.grad(expected, (q, k, v, bias))
    compiled_step = compiled(step, device)
    found = compiled_step(q, k, v, bias)
    assert torch.allclose(found, expected)
    for ours, theirs in zip(torch.autograd.grad(found, (q, k, v, bias)), gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(compiled_step(q, k, v, bias), expected)


def test_compiled_for_any_length():
    step = compiled(lambda q, k, v: numba_flash.attention(q, k, v, causal=True), dynamic=True)
    for seqlen in (5, 8, 13):
        q, k, v = tensors((1, 2, seqlen, 4), (1, 2, seqlen, 4), (1, 2, seqlen, 4), requires_grad=False)
        assert torch.equal(step(q, k, v), numba_flash.attention(q, k, v, causal=True))


def test_compiled_options_are_checked():
    q, k, v = tensors(Q, K, V)
    with pytest.raises(Exception, match="a bare number means different things"):
        compiled(lambda q, k, v: numba_flash.attention(q, k, v, window=3))(q, k, v)


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in tensors(Q, K, V, dtype=torch.bfloat16, requires_grad=False))
        o, lse = numba_flash.attention(q, k, v, return_lse=True)
    assert o.shape == (2, 4, 5, 4) and o.dtype == torch.bfloat16
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32


def test_export():
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return numba_flash.attention(q, k, v, causal=True)

    inputs = tuple(tensors(Q, K, V, requires_grad=False))
    exported = torch.export.export(Module(), inputs)
    assert any(node.target is torch.ops.numba_flash.attention.default for node in exported.graph.nodes)
    assert torch.equal(exported.module()(*inputs), numba_flash.attention(*inputs, causal=True))


def test_subclasses_are_tensors(device):
    class Image(torch.Tensor):
        pass

    q, k, v = tensors(Q, K, V, device=device)
    expected = numba_flash.attention(q, k, v)
    assert torch.equal(numba_flash.attention(q.detach().as_subclass(Image), k.detach(), v.detach()), expected)
    numba_flash.attention(q.as_subclass(Image), k, v).sum().backward()
    assert q.grad.any()


def test_checkpointing():
    q, k, v = tensors(Q, K, V)
    expected = torch.autograd.grad(numba_flash.attention(q, k, v).sum(), q)
    o = torch.utils.checkpoint.checkpoint(numba_flash.attention, q, k, v, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(o.sum(), q)[0], expected[0])


def test_autocast_leaves_attention_alone(device):
    q, k, v = tensors(Q, K, V, device=device, dtype=torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert numba_flash.attention(q, k, v).dtype == torch.float32
        with pytest.raises(TypeError, match=r"q is float32 and v is bfloat16.*compat.torch.*casts"):
            numba_flash.attention(q, k, v.bfloat16())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(out=torch.empty(2, 4, 5, 4, dtype=torch.float64)), NotImplementedError, "out"),
        (dict(stream=0), NotImplementedError, "stream"),
        (dict(dropout_p=0.1), ValueError, "dropout_p needs seed="),
        (dict(dropout_p=0.1, seed=0.5), TypeError, "seed"),
        (dict(mask=torch.ones(6, dtype=torch.bool).numpy()), TypeError, "mask is ndarray"),
        (dict(softcap=-1.0), ValueError, "softcap"),
        (dict(scale="1"), TypeError, "scale"),
        (dict(causal=1), TypeError, "causal"),
        (dict(window=4), ValueError, "window"),
        (dict(layout="sbhd"), ValueError, "layout"),
        (dict(kernel="v3"), ValueError, "kernel"),
        (dict(bias=torch.ones(7, dtype=torch.float64)), ValueError, "bias"),
    ],
)
def test_mistakes_are_named_as_without_gradients(options, error, words):
    q, k, v = tensors(Q, K, V)
    with pytest.raises(error, match=words):
        numba_flash.attention(q, k, v, **options)


def test_what_autograd_runs_can_be_explained_and_warmed_up():
    q, k, v = tensors(Q, K, V)
    assert q.requires_grad
    explanation = numba_flash.explain(q, k, v, causal=True)
    assert explanation.kernel == "cpu" and explanation.problem.return_lse
    assert not numba_flash.explain(q.detach(), k.detach(), v.detach(), causal=True).problem.return_lse
    numba_flash.warmup(q, k, v, causal=True)
    with pytest.raises(ValueError, match="softcap"):
        numba_flash.explain(q, k, v, softcap=-1.0)


@pytest.mark.parametrize(
    "options", [{}, dict(causal=True, scale=0.5, softcap=2.0, window=(3, 0), q_offset=1)], ids=["plain", "options"]
)
def test_checkpointed_blocks_in_one_graph_for_any_length(options):
    """No option, given or not, may become an input of the graph by itself: the second block could not have it."""

    def attend(q):
        # as literals, as a model would write them
        if options:
            return numba_flash.attention(q, q, q, causal=True, scale=0.5, softcap=2.0, window=(3, 0), q_offset=1)
        return numba_flash.attention(q, q, q)

    def step(x):
        for _ in range(2):
            x = x + torch.utils.checkpoint.checkpoint(attend, x, use_reentrant=False)
        return x.square().sum()

    compiled_step = compiled(step, dynamic=True)
    for seqlen in (5, 7):
        (x,) = tensors((1, 2, seqlen, 4))
        found, expected = (torch.autograd.grad(f(x), x)[0] for f in (compiled_step, step))
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


# Tensors without numbers of their own in one dense piece: what to do instead is in the message.
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.to("meta"), "q: a torch tensor on the meta device has no numbers; compat"),
        (lambda x: torch.nested.nested_tensor([x[0], x[0]]), "q: a torch tensor must not be nested; pass"),
        (lambda x: torch.nested.nested_tensor([x[0, 0], x[0, 0]]), "q: a torch tensor must not be nested; pass"),
        (lambda x: torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged), "must not be nested; pass"),
    ],
    ids=["meta", "nested", "nested in 3 dimensions", "jagged"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_tensors_without_numbers_are_refused_by_name(change, words):
    (x,) = tensors((2, 3, 5, 4), requires_grad=False)
    with pytest.raises(TypeError, match=words):
        numba_flash.attention(change(x), x, x)


@pytest.fixture
def mesh():
    """One process as a mesh of devices."""
    distributed = pytest.importorskip("torch.distributed.tensor", reason="needs torch.distributed.tensor")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield distributed, torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_distributed_tensors_are_taken_by_their_parts(mesh):
    distributed, devices = mesh
    from torch.distributed.tensor.experimental import local_map

    (x,) = tensors((2, 4, 5, 4), requires_grad=False)
    placed = [distributed.Shard(0)]
    shared = distributed.distribute_tensor(x, devices, placed).requires_grad_()
    attend = local_map(numba_flash.attention, placed, (placed, placed, placed), device_mesh=devices)
    o = attend(shared, shared, shared)
    o.sum().backward()
    assert torch.equal(o.to_local(), numba_flash.attention(x, x, x)) and shared.grad.placements == tuple(placed)
