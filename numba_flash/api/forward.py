"""The public functions. Each body is the straight line: arrays, Problem, Target, select, launch."""

import functools
import inspect
import sys
from typing import Any, NamedTuple

from .. import arrays
from ..arrays import Layout, Operands
from ..dispatch import host_copies
from ..dispatch.launch import Launch, prepare
from ..functions.function import Function
from ..machine.target import Target
from ..problem.forward import Problem, check_memory, window_sides
from ..select.forward import Choice, select

O, LSE = Operands._fields.index("o"), Operands._fields.index("lse")
NO_AUX, NO_DROPOUT = (), 0.0  # defaults, which each call compares with: as objects, in a fifth of the time


class AttentionOutput(NamedTuple):
    """o in the caller's layout and dtype; lse (batch, heads, seqlen_q), natural logarithm."""

    o: Any
    lse: Any


class Decision(NamedTuple):
    """What is to be computed, where and by what; and that, ready to be run."""

    problem: Problem
    target: Target
    choice: Choice
    launch: Launch


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: Any = None,
    seqlens_k: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux: tuple[Any, ...] = NO_AUX,
    sinks: Any = None,
    dropout_p: float = NO_DROPOUT,
    seed: int | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    kernel: str = "auto",
) -> Any:
    """Exact attention, softmax(scale * q @ k.T) @ v, in memory proportional to the inputs.

    >>> o = numba_flash.attention(q, k, v, causal=True)
    >>> o, lse = numba_flash.attention(q, k, v, window=(127, 0), return_lse=True)

    For query i of a batch entry, at position p = i + q_offset, over the keys j that it sees:

        s_j = softcap(scale * q_i . k_j) - slope * |p - j| + bias_ij,    softcap(x) = cap * tanh(x / cap)
        o_i = sum_j e^(s_j - lse_i) v_j,                                 lse_i = log sum_j e^(s_j)

    Key j is seen when it is one of the first seqlens_k keys, p - left <= j <= p + right, and mask_ij.

    q: (batch, heads, seqlen_q, head_dim); k: (batch, heads_kv, seqlen_k, head_dim);
    v: (batch, heads_kv, seqlen_k, head_dim_v). With layout="bshd" heads and seqlen change places, in
    out= and in the result too. float16, bfloat16, float32 or float64, all three alike; sums are in
    float32, for float64 in float64. Any strides (transposed, sliced, broadcast, negative), any lengths,
    also 0, any head_dim, head_dim_v apart from it. Query head h reads KV head h // (heads // heads_kv),
    so grouped and multi-query attention need no flag. NumPy, CuPy, torch, JAX and Numba device arrays,
    and anything with DLPack or the CUDA Array Interface; all in one place and of one kind, which is
    also what is returned. Nothing is cast or copied (one exception, which `explain` shows: NumPy arrays
    with a GPU kernel named).
    torch tensors that require grad and traced JAX arrays have gradients: `bridges`; else see
    `attention_backward`.

    causal: a query sees no key after its own position; the same as a right window of 0.
    window: (left, right), how many keys before and after its position a query sees, both inclusive;
        None is unbounded. A bare number is refused, because it means three things elsewhere.
    q_offset: the position of query 0 among the keys. None = seqlen_k - seqlen_q, or with seqlens_k
        seqlens_k[b] - seqlen_q: the last query stands at the last key ("bottom-right", flash-attn's). 0 is
        "top-left" (torch's and JAX's). A whole number, or int32 (batch,).
    seqlens_k: int32 (batch,), how many keys are valid, as in a padded cache. In host memory its values
        are checked; on a device they are clamped to 0 .. seqlen_k, since reading them would mean waiting.
    scale: a finite number; None = head_dim ** -0.5.
    softcap: above 0; None = no cap.
    alibi_slopes: (heads,) or (batch, heads), float32 or q's dtype.
    bias: added to the scores, float32 or q's dtype, broadcastable to (batch, heads, seqlen_q, seqlen_k).
        -inf removes a key, as the mask does.
    mask: bool, True = attend, broadcastable likewise.
    score_mod: your own score(score, b, h, q_pos, k_pos, *aux) -> score, a plain Python function of numbers, behind
        the scale and before softcap. It is compiled into the kernel: arithmetic, comparisons, if, loops, min, max, abs,
        round, int, float, math.*, aux[...], captured numbers, and functions made of these. Its numbers are float32
        (float64 for float64) and int64.
    mask_mod: mask(b, h, q_pos, k_pos, *aux) -> True or False, likewise; False removes a key, as the mask does.
    aux: a tuple of arrays that these read, of any shape, strides and dtype; on a GPU nobody checks their bounds.
    sinks, dropout_p, seed: later versions; NotImplementedError until then.
    return_lse: return AttentionOutput(o, lse), lse (batch, heads, seqlen_q) in float32 (float64 for
        float64), natural logarithm, ready for `merge`.
    out: an array to write o to, or a pair (o, lse); it must not share memory with an input.
    stream: a stream of CuPy, torch, Numba or cuda.core, or an address; None = the one that the arrays'
        library is working on. Work is enqueued there, and the host does not wait. After a first call
        with the same shapes it can be captured in a CUDA graph.
    kernel: "auto", or "reference", "v1", "v2", "mma", "wgmma", "cpu" by name; `explain` tells which runs and why.

    A query that sees no key, or none with a score above -inf, gives o = 0 and lse = -inf, never NaN.
    What lies in positions that seqlens_k, window, causal or mask remove never reaches o, even NaN and
    Inf. The same call gives the same bits, and a row's bits do not depend on its batch neighbours.

    Raises TypeError or ValueError for arguments that make no sense, naming the argument, what came and
    what is allowed, and NotImplementedError for what no kernel here can compute, with the reason.

    Sources: Dao et al., FlashAttention (2022), and Dao, FlashAttention-2 (2023).
    """
    if not (sinks is seed is None and dropout_p is NO_DROPOUT):
        refuse_what_is_to_come(sinks, dropout_p, seed)
    try:
        given, (problem, _, choice, launch) = understand(
            q, k, v, causal, window, q_offset, seqlens_k, scale, softcap, alibi_slopes, bias, mask, score_mod, mask_mod,
            aux, layout, return_lse, out, stream, kernel,
        )  # fmt: skip
        like, o, lse = given[0], given[O], given[LSE]
        work_on = arrays.stream_of(given, stream)
        empty = arrays.empty if stream is None else functools.partial(arrays.empty_for, work_on)
        if o is None:
            o = given[O] = empty(like, problem.o_shape, problem.dtype)
        if lse is None and return_lse:
            lse = given[LSE] = empty(like, problem.lse_shape, problem.compute_dtype)
    except arrays.Recorded as recorded:
        if not score_mod is mask_mod is None:
            raise NotImplementedError(
                f"score_mod and mask_mod are not implemented yet where {recorded.family} records: {recorded}"
            ) from None
        return bridge(recorded.family)(
            q, k, v, causal=causal, window=window, q_offset=q_offset, seqlens_k=seqlens_k, scale=scale, softcap=softcap,
            alibi_slopes=alibi_slopes, bias=bias, mask=mask, layout=layout, return_lse=return_lse, out=out,
            stream=stream, kernel=kernel,
        )  # fmt: skip
    if out is not None:
        arrays.note_writing(o, lse)
    if choice.copies:
        keywords = dict(causal=causal, window=window, scale=scale, softcap=softcap, layout=layout, kernel=kernel)
        if problem.q_offset_source != "array":
            keywords["q_offset"] = q_offset
        own = len(Operands._fields)
        keywords |= dict(score_mod=score_mod, mask_mod=mask_mod)
        host_copies.through_gpu(attention, Operands(*given[:own]), keywords, given[own:])
    else:
        launch.run(given, work_on)
    if lse is None:
        return arrays.give(like, o)
    return AttentionOutput(arrays.give(like, o), arrays.give(like, lse))


