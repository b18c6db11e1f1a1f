"""torch's own samples, which its developers test its attention with, computed with ours in place of theirs.

OpInfo has samples of functions, which run under no_grad and with the gradients of all inputs. ModuleInfo has samples of
modules, which run under no_grad when they are evaluated, and with the gradients of all inputs and parameters when they
are trained. Each is computed three times: exactly, by torch's own math in float64; by `plainly` in the sample's dtype;
and with `numba_flash.compat.torch`. Ours may be twice as far from exact as `plainly` is, plus what one rounding of the
scores and of the result can change. In float64 nothing is more exact: there the yardstick is what `plainly` loses in
float32, times the ratio of the two roundings.

A sample is equal, or has dropout: that of other weights than torch's, and test_compat.py has which.
"""

import collections
import contextlib
import copy
import math
import sys
import types
import unittest
import warnings

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

from numba_flash.compat.torch import scaled_dot_product_attention  # noqa: E402

theirs = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(scope="module")
def samples():
    """(OpInfos by name, ModuleInfos by class). torch's testing modules want expecttest, which samples do not use, set a
    hypothesis profile of their own with fewer examples, and forbid the whole process to set flags of torch.backends."""
    expecttest = types.ModuleType("expecttest")
    expecttest.TestCase = unittest.TestCase
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setitem(sys.modules, "expecttest", expecttest)
        patch.setitem(sys.modules, "hypothesis", None)  # cannot be imported
        patch.setattr(torch.backends, "disable_global_flags", lambda: None)
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db
    return {op.name: op for op in op_db}, {info.module_cls: info for info in module_db}


class Plain(torch.autograd.Function):
    """The formula, with its gradient from the stored result as in FlashAttention; what is between in float32."""

    @staticmethod
    def forward(ctx, q, k, v, bias, scale):
        wide = torch.promote_types(q.dtype, torch.float32)
        p = torch.softmax(q.to(wide) @ k.to(wide).mT * scale + bias, -1)
        o = (p @ v.to(wide)).to(q.dtype)
        ctx.save_for_backward(q, k, v, p, o)
        ctx.scale, ctx.bias_dtype = scale, bias.dtype
        return o

    @staticmethod
    def backward(ctx, do):
        dtype = do.dtype
        q, k, v, p, o, do = (x.to(ctx.saved_tensors[3].dtype) for x in (*ctx.saved_tensors, do))
        ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True))
        dq, dk = ds @ k * ctx.scale, ds.mT @ q * ctx.scale
        return dq.to(dtype), dk.to(dtype), (p.mT @ do).to(dtype), ds.to(ctx.bias_dtype), None


