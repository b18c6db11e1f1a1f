"""attention() and warmup(): signature and contract. What they do is in dispatch/."""

import importlib
import inspect
import sys
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

from .. import arrays
from ..dispatch import forward as dispatch
from ..dispatch.call import NO_AUX, Call, folded, has_other_dimensions
from ..dispatch.forward import AttentionOutput as AttentionOutput, CallPlan
from ..problem.forward import NoColumns
from ..problem.options import NO_NUMBERS, OPTION_NAMES, Options

differentiated = arrays.differentiated.get
find = dispatch.find
NO_DROPOUT = 0.0  # the default; calls compare with `is`, which takes a fifth of the time of ==

Function = TypeVar("Function", bound=Any)


def refusing(function: Function) -> Function:
    """The function itself, with a signature for help() and inspect that leaves out its last parameter, **unknown."""
    signature = inspect.signature(function)
    named = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=named)
    return function


def refuse(function: Any, unknown: Iterable[str]) -> None:
    """Raise for the first of these keyword arguments, which the function does not have."""
    for name in unknown:
        from ..problem.keywords import unexpected  # correct calls do not load it

        raise unexpected(function.__name__, name, inspect.signature(function).parameters)


@refusing
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
    block_mask: Any = None,
    sinks: Any = None,
    dropout_p: float = NO_DROPOUT,
    seed: Any = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    kernel: str = "auto",
    **unknown: NoReturn,
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
    out= and in the result too. All of them may also have no batch, no batch and no heads, or several dimensions of
    batch; the results have them as q has, and options are broadcast to them. b then counts the entries in the order of
    their indices. All three have one dtype: float16, bfloat16, float32 or float64. Sums are in
    float32, or in float64 for float64. Strides may be any (transposed, sliced, broadcast, negative), lengths may be
    0, and head_dim_v may differ from head_dim. Query head h reads KV head h // (heads // heads_kv), so grouped and
    multi-query attention need no flag. The arrays are of NumPy, CuPy, torch, JAX or Numba, or anything with DLPack
    or the CUDA Array Interface. They are all in one place and of one kind, and so is the result; only beside JAX
    arrays may options be NumPy's. Nothing else is cast or copied, with one exception, which `explain` shows: NumPy
    arrays with a GPU kernel named.
    torch tensors that require grad and traced JAX arrays get gradients from their frameworks (`bridges`). For other
    arrays see `attention_backward`.

    causal: a query sees no key after its own position; the same as a right window of 0.
    window: (left, right), how many keys before and after its position a query sees, both inclusive;
        None is unbounded. A bare number is refused, because its meaning differs between libraries.
    q_offset: the position of query 0 among the keys, an integer or int32 (batch,). None = seqlen_k - seqlen_q, or
        with seqlens_k seqlens_k[b] - seqlen_q: the last query has the position of the last key ("bottom-right", as
        in flash-attn). 0 is "top-left" (as in torch and JAX).
    seqlens_k: int32 (batch,), how many keys are valid, as in a padded cache; of no dimensions where q has no batch.
        In host memory the values are checked.
        On a device they are clamped to 0 .. seqlen_k, because reading them would make the host wait.
    scale: a finite number; None = head_dim ** -0.5. q_i . k_j is computed before it is scaled, and must be below the
        largest number of the sums' dtype, 3.4e38 for float32; otherwise multiply q by scale first.
    softcap: above 0; None = no cap.
    alibi_slopes: (heads,) or (batch, heads), float32 or q's dtype.
    bias: added to the scores, float32 or q's dtype, broadcastable to (batch, heads, seqlen_q, seqlen_k).
        -inf removes a key, as the mask does, unless its score is NaN.
    mask: bool, True = attend, broadcastable to the same shape.
    score_mod: your own score(score, b, h, q_pos, k_pos, *aux) -> score, a plain Python function of numbers. It runs
        after the scale and before softcap, and is compiled into the kernel. It may use arithmetic, comparisons, if,
        loops, min, max, abs, round, int, float, math.*, aux[...], captured numbers, and functions made of these. Its
        numbers are int64 and float32 (float64 for float64). q_pos is the position among the keys; a parameter of the
        name q_index, behind k_pos, gets the row of q.
    mask_mod: mask(b, h, q_pos, k_pos, *aux) -> True or False, such a function; False, or the integer 0, removes a key.
        Tiles in which it removes every key are skipped.
    aux: a tuple of arrays that these functions read, of any shape, strides and dtype, as in aux[q_index], or with
        q_offset=0 aux[q_pos]. A read outside one raises IndexError if the shapes tell of it, and on "cpu" and
        "reference" always; a GPU does not check the others.
    block_mask: a result of `numba_flash.block_mask`, instead of mask_mod. It finds the empty and full tiles once for
        many calls. It contains causal, window, q_offset, seqlens_k and aux.
    sinks: (heads,) or (batch, heads), float32 or q's dtype. e^sink is one more term of the sum in lse_i, like a key
        without a value, as in gpt-oss. A query that sees no key then has lse = sink. -inf means no sink.
    dropout_p: the probability, from 0 to below 1, of dropping a weight from o. The other weights are multiplied by
        1 / (1 - dropout_p). It is rounded to the nearest multiple of 2^-16. lse is that without dropout.
    seed: an integer from 0 to below 2**64, required with dropout_p, because there is no hidden random state. The
        dropped weights follow from (seed, b, h, q_pos, k_pos) alone, so they are the same in every kernel, tile and
        part; `testing.dropout_mask` gives them. It may be an array of one integer, also one that JAX or torch traces.
    return_lse: return AttentionOutput(o, lse), lse (batch, heads, seqlen_q) in float32 (float64 for
        float64), natural logarithm, ready for `merge`.
    out: an array to write o to, or a pair (o, lse); it must not share memory with an input.
    stream: a stream of CuPy, torch, Numba or cuda.core, or an address; None = the current stream of the arrays'
        library. Work is enqueued there, and the host does not wait. After a first call with the same shapes, a call
        can be captured in a CUDA graph.
    kernel: "auto", or "reference", "v1", "v2", "mma", "wgmma", "cpu" by name; `explain` says which runs and why.

    A query that sees no key, or none with a score above -inf, gives o = 0 and lse = -inf (or its sink), never NaN.
    The contents of positions that seqlens_k, window, causal or mask remove never reach o, not even NaN and Inf.
    The same call gives the same bits, and a row's bits do not depend on its batch neighbours.
    "v1", "v2", "cpu" and bfloat16 need |v| times (keys + 1) to be below the largest number of the sums' dtype;
    otherwise o may be Inf.

    Raises TypeError or ValueError for invalid arguments; the message names the argument, what was given and what is
    allowed. Raises NotImplementedError, with the reason, for what no kernel here can compute, and IndexError, with the
    function's line, for a read outside an array of aux.

    Sources: Dao et al., FlashAttention (2022), and Dao, FlashAttention-2 (2023).
    """
    if unknown:
        refuse(attention, unknown)
    if block_mask is not None:
        from ..dispatch.block_mask import expanded  # plain calls do not load it

        causal, window, q_offset, seqlens_k, mask_mod, aux = expanded(
            block_mask, causal, window, q_offset, seqlens_k, mask_mod, aux
        )
    numbers = NO_NUMBERS if scale is softcap is None and dropout_p is NO_DROPOUT else (scale, softcap, dropout_p)
    plain = bias is mask is alibi_slopes is seqlens_k is sinks is None
    given = None if plain else (bias, mask, alibi_slopes, seqlens_k, sinks, None, None)
    functions = None if score_mod is mask_mod is None and aux is NO_AUX else (score_mod, mask_mod, aux)
    options = causal, window, q_offset, numbers, given, functions, layout, seed
    fields = (q, k, v, out), options, return_lse, None, stream, kernel
    found, key = find(fields), None
    if found is not None:
        key, cached, addresses, is_recorded = found
        if cached is not None:
            if is_recorded:
                return bridge("torch").run_cached(cached, addresses, q, k, v, return_lse)
            o, lse = cached.run(q, addresses, out)
            return o if lse is None else AttentionOutput(o, lse)
    call = Call.of(fields, key)
    if has_other_dimensions(q, layout):
        call, unfold = folded(call)
        return unfold(_repeated(call[:-1]))
    return _run(call)


def _repeated(fields: Any) -> Any:
    """Runs a call from the fields of its Call. `attention` has the same code inline, which saves 0.1 us."""
    (q, k, v, out), return_lse = fields[0], fields[2]
    key, cached, addresses, is_recorded = find(fields) or (None, None, (), False)
    if cached is None:
        return _run(Call.of(fields, key))
    if is_recorded:
        return bridge("torch").run_cached(cached, addresses, q, k, v, return_lse)
    o, lse = cached.run(q, addresses, out)
    return o if lse is None else AttentionOutput(o, lse)


def _run(call: Call) -> Any:
    q, k, v, _ = call.operands
    differentiates = differentiated(type(q))
    try:
        if differentiates is None or not differentiates(q, k, v):
            try:
                return dispatch.run(call)
            except arrays.NeedsBridge as recorded:
                family = recorded.family
        else:
            family = "torch"
        return bridge(family).run(call)
    except NoColumns:
        return _without_values(call)


def _without_values(call: Call) -> Any:
    """For head_dim_v = 0: o has no columns; lse is computed with one column of values."""
    found = _run(_with_a_column(call))
    o = found.o[..., :0]
    return AttentionOutput(o, found.lse) if call.return_lse else o


def _with_a_column(call: Call) -> Call:
    q, k, _, out = call.operands
    if out is not None:
        raise NotImplementedError("out cannot be given with a head_dim_v of 0: leave it out")
    return call._replace(operands=(q, k, first_column(k), None), return_lse=True, key=None)


def first_column(k: Any) -> Any:
    """The first column of k, in place of v when only lse is asked for; detached from torch's autograd."""
    column = k[..., :1]
    return column.detach() if hasattr(column, "detach") else column


