"""attention_backward: the gradients of attention(), along the same straight line."""

import functools
from typing import Any, NamedTuple

from .. import arrays
from ..arrays import GradientOperands, Layout
from ..dispatch.launch import Launch
from ..dispatch.launch_backward import prepare_backward
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from ..problem.forward import check_alignments, check_lengths, window_sides
from ..select.backward import BackwardChoice, select_backward
from .forward import MOST_DECIDED, NO_AUX, bound_to, refuse_what_is_to_come, understand_functions


class AttentionGradients(NamedTuple):
    """dq, dk and dv in the layout, shape and dtype of q, k and v; dbias and dalibi_slopes in those of bias and
    alibi_slopes. None for what was not wanted."""

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dalibi_slopes: Any = None


class Decision(NamedTuple):
    """What is to be computed, where and by what; and that, ready to be run."""

    problem: BackwardProblem
    target: Target
    choice: BackwardChoice
    launch: Launch
    shapes: tuple[tuple[tuple[int, ...], str] | None, ...]  # shape and dtype of each gradient that is wanted


def attention_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    *,
    dlse: Any = None,
    wanted: tuple[str, ...] = ("dq", "dk", "dv"),
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
    dropout_p: float = 0.0,
    seed: int | None = None,
    layout: str = "bhsd",
    deterministic: bool = True,
    stream: Any = None,
    kernel: str = "auto",
) -> AttentionGradients:
    """The gradients of `attention` in memory proportional to the inputs: no scores are kept, they are computed again.

    >>> o, lse = numba_flash.attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv, *_ = numba_flash.attention_backward(do, q, k, v, o, lse, causal=True)

    With P = e^(S - lse), where S are the scores that `attention` describes, and delta = rowsum(do * o) - dlse:

        dv = P^T do     dP = do v^T     dS = P * (dP - delta)     dq = scale * dS k     dk = scale * dS^T q

    and dS is also the gradient of bias; with softcap dS of q and k is times 1 - tanh(x / cap)^2.

    do: the gradient of o, in o's shape and dtype. q, k, v and all options: as `attention` was called with
    them. o, lse: what it returned with return_lse=True. If they come from a longer set of keys of which k
    and v are a part, as in context-parallel attention, the results are that part's share: dk and dv are
    final, and dq is to be summed over the parts. lse must be contiguous; everything else may have any strides.
    dlse: the gradient of lse, (batch, heads, seqlen_q) in lse's dtype; None = lse was not used.
    wanted: what to compute, names of AttentionGradients' fields; what is left out costs nothing.
    deterministic: True = the same call gives the same bits. False allows a kernel to add up in any order
        where that is faster; none does yet.
    stream: as for `attention`.
    kernel: "auto", or by name "reference", "v2", "mma", "wgmma", "cpu"; the rungs without a backward say what would
        run, and `explain_backward` which does and why.

    Returns AttentionGradients(dq, dk, dv, dbias, dalibi_slopes) in the caller's kind of array: dq, dk, dv
    like q, k, v, with dk and dv summed over the query heads that share a KV head; dbias in bias' own shape
    and dtype, summed over the dimensions in which it is broadcast, as is dalibi_slopes. Sums are in float32,
    for float64 in float64, and are rounded once.

    A query that sees no key (lse -inf) gives and gets zero, as does a key that no query sees. What lies in
    positions that seqlens_k, window, causal or mask remove never reaches a gradient, even NaN and Inf.

    Raises TypeError, ValueError and NotImplementedError as `attention` does.

    Sources: Dao et al., FlashAttention (2022), and Dao, FlashAttention-2 (2023).
    """
    refuse_what_is_to_come(sinks, dropout_p, seed)
    given, (_, _, _, launch, shapes) = understand(
        do, q, k, v, o, lse, dlse, wanted, causal, window, q_offset, seqlens_k, scale, softcap, alibi_slopes, bias,
        mask, score_mod, mask_mod, aux, layout, deterministic, stream, kernel,
    )  # fmt: skip
    like = given[0]
    work_on = arrays.stream_of(given, stream)
    empty = arrays.empty if stream is None else functools.partial(arrays.empty_for, work_on)
    results = [None if wanted_shape is None else empty(like, *wanted_shape) for wanted_shape in shapes]
    own = len(_READ)
    launch.run([*given[:own], *results, *given[own:]], work_on)
    return AttentionGradients(*[None if array is None else arrays.give(like, array) for array in results])


def understand_call(arguments: dict[str, Any]) -> tuple[list[Any], Decision]:
    """`understand` for what a caller would hand to `attention_backward`, by name."""
    return understand(**bound_to(attention_backward, arguments))


