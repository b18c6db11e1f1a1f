"""The object that describes a mask, where others handle it as they would a tensor: torch.compile, caches, hooks.

None of them may build the matrix, and torch.compile may not make more graphs than it makes of torch's own attention.
"""

import types

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs Transformers")

from transformers import masking_utils  # noqa: E402

from numba_flash.compat import transformers as bridge  # noqa: E402

OURS = bridge.register()
TOKENS, LENGTH = 97, 12
SMALL = dict(
    vocab_size=TOKENS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def gemma3():
    """A window in the first layer alone: two masks, and two kinds of cache."""
    types = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=4, layer_types=types)
    return transformers.Gemma3ForCausalLM(config)


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture
def no_matrix(monkeypatch):
    """A matrix that is made is an error."""

    def refuse(*unused, **given):
        raise AssertionError("a matrix was made")

    for name in ("eager_mask", "sdpa_mask"):
        monkeypatch.setattr(masking_utils, name, refuse)


class Counting:
    """A backend of torch.compile that runs what it is given, and counts how often that is."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def padding_mask(side, device, batch=2):
    mask = torch.ones(batch, LENGTH, dtype=torch.long, device=device)
    if side is not None:
        mask[0, slice(0, 3) if side == "left" else slice(-3, None)] = 0
    return mask


def test_a_mask_is_no_tensor():
    """What DeepSeek V4 appends to a mask only where that is one; torch.compile takes what claims to be one for one."""
    made = bridge.visible(1, 4, 4)
    assert not isinstance(made, torch.Tensor)
    compiled = torch.compile(lambda x, m: x + isinstance(m, torch.Tensor), backend="eager", fullgraph=True)
    assert compiled(torch.ones(2), made).tolist() == [1, 1]
    config = types.SimpleNamespace(model_type="deepseek_v4")
    made = bridge.visible(1, 4, 4, config=config)
    assert torch.equal(made, masking_utils.eager_mask(1, 4, 4))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(("build", "side"), [(llama, "left"), (gemma3, None)])
def test_static_caches_are_decoded_in_as_many_graphs_as_with_sdpa(build, side, device, monkeypatch):
    model = build().eval().to(device)
    found, plain = {}, model.forward
    for how in ("eager", "sdpa", OURS):
        model.set_attn_implementation(how)
        torch._dynamo.reset()
        count = Counting()
        monkeypatch.setattr(
            model, "forward", plain if how == "eager" else torch.compile(plain, backend=count, fullgraph=True)
        )
        tokens = []
        for length in (LENGTH, LENGTH - 3):
            ids = torch.randint(3, TOKENS, (2, length), generator=torch.Generator().manual_seed(length)).to(device)
            mask = None if side is None else padding_mask(side, device)[:, :length]
            tokens += [model.generate(
                ids, attention_mask=mask, max_new_tokens=5, do_sample=False, eos_token_id=None, disable_compile=True,
                cache_implementation="static",
            )]  # fmt: skip
        found[how] = tokens, count.graphs
    for expected, generated in zip(found["eager"][0], found[OURS][0], strict=True):
        assert torch.equal(expected, generated)
    assert 0 < found[OURS][1] <= found["sdpa"][1]


# Every length but the first shares a graph; a window is a constant of its own.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(("build", "side", "graphs"), [(llama, None, 2), (llama, "left", 2), (gemma3, "right", 4)])
def test_layers_compiled_one_by_one(build, side, graphs, device):
    """As accelerate's compile_regions does: the results and the gradients of layers that are not compiled."""
    model = build().train().to(device)
    model.set_attn_implementation(OURS)
    count, layers = Counting(), [*model.model.layers]
    found = []
    for compiled in (False, True):
        for i, layer in enumerate(layers):
            model.model.layers[i] = torch.compile(layer, backend=count, fullgraph=True) if compiled else layer
        tensors = []
        for length in (LENGTH, LENGTH - 2, LENGTH - 5):
            mask = padding_mask(side, device)
            mask = mask[:, -length:] if side == "right" else mask[:, :length]
            ids = torch.randint(3, TOKENS, mask.shape, generator=torch.Generator().manual_seed(length)).to(device)
            model.zero_grad()
            logits = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
            logits.square().mean().backward()
            tensors += [logits, *(x.grad.clone() for x in model.parameters())]
        found.append(tensors)
    for expected, compiled in zip(*found, strict=True):
        assert torch.allclose(expected, compiled, rtol=1e-4, atol=1e-5 * float(expected.detach().abs().max()))
    assert count.graphs == graphs


