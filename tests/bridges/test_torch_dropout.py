"""The seed of dropout in torch: a number or a tensor. It is an operand, so that another one compiles nothing."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from torch import func  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import numba_flash  # noqa: E402
from numba_flash.compat.flash_attn import flash_attn_func  # noqa: E402
from numba_flash.compat.torch import scaled_dot_product_attention  # noqa: E402

SHAPE = (2, 4, 5, 4)
BIG = 2**63 + 5


def given(*shape):
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(0))


def attend(x, seed):
    return numba_flash.attention(x, x, x, dropout_p=0.5, seed=seed)


def gradient(x, seed, function=attend):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x, seed).square().sum(), x)[0]


def counted(function, **options):
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=graphs, **options), graphs


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_tensor_is_the_number_that_it_holds(dtype):
    x, seed = given(), torch.tensor(7, dtype=dtype)
    assert torch.equal(attend(x, seed), attend(x, 7)) and torch.equal(attend(x, seed[None]), attend(x, 7))
    assert torch.equal(gradient(x, seed), gradient(x, 7))


@pytest.mark.parametrize("seed", [BIG, 2**64 - 1])
def test_numbers_that_only_uint64_holds(seed):
    """torch makes no number of such a tensor, and has none in a graph."""
    x, expected = given(), attend(given(), seed)
    tensor = torch.full((), seed, dtype=torch.uint64)
    compiled, graphs = counted(attend)
    assert torch.equal(attend(x, tensor), expected) and torch.equal(compiled(x, seed), expected)
    assert torch.equal(compiled(x, tensor), expected) and torch.equal(gradient(x, tensor), gradient(x, seed))
    assert torch.equal(gradient(x, seed, compiled), gradient(x, seed))


def test_tensors_as_seeds_share_one_graph():
    x = given()
    compiled, graphs = counted(attend)
    for seed in (3, 4, 2**40):
        assert torch.equal(compiled(x, torch.tensor(seed)), attend(x, seed))
    assert graphs.frame_count == 1
    for seed in (3, 4, 2**62 + 3):
        assert torch.equal(gradient(x, torch.tensor(seed), compiled), gradient(x, seed))
    assert graphs.frame_count == 2  # with gradients, without


def test_numbers_as_seeds_share_a_graph():
    compiled, graphs = counted(attend)
    for seed in (1, 2, 3, 2**40):
        assert torch.equal(compiled(given(), seed), attend(given(), seed))
    assert graphs.frame_count <= 3  # torch makes the first number a constant, 2.4 the first two


def test_a_number_drawn_in_the_graph():
    def drawn(x):
        return attend(x, int(torch.randint(2**62, ())))

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled, _ = counted(drawn)
        torch.manual_seed(3)
        found = compiled(given())
    torch.manual_seed(3)
    assert torch.equal(found, drawn(given()))


def test_a_seed_that_changed_before_the_backward_is_noticed():
    x, seed = given().requires_grad_(), torch.tensor(3)
    o = attend(x, seed)
    seed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize(
    ("seed", "error", "words"),
    [
        (torch.tensor(0.5), TypeError, "seed must be a whole number"),
        (torch.tensor([1, 2]), TypeError, "seed must be a whole number"),
        (torch.tensor(-1), ValueError, "seed must be from 0"),
    ],
    ids=["float", "two", "negative"],
)
@pytest.mark.parametrize("form", ["plain", "grad", "traced"])
def test_what_is_no_seed(seed, error, words, form):
    x = given().requires_grad_(form == "grad")
    run = make_fx(attend) if form == "traced" else attend
    with pytest.raises(error, match=words):
        run(x, seed)


def attend_sdpa(x):
    return scaled_dot_product_attention(x, x, x, dropout_p=0.5)


def attend_flash(x):
    return flash_attn_func(x, x, x, 0.5)


@pytest.mark.parametrize("function", [attend_sdpa, attend_flash])
def test_a_drawn_seed_is_part_of_the_graph(function):
    """One graph without breaks; a new seed in each run; the same after manual_seed."""
    if function is attend_flash and not hasattr(torch.library, "register_vmap"):
        pytest.skip("torch 2.4 does not trace hasattr of a tensor")
    compiled, graphs = counted(function)
    torch.manual_seed(5)
    found = [compiled(given()) for _ in range(3)]
    torch.manual_seed(5)
    for one in found:
        assert torch.equal(function(given()), one)
    assert graphs.frame_count == 1 and not torch.equal(found[0], found[1])


@pytest.mark.parametrize("function", [attend_sdpa, attend_flash])
def test_a_drawn_seed_is_in_host_memory_whatever_the_default_device_is(function):
    x = given()
    torch.manual_seed(5)
    expected = function(x)
    torch.manual_seed(5)
    with torch.device("meta"):
        found = function(x)
    assert torch.equal(found, expected)


def test_under_vmap_each_problem_counts_its_own_batch():
    x, seeds = given(3, *SHAPE), torch.tensor([4, 5, 2**40])
    found = func.vmap(attend, in_dims=(0, None))(x, 9)
    assert torch.equal(found, torch.stack([attend(one, 9) for one in x]))
    found = func.vmap(attend)(x, seeds)
    assert torch.equal(found, torch.stack([attend(one, int(seed)) for one, seed in zip(x, seeds, strict=True)]))
    found = func.vmap(attend, in_dims=(None, 0))(x[0], seeds)
    assert torch.equal(found, torch.stack([attend(x[0], int(seed)) for seed in seeds]))


def test_gradients_under_vmap():
    x, seeds = given(3, *SHAPE), torch.tensor([4, 5, 2**40])
    found = func.vmap(func.grad(lambda x, seed: attend(x, seed).square().sum()))(x, seeds)
    assert torch.equal(found, torch.stack([gradient(one, int(seed)) for one, seed in zip(x, seeds, strict=True)]))


def test_seeds_that_vmap_draws():
    x = given(3, *SHAPE)
    torch.manual_seed(1)
    same = func.vmap(attend_sdpa, randomness="same")(torch.stack([x[0], x[0]]))
    assert torch.equal(same[0], same[1])
    torch.manual_seed(1)
    different = func.vmap(attend_sdpa, randomness="different")(torch.stack([x[0], x[0]]))
    assert not torch.equal(different[0], different[1])
