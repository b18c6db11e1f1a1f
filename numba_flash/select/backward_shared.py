"""What the backward kernels of all rungs share: the parts of each Config that follow from the problem, the rows of a
table that can be used, and the kernels that run before and after those of the rungs."""

from collections.abc import Sequence
from typing import Any

from ..config.backward import BackwardConfig, MmaDkdvConfig, PreprocessConfig
from ..config.forward import Config
from ..config.mask_bits import MaskBitsConfig
from ..config.simt_backward import DeltaConfig, HeadSumsConfig
from ..config.tile_states import TileOrderConfig, TileStatesConfig
from ..config.wgmma_backward import BY_ELEMENT, WgmmaDkdvConfig
from ..config.wgmma_backward_float32 import WgmmaDkdvFloat32Config
from ..config.wide_backward import WideDkdvConfig
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from ..problem.options import BY_NAME, HEAD_GRADIENTS, changes_scores, of_scores
from .backward_tiles import BY_ELEMENT as KINDS_BY_ELEMENT
from .backward_tiles import rows_for
from .forward import no_wide_rows
from .tiles import table_of


def features_of(problem: BackwardProblem) -> dict[str, Any]:
    """What the problem uses, as every Config says it."""
    forward = problem.forward
    return dict(
        dtype=forward.dtype,
        head_dim=forward.head_dim,
        head_dim_v=forward.head_dim_v,
        uses=of_scores(forward.uses),
        q_offset_source=forward.q_offset_source,
        narrow=forward.narrow,
    )


def bias_pairs_of(problem: BackwardProblem) -> dict[str, Any]:
    bias = problem.forward.array("bias")
    return dict(bias_pairs=bias is not None and bias.pairs)


def bias_boxes_of(problem: BackwardProblem) -> dict[str, Any]:
    """Like bias_pairs_of, for kernels that can load the bias by TMA."""
    bias = problem.forward.array("bias")
    return bias_pairs_of(problem) | dict(bias_boxes=bias is not None and bias.boxes)


def apart_or_together(problem: BackwardProblem, apart: bool) -> list[list[str]]:
    """Which of dK and dV each kernel computes."""
    wanted: list[str] = [name for name in ("dk", "dv") if name in problem.wanted]
    return [[name] for name in wanted] if apart else [wanted] if wanted else []


def usable(kernel: str, problem: BackwardProblem, target: Target) -> list[Any]:
    """The rows of a kernel's table for this head_dim and these scores."""
    forward = problem.forward
    head_dim = max(forward.head_dim, forward.head_dim_v)
    asked = tuple((name, given) for name, given in forward.uses if not BY_NAME[name].function)
    bare = not changes_scores(asked) and forward.array("mask") is None and not forward.seeded
    plain, alone = bare and not forward.functions, bare and bool(forward.functions)
    reads = bool(forward.functions) or any(forward.array(name) is not None for name in ("bias", "mask"))
    linear = not any(BY_NAME[name].derivative for name, _ in forward.uses)
    by_element = _by_element(problem)

    def takes(row: Any) -> bool:
        if head_dim > row.head_dim or (reads and getattr(row, "unread", False)):
            return False
        if by_element and hasattr(row, "by_element"):
            return row.by_element in KINDS_BY_ELEMENT[KINDS_BY_ELEMENT.index(by_element) :]
        of_scores = (plain or not getattr(row, "plain", False)) and (alone or not getattr(row, "functions", False))
        return of_scores and (linear or not getattr(row, "linear", False)) and not getattr(row, "by_element", "")

    return [row for row in rows_for(table_of(kernel, forward.dtype), target) if takes(row)]


def _by_element(problem: BackwardProblem) -> str:
    """Which entry of backward_tiles.BY_ELEMENT the problem is; "" if no option acts on single scores."""
    forward = problem.forward
    found = [name for name, _ in forward.uses if name in BY_ELEMENT]
    kinds = {"functions" if BY_NAME[name].function else "read" if BY_NAME[name].shape else name for name in found}
    if not found:
        return ""
    if len(found) == 1 and not changes_scores(forward.uses):
        return "mask_mod" if found == ["mask_mod"] else "mask or dropped weights"
    used, bias = dict(forward.uses), forward.array("bias")
    others = tuple((name, given) for name, given in forward.uses if name not in BY_ELEMENT)
    if found == ["bias"] and bias is not None and bias.boxes and not changes_scores(others):
        return "mask or dropped weights"
    if len(kinds) > 1 or ("bias" in used and changes_scores(others)):
        return "several kinds"
    return "one kind"


def first_that_fits(candidates: Sequence[Sequence[Any]], target: Target) -> Sequence[Any]:
    """The first set of kernels whose blocks fit into a multiprocessor as often as they need, or the last set."""

    def fit(config: Config) -> bool:
        return config.shared_bytes * max(config.blocks_per_sm, 1) <= target.shared_bytes

    return next((made for made in candidates if all(map(fit, made))), candidates[-1])


def with_what_goes_before(configs: Sequence[Config], target: Target) -> list[BackwardConfig]:
    """Tensor-core kernels, preceded by those that prepare what they read: a mask's bits, the states of tiles."""
    threads = 32 if target.simulated else 512
    made: list[BackwardConfig] = []
    for config in configs:
        before: list[BackwardConfig] = []
        if config.has("mask"):
            of_keys = isinstance(config, MmaDkdvConfig | WgmmaDkdvConfig | WgmmaDkdvFloat32Config | WideDkdvConfig)
            before.append(MaskBitsConfig(of_keys=of_keys, threads=threads))
        if config.tile_states:
            states = TileStatesConfig.before(config, threads)
            before += [states, TileOrderConfig.behind(states)]
        made += [other for other in before if other not in made] + [config]
    return made


def preprocess_config(problem: BackwardProblem, target: Target) -> PreprocessConfig:
    forward = problem.forward
    wide = not any(
        no_wide_rows(name, strides, forward.head_dim_v)
        for name, strides in (("do", problem.do_strides), ("o", forward.o_strides))
    )
    threads = 32 if target.simulated else 256
    return PreprocessConfig(
        forward.dtype,
        forward.head_dim_v,
        problem.has_dlse,
        wide,
        threads,
        natural=forward.array("bias") is not None,
        of_terms=_of_terms(problem),
    )


def delta_config(problem: BackwardProblem, target: Target) -> DeltaConfig:
    """The Config of the kernel with which v2 begins."""
    threads, lanes = (16, 4) if target.simulated else (256, 16)
    forward, of_terms = problem.forward, _of_terms(problem)
    return DeltaConfig(forward.dtype, forward.head_dim_v, problem.has_dlse, threads, lanes, of_terms)


def _of_terms(problem: BackwardProblem) -> bool:
    """Whether the gradient of a term of every row's sum is wanted (kernels/score/sum_terms.py)."""
    return any(option.acts_on == "sum" for name, option in HEAD_GRADIENTS.items() if name in problem.wanted)


def head_sums(problem: BackwardProblem, target: Target, of_blocks: bool) -> list[HeadSumsConfig]:
    """The kernels of the wanted gradients of options that are one number for each head. of_blocks: as in
    HeadSumsConfig."""
    made, threads, dtype = [], 16 if target.simulated else 1024, problem.forward.dtype
    for name, option in HEAD_GRADIENTS.items():
        given = problem.forward.array(option.name)
        if name in problem.wanted and given is not None:
            of_all, of_delta = len(problem.shape_of(name)) == 1, option.acts_on == "sum"
            made.append(HeadSumsConfig(dtype, name, given.dtype, of_all, of_blocks and of_delta, threads))
    return made