def bridge(framework: str) -> Any:
    """The module in which dispatch.run is an operation of `framework`; imported only when an array asks for it."""
    if framework not in _bridges:  # not functools.cache: torch.compile traces this and would warn about it
        _bridges[framework] = importlib.import_module(f"..bridges.{framework}", __package__)
    return _bridges[framework]


_bridges: dict[str, Any] = {}


def _in_torch_compile(q: Any, k: Any, v: Any, **options: Any) -> Any:
    from ..bridges.torch import attention as traced

    return traced(q, k, v, **options)


# torch.compile traces this in attention's place. Asking in each call whether it is being traced would cost 0.1 us.
attention._torchdynamo_inline = _in_torch_compile  # type: ignore[attr-defined]


def warmup(q: Any, k: Any, v: Any, **options: Any) -> None:
    """Compile and load what `attention(q, k, v, **options)` would run, so that the first real call is quick.

    >>> numba_flash.warmup(q, k, v, causal=True)

    Takes the arguments of `attention`, checks them in the same way and raises the same errors. It computes nothing and
    writes to no array. The compiled kernel serves every call of the same dtype, head_dim and options for which
    `explain` shows the same kernel and tile. The tile size depends on the lengths and, with `wgmma`, on the number of
    heads and batch entries. The kernel stays loaded in this process, and in the disk cache for later processes.
    """
    _, plan = prepare_call(q, k, v, options)
    plan.launch.load()


