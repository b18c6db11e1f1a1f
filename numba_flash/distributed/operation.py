"""context_parallel_attention(): signature, checks, refused options. The ranks' work is in gather, heads and ring."""

import sys
from typing import Any, NamedTuple

from ..arrays import is_array
from ..dispatch.forward import AttentionOutput
from ..problem.keywords import unexpected
from ..problem.option_checks import window_sides
from ..problem.options import OF_HEADS, AttentionGradients
from . import gather, heads as by_heads, ring, rule
from .groups import namespace
from .layout import ZIGZAG, Layout, Reach, check_local, document_ends, layout_of
from .local import Call
from .whole import agree, group_of

# Arguments of attention that are not taken, and what to use in their place.
INSTEAD = dict(
    bias="score_mod with aux",
    mask="mask_mod with aux",
    block_mask="mask_mod",
    q_offset="layout, which says where each token stands",
    out="the result",
    stream="the current stream",
)


def context_parallel_attention(
    q: Any,
    k: Any,
    v: Any,
    group: Any,
    *,
    layout: str | Layout = ZIGZAG,
    seqlen: int | None = None,
    cu_seqlens: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    seqlens_k: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux: tuple[Any, ...] = (),
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    method: str = "auto",
    slices: int | None = None,
    most_gathered: int = rule.MOST_GATHERED,
    dims: str = "bhsd",
    return_lse: bool = False,
    kernel: str = "auto",
    **refused: Any,
) -> Any:
    """Attention of a rank's own tokens over the tokens of all ranks, as if one process had them all.

    >>> o = numba_flash.distributed.context_parallel_attention(q, k, v, group, causal=True)

    All ranks of `group` call it with equal options, all with autograd or none, each with its own tokens: q (batch,
    heads, tokens, head_dim), k (batch, heads_kv, tokens, head_dim), v (batch, heads_kv, tokens, head_dim_v). The result
    is (batch, heads, tokens, head_dim_v). The token at position p of the whole sequence has position p among the keys.

    group: a process group of torch (NCCL on GPUs, gloo on CPUs) or a DeviceMesh of one dimension; a communicator of
        nccl4py, with CuPy arrays (not tried); inside `jax.shard_map` the name of the mesh axis; or a Group.
    layout: which tokens a rank has, in which order: "zigzag" (chunks r and 2 * size - 1 - r, equal work with causal),
        "contiguous", or a Layout. `shard` and `unshard` convert.
    seqlen: how many tokens all ranks have together; None = equally many on each rank.
    cu_seqlens: where packed documents end, (documents + 1,) numbers on the host, equal on all ranks: then arrays have
        no batch, and a token sees its own document alone, as in `attention_varlen`. b, positions, sinks and
        alibi_slopes are as there. `Layout.per_document` divides each document among all ranks.
    causal, window, seqlens_k, scale, softcap, alibi_slopes, sinks, dropout_p, seed: as for `attention`, by positions in
        the whole. seqlens_k are numbers of keys of the whole.
    score_mod, mask_mod, aux: as for `attention`; aux is what one process would be given.
    method: "gather" (K and V come to each rank, in slices of KV heads), "heads" (all tokens of some heads come to each
        rank), "ring" (K and V go round); "auto" takes one by shapes: docs/context_parallel.md.
    slices: for "gather" and "heads", in how many equal slices heads come; None = by shapes. most_gathered: bytes of K
        and V that a rank may hold at once; "auto" takes "ring" if one KV head needs more.
    dims: order of the arrays' dimensions, "bhsd" or "bshd".
    return_lse: return AttentionOutput(o, lse), lse (batch, heads, tokens), or (heads, tokens) with cu_seqlens.
    kernel: as for `attention`.

    With "gather" and "heads" o, lse and dq have the bits of one process, with "heads" dk and dv have, too: under the
    conditions that docs/context_parallel.md names. dk and dv are summed in float32 (float64 for float64) in the order
    of ranks. Equal calls give equal bits with each method.

    torch tensors that require grad get their gradients; the backward is a collective call, too. Gradients of sinks and
    alibi_slopes are those of the rank's own tokens: sum them over ranks, as those of weights.

    Raises what `attention` raises; NotImplementedError for options that ranks cannot serve, which says what to use
    instead; RuntimeError if another rank has ended, or does not answer within the group's own timeout.

    Sources: Llama 3 (2024), section 3.3.2 (gather); DeepSpeed Ulysses (2023); Ring Attention (2023); zigzag from
    Brandon et al., Striped Attention (2023), and Zhu's ring-flash-attention.
    """
    given = dict(causal=causal, window=window, seqlens_k=seqlens_k, scale=scale, softcap=softcap, sinks=sinks)
    given |= dict(alibi_slopes=alibi_slopes, score_mod=score_mod, mask_mod=mask_mod, aux=aux, dropout_p=dropout_p)
    given |= dict(seed=seed, kernel=kernel)
    _refuse(refused)
    if isinstance(group, str):
        from .jax_operation import attention as in_jax

        return in_jax(q, k, v, group, (layout, seqlen, cu_seqlens), given, method, dims, return_lse)
    torch: Any = sys.modules.get("torch")
    tensors = torch is not None and isinstance(q, torch.Tensor)
    gradients = tensors and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    how = method, slices, most_gathered
    plan = planned(q, k, v, group, given, (layout, seqlen, cu_seqlens), how, dims, gradients)
    if tensors:
        from .torch_operation import attention as differentiable

        o, lse = differentiable(plan, q, k, v)
    else:
        o, lse, _ = plan.forward(q, k, v)
    return AttentionOutput(o, lse) if return_lse else o


