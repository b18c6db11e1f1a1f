"""Padding-free training: flattened examples have the loss and the gradients of padded ones with eager attention."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs Transformers")

from functorch.compile import make_boxed_func  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from transformers import masking_utils  # noqa: E402

from numba_flash.bridges import torch_operations  # noqa: E402
from numba_flash.compat import packed, transformers as bridge  # noqa: E402
from numba_flash.compat.visible import Visible  # noqa: E402
from numba_flash.problem.options import Packed  # noqa: E402

OURS = bridge.register()
TOKENS = 97
DECODER = dict(
    vocab_size=TOKENS, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LENGTHS = (5, 1, 9, 3)


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER | more))


def mistral():
    return transformers.MistralForCausalLM(transformers.MistralConfig(**DECODER, sliding_window=4))


def gemma2():
    """Softcap, and a window in every other layer."""
    config = transformers.Gemma2Config(**DECODER, head_dim=16, sliding_window=4, attn_logit_softcapping=5.0)
    return transformers.Gemma2ForCausalLM(config)


def gpt_oss():
    """Sinks, and a window in every other layer."""
    config = transformers.GptOssConfig(
        **DECODER, head_dim=16, sliding_window=4, num_local_experts=2, num_experts_per_tok=1
    )
    return transformers.GptOssForCausalLM(config)


MODELS = (llama, mistral, gemma2, gpt_oss)
# What DataCollatorWithFlattening is asked for, and whether the model has a cache: its default, with which Transformers
# makes a mask of one sequence.
FORMS = {
    "arguments": (dict(return_flash_attn_kwargs=True), False),
    "arguments, with a cache": (dict(return_flash_attn_kwargs=True), True),
    "arguments without positions": (dict(return_flash_attn_kwargs=True, return_position_ids=False), False),
    "positions": ({}, False),
    "positions, with a cache": ({}, True),
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch._dynamo.reset()


def examples(lengths=LENGTHS):
    return [dict(input_ids=torch.randint(3, TOKENS, (length,)).tolist()) for length in lengths]


def flattened(given, form):
    asked, use_cache = FORMS[form]
    return dict(transformers.DataCollatorWithFlattening(**asked)(given), use_cache=use_cache)


def padded(given):
    longest = max(len(x["input_ids"]) for x in given)
    ids, mask = torch.zeros(len(given), longest, dtype=torch.long), torch.zeros(len(given), longest, dtype=torch.long)
    for n, x in enumerate(given):
        ids[n, : len(x["input_ids"])] = torch.tensor(x["input_ids"])
        mask[n, : len(x["input_ids"])] = 1
    return dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))


def trained(model, implementation, batch, run=None):
    """The loss, and the gradients of all parameters."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    loss = (model if run is None else run)(**batch).loss
    loss.backward()
    return [loss.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)]


def close(found, expected):
    assert len(found) == len(expected) > 10
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()) + 1e-8)


@pytest.fixture
def packs(monkeypatch):
    """The options of each call of attention_varlen; and no call of attention."""
    asked, real = [], packed.varlen.attention_varlen

    def recording(*arrays, **options):
        asked.append(options)
        return real(*arrays, **options)

    monkeypatch.setattr(packed.varlen, "attention_varlen", recording)
    monkeypatch.setattr(bridge.api, "attention", lambda *_, **options: pytest.fail(f"attention() with {options}"))
    return asked


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("build", MODELS)
def test_a_step_is_that_of_padded_examples(build, form, packs):
    model, given = build().train(), examples()
    found = trained(model, OURS, flattened(given, form))
    assert len(packs) == 2 and all(x["cu_seqlens_q"].tolist() == [0, 5, 6, 15, 18] for x in packs)
    assert all(x["max_seqlen_q"] == x["max_seqlen_k"] == 9 for x in packs)
    close(found, trained(model, "eager", padded(given)))


def in_a_graph(monkeypatch):
    """The layout and the mask of each call that a compiled program makes."""
    asked, compute = [], torch_operations.forward_now

    def recording(call, tensors):
        asked.append((call.options.layout, tensors[torch_operations.ARRAYS.index("mask")]))
        return compute(call, tensors)

    monkeypatch.setattr(torch_operations, "forward_now", recording)
    return asked


