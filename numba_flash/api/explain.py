"""explain, explain_backward: which kernels a call would run, with which settings, and why not the others."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config.forward import Config, LaunchFacts
from ..dispatch import backward as gradients, launch
from ..gpu import compiled
from ..machine.cache_folder import bundle_folder, bundle_only
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from ..problem.forward import Problem
from ..problem.options import daux_name
from ..select.around import epilogue, prologue
from ..select.backward import BackwardChoice
from ..select.forward import Choice
from ..select.rungs import RUNGS
from . import backward, estimates, forward, kvcache, varlen

IN_16_BITS = "in float32, of exact products; the weights are rounded to 16 bits before they meet v"
GRADIENTS_IN_16_BITS = "in float32, of exact products; P and dS are rounded to 16 bits before they are multiplied"


class Readable:
    """Facts about a call that are read as lines of text, and in a notebook as a table."""

    def headline(self) -> str:
        raise NotImplementedError

    def facts(self) -> list[tuple[str, str]]:
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join([self.headline(), *(f"  {name}: {text}" for name, text in self.facts())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in self.facts()]
        style = "<style scoped>.numba-flash th, .numba-flash td {text-align: left; vertical-align: top}</style>"
        return f'<b>{html.escape(self.headline())}</b>{style}<table class="numba-flash">{"".join(rows)}</table>'


@dataclass(frozen=True, repr=False)
class Explanation(Readable):
    """Result of `explain`: the kernel that `attention` would run. str() and repr() are for people."""

    kernel: str
    config: Config | None  # None for the rungs that are not compiled for CUDA
    problem: Problem
    target: Target
    blocks: int
    copies: bool
    refused: tuple[tuple[str, str], ...]
    seconds: float | None = None  # about how long it will take; None where that is not known
    cost: str | None = None  # cost of not running a faster kernel, and what to do about it

    @staticmethod
    def of(problem: Problem, target: Target, choice: Choice) -> "Explanation":
        blocks = launch.blocks_of(choice.config, problem, target) if choice.config else 0
        time = estimates.seconds(choice.kernel, choice.config, problem, target)
        lost = estimates.lost(choice, problem, target)
        return Explanation(
            choice.kernel, choice.config, problem, target, blocks, choice.copies, choice.refused, time, lost
        )

    def headline(self) -> str:
        return f"kernel {self.kernel!r} on {self.target.name if self.config else 'the CPU'}"

    def facts(self) -> list[tuple[str, str]]:
        facts = _about(self.problem)
        if self.config:
            grid = (
                f"{self.blocks} blocks of {self.config.threads} threads, "
                f"tile {self.config.tile_m} queries x {self.config.tile_n} keys, "
                f"{self.config.shared_bytes} of {self.target.shared_bytes} bytes of shared memory"
            )
            facts.append(("grid", grid))
        if self.config:
            facts += _sums(self.kernel, self.problem.dtype, IN_16_BITS)
            before, behind = prologue(self.config, self.problem, self.target), epilogue(self.config)
            facts += [
                (when, f"{each.kernel}, {each.grid(self.problem)} blocks of {each.threads} threads")
                for when, kernels in (("before it", before), ("behind it", behind))
                for each in kernels
            ]
            configs = [*before, self.config, *behind]
            size = launch.workspace_bytes(configs, self.problem)
            if size:
                facts.append(("workspace", f"{size} bytes beside the result"))
            facts += _in_bundle(configs, self.target)
        if self.copies:
            facts.append(("copies", "the arrays go to the GPU and the result comes back, which is waited for"))
        if self.seconds is not None:
            facts.append(("time", f"about {_duration(self.seconds)}, by measurements of others like it"))
        if self.cost:
            facts.append(("cost", self.cost))
        return facts + _refused(self.refused)


def _in_bundle(configs: Sequence[LaunchFacts], target: Target) -> list[tuple[str, str]]:
    """Which kernels the bundle holds, where NUMBA_FLASH_BUNDLE names one."""
    folder = bundle_folder()
    if folder is None or target.cc is None or target.simulated:
        return []
    arch, names = compiled.architecture(target.cc), {True: list[str](), False: list[str]()}
    try:
        for config in configs:
            names[compiled.bundled(config, arch) is not None].append(config.kernel)
    except ValueError as error:
        return [("bundle", f"refused: {error}")]
    missing = f"; not in it, and {'refused' if bundle_only() else 'compiled'}: {', '.join(names[False])}"
    return [("bundle", f"{folder} has {', '.join(names[True]) or 'none'} for {arch}{missing * bool(names[False])}")]


def _sums(kernel: str, dtype: str, in_16_bits: str) -> list[tuple[str, str]]:
    """The precision of sums on tensor cores."""
    sums = RUNGS[kernel].sums
    return [("sums", sums.get(dtype, in_16_bits))] if sums else []


def _refused(refused: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    """A line for each reason, with all kernels that it refuses: without a GPU four kernels have the same reason."""
    kernels: dict[str, list[str]] = {}
    for name, reason in refused:
        kernels.setdefault(reason, []).append(repr(name))
    return [(f"not {', '.join(names)}", reason) for reason, names in kernels.items()]


@dataclass(frozen=True, repr=False)
class CacheExplanation(Explanation):
    """Result of `explain` for `attention_kvcache`. str() and repr() are for people."""

    own: tuple[tuple[str, str], ...] = ()  # facts about the KV cache

    @staticmethod
    def of_plan(plan: Any) -> "CacheExplanation":
        p, on_gpu = plan.made.problem, plan.on_gpu
        choice = (on_gpu and on_gpu.choice) or Choice(plan.kernel, None, False, ())
        config: Any = choice.config
        refused = dict(choice.refused) | dict(plan.refused)
        own = [("cache", f"{p.pages.total} pages of {p.pages.size} keys, up to {p.pages.capacity} keys of a sequence")]
        if config and config.kernel == "decode":
            own.append(("keys", _divided(config)))
            if config.members > 1:
                own.append(("prefixes", f"read once for up to {config.members} sequences that share one"))
        if on_gpu and on_gpu.not_shared:
            own.append(("prefixes", f"each sequence reads its own: {on_gpu.not_shared}"))
        if plan.not_decode:
            own.append(("not the kernel of caches", plan.not_decode))
        if on_gpu and on_gpu.append:
            own.append(("before it", "a kernel that appends new keys, turns queries and counts keys"))
        blocks = launch.blocks_of(config, p, plan.target) if config else 0
        return CacheExplanation(
            choice.kernel, config, p, plan.target, blocks, False, tuple(refused.items()), own=tuple(own)
        )

    def facts(self) -> list[tuple[str, str]]:
        problem, sees, *more = super().facts()
        return [problem, sees, *self.own, *more]


def _divided(config: Any) -> str:
    return (
        f"a tree over chunks of {config.CHUNK} at absolute positions; a block computes 2^n neighbouring ones at a "
        f"time, with the least n by which the sequences that are divided have at most {config.blocks} parts; "
        "the device finds n from the lengths"
    )


def explain(q: Any, k: Any = None, v: Any = None, **options: Any) -> Explanation:
    """Tells which kernel `attention(q, k, v, **options)` would run here, and why each other kernel does not.

    >>> print(numba_flash.explain(q, k, v, causal=True))

    Takes the arguments of `attention`, or with cu_seqlens_q= those of `attention_varlen`, or with k_cache= and v_cache=
    those of `attention_kvcache`. It checks them in the same way (and raises the same errors), allocates nothing and
    runs nothing.
    """
    if "k_cache" in options:
        return CacheExplanation.of_plan(kvcache.plan_of(dict(options, q=q)))
    if "cu_seqlens_q" in options:
        call = varlen.call_of(varlen.attention_varlen, dict(options, q=q, k=k, v=v))
        _, plan = forward.prepared(call)
    else:
        _, plan = forward.prepare_call(q, k, v, options)
    return Explanation.of(plan.problem, plan.target, plan.choice)


@dataclass(frozen=True, repr=False)
class BackwardExplanation(Readable):
    """Result of `explain_backward`: the kernels that it would run. str() and repr() are for people."""

    kernel: str
    configs: tuple[LaunchFacts, ...]  # one for each kernel, in launch order; () for rungs on the host
    problem: BackwardProblem
    target: Target
    blocks: tuple[int, ...]  # number of blocks of each kernel
    refused: tuple[tuple[str, str], ...]

    @staticmethod
    def of(problem: BackwardProblem, target: Target, choice: BackwardChoice) -> "BackwardExplanation":
        blocks = tuple(launch.blocks_of(config, problem, target) for config in choice.configs)
        return BackwardExplanation(choice.kernel, choice.configs, problem, target, blocks, choice.refused)

    def headline(self) -> str:
        return f"kernel {self.kernel!r} on {self.target.name if self.configs else 'the CPU'}"

    def facts(self) -> list[tuple[str, str]]:
        wanted = (*self.problem.wanted, *map(daux_name, self.problem.wanted_aux))
        facts = [*_about(self.problem.forward), ("gradients", ", ".join(wanted))]
        if self.configs:
            facts += _sums(self.kernel, self.problem.forward.dtype, GRADIENTS_IN_16_BITS)
        for config, blocks in zip(self.configs, self.blocks, strict=True):
            shared = f"{config.shared_bytes} of {self.target.shared_bytes} bytes of shared memory"
            facts.append((config.kernel, f"{blocks} blocks of {config.threads} threads, {shared}"))
        if self.configs:
            made = launch.workspace_bytes(self.configs, self.problem)
            facts.append(("workspace", f"{made} bytes beside the gradients"))
            facts += _in_bundle(self.configs, self.target)
        return facts + _refused(self.refused)


def explain_backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, **options: Any) -> BackwardExplanation:
    """Tells which kernels `attention_backward(do, q, k, v, o, lse, **options)` would run here, and why not others.

    >>> print(numba_flash.explain_backward(do, q, k, v, o, lse, causal=True))

    Takes the arguments of `attention_backward`, or with cu_seqlens_q= those of `attention_varlen_backward`, checks them
    in the same way (and raises the same errors), allocates nothing and runs nothing.
    """
    given = dict(do=do, q=q, k=k, v=v, o=o, lse=lse) | options
    if "cu_seqlens_q" in options:
        _, plan = gradients.prepare(varlen.call_of(varlen.attention_varlen_backward, given))
    else:
        _, plan = backward.prepare_call(given)
    return BackwardExplanation.of(plan.problem, plan.target, plan.choice)


def _duration(seconds: float) -> str:
    if seconds >= 90:
        return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
    unit, name = (1, "s") if seconds >= 0.5 else (1e-3, "ms") if seconds >= 5e-4 else (1e-6, "us")
    return f"{float(f'{seconds / unit:.2g}'):g} {name}"


def _about(p: Problem) -> list[tuple[str, str]]:
    entries, most = f"batch {p.batch}", ""
    if p.packed is not None:
        entries, most = f"{p.batch} sequences packed in {p.packed[0]} and {p.packed[1]} rows", "up to "
    problem = (
        f"{entries}, heads {p.heads} over {p.heads_kv} of k and v, seqlen {most}{p.seqlen_q} x {p.seqlen_k}, "
        f"head_dim {p.head_dim} and {p.head_dim_v}, {p.dtype}, scale {p.scale:.6g}"
    )
    return [("problem", problem), ("sees", _visibility(p))]


def _visibility(p: Problem) -> str:
    start = {"number": str(p.q_offset), "seqlens_k": f"seqlens_k[b] - {p.seqlen_q}", "array": "q_offset[b]"}
    start["sequence"] = "keys - queries of its sequence"
    left = "all before" if p.left is None else f"{p.left} before"
    right = "all after" if p.right is None else f"{p.right} after"
    lengths = "seqlens_k[b] keys" if p.array("seqlens_k") else f"{p.seqlen_k} keys"
    return f"{left}, {right} its position i + {start[p.q_offset_source]}, of {lengths}" + (
        ", where mask" if p.array("mask") else ""
    )
