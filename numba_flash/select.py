"""Problem x Target -> which kernel runs, with which Config; and why the others do not.

Nothing here touches CUDA or Numba, so every choice can be tested for machines that are not there.
"""

from dataclasses import dataclass

from .config import Config
from .problem import Problem
from .target import Target

KERNELS = ("reference", "v1", "v2", "cpu")

# (tile_m, tile_n): the first that fits into the device's shared memory and is not mostly past the last query.
# H200, v2, seqlen 4096, 16 heads, 2026-11-21, in TFLOP/s: float32, head_dim 64: 256 x 16 11.4, 256 x 32 11.3,
# 128 x 16 11.0, 128 x 32 10.5, 64 x 16 9.6, 256 x 8 9.5, 64 x 32 9.3, 192 x 16 7.7, 160 x 16 5.7 (CuPy's formula 9.1);
# float16, head_dim 64: 11.9, 128 x 16 11.5, 64 x 16 10.1; float32, head_dim 128: 13.6, 128 x 16 12.9, 64 x 16 10.9.
SEED_TILES = ((256, 16), (128, 16), (64, 16), (32, 16), (32, 8), (16, 8), (8, 8), (8, 4), (4, 4), (1, 4))
# A simulated thread is a Python thread: small blocks, whose barriers are cheap, and few wasted rows.
SIMULATOR_TILES = ((16, 16), (16, 8), (8, 8), (8, 4), (4, 4), (1, 4))


@dataclass(frozen=True)
class Choice:
    """What will run. `config` is None for the rungs that are not compiled for CUDA."""

    kernel: str
    config: Config | None
    copies: bool  # the arrays are copied to the GPU and the result back: only for a GPU kernel asked for by name
    refused: tuple[tuple[str, str], ...]  # (kernel, why it does not run), in the order they were asked


def select(problem: Problem, target: Target, kernel: str, family: str = "numpy", stream: bool = False) -> Choice:
    """The kernel by name, or for "auto" the fastest one that can compute the problem exactly here.

    family: the kind of arrays that came; stream: whether a stream was named, which only a GPU has.
    """
    if not isinstance(kernel, str) or kernel not in ("auto", *KERNELS):
        raise ValueError(f"kernel must be one of {', '.join(('auto', *KERNELS))}, not {kernel!r}")
    if stream and target.arrays_on_host:
        raise ValueError("stream was given, but the arrays are in host memory, where there are no streams")
    if target.simulated and family != "numpy" and kernel not in ("cpu", "reference"):
        raise NotImplementedError(
            f"the simulator (NUMBA_ENABLE_CUDASIM) takes NumPy arrays only, and {family} arrays were given; "
            "unset NUMBA_ENABLE_CUDASIM, or pass NumPy arrays"
        )
    wanted = _by_preference(target) if kernel == "auto" else (kernel,)
    refused = [(name, _not_asked(name, kernel, target)) for name in KERNELS if name not in wanted]
    for index, name in enumerate(wanted):
        reason = refusal(name, problem, target)
        if reason is None:
            refused += [(later, f"{name} comes first") for later in wanted[index + 1 :]]
            config = _config(name, problem, target) if name in ("v1", "v2") else None
            copies = config is not None and target.arrays_on_host and not target.simulated
            return Choice(name, config, copies, tuple(refused))
        refused.append((name, reason))
    reasons = "; ".join(f"{name}: {why}" for name, why in refused if name in wanted)
    others = [name for name in KERNELS if name not in wanted and refusal(name, problem, target) is None]
    possible = f" What would run: kernel={' or '.join(map(repr, others))}." if others else ""
    raise NotImplementedError(f"kernel={kernel!r} cannot run this problem here. {reasons}.{possible}")


def _by_preference(target: Target) -> tuple[str, ...]:
    if target.simulated:
        return ("v2",)
    return ("cpu",) if target.arrays_on_host else ("v2", "v1")


def _not_asked(name: str, kernel: str, target: Target) -> str:
    if kernel != "auto":
        return f"kernel={kernel!r} was asked for"
    if name == "reference":
        return "the oracle holds the whole score matrix; it runs when named"
    if name == "cpu":
        return "in the simulator v2 is what is looked at" if target.simulated else "the arrays are on a GPU"
    if target.simulated:
        return "v2 comes first"
    return "the arrays are in host memory; it runs when named, with copies to the GPU and back"


def refusal(name: str, problem: Problem, target: Target) -> str | None:
    """Why kernel `name` cannot compute the problem on this machine, or None."""
    if name in ("reference", "cpu"):
        return None if target.arrays_on_host else "it computes in host memory; copy the arrays there first"
    if target.cc is None:
        return (
            f"no GPU is usable ({target.why_no_gpu}); to step through it without one, set "
            "NUMBA_ENABLE_CUDASIM=1 before Python starts"
        )
    if _config(name, problem, target) is None:
        smallest = _make_config(name, problem, SEED_TILES[-1]).shared_bytes
        return (
            f"head_dim {problem.head_dim} and {problem.head_dim_v} in {problem.dtype} need {smallest} bytes of "
            f"shared memory in the smallest tile, and {target.name} has {target.shared_bytes}"
        )
    return None


def _config(name: str, problem: Problem, target: Target) -> Config | None:
    for tile in SIMULATOR_TILES if target.simulated else SEED_TILES:
        config = _make_config(name, problem, tile)
        enough_rows = tile[0] <= 32 or tile[0] < 2 * problem.seqlen_q
        if config.shared_bytes <= target.shared_bytes and enough_rows:
            return config
    return None


def _make_config(name: str, problem: Problem, tile: tuple[int, int]) -> Config:
    return Config(
        kernel=name,
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        tile_m=tile[0],
        tile_n=tile[1],
        write_lse=problem.return_lse,
        softcap=problem.softcap is not None,
        alibi_dtype=problem.alibi_dtype,
        bias_dtype=problem.bias_dtype,
        mask=problem.has_mask,
        seqlens_k=problem.has_seqlens_k,
        q_offset_source=problem.q_offset_source,
    )