def bridge(framework: str) -> Any:
    """attention() as an operation of `framework`: it stands above this module, and is imported only when an array asks
    for it."""
    if framework == "torch":
        from ..bridges.torch import attention as operation
    else:
        from ..bridges.jax import attention as operation
    return operation


def _in_torch_compile(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return bridge("torch")(q, k, v, **options)


# What torch.compile traces in attention's place. Asking in each call whether one is being traced would cost 0.1 us.
attention._torchdynamo_inline = _in_torch_compile  # type: ignore[attr-defined]


def warmup(q: Any, k: Any, v: Any, **options: Any) -> None:
    """Compile and load what `attention(q, k, v, **options)` would run, so that the first real call is quick.

    >>> numba_flash.warmup(q, k, v, causal=True)

    Takes the arguments of `attention` and checks them in the same way, raising the same errors; computes
    nothing and writes to nothing. What is compiled serves every call of the same dtype, head_dim and
    options as long as `explain` names the same kernel and tile for it: how large tiles are depends on the
    lengths and, with `wgmma`, on how many heads and batch entries there are. It stays loaded in this
    process, and in the disk cache for the next one.
    """
    _, decision = understand_call(q, k, v, options)
    decision.launch.load()


def understand_call(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[list[Any], Decision]:
    """`understand` for what a caller would hand to `attention`; what autograd would run, where torch records."""
    arguments = bound_to(attention, dict(options, q=q, k=k, v=v))
    try:
        return understand(**arguments)
    except arrays.Recorded as recorded:
        if recorded.family != "torch":
            raise
    with sys.modules["torch"].no_grad():
        return understand(**arguments | dict(return_lse=True))  # which the backward reads


def bound_to(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with the defaults of `function`, without those that later versions fill."""
    try:
        bound = inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise TypeError(f"{function.__name__}() {error}") from None
    bound.apply_defaults()
    to_come = ("sinks", "dropout_p", "seed")
    refuse_what_is_to_come(*(bound.arguments.pop(name) for name in to_come))
    return bound.arguments


def understand(
    q: Any, k: Any, v: Any, causal: Any, window: Any, q_offset: Any, seqlens_k: Any, scale: Any, softcap: Any,
    alibi_slopes: Any, bias: Any, mask: Any, score_mod: Any, mask_mod: Any, aux: Any, layout: Any, return_lse: Any,
    out: Any, stream: Any, kernel: Any,
) -> tuple[list[Any], Decision]:  # fmt: skip
    """Everything before memory is allocated or anything runs; what `explain` reports.

    The arrays come in the order of Operands, and behind them those of aux; o and lse are what came in out=, or None.
    """
    read, checks = arrays.read, arrays.checks
    o = lse = None
    if out is not None:
        pair = out if isinstance(out, tuple) else (out,)
        if len(pair) != (2 if return_lse and isinstance(out, tuple) else 1):
            raise ValueError("out must be one array, or with return_lse=True also a pair (o, lse)")
        o = read("out", pair[0])
        lse = read("the lse of out", pair[1]) if len(pair) == 2 else None
    offsets = None
    if q_offset is not None and arrays.is_array(q_offset):
        offsets, q_offset = read("q_offset", q_offset), None
    q, k, v = read("q", q), read("k", k), read("v", v)
    bias = None if bias is None else read("bias", bias)
    mask = None if mask is None else read("mask", mask)
    alibi_slopes = None if alibi_slopes is None else read("alibi_slopes", alibi_slopes)
    seqlens_k = None if seqlens_k is None else read("seqlens_k", seqlens_k)
    if window is not None:
        window = window_sides(window)  # before it is part of a key: (1.0, 0) and (1, 0) would be the same one
    addresses = q.pointer | k.pointer | v.pointer | (o.pointer if o else 0)
    given = [q, k, v, o, lse, bias, mask, alibi_slopes, seqlens_k, offsets]
    if not (score_mod is mask_mod is None and aux is NO_AUX):
        score_mod, mask_mod, more = understand_functions(score_mod, mask_mod, aux)
        given += more
    if q.layout.family in checks:
        checks[q.layout.family](given)
    # nearly always q, k and v are all, and what is not there need not be looked at one by one
    others = None if given[3:] == _NO_OTHERS else tuple([array and array.layout for array in given[3:]])
    key = (
        q.layout, k.layout, v.layout, others, q_offset, causal, window, scale, softcap, score_mod, mask_mod, layout,
        return_lse, kernel, stream is not None, addresses % 16 == 0,
        # 1 and True are equal as keys, but only one of them is a causal=
        type(q_offset), type(causal), type(scale), type(softcap), type(return_lse),
    )  # fmt: skip
    try:
        decision = _decided.get(key)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        decision = decide(*key[:-5])  # something that cannot be a key was given: say what is wrong with it
    if decision is None:
        if len(_decided) >= MOST_DECIDED:
            _decided.clear()
        decision = _decided[key] = decide(*key[:-5])
    if others is not None or addresses & 7:
        check_memory(given, decision.problem)
    return given, decision


_NO_OTHERS = [None] * (len(Operands._fields) - 3)


def decide(
    q: Layout, k: Layout, v: Layout, others: tuple[Layout | None, ...] | None, q_offset: Any, causal: Any, window: Any,
    scale: Any, softcap: Any, score_mod: Function | None, mask_mod: Function | None, layout: Any, return_lse: Any,
    kernel: Any, has_stream: bool, aligned: bool,
) -> Decision:  # fmt: skip
    """All that follows from layouts and options, so that a call seen before is decided by looking it up.

    others: the layouts of Operands from o on, and behind them those of aux; None for none at all.
    """
    o, lse, bias, mask, alibi_slopes, seqlens_k, q_offsets, *aux = others or _NO_OTHERS
    problem = Problem.of(
        q, k, v, o, lse, bias, mask, alibi_slopes, seqlens_k, q_offsets, q_offset, causal, window, scale, softcap,
        layout, return_lse, aligned, score_mod, mask_mod, tuple(aux),  # type: ignore[arg-type]
    )  # fmt: skip
    target = Target.of(q.device)
    choice = select(problem, target, kernel, q.family, has_stream)
    return Decision(problem, target, choice, prepare(choice, problem, target))


# What was decided before. It is looked up in each call: functools.lru_cache, which would type all parts of the key,
# takes twice as long.
_decided: dict[tuple[Any, ...], Decision] = {}
MOST_DECIDED = 4096


def understand_functions(
    score_mod: Any, mask_mod: Any, aux: Any
) -> tuple[Function | None, Function | None, list[arrays.Array]]:
    """The caller's functions as values, and the arrays that they read."""
    if not isinstance(aux, tuple):
        raise TypeError(f"aux must be a tuple of arrays, not {type(aux).__name__}")
    return (
        None if score_mod is None else Function.of("score_mod", score_mod),
        None if mask_mod is None else Function.of("mask_mod", mask_mod),
        [arrays.read(f"aux[{number}]", array) for number, array in enumerate(aux)],
    )


def refuse_what_is_to_come(sinks: Any, dropout_p: Any, seed: Any) -> None:
    """The part of the signature that later versions fill; never ignored in silence."""
    no_dropout = isinstance(dropout_p, (float, int)) and dropout_p == 0  # noqa: UP038 - a third of the time of float | int
    if sinks is seed is None and no_dropout:
        return
    given = dict(sinks=sinks, seed=seed)
    wrong = [f"{name} must be None, its default" for name, value in given.items() if value is not None]
    wrong += [f"dropout_p must be 0.0, its default, not {dropout_p!r}"] * (not no_dropout)
    # docs/contract.md says the same
    meanwhile = ["for a sink, scale o by 1 / (1 + e^(sink - lse)), with return_lse=True"] * (sinks is not None)
    meanwhile += ["dropout can be on the output"] * (not no_dropout)
    instead = f". Meanwhile: {'; '.join(meanwhile)}" if meanwhile else ""
    raise NotImplementedError(f"{'; '.join(wrong)}: anything else is not implemented yet{instead}")
