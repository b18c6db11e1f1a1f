"""attention() as an operation of torch: autograd, torch.func, torch.compile, torch.export, tracers, FakeTensor.

`numba_flash.attention` calls this module for tensors that require grad, and wherever torch records operations on
tensors. dispatch/ does the computation, as for `attention` and `attention_backward`. torch sees it in one of three
forms, and `run` chooses the one that a call needs: an autograd.Function for eager calls (torch_eager.py), which is the
cheapest; one in the parts that torch.func asks for (torch_func.py, torch_func_backward.py, torch_vmap.py); and
operations of torch's dispatcher for everything that traces (torch_operations.py). All carry a StaticCall
(static_call.py).

Autocast does not affect them: nothing is cast silently, and q, k and v must have one dtype, as without autocast.
"""

from typing import Any

import torch
from torch import Tensor

from ..arrays import recording
from ..dispatch import forward as dispatch
from ..dispatch.block_mask import in_options
from ..dispatch.cached_call import CachedForward
from ..dispatch.call import Call, folded, has_other_dimensions
from ..dispatch.forward import AttentionOutput
from ..problem.options import Options
from ..problem.packed import bounds
from .static_call import StaticCall
from .torch_call import flatten
from .torch_eager import record, record_both, record_cached
from .torch_func import Transformed
from .torch_functions import IN_GRAPHS
from .torch_operations import operation

PLAIN = {Tensor, torch.nn.Parameter, type(None)}  # not a subclass that traces, such as FakeTensor
# An integer: torch.compile(dynamic=True) turns a float default into an input of the graph, and cannot pass it to the
# second of two regions under torch.utils.checkpoint.
NO_DROPOUT = 0


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    dropout_p: float = NO_DROPOUT,
    seed: Any = None,
    block_mask: Any = None,
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    kernel: str = "auto",
    **named: Any,
) -> Any:
    """torch.compile traces this function in place of `numba_flash.attention`."""
    if block_mask is not None:
        named |= in_options(block_mask, named)
    dropout = dict(dropout_p=dropout_p, seed=seed) if dropout_p else {}
    options = Options.of(**named, **dropout)
    call = Call((q, k, v, out), options, return_lse=return_lse, stream=stream, kernel=kernel)
    if has_other_dimensions(q, options.layout):
        call, unfold = folded(call)
        return unfold(run(call))
    return run(call)


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    dropout_p: float = NO_DROPOUT,
    seed: Any = None,
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    kernel: str = "auto",
    **named: Any,
) -> Any:
    """torch.compile traces this function in place of `numba_flash.attention_varlen`."""
    named |= dict(dropout_p=dropout_p, seed=seed) if dropout_p else {}
    most = bounds(named.pop("max_seqlen_q", None), named.pop("max_seqlen_k", None))
    of_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    named |= dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=of_k, layout=most)
    options = Options.of(**named)
    return run(Call((q, k, v, out), options, return_lse=return_lse, stream=stream, kernel=kernel))


def run(call: Call) -> Any:
    """`dispatch.forward.run` for torch tensors, with gradients of q, k, v and the options that have one, also
    through lse.

    The arguments and errors are the same, except that out and stream are refused: autograd owns the memory of a result
    that has a gradient, and work goes to torch's current stream. The kernel of the same name computes the gradients if
    it has a backward, else "auto" does. Second derivatives and forward mode raise
    NotImplementedError.

    torch.func.grad, vjp, jacrev and vmap take it, in any order. vmap makes the mapped dimension part of the batch and
    calls once. That costs nothing for tensors that are contiguous with the mapped dimension first, and for those that
    are not mapped and have a batch of 1; others are copied into such a form. score_mod, mask_mod and dropout depend on
    the batch entry's index. So with these it makes a call for each, which counts the entries of its own batch.
    """
    (q, k, v, out), options, kernel, return_lse = call.operands, call.options, call.kernel, call.return_lse
    if out is not None or call.stream is not None:
        name = "stream" if out is None else "out"
        raise NotImplementedError(f"{name} cannot be given where torch records what is done, as it does for grad")
    if options.functions is not None and torch.compiler.is_compiling() and not IN_GRAPHS:
        if torch._C._are_functorch_transforms_active():  # a graph break is not allowed inside a transform
            raise NotImplementedError(NO_FUNCTIONS)
        return _outside_of_the_graph(q, k, v, options, return_lse, kernel)
    if torch.compiler.is_compiling() or not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN):
        o, lse = operation(*flatten(q, k, v, options, kernel))
    elif torch._C._are_functorch_transforms_active():  # before all tracers: what it calls comes here again
        tensors, static = flatten(q, k, v, options, kernel)
        o, lse = Transformed.apply(static, *tensors)
    elif torch._C._get_tracing_state() is not None or recording.recording_mode() is not None:
        o, lse = operation(*flatten(q, k, v, options, kernel))
    else:
        numbers = not (isinstance(options.q_offset, Tensor) or isinstance(options.seed, Tensor))
        if options.arrays is options.functions is None and numbers:
            # autograd is told of three tensors
            tensors, static = (q, k, v), StaticCall(options, kernel, call.key)
        else:
            tensors, static = flatten(q, k, v, options, kernel)
            if not PLAIN.issuperset(map(type, tensors)):
                return _result(return_lse, *operation(tensors, static))
        if not return_lse:
            return record(static, *tensors)
        o, lse = record_both(static, *tensors)
    return _result(return_lse, o, lse)


def run_cached(cached: CachedForward, addresses: Any, q: Tensor, k: Tensor, v: Tensor, return_lse: Any) -> Any:
    """`run` of a repeated call that `dispatch.forward.find` found."""
    if return_lse:
        return run(Call((q, k, v, None), cached.options, return_lse=return_lse, kernel=cached.kernel))
    return record_cached(cached, addresses, q, k, v)


def _result(return_lse: Any, o: Tensor, lse: Tensor) -> Any:
    return AttentionOutput(o, lse) if return_lse else o


NO_FUNCTIONS = (
    f"torch {torch.__version__} cannot have score_mod and mask_mod in transforms inside of torch.compile, and 2.13 "
    "can: bias= and mask= go into every graph"
)


def _run_outside(q: Any, k: Any, v: Any, options: Options, return_lse: Any, kernel: str) -> Any:
    return run(Call((q, k, v, None), options, return_lse=return_lse, kernel=kernel))


def _outside_of_the_graph(*arguments: Any) -> Any:
    """torch.compile breaks its graph here and resumes after it."""
    import torch._dynamo  # takes a second at first; it is loaded whenever torch.compile calls this

    return torch._dynamo.disable(_run_outside)(*arguments)


_outside_of_the_graph._torchdynamo_disable = True  # type: ignore[attr-defined]
_outside_of_the_graph._torchdynamo_disable_msg = "score_mod and mask_mod are no part of a graph before torch 2.13"  # type: ignore[attr-defined]
# It leaves for the call of `attention`, which it would then trace as it stands: nothing below dispatch is for it.
_BELOW: Any = (run_cached, _run_outside, Transformed.forward, Transformed.backward, Transformed.setup_context)
for _function in _BELOW:
    _function._torchdynamo_disable = True
_frames = torch._C._dynamo.eval_frame
if hasattr(_frames, "_FrameExecStrategy"):  # else it traces there what it can, and warns
    _skip = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)  # also what it calls
    for _function in (*dispatch.NOT_TO_BE_TRACED, *_BELOW):
        _frames.set_code_exec_strategy(_function.__code__, _skip)