def prepare_call(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[list[Any], CallPlan]:
    """`dispatch.forward.prepare` for the arguments of `attention`, or for the call that torch's autograd would make."""
    named = bound_to(attention, dict(options, q=q, k=k, v=v))
    return prepared(Call(tuple([named.pop(name) for name in ("q", "k", "v", "out")]), **named))


def prepared(call: Call) -> tuple[list[Any], CallPlan]:
    """`dispatch.forward.prepare` of a Call, or of the call that torch's autograd would make."""
    if has_other_dimensions(call.operands[0], call.options.layout):
        call, _ = folded(call)
    try:
        return dispatch.prepare(call)
    except NoColumns:
        return prepared(_with_a_column(call))
    except arrays.NeedsBridge as recorded:
        if recorded.family != "torch":
            raise
    with sys.modules["torch"].no_grad():
        return dispatch.prepare(call._replace(return_lse=True))  # the backward reads lse


def bound(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with the defaults of `function`."""
    signature = inspect.signature(function)
    refuse(function, [name for name in arguments if name not in signature.parameters])
    try:
        found = signature.bind(**arguments)
    except TypeError as error:  # one is missing
        raise TypeError(f"{function.__name__}() {error}") from None
    found.apply_defaults()
    return found.arguments


def bound_to(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """`bound`, with the arguments of Options as one value."""
    given = bound(function, arguments)
    blocks = given.pop("block_mask")
    if blocks is not None:
        from ..dispatch.block_mask import in_options

        given.update(in_options(blocks, given))
    named = {name: given.pop(name) for name in OPTION_NAMES}
    return dict(given, options=Options.of(**named))
