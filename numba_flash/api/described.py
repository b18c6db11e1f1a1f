"""Problems and GPUs described by command line options, without arrays."""

import argparse
from typing import Any

from ..problem.options import ARRAYS, NUMBERS, OPTION_NAMES, Option, Options


def add_problem(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--batch", type=int, default=1)
    add("--heads", type=int, default=8)
    add("--heads-kv", type=int, metavar="HEADS", help="default: --heads")
    add("--seqlen-q", type=int, default=1024, metavar="N")
    add("--seqlen-k", type=int, metavar="N", help="default: --seqlen-q")
    add("--head-dim", type=int, default=128, metavar="D")
    add("--head-dim-v", type=int, metavar="D", help="default: --head-dim")
    add("--dtype", default="float16", choices=("float16", "bfloat16", "float32", "float64"))
    add("--layout", default="bhsd", choices=("bhsd", "bshd"))
    add("--causal", action="store_true")
    add("--window", nargs=2, type=bound, metavar=("LEFT", "RIGHT"), help="a number, or none for no bound")
    add("--q-offset", type=int, metavar="N", help="where query 0 stands among the keys")
    for number in NUMBERS:
        add(f"--{number.replace('_', '-')}", type=float, metavar="X")
    shapes = dict(scores="(1, 1, seqlen_q, seqlen_k)", heads="(heads,)", batch="(batch,)")
    for option in ARRAYS:
        if option.name in OPTION_NAMES and option.name != "q_offset":
            about = f"with {option.name}, {shapes[option.shape]} of {_dtype_of(option, 'the dtype')}"
            add(f"--{option.name.replace('_', '-')}", action="store_true", help=about)
    add("--return-lse", action="store_true")
    add("--kernel", default="auto", help="the one that would be asked for")
    add("--shared-kb", type=int, metavar="KB", help="with --cc: shared memory that a block can have there")
    add("--multiprocessors", type=int, metavar="N", help="with --cc: how many it has; default: 132, as an H100 or H200")


def bound(text: str) -> int | None:
    return None if text == "none" else int(text)


def capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def check(asked: argparse.Namespace) -> None:
    for name in ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"):
        value = getattr(asked, name)
        if value is not None and value < 0:
            raise ValueError(f"--{name.replace('_', '-')} must not be negative, and is {value}")
    if asked.gpu and asked.cc:
        raise ValueError("--gpu names a GPU and --cc describes one: give one of them")
    for name in ("shared_kb", "multiprocessors"):
        if getattr(asked, name) is not None and not asked.cc:
            raise ValueError(f"--{name.replace('_', '-')} says what the GPU of --cc has: give that, too")


def _dtype_of(option: Option, of_q: str) -> str:
    """The dtype assumed for an array: q's for arrays of the scores' shape if allowed, else the first allowed one."""
    return of_q if option.shape == "scores" and "q" in option.dtypes else option.dtypes[0]


def problem_of(asked: argparse.Namespace, family: str) -> Any:
    """The problem described by the options, as for contiguous arrays."""
    from ..problem.forward import Problem

    q, k, v, _, _, options = _described(asked, family)
    return_lse = asked.return_lse or getattr(asked, "backward", None) is not None
    return Problem.of(q, k, v, options, return_lse=return_lse, bias_aligned=True)


def backward_problem_of(asked: argparse.Namespace, family: str) -> Any:
    from ..problem.backward import BackwardProblem

    q, k, v, o, lse, options = _described(asked, family)
    wanted = tuple(asked.backward) or ("dq", "dk", "dv")
    return BackwardProblem.of(o, q, k, v, o, lse, None, options, wanted, bias_aligned=True)


def _described(asked: argparse.Namespace, family: str) -> tuple[Any, ...]:
    """The layouts of q, k, v, o and lse, and the options."""
    from ..arrays import ITEM_SIZE, Layout
    from ..arrays.dtypes import COMPUTE_DTYPE
    from ..problem.forward import LAYOUTS
    from ..problem.strides import contiguous_strides

    heads_kv = asked.heads if asked.heads_kv is None else asked.heads_kv
    seqlen_k = asked.seqlen_q if asked.seqlen_k is None else asked.seqlen_k
    head_dim_v = asked.head_dim if asked.head_dim_v is None else asked.head_dim_v

    def array(dtype: str, *shape: int) -> Layout:
        device = None if family == "numpy" else 0
        return Layout(family, device, shape, contiguous_strides(shape), ITEM_SIZE.get(dtype, 1), dtype, False)

    def layout(heads: int, seqlen: int, dim: int) -> Layout:
        extents = (asked.batch, heads, seqlen, dim)
        return array(asked.dtype, *(extents[axis] for axis in LAYOUTS[asked.layout]))

    q, o = (layout(asked.heads, asked.seqlen_q, dim) for dim in (asked.head_dim, head_dim_v))
    k, v = (layout(heads_kv, seqlen_k, dim) for dim in (asked.head_dim, head_dim_v))
    lse = array(COMPUTE_DTYPE.get(asked.dtype, "float32"), asked.batch, asked.heads, asked.seqlen_q)
    shapes = dict(scores=(1, 1, asked.seqlen_q, seqlen_k), heads=(asked.heads,), batch=(asked.batch,))
    given: dict[str, Any] = {name: getattr(asked, name) for name in ("causal", "q_offset", "layout", *NUMBERS)}
    for option in ARRAYS:
        if option.name in OPTION_NAMES and option.name != "q_offset" and getattr(asked, option.name):
            given[option.name] = array(_dtype_of(option, asked.dtype), *shapes[option.shape])
    options = Options.of(window=asked.window and tuple(asked.window), **given)
    return q, k, v, o, lse, options


def made_up(cc: tuple[int, int], shared_kb: int | None, multiprocessors: int | None) -> Any:
    from ..machine.gpus import SHARED_KB
    from ..machine.target import Target

    name = f"a GPU of compute capability {cc[0]}.{cc[1]}"
    kb = SHARED_KB.get(cc) if shared_kb is None else shared_kb
    if kb is None:
        raise ValueError(f"how much shared memory {name} has is not known here: say it with --shared-kb")
    count = 132 if multiprocessors is None else multiprocessors
    return Target(arrays_on_host=False, cc=cc, shared_bytes=kb * 1024, multiprocessors=count, name=name)
