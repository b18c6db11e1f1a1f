"""The kernels around a kernel: some prepare the arrays that it reads, others finish the parts that it leaves."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..config.forward import Config, LaunchFacts
from ..machine.target import Target
from ..problem.forward import Problem

if TYPE_CHECKING:
    from ..problem.backward import BackwardProblem


def prologue(config: Config, problem: Problem, target: Target, overlaps: bool = False) -> list[LaunchFacts]:
    """The kernels that prepare arrays for the kernel of `config`: a mask's bits, the states of tiles under a mask_mod,
    their order, and its bits. Most calls need none, and then import nothing. overlaps: kernels that can overlap with
    the ones before them may do so."""
    threads, made = 32 if target.simulated else 512, list[LaunchFacts]()
    if config.packed and "o" in config.takes.arrays and not (config.clears_outside and problem.batch):
        from ..config.outside import OutsideConfig

        written = ("o", "lse") if config.write_lse else ("o",)
        made.append(OutsideConfig.of(config, written, target, in_order=config.in_order))
    if config.has("mask") and "mask" not in config.takes.arrays:
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
    """The kernel that joins parts, if the kernel of `config` leaves parts."""
    if getattr(config, "parts", 1) == 1:
        return []
    from ..config.wgmma_join import WgmmaJoinConfig

    return [WgmmaJoinConfig.behind(config)]


def outside(problem: "BackwardProblem", target: Target, before: Sequence[LaunchFacts]) -> list[LaunchFacts]:
    """The kernel that writes the gradients of rows in no packed sequence. before: the kernels before it."""
    written = tuple(name for name in ("dq", "dk", "dv") if name in problem.wanted)
    if problem.forward.packed is None or not written:
        return []
    from ..config.outside import OutsideConfig

    in_order = any(config.in_order for config in before)
    # Before sm_90 no kernel begins beside the previous one, and there is no griddepcontrol.wait.
    waits = (target.cc or (0, 0)) >= (9, 0) and (in_order or any(config.waits for config in before))
    return [OutsideConfig.of(problem.forward, written, target, in_order=in_order, waits=waits)]


def with_prologues(configs: Sequence[Config], problem: "BackwardProblem", target: Target) -> list[LaunchFacts]:
    """These kernels, each after the kernels that prepare its arrays: a mask's bits, the states of tiles. Kernels that
    overlap with the ones before them come first."""
    made, ahead = list[LaunchFacts](), list[LaunchFacts]()
    overlaps = len(configs) > 0 and configs[0].waits
    for config in configs:
        for other in prologue(config, problem.forward, target, overlaps):
            if other not in (*ahead, *made):
                (ahead if other.waits else made).append(other)
        made.append(config)
    return [*ahead, *made]