def plainly(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    assert not dropout_p
    shape = (query.shape[-2], key.shape[-2])
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    bias = torch.zeros(shape, dtype=query.dtype) if attn_mask is None else attn_mask
    if bias.dtype == torch.bool or is_causal:
        seen = bias if bias.dtype == torch.bool else torch.ones(shape, dtype=torch.bool).tril()
        bias = torch.zeros(shape, dtype=query.dtype).masked_fill(~seen, -torch.inf)
    query, key, value, bias = (x.expand(*batch, *x.shape[-2:]) for x in (query, key, value, bias))
    return Plain.apply(query, key, value, bias, query.shape[-1] ** -0.5 if scale is None else scale)


class Ours:
    """Our attention where torch's modules look theirs up, with what it was called with."""

    def __init__(self):
        self.calls, self.largest_score = 0, 0.0

    def __call__(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        self.calls += 1
        q, k = query.detach().double(), key.detach().double()
        largest = (q @ k.mT).abs().amax().item() * (query.shape[-1] ** -0.5 if scale is None else scale)
        self.largest_score = max(self.largest_score, largest)
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


@contextlib.contextmanager
def attention_is(function):
    """Also without the fused layers, which modules use under no_grad instead of any attention function."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.nn.functional.scaled_dot_product_attention = function
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = theirs
        torch.backends.mha.set_fastpath_enabled(fused)


def cast(tree, dtype):
    """A copy in this dtype, in the same strides."""
    with torch.no_grad():
        return tree_map(lambda x: x.to(dtype, copy=True) if is_real(x) else x, tree)


def is_real(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


class OfFunction:
    """One sample of an OpInfo: a program that can be run in any dtype."""

    def __init__(self, op, sample, **more):
        self.op, self.arguments = op, ((sample.input, *sample.args), {**sample.kwargs, **more})

    def __call__(self, dtype):
        args, kwargs = cast(self.arguments, dtype)
        leaves = [x for x in tree_leaves((args, kwargs)) if is_real(x)]
        return leaves, lambda: self.op(*args, **kwargs)

    @property
    def dropout_p(self):
        return self.arguments[1].get("dropout_p", 0.0)


class OfMultiHead(OfFunction):
    @property
    def dropout_p(self):
        return self.arguments[0][10] if self.arguments[1]["training"] else 0.0


class OfModule:
    """One sample of a ModuleInfo."""

    dropout_p = 0.0  # in all of them

    def __init__(self, module_cls, sample, training, dtype, **more):
        torch.manual_seed(0)
        made = sample.constructor_input
        self.module = module_cls(*made.args, **made.kwargs).to(dtype).train(training)
        self.arguments = (sample.forward_input.args, {**sample.forward_input.kwargs, **more})

    def __call__(self, dtype):
        module = copy.deepcopy(self.module).to(dtype)
        args, kwargs = cast(self.arguments, dtype)
        leaves = [x for x in tree_leaves((args, kwargs)) if is_real(x)] + list(module.parameters())
        return leaves, lambda: module(*args, **kwargs)


def results(program, dtype, attention, recorded):
    """The output and the gradients, in float64."""
    leaves, run = program(dtype)
    with attention_is(attention), torch.set_grad_enabled(recorded):
        for x in leaves:
            x.requires_grad_(recorded)
        output = run()
        output = output[0] if isinstance(output, tuple) else output
        found = [output]
        if recorded:
            generator = torch.Generator().manual_seed(1)
            do = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(dtype)
            found += torch.autograd.grad(output, leaves, do, allow_unused=True)
    return [x if x is None else x.detach().double() for x in found], output.dtype


def largest(tensors):
    return max((x.abs().max().item() for x in tensors if x is not None and x.numel()), default=0.0)


def outcome(program, dtype, recorded):
    """What became of a sample: "equal" or DROPPED; AssertionError where it is wrong."""
    ours = Ours()
    found, kind = results(program, dtype, ours, recorded)
    assert kind == dtype
    assert ours.calls, "our attention was not called"
    if program.dropout_p:  # of other weights than torch's: test_compat.py has which
        return DROPPED
    exact, _ = results(program, torch.float64, theirs, recorded)
    # eps of float32 also for float64, whose yardstick is what is lost in float32
    lower = torch.float32 if dtype == torch.float64 else dtype
    losing, _ = results(program, lower, plainly, recorded)
    times = 2 if lower == dtype else 3 * torch.finfo(dtype).eps / torch.finfo(lower).eps  # exact loses as much there
    one_of_scores = (1 + 2 * ours.largest_score) * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    for part in (slice(0, 1), slice(1, None)):  # the result, then the gradients
        assert [x is None for x in found[part]] == [x is None for x in exact[part]]
        floor = (torch.finfo(dtype).eps + one_of_scores) * largest(exact[part])
        for one, right, other in zip(found[part], exact[part], losing[part], strict=True):
            if one is not None and one.numel():
                assert one.shape == right.shape
                allowed = times * (other - right).abs().max().item() + floor
                worst = (one - right).abs().max().item()
                assert math.isfinite(allowed) and worst <= allowed, f"off by {worst:.3g}, allowed is {allowed:.3g}"
    return "equal"


def tally(name, dtype, programs, recorded=(False, True)):
    """How many samples have which outcome. `COUNTS` has what they are for one version of torch."""
    counts = collections.Counter(outcome(program, dtype, grad) for program in programs for grad in recorded)
    print(f"{name} in {dtype}: {dict(counts)}")
    return counts


def check_counts(name, counts):
    assert counts["equal"], "no sample was computed"
    if torch.__version__.startswith(COUNTED):
        assert dict(counts) == COUNTS[name]


COUNTED = "2.13."
DROPPED = "with dropout"
COUNTS = {  # in each dtype
    "scaled_dot_product_attention": {"equal": 26, DROPPED: 24},
    "scaled_dot_product_attention, other strides": {"equal": 26, DROPPED: 24},
    "multi_head_attention_forward": {"equal": 192, DROPPED: 192},
    "MultiheadAttention": {"equal": 128},
    "TransformerEncoderLayer": {"equal": 74},
    "TransformerEncoder": {"equal": 74},
    "TransformerDecoderLayer": {"equal": 134},
    "Transformer": {"equal": 128},
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("strides", ["", ", other strides"])
def test_function(samples, dtype, strides):
    op = samples[0]["nn.functional.scaled_dot_product_attention"]
    assert op.error_inputs_func is None  # else they are to be tried too
    torch.manual_seed(0)
    given = op.sample_inputs("cpu", dtype)
    given = [sample.noncontiguous() for sample in given] if strides else given
    name = f"scaled_dot_product_attention{strides}"
    check_counts(name, tally(name, dtype, [OfFunction(op, sample) for sample in given]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
def test_function_of_many_heads(samples, dtype):
    op = samples[0]["nn.functional.multi_head_attention_forward"]
    torch.manual_seed(0)
    given = op.sample_inputs("cpu", dtype)
    # need_weights, the default, is without any attention function
    programs = [OfMultiHead(op, sample, need_weights=False) for sample in given]
    check_counts("multi_head_attention_forward", tally("multi_head_attention_forward", dtype, programs))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "name",
    ["MultiheadAttention", "TransformerEncoderLayer", "TransformerEncoder", "TransformerDecoderLayer", "Transformer"],
)
def test_module(samples, name, dtype):
    module_cls = getattr(torch.nn, name)
    info = samples[1][module_cls]
    assert info.module_error_inputs_func is None and dtype in info.dtypes
    more = dict(need_weights=False) if name == "MultiheadAttention" else {}
    counts = collections.Counter()
    for training in (False, True):  # as modules are used: trained with gradients, evaluated without
        torch.manual_seed(0)
        given = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=False, training=training)
        programs = [OfModule(module_cls, sample, training, dtype, **more) for sample in given]
        counts += tally(name, dtype, programs, [training])
    check_counts(name, counts)
