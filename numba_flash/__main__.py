"""python -m numba_flash info | explain | bundle"""

import argparse
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from . import __version__
from .api.described import add_problem, backward_problem_of, capability, check, made_up, problem_of
from .problem.options import GRADIENT_OF

DEMO = (
    "The demo is no part of the installed package: it is examples/demo in the repository, and sh scripts/demo runs it."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status: 0 done, 2 it cannot be done as asked."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:
        print(DEMO, file=sys.stderr)
        return 2
    parsed = _parser().parse_args(arguments, argparse.Namespace(arguments=arguments))
    return dict(info=info, explain=explain, bundle=bundle)[parsed.command](parsed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m numba_flash", description="Exact attention in pure Python.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="info | explain | bundle")
    commands.add_parser("info", help="versions, GPUs, the cache, and which kernels are usable here")
    explaining = commands.add_parser(
        "explain",
        help="which kernel a problem would get, and why not the others",
        description="For arrays on GPU 0 where there is one, else for NumPy arrays.",
    )
    add_problem(explaining)
    explaining.add_argument("--gpu", metavar="NAME", help='arrays on a GPU that is not here: H200, A100, "RTX 4090"')
    explaining.add_argument(
        "--cc", type=capability, metavar="8.6", help="on a GPU of this compute capability, not here"
    )
    bundling = commands.add_parser(
        "bundle",
        help="compile kernels for GPUs that need not be here, into a folder that NUMBA_FLASH_BUNDLE names later",
        description="The kernels of a problem, or with --run those that a program loads. The folder may have a bundle.",
    )
    bundling.add_argument("folder", type=Path)
    add_problem(bundling)
    bundling.add_argument("--gpu", nargs="+", default=[], metavar="NAME", help='H200, A100, "RTX 4090" and others')
    bundling.add_argument("--cc", nargs="+", type=capability, default=[], metavar="8.6", help="compute capabilities")
    bundling.add_argument(
        "--backward",
        nargs="*",
        choices=tuple(GRADIENT_OF),
        metavar="GRADIENT",
        help="also the kernels of gradients, of q, k and v if none are named; lse is then returned",
    )
    bundling.add_argument(
        "--run", nargs=argparse.REMAINDER, metavar="PROGRAM", help="a Python file and its arguments, run on a GPU here"
    )
    return parser


def explain(asked: argparse.Namespace) -> int:
    """Print `explain` of a problem that is only described: there are no arrays."""
    from .api import explain
    from .machine import toolchain
    from .machine.gpus import gpu
    from .machine.target import Target
    from .select.forward import select

    try:
        check(asked)
        if asked.gpu:
            target = gpu(asked.gpu)
        elif asked.cc:
            target = made_up(asked.cc, asked.shared_kb, asked.multiprocessors)
        else:
            target = Target.of(None if toolchain.simulated() or toolchain.unusable() else 0)
        family = "numpy" if target.arrays_on_host else "cupy"
        problem = problem_of(asked, family)
        choice = select(problem, target, asked.kernel, family)
    except (TypeError, ValueError, NotImplementedError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    print(explain.Explanation.of(problem, target, choice))
    return 0


def bundle(asked: argparse.Namespace) -> int:
    """Write the kernels of problems that are only described, or those that a program loads, into a folder."""
    from .gpu import bundling

    try:
        jobs, problems = _of_program(asked.run) if asked.run is not None else _of_problem(asked)
        count = bundling.add(asked.folder, jobs, problems, lambda line: print(line, flush=True))
    except (TypeError, ValueError, NotImplementedError, ImportError) as error:
        print(f"bundle: {error}", file=sys.stderr)
        return 2
    print(f"{count} kernels are new in {asked.folder}. NUMBA_FLASH_BUNDLE={asked.folder} loads them")
    return 0


def _of_problem(asked: argparse.Namespace) -> tuple[list[Any], list[Any]]:
    """(Config, compute capability) of every kernel on every GPU that is named, and notes of what they are for."""
    from .dispatch.launch import blocks_of, configs_of
    from .gpu.bundling import key_of
    from .machine.gpus import gpu
    from .select.backward import select_backward
    from .select.forward import select

    check(asked)
    targets = [*map(gpu, asked.gpu), *(made_up(cc, asked.shared_kb, asked.multiprocessors) for cc in asked.cc)]
    if not targets:
        raise ValueError("for which GPUs? --gpu names some, --cc gives compute capabilities; or --run a program here")
    jobs, notes = [], []
    for target in targets:
        problem: Any = problem_of(asked, "cupy")
        configs: Any = configs_of(select(problem, target, asked.kernel, "cupy"), problem, target)
        made = [("forward", problem, configs)]
        if asked.backward is not None:
            problem = backward_problem_of(asked, "cupy")
            made.append(("backward", problem, select_backward(problem, target, asked.kernel, "cupy").configs))
        for direction, problem, configs in made:
            used = [config for config in configs if config.grid(problem)]
            jobs += [(config, target.cc) for config in used]
            launches = [
                dict(kernel=key_of(config, target.cc), blocks=blocks_of(config, problem, target)) for config in used
            ]
            asked_as = shlex.join(x for x in asked.arguments if x not in ("bundle", str(asked.folder)))
            notes.append(dict(asked=asked_as, gpu=target.name, direction=direction, launches=launches))
    if not jobs:
        raise ValueError("no GPU that is named has a kernel for this problem: explain says why")
    return jobs, notes


def _of_program(program: Sequence[str]) -> tuple[list[Any], list[Any]]:
    import runpy

    from .gpu.compiled import loaded
    from .machine.target import Target

    if not program:
        raise ValueError("--run takes a Python file and its arguments")
    before = sys.argv
    sys.argv = list(program)
    try:
        runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise ValueError(f"{program[0]} ended with {end.code}, so nothing is written") from end
    finally:
        sys.argv = before
    jobs = [(config, Target.of(device).cc) for config, device in loaded()]
    if not jobs:
        raise ValueError(f"{program[0]} loaded no kernel on a GPU")
    return jobs, []


def info(asked: argparse.Namespace) -> int:
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
    yield "bundle", _bundle()


def _bundle() -> str:
    from .gpu.bundle import opened
    from .machine.cache_folder import bundle_folder

    folder = bundle_folder()
    if folder is None:
        return "none (NUMBA_FLASH_BUNDLE names one)"
    try:
        kernels = opened(folder).table["kernels"].values()
    except ValueError as error:
        return str(error)
    return f"{folder}, {len(kernels)} kernels for {', '.join(sorted({kernel['arch'] for kernel in kernels}))}"


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
    if target.why_no_gpu:  # already printed under GPU
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
        return 0


if __name__ == "__main__":
    sys.exit(run())