def context_parallel_attention_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    group: Any,
    *,
    dlse: Any = None,
    wanted: Any = None,
    **options: Any,
) -> AttentionGradients:
    """The gradients of `context_parallel_attention` for this rank's q, k and v: for arrays without autograd.

    >>> dq, dk, dv, *_ = numba_flash.distributed.context_parallel_attention_backward(do, q, k, v, o, lse, group)

    do, dlse, wanted: as for `attention_backward`, of this rank's tokens. o, lse: the results with return_lse=True.
    options: those of the call of `context_parallel_attention`. A collective call.
    """
    names = ("layout", "seqlen", "cu_seqlens"), ("method", "slices", "most_gathered"), ("dims",)
    defaults = dict(layout=ZIGZAG, method="auto", most_gathered=rule.MOST_GATHERED, dims="bhsd")
    taken = [[options.pop(name, defaults.get(name)) for name in group_of_names] for group_of_names in names]
    _refuse({name: options.pop(name) for name in INSTEAD if name in options})
    plan = planned(q, k, v, group, options, taken[0], taken[1], taken[2][0])
    saved = plan.again(q, k, v, o, lse)
    found = plan.backward(do, dlse, saved, ("dq", "dk", "dv") if wanted is None else tuple(wanted))
    return AttentionGradients(**found)


class Plan(NamedTuple):
    """A checked call: the method, and how to view the caller's arrays as (batch, tokens, heads, head_dim)."""

    call: Call
    method: str
    transposed: bool  # the caller's are (batch, heads, tokens, head_dim)

    def seen(self, x: Any) -> Any:
        if x is None:
            return None
        return x[None] if self.call.packed else x.swapaxes(1, 2) if self.transposed else x

    def given_back(self, x: Any) -> Any:
        return x[0] if self.call.packed else x.swapaxes(1, 2) if self.transposed else x

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        """-> o and lse in the caller's layout, and the arrays that `backward` takes."""
        q, k, v = self.seen(q), self.seen(k), self.seen(v)
        if self.method == "heads":
            o, lse, saved = by_heads.forward(self.call, q, k, v)
        else:
            o, lse = (gather if self.method == "gather" else ring).forward(self.call, q, k, v)
            saved = (q, k, v, o, lse)
        return self.given_back(o), lse[0] if self.call.packed else lse, saved

    def again(self, q: Any, k: Any, v: Any, o: Any, lse: Any) -> tuple[Any, ...]:
        """The arrays that `forward` saves for `backward`, made again from its operands and results."""
        lse = lse[None] if self.call.packed else lse
        saved = self.seen(q), self.seen(k), self.seen(v), self.seen(o)
        if self.method != "heads":
            return (*saved, lse)
        return by_heads.kept_of(self.call, *saved, lse)

    def backward(self, do: Any, dlse: Any, saved: tuple[Any, ...], wanted: tuple[str, ...]) -> dict[str, Any]:
        do, dlse = self.seen(do), dlse[None] if dlse is not None and self.call.packed else dlse
        if self.method == "heads":
            found = by_heads.backward(self.call, do, dlse, saved, wanted)
        else:
            found = (gather if self.method == "gather" else ring).backward(self.call, do, *saved, dlse, wanted)
        return {name: self.given_back(x) if name in ("dq", "dk", "dv") else x for name, x in found.items()}


