"""context_parallel_attention as an operation of torch's autograd."""

from typing import Any

import torch

from ..problem.options import OF_HEADS


@torch.compiler.disable  # the layout is Python integers, and collectives must keep their order
def attention(plan: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    given = (q, k, v, *(plan.call.options.get(name) for name in OF_HEADS))
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        return _Attention.apply(plan, *given)
    with torch.no_grad():
        return plan.forward(q, k, v)[:2]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Any, *given: Any) -> tuple[Any, Any]:
        given = tuple(None if x is None else x.detach() for x in given)
        options = plan.call.options | dict(zip(OF_HEADS, given[3:], strict=True))
        plan = plan._replace(call=plan.call._replace(options=options))
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        o, lse, saved = plan.forward(*given[:3])
        ctx.save_for_backward(*saved)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
        names = ("dq", "dk", "dv", *(f"d{name}" for name in OF_HEADS))
        # dk and dv are sums over all ranks: a rank that wants none still sends its share
        needed = dict(zip(names, ctx.needs_input_grad[1:], strict=True))
        wanted = ("dq", "dk", "dv", *(name for name in names[3:] if needed[name]))
        saved = ctx.saved_tensors
        if do is None:
            do = torch.zeros(_shape_of_o(ctx.plan, dlse, saved), dtype=saved[3].dtype, device=saved[3].device)
        found = ctx.plan.backward(do, dlse, saved, wanted)
        return None, *(found.get(name) if needed[name] else None for name in names)


def _shape_of_o(plan: Any, dlse: Any, saved: Any) -> tuple[int, ...]:
    """The shape of o, from that of dlse: (batch, heads, tokens) or (heads, tokens)."""
    *batch, heads, tokens = dlse.shape
    width = saved[3].shape[3]
    return (*batch, heads, tokens, width) if plan.transposed else (*batch, tokens, heads, width)
