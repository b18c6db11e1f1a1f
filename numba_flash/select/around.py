"""The kernels before and behind a kernel: those that make what it reads, and those that finish what it leaves."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..config.forward import Config, LaunchFacts
from ..machine.target import Target
from ..problem.forward import Problem

if TYPE_CHECKING:
    from ..problem.backward import BackwardProblem


def prologue(config: Config, problem: Problem, target: Target, overlaps: bool = False) -> list[LaunchFacts]:
    """The kernels that make what the kernel of `config` reads: a mask's bits, the states of tiles under a mask_mod,
    their order, and its bits. Most calls have none, and load nothing for them. overlaps: they may run beside kernels in
    front of them, as far as they can."""
    threads, made = 32 if target.simulated else 512, list[LaunchFacts]()
    if config.packed and "o" in config.takes.arrays and not (config.clears_outside and problem.batch):
        from ..config.outside import OutsideConfig

        written = ("o", "lse") if config.write_lse else ("o",)
        made.append(OutsideConfig.of(config, written, target, in_order=config.in_order))
    if config.reads_bits and config.has("mask"):
        from ..config.mask_bits import MaskBitsConfig

        made.append(MaskBitsConfig(config.of_keys, threads, overlaps))
    if config.tile_states:
        from ..config.tile_states import MaskModBitsConfig, TileOrderConfig, TileStatesConfig

        states = TileStatesConfig.before(config, problem, threads)
        made += [states, TileOrderConfig.behind(states)] if config.reads_order else [states]
        if config.mask_mod_as_bits:
            made.append(MaskModBitsConfig.before(config, problem, threads))
    return made


def epilogue(config: Config) -> list[LaunchFacts]:
    """The kernel that joins parts, if the one of `config` leaves parts."""
    if getattr(config, "parts", 1) == 1:
        return []
    from ..config.wgmma_join import WgmmaJoinConfig

    return [WgmmaJoinConfig.behind(config)]


def outside(problem: "BackwardProblem", target: Target, before: Sequence[LaunchFacts]) -> list[LaunchFacts]:
    """The kernel that writes the gradients of rows of no packed sequence. before: those in front of it."""
    written = tuple(name for name in ("dq", "dk", "dv") if name in problem.wanted)
    if problem.forward.packed is None or not written:
        return []
    from ..config.outside import OutsideConfig

    in_order = any(config.in_order for config in before)
    waits = (target.cc or (0, 0)) >= (9, 0) and (in_order or any(config.waits for config in before))
    return [OutsideConfig.of(problem.forward, written, target, in_order=in_order, waits=waits)]


def with_prologues(configs: Sequence[Config], problem: "BackwardProblem", target: Target) -> list[LaunchFacts]:
    """Kernels, preceded by those that prepare what they read: a mask's bits, the states of tiles. Those that overlap
    with what is in front of them go ahead of all."""
    made, ahead = list[LaunchFacts](), list[LaunchFacts]()
    overlaps = len(configs) > 0 and configs[0].waits
    for config in configs:
        for other in prologue(config, problem.forward, target, overlaps):
            if other not in (*ahead, *made):
                (ahead if other.waits else made).append(other)
        made.append(config)
    return [*ahead, *made]