def understand(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, wanted: Any, causal: Any, window: Any, q_offset: Any,
    seqlens_k: Any, scale: Any, softcap: Any, alibi_slopes: Any, bias: Any, mask: Any, score_mod: Any, mask_mod: Any,
    aux: Any, layout: Any, deterministic: Any, stream: Any, kernel: Any,
) -> tuple[list[Any], Decision]:  # fmt: skip
    """Everything before memory is allocated or anything runs. The arrays come in the order of GradientOperands, and
    behind them those of aux."""
    read, checks = arrays.read, arrays.checks
    offsets = None
    if q_offset is not None and arrays.is_array(q_offset):
        offsets, q_offset = read("q_offset", q_offset), None
    q, k, v, o, lse = read("q", q), read("k", k), read("v", v), read("o", o), read("lse", lse)
    bias = None if bias is None else read("bias", bias)
    mask = None if mask is None else read("mask", mask)
    alibi_slopes = None if alibi_slopes is None else read("alibi_slopes", alibi_slopes)
    seqlens_k = None if seqlens_k is None else read("seqlens_k", seqlens_k)
    do = read("do", do)
    dlse = None if dlse is None else read("dlse", dlse)
    if window is not None:
        window = window_sides(window)  # before it is part of a key: (1.0, 0) and (1, 0) would be the same one
    given = [q, k, v, o, lse, bias, mask, alibi_slopes, seqlens_k, offsets, do, dlse]
    if not (score_mod is mask_mod is None and aux is NO_AUX):
        score_mod, mask_mod, more = understand_functions(score_mod, mask_mod, aux)
        given += more
    if q.layout.family in checks:
        checks[q.layout.family](given)
    addresses = q.pointer | k.pointer | v.pointer | o.pointer | do.pointer
    # nearly always there is none of them, and what is not there need not be looked at one by one
    optional = None if given[5:10] == _NO_OPTIONAL else tuple([array and array.layout for array in given[5:10]])
    functions = None
    if not score_mod is mask_mod is None or len(given) > len(_READ):
        functions = score_mod, mask_mod, tuple([array.layout for array in given[12:]])
    key = (
        q.layout, k.layout, v.layout, o.layout, lse.layout, do.layout, dlse and dlse.layout, optional, functions,
        wanted, q_offset, causal, window, scale, softcap, layout, deterministic, kernel,
        stream is not None, addresses % 16 == 0,
        # 1 and True are equal as keys, but only one of them is a causal=
        type(q_offset), type(causal), type(scale), type(softcap), type(deterministic),
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
    if optional is not None or functions is not None or dlse is not None or (addresses | lse.pointer) & 7:
        names = [*_READ, *(f"aux[{number}]" for number in range(len(given) - len(_READ)))]
        check_alignments([array for array in given if array is not None], names, given)
        if decision.problem.forward.array("seqlens_k") is not None:
            check_lengths(seqlens_k, decision.problem.forward)
    return given, decision


_NO_OPTIONAL = [None] * 5
_READ = GradientOperands._fields[:12]  # the names of what is given


def decide(
    q: Layout, k: Layout, v: Layout, o: Layout, lse: Layout, do: Layout, dlse: Layout | None,
    optional: tuple[Layout | None, ...] | None, functions: tuple[Any, ...] | None, wanted: Any, q_offset: Any,
    causal: Any, window: Any, scale: Any, softcap: Any, layout: Any, deterministic: Any, kernel: Any, has_stream: bool,
    aligned: bool,
) -> Decision:  # fmt: skip
    """All that follows from layouts and options, so that a call seen before is decided by looking it up.

    optional: the layouts of GradientOperands from bias to q_offset; None for none at all. functions: score_mod,
    mask_mod and the layouts of aux; None for none at all.
    """
    bias, mask, alibi_slopes, seqlens_k, q_offsets = optional or _NO_OPTIONAL
    problem = BackwardProblem.of(
        do, q, k, v, o, lse, dlse, bias, mask, alibi_slopes, seqlens_k, q_offsets, q_offset, causal, window, scale,
        softcap, layout, wanted, deterministic, aligned, *(functions or ()),
    )  # fmt: skip
    target = Target.of(q.device)
    choice = select_backward(problem, target, kernel, q.family, has_stream)
    of_options = [problem.forward.array(name) for name in ("bias", "alibi_slopes")]
    dtypes = [*(problem.forward.dtype,) * 3, *[array and array.dtype for array in of_options]]
    shapes = tuple(
        (shape, str(dtype)) if name in problem.wanted else None
        for name, shape, dtype in zip(AttentionGradients._fields, problem.shapes, dtypes, strict=True)
    )
    return Decision(problem, target, choice, prepare_backward(choice, problem, target), shapes)


# What was decided before, as in forward.py.
_decided: dict[tuple[Any, ...], Decision] = {}