def planned(
    q: Any,
    k: Any,
    v: Any,
    group: Any,
    given: dict[str, Any],
    of_tokens: Any,
    how: Any,
    dims: Any,
    gradients: bool = False,
) -> Plan:
    """of_tokens: layout, seqlen, cu_seqlens; how: method, slices, most_gathered. As the caller gave them. gradients:
    autograd will want them."""
    made, (layout, seqlen, cu_seqlens) = group_of(group), of_tokens
    packed = cu_seqlens is not None
    if dims not in ("bhsd", "bshd"):
        raise ValueError(f"dims must be 'bhsd' or 'bshd', not {dims!r}")
    transposed = dims == "bhsd" and not packed
    batch, tokens, heads, heads_kv = _sizes(q, k, v, packed, transposed)
    chosen = layout_of(layout, made.size, tokens * made.size if seqlen is None else seqlen)
    check_local("q", tokens, chosen, made.rank)
    if seqlen is not None and seqlen != chosen.seqlen:
        raise ValueError(f"seqlen must be {chosen.seqlen}, the tokens of layout, not {seqlen}")
    ends = document_ends(cu_seqlens) if packed else (0, chosen.seqlen)
    if ends[-1] > chosen.seqlen:
        raise ValueError(f"cu_seqlens must rise to at most {chosen.seqlen}, the tokens of all ranks, not {list(ends)}")
    _check_options(given, packed)
    _check_of_heads(given, len(ends) - 1 if packed else batch, heads)
    left, right = window_sides(given.get("window"))
    reach = Reach(left, 0 if given.get("causal") else right, ends)
    call = Call(made, chosen, reach, packed, given)
    alone = [name for name in ("score_mod", "mask_mod", "dropout_p") if given.get(name)]
    least = batch * chosen.seqlen * (k.shape[-1] + v.shape[-1]) * (_item_size(k))
    method, slices = _how(how, call, k, (heads, heads_kv), least, alone, gradients)
    facts = dict(tokens=chosen.seqlen, batch=batch, heads=heads, heads_kv=heads_kv, head_dim=k.shape[-1])
    facts |= dict(head_dim_v=v.shape[-1], dtype=str(q.dtype), method=method, left=left, right=reach.right)
    held: dict[str, Any] = dict(slices=slices, ahead=rule.ahead_of(slices, least, how[2]))
    agree(group, made, q, facts | held)
    return Plan(call._replace(**held), method, transposed)


def _how(
    how: Any, call: Call, k: Any, sizes: tuple[int, int], least: int, alone: list[str], gradients: bool
) -> tuple[str, tuple[int, ...]]:
    """-> method and slices. sizes: heads and heads_kv; alone: options that need the head's number in the whole,
    such as functions and dropout."""
    (method, count, most), size, (heads, heads_kv) = how, call.group.size, sizes
    rule.check_method(method)
    if method == "auto":
        method = rule.method_of(size, heads, heads_kv, least, bool(alone) or call.packed, most, gradients)
    if size == 1:
        method = "gather"
    if method == "heads" and (heads_kv % size or heads % size):
        raise ValueError(
            f"method='heads' needs heads and heads_kv that {size} ranks divide, not {heads} and {heads_kv}: use "
            "method='gather'"
        )
    if method != "gather" and alone:
        raise NotImplementedError(
            f"{alone[0]} is told heads and positions of the whole, which method={method!r} does not have: use "
            "method='gather'"
        )
    if method == "ring" and call.packed:
        raise NotImplementedError("cu_seqlens with method='ring': use method='gather' or method='heads'")
    moved = heads_kv // size if method == "heads" else heads_kv  # KV heads that are divided into slices
    if count is not None and (method == "ring" or count < 1 or moved % count):
        raise ValueError(f"slices must divide {moved} KV heads, with method='gather' or 'heads', not {count}")
    if count not in (None, 1) and alone:
        raise NotImplementedError(f"{alone[0]} is told the number of a head of the whole: leave slices out")
    if count is not None or alone:
        return method, rule.equal_slices(moved, count or 1)
    by_heads = method == "heads"
    given = heads // heads_kv, k.shape[-1], call.layout.seqlen, 0 if by_heads else least, most
    return method, rule.slices_of(moved, *given, call.group.takes_views(k), gradients or by_heads)