@pytest.mark.parametrize("left", [0, 3])
@pytest.mark.parametrize("size", [None, 4])
def test_the_steps_of_a_static_cache_are_described_alike(size, left, no_matrix):
    """Also where no padding is seen: the last step fills the cache, and a window leaves the padding behind."""
    causal = masking_utils.causal_mask_function
    function = causal if size is None else masking_utils.sliding_window_causal_mask_function(size)
    found = []
    for position in range(4, 12):
        padding = torch.ones(2, 12, dtype=torch.bool)
        padding[0, :left] = padding[:, position + 1 :] = False
        first, keys = (0, 12) if size is None else (max(0, position + 1 - size), size)
        made = bridge.visible(2, 1, keys, torch.tensor(position), first, function, padding, size)
        found.append((made.start, {name: getattr(x, "shape", x) for name, x in made.options.items()}))
    assert all(form == found[0] for form in found)


def moved_by_a_hook(module, arguments, named):
    """What accelerate does before the forward of each module that is on a device of its own."""
    return torch.utils._pytree.tree_map(
        lambda x: x.to(next(module.parameters()).device, non_blocking=True) if hasattr(x, "to") else x,
        (arguments, named),
    )


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("build", [llama, gemma3])
def test_hooks_that_move_all_arguments_make_no_matrix(build, side, device, no_matrix):
    model = build().eval().to(device)
    model.set_attn_implementation(OURS)
    ids, mask = torch.randint(3, TOKENS, (2, LENGTH), device=device), padding_mask(side, device)
    with torch.no_grad():
        plain = model(ids, attention_mask=mask).logits
        for layer in model.model.layers:
            layer.register_forward_pre_hook(moved_by_a_hook, with_kwargs=True)
        assert torch.equal(plain, model(ids, attention_mask=mask).logits)


@pytest.mark.parametrize("side", [None, "left"])
def test_sharding_with_mixed_precision_makes_no_matrix(side, no_matrix):
    """FSDP2 casts what is a tensor and floating-point."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = llama().eval()
    model.set_attn_implementation(OURS)
    ids, mask = torch.randint(3, TOKENS, (2, LENGTH)), padding_mask(side, "cpu")
    with torch.no_grad():
        plain = model(ids, attention_mask=mask).logits
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))
        with torch.no_grad():
            cast = model(ids, attention_mask=mask).logits
    finally:
        torch.distributed.destroy_process_group()
    assert (plain - cast).abs().max() < 0.1 * plain.abs().max()


def test_a_mask_that_is_moved_means_the_same(no_matrix):
    """What it says is on the other device, and one mask is made at most: when its numbers are read."""
    made = bridge.visible(2, 4, 4, attention_mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), dtype=torch.float64)
    assert made.to("cpu") is made and made.to(torch.float64) is made and made.to(torch.ones(1).double()) is made
    moved = made.to(device="meta", dtype=torch.float32)
    assert (moved.dtype, moved.device.type, moved.shape) == (torch.float32, "meta", made.shape)
    tensors = [moved.start, *(x for x in moved.options.values() if isinstance(x, torch.Tensor))]
    assert len(tensors) == 3 and all(x.device.type == "meta" for x in tensors)
    assert (made.dtype, made.device.type, made.ndim) == (torch.float64, "cpu", 4)


def test_a_mask_that_was_written_to_is_moved_with_what_was_written():
    made = bridge.visible(1, 4, 4)
    other = made.to(torch.float64)
    assert torch.equal(other[:], made.whole().double())
    made.fill_(0)
    assert not made.to(torch.float64).any() and other.whole().any()


# generate() of a static cache on a GPU compiles by itself, for CUDA graphs.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("build", [llama, gemma3])
def test_static_caches_in_cuda_graphs(build, side, dtype):
    model = build().eval().to("cuda", dtype)
    ids, mask = torch.randint(3, TOKENS, (2, LENGTH), device="cuda"), padding_mask(side, "cuda")
    counters, graphs = torch._dynamo.utils.counters, {}
    for implementation in ("sdpa", OURS):
        model.set_attn_implementation(implementation)
        torch._dynamo.reset()
        found = []
        for given in (dict(), dict(cache_implementation="static")):
            counters.clear()
            for _ in range(3):  # the first runs record, the others replay
                found.append(model.generate(
                    ids, attention_mask=mask, max_new_tokens=16, do_sample=False, eos_token_id=None, **given
                ))  # fmt: skip
        graphs[implementation] = counters["stats"]["unique_graphs"]
    # In 16 bits torch's compiler rounds elsewhere than eager torch does.
    same = found if dtype == torch.float32 else found[3:]
    assert all(torch.equal(same[0], tokens) for tokens in same[1:])
    assert 1 <= graphs[OURS] <= graphs["sdpa"], graphs
    assert not counters["inductor"]["cudagraph_skips"]
