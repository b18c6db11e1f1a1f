"""The public functions. Each body is the straight line: arrays, Problem, Target, select, launch."""

from typing import Any, NamedTuple

from . import arrays, copies
from .arrays import Array
from .launch import Operands, launch
from .problem import Problem, check_memory
from .select import Choice, select
from .target import Target


class AttentionOutput(NamedTuple):
    """o in the caller's layout and dtype; lse (batch, heads, seqlen_q), natural logarithm."""

    o: Any
    lse: Any


class Call(NamedTuple):
    """A call as it was understood: what came, what is to be computed, where and by what."""

    given: dict[str, Array]
    problem: Problem
    target: Target
    choice: Choice


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
    aux: tuple[Any, ...] = (),
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    kernel: str = "auto",
) -> Any:
    """Exact attention, softmax(scale * q @ k.T) @ v, in memory proportional to the inputs."""
    refuse_what_is_to_come(score_mod, mask_mod, aux, sinks, dropout_p, seed)
    given, problem, target, choice = understand(
        q, k, v, causal, window, q_offset, seqlens_k, scale, softcap, alibi_slopes, bias, mask, layout, return_lse,
        out, stream, kernel,
    )  # fmt: skip
    q_array, o, lse = given["q"], given.get("out"), given.get("out_lse")
    if o is None:
        o = arrays.empty(q_array, problem.o_shape, problem.dtype)
    if lse is None and return_lse:
        lse = arrays.empty(q_array, problem.lse_shape, problem.compute_dtype)
    if choice.copies:
        inputs = {name: array for name, array in given.items() if name not in ("out", "out_lse")}
        options = dict(causal=causal, window=window, scale=scale, softcap=softcap, layout=layout, kernel=kernel)
        if "q_offset" not in given:
            options["q_offset"] = q_offset
        copies.through_gpu(attention, inputs, [o] if lse is None else [o, lse], options)
    else:
        operands = Operands(
            q_array, given["k"], given["v"], o, lse, given.get("bias"), given.get("mask"), given.get("alibi_slopes"),
            given.get("seqlens_k"), given.get("q_offset"),
        )  # fmt: skip
        launch(choice, problem, target, operands, arrays.stream_of(q_array, stream))
    if lse is None:
        return arrays.give(q_array, o)
    return AttentionOutput(arrays.give(q_array, o), arrays.give(q_array, lse))


def understand(
    q: Any, k: Any, v: Any, causal: Any, window: Any, q_offset: Any, seqlens_k: Any, scale: Any, softcap: Any,
    alibi_slopes: Any, bias: Any, mask: Any, layout: Any, return_lse: Any, out: Any, stream: Any, kernel: Any,
) -> Call:  # fmt: skip
    """Everything before memory is allocated or anything runs; what `explain` reports."""
    given = {"q": arrays.read("q", q), "k": arrays.read("k", k), "v": arrays.read("v", v)}
    if out is not None:
        pair = out if isinstance(out, tuple) else (out,)
        if len(pair) != (2 if return_lse and isinstance(out, tuple) else 1):
            raise ValueError("out must be one array, or with return_lse=True also a pair (o, lse)")
        given.update((name, arrays.read(name, x)) for name, x in zip(("out", "out_lse"), pair, strict=False))
    if bias is not None:
        given["bias"] = arrays.read("bias", bias)
    if mask is not None:
        given["mask"] = arrays.read("mask", mask)
    if alibi_slopes is not None:
        given["alibi_slopes"] = arrays.read("alibi_slopes", alibi_slopes)
    if seqlens_k is not None:
        given["seqlens_k"] = arrays.read("seqlens_k", seqlens_k)
    if q_offset is not None and arrays.is_array(q_offset):
        given["q_offset"] = arrays.read("q_offset", q_offset)
        q_offset = given["q_offset"].layout

    layouts = {name: array.layout for name, array in given.items()}
    problem = Problem.of(
        layouts["q"], layouts["k"], layouts["v"], layouts.get("out"), layouts.get("out_lse"), layouts.get("bias"),
        layouts.get("mask"), layouts.get("alibi_slopes"), layouts.get("seqlens_k"), q_offset, causal, window, scale,
        softcap, layout, return_lse,
    )  # fmt: skip
    check_memory(given, problem)
    target = Target.of(given["q"].layout.device)
    return Call(given, problem, target, select(problem, target, kernel, given["q"].layout.family, stream is not None))


def refuse_what_is_to_come(score_mod: Any, mask_mod: Any, aux: Any, sinks: Any, dropout_p: Any, seed: Any) -> None:
    """The part of the signature that later versions fill; never ignored in silence."""
    no_aux = isinstance(aux, tuple) and not aux
    no_dropout = isinstance(dropout_p, float | int) and dropout_p == 0
    if score_mod is mask_mod is sinks is seed is None and no_aux and no_dropout:
        return
    given = dict(score_mod=score_mod, mask_mod=mask_mod, sinks=sinks, seed=seed)
    names = [name for name, value in given.items() if value is not None]
    names += ["aux"] * (not no_aux) + ["dropout_p"] * (not no_dropout)
    raise NotImplementedError(f"{', '.join(names)}: not implemented yet; leave out, or pass the default")
