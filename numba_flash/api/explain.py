"""explain, explain_backward: which kernels a call would run, with what, and why not others."""

from dataclasses import dataclass
from typing import Any

from ..config.backward import BackwardConfig
from ..config.forward import Config
from ..dispatch import launch, launch_backward
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from ..problem.forward import Problem
from ..select.backward import BackwardChoice
from ..select.forward import Choice
from . import backward as gradients
from .forward import understand_call

IN_16_BITS = "in float32, of exact products; the weights are rounded to 16 bits before they meet v"
# Of the kernels on tensor cores, which could do otherwise.
ACCURACY = {
    "mma": dict(
        float32="as exact as in float32: each factor is split into two of 11 bits (3xTF32)", float64="in float64"
    ),
    "wgmma": {},
}


@dataclass(frozen=True)
class Explanation:
    """What `attention` would do with these arguments. str() of it is for people."""

    kernel: str
    config: Config | None  # None for the rungs that are not compiled for CUDA
    problem: Problem
    target: Target
    blocks: int
    copies: bool
    refused: tuple[tuple[str, str], ...]

    @staticmethod
    def of(problem: Problem, target: Target, choice: Choice) -> "Explanation":
        blocks = launch.grid(choice.config, problem, target) if choice.config else 0
        return Explanation(choice.kernel, choice.config, problem, target, blocks, choice.copies, choice.refused)

    def __str__(self) -> str:
        lines = [
            f"kernel {self.kernel!r} on {self.target.name if self.config else 'the CPU'}",
            *_about(self.problem),
        ]
        if self.config:
            lines.append(
                f"  grid: {self.blocks} blocks of {self.config.threads} threads, {_clusters(self.config)}"
                f"tile {self.config.tile_m} queries x {self.config.tile_n} keys, "
                f"{self.config.shared_bytes} of {self.target.shared_bytes} bytes of shared memory"
            )
        if self.config and self.kernel in ACCURACY:
            lines.append(f"  sums: {ACCURACY[self.kernel].get(self.problem.dtype, IN_16_BITS)}")
        if self.copies:
            lines.append("  copies: the arrays go to the GPU and the result comes back, which is waited for")
        lines += [f"  not {name!r}: {reason}" for name, reason in self.refused]
        return "\n".join(lines)


def explain(q: Any, k: Any, v: Any, **options: Any) -> Explanation:
    """What `attention(q, k, v, **options)` would run here, and why each other kernel does not.

    >>> print(numba_flash.explain(q, k, v, causal=True))

    Takes the arguments of `attention`, checks them in the same way (and raises the same errors),
    allocates nothing and runs nothing.
    """
    _, decision = understand_call(q, k, v, options)
    return Explanation.of(decision.problem, decision.target, decision.choice)


@dataclass(frozen=True)
class BackwardExplanation:
    """What `attention_backward` would do with these arguments. str() of it is for people."""

    kernel: str
    configs: tuple[BackwardConfig, ...]  # of its kernels in the order of their launches; none of the host's rungs
    problem: BackwardProblem
    target: Target
    blocks: tuple[int, ...]  # of each kernel
    refused: tuple[tuple[str, str], ...]

    @staticmethod
    def of(problem: BackwardProblem, target: Target, choice: BackwardChoice) -> "BackwardExplanation":
        blocks = tuple(launch_backward.grid(config, problem) for config in choice.configs)
        return BackwardExplanation(choice.kernel, choice.configs, problem, target, blocks, choice.refused)

    def __str__(self) -> str:
        lines = [
            f"kernel {self.kernel!r} on {self.target.name if self.configs else 'the CPU'}",
            *_about(self.problem.forward),
            f"  gradients: {', '.join(self.problem.wanted)}",
        ]
        lines += [
            f"  {config.kernel}: {blocks} blocks of {config.threads} threads, "
            f"{config.shared_bytes} of {self.target.shared_bytes} bytes of shared memory"
            for config, blocks in zip(self.configs, self.blocks, strict=True)
        ]
        if self.configs:
            made = launch_backward.workspace_bytes(self.configs, self.problem)
            lines.append(f"  workspace: {made} bytes beside the gradients")
        lines += [f"  not {name!r}: {reason}" for name, reason in self.refused]
        return "\n".join(lines)


def explain_backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, **options: Any) -> BackwardExplanation:
    """What `attention_backward(do, q, k, v, o, lse, **options)` would run here, and why other kernels do not.

    >>> print(numba_flash.explain_backward(do, q, k, v, o, lse, causal=True))

    Takes the arguments of `attention_backward`, checks them in the same way (and raises the same errors),
    allocates nothing and runs nothing.
    """
    _, decision = gradients.understand_call(dict(do=do, q=q, k=k, v=v, o=o, lse=lse) | options)
    return BackwardExplanation.of(decision.problem, decision.target, decision.choice)


def _clusters(config: Config) -> str:
    return f"in clusters of {config.cluster} that share K and V, " if config.cluster > 1 else ""


def _about(p: Problem) -> list[str]:
    return [
        f"  problem: batch {p.batch}, heads {p.heads} over {p.heads_kv} of k and v, "
        f"seqlen {p.seqlen_q} x {p.seqlen_k}, head_dim {p.head_dim} and {p.head_dim_v}, "
        f"{p.dtype}, scale {p.scale:.6g}",
        f"  sees: {_visibility(p)}",
    ]


def _visibility(p: Problem) -> str:
    start = {"number": str(p.q_offset), "seqlens_k": f"seqlens_k[b] - {p.seqlen_q}", "array": "q_offset[b]"}
    left = "all before" if p.left is None else f"{p.left} before"
    right = "all after" if p.right is None else f"{p.right} after"
    lengths = "seqlens_k[b] keys" if p.array("seqlens_k") else f"{p.seqlen_k} keys"
    return f"{left}, {right} its position i + {start[p.q_offset_source]}, of {lengths}" + (
        ", where mask" if p.array("mask") else ""
    )