# What says where sequences end with one model, with a cache and without; and every model with the form that says least.
# Not compiled, each has each (above).
COMPILED = [
    *((llama, form) for form in ("arguments, with a cache", "arguments without positions", "positions")),
    *((build, "positions, with a cache") for build in MODELS[1:]),
]


@pytest.mark.parametrize(
    ("build", "form"), [COMPILED[0], *[pytest.param(*pair, marks=pytest.mark.slow) for pair in COMPILED[1:]]]
)
def test_a_model_compiled_as_a_whole(build, form, monkeypatch):
    """One graph for any lengths, after a first one for constants."""
    model = build().train()
    graphs = CompileCounterWithBackend("aot_eager")
    run, asked = torch.compile(model, fullgraph=True, backend=graphs), in_a_graph(monkeypatch)
    for lengths in (LENGTHS, (4, 7), (2, 2, 2, 5, 8)):
        given = examples(lengths)
        asked.clear()
        found = trained(model, OURS, flattened(given, form), run)
        assert asked == [(Packed(max(lengths), max(lengths)), None)] * 2
        close(found, trained(model, "eager", padded(given)))
    assert graphs.frame_count <= 2 + (build is gpt_oss)


def test_no_matrix_is_made_of_the_arguments():
    """In a compiled program nothing is as large as rows times rows, and nothing is read on the host."""
    kept, rows = [], 300
    model = llama(max_position_embeddings=rows).train()
    model.set_attn_implementation(OURS)

    def keep(graph, _):
        kept.append(graph.graph)
        return make_boxed_func(graph.forward)

    run = torch.compile(model.model, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    batch = flattened(examples((100, 200)), "arguments")
    del batch["labels"]
    run(**batch)
    nodes = [node for graph in kept for node in graph.nodes]
    values = [node.meta["val"] for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    assert len(values) > 50 and max(value.numel() for value in values) < rows * rows
    assert not any("proven" in str(node.target) or "_local_scalar" in str(node.target) for node in nodes)


def test_dropout_drops_the_same_in_a_graph():
    model, batch = llama(attention_dropout=0.3, num_hidden_layers=1).train(), flattened(examples(), "arguments")
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = []
    for how in (None, run):
        torch.manual_seed(1)
        found.append(trained(model, OURS, batch, how))
    close(*found)
    torch.manual_seed(2)
    assert not torch.allclose(trained(model, OURS, batch)[0], found[0][0], rtol=1e-4)


def test_each_row_of_a_batch_may_hold_several(packs):
    model = mistral().eval()
    model.set_attn_implementation(OURS)
    ids, lengths = torch.randint(3, TOKENS, (2, 9)), ((4, 5), (2, 7))
    positions = torch.tensor([[*range(a), *range(b)] for a, b in lengths])
    with torch.no_grad():
        found = model(ids, position_ids=positions, use_cache=False).logits
        assert [x["cu_seqlens_q"].tolist() for x in packs] == [[0, 4, 9, 11, 18]] * 2
        model.set_attn_implementation("eager")
        for row, own, pair in zip(found, ids, lengths, strict=True):
            expected = torch.cat([model(x[None]).logits[0] for x in own.split(pair)])
            assert torch.allclose(row, expected, rtol=1e-4, atol=1e-5)


def test_positions_are_read_once_for_all_layers(monkeypatch):
    made, real = [], packed.Sequences.of
    monkeypatch.setattr(packed.Sequences, "of", lambda starts: made.append(0) or real(starts))
    model = llama().eval()
    model.set_attn_implementation(OURS)
    with torch.no_grad():
        for form in ("positions", "positions, with a cache"):
            made.clear()
            model(**flattened(examples(), form))
            assert len(made) == 1


@pytest.mark.parametrize("lengths", [(12,), (5, 7)], ids=str)
def test_a_mask_is_freed_with_its_last_user(lengths):
    """Without the collector of cycles, which would keep matrices in memory until it runs."""
    mask = bridge.visible(1, 12, 12)
    positions = torch.tensor([[position for length in lengths for position in range(length)]])
    bridge.attention(torch.nn.Module(), *heads(12), mask, position_ids=positions)
    there = weakref.ref(mask)
    gc.disable()
    try:
        del mask
        assert there() is None
    finally:
        gc.enable()


def heads(rows, queries=4, keys=2):
    return [torch.randn(1, count, rows, 8, requires_grad=True) for count in (queries, keys, keys)]


ENDS = torch.tensor([0, 5, 12], dtype=torch.int32)
TABLE = dict(cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS, max_length_q=7, max_length_k=7)


@pytest.mark.parametrize("sinks", [None, (4,), (1, 4, 12, 1)], ids=str)
def test_a_layer_without_a_mask(sinks):
    """Sinks of each kind; a maximum that is a tensor is not read; a module that is not causal sees both ways."""
    tensors, s_aux = heads(12), None if sinks is None else torch.randn(sinks, requires_grad=True)
    module, tensors = torch.nn.Module(), tensors if sinks is None else [*tensors, s_aux]
    module.is_causal = sinks is None
    most = torch.tensor(7)
    given = TABLE if sinks is None else TABLE | dict(max_length_q=most, max_length_k=most)
    o, _ = bridge.attention(module, *tensors[:3], None, s_aux=s_aux, **given)
    parts = [[x.narrow(2, a, e - a) for x in tensors[:3]] for a, e in ((0, 5), (5, 12))]
    of_parts = [s_aux, s_aux] if sinks in (None, (4,)) else s_aux.split((5, 7), 2)
    expected = torch.cat(
        [bridge.attention(module, *x, None, s_aux=sink)[0] for x, sink in zip(parts, of_parts, strict=True)], 1
    )
    weights = torch.randn_like(o)
    for one, other in zip(
        *[(x, *torch.autograd.grad((x * weights).sum(), tensors)) for x in (o, expected)], strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


CHUNKS = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
REFUSED = {
    "padding": (dict(attention_mask=torch.ones(1, 12, dtype=torch.bool).index_fill(1, torch.tensor([0]), False)), {}),
    "chunks": (dict(mask_function=CHUNKS, local_size=4), {}),
    "a mask of another length": (dict(kv_length=14), {}),
    "a matrix": (None, dict(attention_mask=torch.ones(1, 1, 12, 12, dtype=torch.bool))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_arguments_do_not_say_is_refused(name):
    arguments, given = REFUSED[name]
    q, k, v = heads(12)
    if arguments is not None:
        arguments = dict(batch_size=1, q_length=12, kv_length=12) | arguments
        given = dict(attention_mask=bridge.visible(**arguments))
        k, v = (torch.randn(1, 2, arguments["kv_length"], 8) for _ in range(2))
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q is taken beside a causal mask or a window"):
        bridge.attention(torch.nn.Module(), q, k, v, **given, **TABLE)


def test_a_compiled_program_refuses_a_window_that_the_layer_is_not_told_of():
    """Of chunks, as Llama 4 has them: nobody can look into a mask there."""

    def layer(q, k, v, told):
        mask = bridge.visible(
            1, 12, 12, mask_function=masking_utils.sliding_window_causal_mask_function(4), local_size=4
        )
        return bridge.attention(torch.nn.Module(), q, k, v, mask, sliding_window=told, **TABLE)[0]

    run, tensors = torch.compile(layer, backend="eager", fullgraph=True), heads(12)
    assert torch.allclose(run(*tensors, 4), layer(*tensors, 4), rtol=1e-5, atol=1e-6)
    with pytest.raises(Exception, match="cu_seq_lens_q is taken beside a causal mask or a window"):
        run(*tensors, None)


POSITIONS = torch.tensor([[*range(5), *range(7)]])


def apart(positions=POSITIONS):
    """What Transformers makes of the causal mask for these positions."""
    numbers = masking_utils.find_packed_sequence_indices(positions)
    inside, remap = (
        masking_utils.causal_mask_function,
        getattr(masking_utils, "remap_positions_for_packed_sequence", None),
    )
    inside = inside if remap is None else remap(inside, positions)
    return masking_utils.and_masks(inside, masking_utils.packed_sequence_mask_function(numbers))


@pytest.mark.parametrize("compiled", [False, True])
def test_position_bias_beside_packed_sequences(compiled):
    """A mask that keeps sequences apart is one that a bias can be added to; a table of them is none."""
    (q, k, v), bias, module = heads(12), torch.randn(1, 4, 12, 12), torch.nn.Module()

    def layer(positions, function, **given):
        function = masking_utils.causal_mask_function if function is None else function(positions)
        mask = bridge.visible(1, 12, 12, mask_function=function)
        return bridge.attention(module, q, k, v, mask, position_bias=bias, **given)[0]

    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    parts = [[x.narrow(2, a, e - a) for x in (q, k, v)] for a, e in ((0, 5), (5, 12))]
    biases = bias[..., :5, :5], bias[..., 5:, 5:]
    expected = [bridge.attention(module, *x, None, position_bias=own)[0] for x, own in zip(parts, biases, strict=True)]
    assert torch.allclose(run(POSITIONS, apart), torch.cat(expected, 1), rtol=1e-5, atol=1e-6)
    for given in (TABLE, dict(position_ids=POSITIONS)):
        with pytest.raises(Exception, match="position_bias is not taken for packed sequences"):
            run(POSITIONS, None, **given)


def test_positions_with_a_gap():
    """Transformers' masks let a sequence begin there, unlike its flash attention: the mask decides, compiled or not."""
    positions, tensors = torch.tensor([[*range(5), 0, 1, *range(7, 12)]]), heads(12)

    def layer(positions):
        mask = bridge.visible(1, 12, 12, mask_function=apart(positions))
        return bridge.attention(torch.nn.Module(), *tensors, mask, position_ids=positions)[0]

    expected = [
        bridge.attention(torch.nn.Module(), *x, None)[0]
        for x in zip(*(y.split((5, 2, 5), 2) for y in tensors), strict=True)
    ]
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        assert torch.allclose(run(positions), torch.cat(expected, 1), rtol=1e-5, atol=1e-6)


def test_packed_sequences_beside_padding_are_a_mask():
    padding = torch.ones(1, 12, dtype=torch.bool)
    padding[0, 3] = False
    found = bridge.visible(1, 12, 12, mask_function=apart(), attention_mask=padding)
    expected = masking_utils.sdpa_mask(1, 12, 12, mask_function=apart(), attention_mask=padding)
    assert torch.equal(found.options["mask"], expected)


@pytest.mark.parametrize(
    ("batch", "function"), [(1, masking_utils.bidirectional_mask_function), (2, masking_utils.causal_mask_function)]
)
def test_positions_that_say_nothing_of_sequences(batch, function):
    """Those in an image begin anew in each line of it; and those of several batch entries, as for flash attention."""
    mask = bridge.visible(batch, 12, 12, mask_function=function)
    tensors, module = [x.expand(batch, -1, -1, -1) for x in heads(12)], torch.nn.Module()
    expected = bridge.attention(module, *tensors, mask)[0]
    assert torch.equal(bridge.attention(module, *tensors, mask, position_ids=POSITIONS)[0], expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile's own
@pytest.mark.parametrize("use_cache", [False, True])
def test_layers_compiled_one_by_one(use_cache):
    model, graphs = llama().train(), CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=graphs)
    for lengths in (LENGTHS, (4, 7), (2, 2, 2, 5, 8)):
        given = examples(lengths)
        found = trained(model, OURS, flattened(given, "positions, with a cache" if use_cache else "positions"))
        with torch.compiler.set_stance("force_eager"):
            close(found, trained(model, "eager", padded(given)))
    assert graphs.frame_count <= 4


def test_a_mask_that_moves_keeps_its_sequences():
    starts = torch.zeros(1, 12, dtype=torch.bool).index_fill(1, torch.tensor([0, 5]), True)
    sequences = packed.Sequences.of(starts)
    assert sequences.ends.tolist() == [0, 5, *[12] * 11] and sequences.counts.tolist() == [2, 7]
    mask = Visible(packed.no_matrix, (1, 1, 12, 12), torch.float32, torch.device("cpu"), {}, starts=starts)
    moved = mask.to(torch.float64)
    assert moved is not mask and all(map(torch.equal, moved.sequences, sequences))


def test_errors_have_the_names_of_flash_attention():
    tensors = heads(12)
    with pytest.raises(TypeError, match="cu_seq_lens_q must be int32, not int64"):
        bridge.attention(torch.nn.Module(), *tensors, None, **TABLE | dict(cu_seq_lens_q=ENDS.long()))
    with pytest.raises(ValueError, match="max_length_q = 6 is less than a length of cu_seq_lens_q, 7"):
        bridge.attention(torch.nn.Module(), *(x.detach() for x in tensors), None, **TABLE | dict(max_length_q=6))