def _sizes(q: Any, k: Any, v: Any, packed: bool, transposed: bool) -> tuple[int, int, int, int]:
    """-> batch, tokens, heads, heads_kv; checked as far as the ranks' exchange depends on them."""
    dimensions = 3 if packed else 4
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_array(x):
            raise TypeError(f"{name} must be an array, not {type(x).__name__}")
        if len(x.shape) != dimensions:
            words = "(tokens, heads, head_dim) with cu_seqlens" if packed else "4 dimensions"
            raise ValueError(f"{name} must have {words}, not shape {tuple(x.shape)}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must be {q.dtype} like q, not {x.dtype}")
    at_tokens, at_heads = (0, 1) if packed else (2, 1) if transposed else (1, 2)
    tokens = q.shape[at_tokens]
    for name, x in (("k", k), ("v", v)):
        if x.shape[at_tokens] != tokens or (not packed and x.shape[0] != q.shape[0]):
            raise ValueError(
                f"{name} must have the batch and the tokens of q, {tuple(q.shape)}, not {tuple(x.shape)}: queries "
                "and keys are of one sequence"
            )
    heads, heads_kv = q.shape[at_heads], k.shape[at_heads]
    if v.shape[at_heads] != heads_kv or not heads_kv or heads % heads_kv:
        raise ValueError(
            f"k and v must have equally many heads, which divide the {heads} of q, not {heads_kv} and "
            f"{v.shape[at_heads]}"
        )
    return 1 if packed else q.shape[0], tokens, heads, heads_kv


def _check_options(given: dict[str, Any], packed: bool) -> None:
    import inspect

    for name in ("score_mod", "mask_mod"):
        function = given.get(name)
        if function is not None and "q_index" in inspect.signature(function).parameters:
            raise NotImplementedError(f"{name} asks for q_index, the row of one process: use q_pos")
    if packed and given.get("seqlens_k") is not None:
        raise NotImplementedError("seqlens_k with cu_seqlens: let cu_seqlens end where the keys do")
    for x in given.get("aux") or ():
        if getattr(x, "requires_grad", False):
            raise NotImplementedError(
                "gradients of aux: pass aux.detach(), and compute them by attention on one process"
            )


def _check_of_heads(given: dict[str, Any], batch: int, heads: int) -> None:
    """Checks options with a number for each head, before ranks send anything or take the numbers of their own heads."""
    for name in OF_HEADS:
        x = given.get(name)
        if x is None:
            continue
        if not is_array(x):
            raise TypeError(f"{name} must be an array, not {type(x).__name__}")
        if tuple(x.shape) not in ((heads,), (batch, heads)):
            shapes = f"(heads,) = ({heads},) or (batch, heads) = ({batch}, {heads})"
            raise ValueError(f"{name} must have shape {shapes}, not {tuple(x.shape)}")


def _refuse(others: dict[str, Any]) -> None:
    for name, x in others.items():
        if name not in INSTEAD:
            raise unexpected("context_parallel_attention", name)
        if x is not None:
            raise NotImplementedError(f"{name} is not taken across ranks: use {INSTEAD[name]}")


def _item_size(x: Any) -> int:
    size = getattr(x, "itemsize", None)
    return int(size if size is not None else namespace(x).finfo(x.dtype).bits // 8)
