"""python -m numba_flash info | explain"""

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from . import __version__
from .problem.options import ARRAYS, NUMBERS, OPTION_NAMES, Option, Options

DEMO = (
    "The demo is no part of the installed package: it is examples/demo in the repository, and sh scripts/demo runs it."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status: 0 done, 2 it cannot be done as asked."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:
        print(DEMO, file=sys.stderr)
        return 2
    parsed = _parser().parse_args(arguments)
    return explain(parsed) if parsed.command == "explain" else info()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m numba_flash", description="Exact attention in pure Python.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="info | explain")
    commands.add_parser("info", help="versions, GPUs, the cache, and which kernels are usable here")
    add = commands.add_parser(
        "explain",
        help="which kernel a problem would get, and why not the others",
        description="For arrays on GPU 0 where there is one, else for NumPy arrays.",
    ).add_argument
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
    add("--gpu", metavar="NAME", help='arrays on a GPU that is not here: H200, A100, "RTX 4090" and others')
    add("--cc", type=capability, metavar="8.6", help="arrays on a GPU of this compute capability, not on this machine")
    add("--shared-kb", type=int, metavar="KB", help="with --cc: shared memory that a block can have there")
    add("--multiprocessors", type=int, metavar="N", help="with --cc: how many it has; default: 132, as an H100 or H200")
    return parser


def bound(text: str) -> int | None:
    return None if text == "none" else int(text)


def capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def explain(asked: argparse.Namespace) -> int:
    """Print `explain` of a problem that is only described: there are no arrays."""
    from .api import explain
    from .machine import toolchain
    from .machine.gpus import gpu
    from .machine.target import Target
    from .select.forward import select

    try:
        _check(asked)
        if asked.gpu:
            target = gpu(asked.gpu)
        elif asked.cc:
            target = _made_up(asked.cc, asked.shared_kb, asked.multiprocessors)
        else:
            target = Target.of(None if toolchain.simulated() or toolchain.unusable() else 0)
        family = "numpy" if target.arrays_on_host else "cupy"
        problem = _problem(asked, family)
        choice = select(problem, target, asked.kernel, family)
    except (TypeError, ValueError, NotImplementedError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    print(explain.Explanation.of(problem, target, choice))
    return 0


def _check(asked: argparse.Namespace) -> None:
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
    """Of an array: a wide one is of q's dtype, where it may be."""
    return of_q if option.shape == "scores" and "q" in option.dtypes else option.dtypes[0]


def _problem(asked: argparse.Namespace, family: str) -> Any:
    """As of contiguous arrays."""
    from .arrays import ITEM_SIZE, Layout
    from .problem.forward import LAYOUTS, Problem
    from .problem.strides import contiguous_strides

    heads_kv = asked.heads if asked.heads_kv is None else asked.heads_kv
    seqlen_k = asked.seqlen_q if asked.seqlen_k is None else asked.seqlen_k
    head_dim_v = asked.head_dim if asked.head_dim_v is None else asked.head_dim_v

    def array(dtype: str, *shape: int) -> Layout:
        device = None if family == "numpy" else 0
        return Layout(family, device, shape, contiguous_strides(shape), ITEM_SIZE.get(dtype, 1), dtype, False)

    def layout(heads: int, seqlen: int, dim: int) -> Layout:
        extents = (asked.batch, heads, seqlen, dim)
        return array(asked.dtype, *(extents[axis] for axis in LAYOUTS[asked.layout]))

    q, k, v = (
        layout(asked.heads, asked.seqlen_q, asked.head_dim),
        *(layout(heads_kv, seqlen_k, dim) for dim in (asked.head_dim, head_dim_v)),
    )
    shapes = dict(scores=(1, 1, asked.seqlen_q, seqlen_k), heads=(asked.heads,), batch=(asked.batch,))
    given: dict[str, Any] = {name: getattr(asked, name) for name in ("causal", "q_offset", "layout", *NUMBERS)}
    for option in ARRAYS:
        if option.name in OPTION_NAMES and option.name != "q_offset" and getattr(asked, option.name):
            given[option.name] = array(_dtype_of(option, asked.dtype), *shapes[option.shape])
    options = Options.of(window=asked.window and tuple(asked.window), **given)
    return Problem.of(q, k, v, options, return_lse=asked.return_lse, bias_aligned=True)


def _made_up(cc: tuple[int, int], shared_kb: int | None, multiprocessors: int | None) -> Any:
    from .machine.gpus import SHARED_KB
    from .machine.target import Target

    name = f"a GPU of compute capability {cc[0]}.{cc[1]}"
    kb = SHARED_KB.get(cc) if shared_kb is None else shared_kb
    if kb is None:
        raise ValueError(f"how much shared memory {name} has is not known here: say it with --shared-kb")
    count = 132 if multiprocessors is None else multiprocessors
    return Target(arrays_on_host=False, cc=cc, shared_bytes=kb * 1024, multiprocessors=count, name=name)


def info() -> int:
    """Print what somebody who helps would ask for first."""
    _print("Versions", _versions())
    _print("GPU", _gpus())
    _print("CPU", _cpu())
    _print("Cache of compiled kernels", _cache())
    _print("Kernels, for NumPy arrays of float16 with head_dim 128", _kernels())
    return 0


Rows = Iterator[tuple[str, str]]


def _versions() -> Rows:
    """Read without importing: one package that does not load must not hide the others."""
    yield "numba_flash", __version__
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    for name, distributions in {
        "NumPy": ("numpy",),
        "Numba": ("numba",),
        "numba-cuda": ("numba-cuda",),
        "cuda-core": ("cuda-core",),
        "CuPy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "torch": ("torch",),
        "jax": ("jax",),
    }.items():
        found = [version for version in map(_version, distributions) if version]
        yield name, found[0] if found else "not installed"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> Rows:
    from .machine import toolchain
    from .machine.target import Target

    simulated = toolchain.simulated()
    yield "simulator", "on" if simulated else "off; NUMBA_ENABLE_CUDASIM=1 before Python starts turns it on"
    reason = "the simulator is on, so none is looked for" if simulated else toolchain.unusable()
    if reason is not None:
        yield "devices", f"none: {reason}"
        return
    from cuda.bindings import driver

    _, version = driver.cuDriverGetVersion()
    yield "driver", f"CUDA {version // 1000}.{version % 1000 // 10}"
    _, count = driver.cuDeviceGetCount()
    for device in range(count):
        gpu = Target.of(device)
        assert gpu.cc is not None
        yield (
            f"device {device}",
            f"{gpu.name}, compute capability {gpu.cc[0]}.{gpu.cc[1]}, {gpu.multiprocessors} multiprocessors, "
            f"{gpu.shared_bytes // 1024} KB of shared memory for a block",
        )


def _cpu() -> Rows:
    import numba

    from .machine import threads

    numba.get_num_threads()  # starts them, so that their layer is known
    yield "threads", f"{threads.count()}, {numba.threading_layer()}"


def _cache() -> Rows:
    from .machine.cache_folder import cache_folder

    folder = cache_folder()
    files = [path for path in folder.rglob("*") if path.is_file()]
    yield "folder", f"{folder} (NUMBA_FLASH_CACHE_DIR names another)"
    yield "holds", f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB"
    yield "can be written", _can_be_written(folder)


def _can_be_written(folder: Path) -> str:
    """Tried, not asked: permissions say nothing about a file system that is read-only or full."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    for place in (there, *(folder / cache for cache in ("cpu", "cubin") if (folder / cache).exists())):
        try:
            tempfile.TemporaryFile(dir=place).close()
        except OSError as error:
            return f"no: {error}; kernels are compiled anew in every process"
    return "yes" if there == folder else "yes, and will be made"


def _kernels() -> Rows:
    import dataclasses

    import numpy as np

    from .api.explain import explain
    from .machine import toolchain
    from .machine.target import Target
    from .select.forward import refusal
    from .select.rungs import RUNGS

    x = np.zeros((1, 1, 1, 128), np.float16)
    problem = explain(x, x, x, kernel="reference").problem
    target = Target.of(None)
    if target.why_no_gpu:  # which was said once, under GPU
        target = dataclasses.replace(target, why_no_gpu="see above")
    no_jit = "NUMBA_DISABLE_JIT is set" if toolchain.jit_disabled() else None
    for name in RUNGS:
        yield name, (no_jit if name == "cpu" else None) or refusal(name, problem, target) or "usable"


def _print(title: str, rows: Rows) -> None:
    """A table of two columns; rich breaks long lines within the second one, where it is installed."""
    table = dict(rows)
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            grid = Table.grid("", "", padding=(0, 2))
            for row in table.items():
                grid.add_row(*row)
            console = Console(markup=False)
            console.print(title, style="bold")
            console.print(grid)
            return
    print(title)
    for name, value in table.items():
        print(f"  {name:<14}  {value}")


def run() -> int:
    """`main`, and the end of a reader that had enough, as `| head` has, is no error."""
    try:
        status = main()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left has to go somewhere at exit
        return 0


if __name__ == "__main__":
    sys.exit(run())
