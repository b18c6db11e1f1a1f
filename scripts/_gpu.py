"""What the scripts that need a GPU share: which machine it is, kernels compiled ahead, exact rows, fair times."""

import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import pickle
import platform
import subprocess
import time
from importlib import metadata
from typing import Any, ClassVar

import numpy as np
from _clone import commit

import numba_flash
from numba_flash.dispatch import forward as dispatch
from numba_flash.gpu import compiled
from numba_flash.select import around, forward_kernels as select

VERSIONS = (
    "numba", "numba-cuda", "cuda-core", "cupy-cuda13x", "cupy-cuda12x", "numpy", "torch", "triton", "jax",
    "nvidia-nvjitlink", "nvidia-nvvm",
)  # fmt: skip


def machine():
    """The GPU, its driver and what is installed, for the results that README quotes."""
    import cupy as cp

    versions = {}
    for name in VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return dict(
        gpu=cp.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        driver=cp.cuda.runtime.driverGetVersion(),
        python=platform.python_version(),
        date=time.strftime("%Y-%m-%d"),
        versions=versions,
        **commit(),
    )


def clocks():
    """The SM clock in MHz and the power in W at this moment, or nothing where nvidia-smi does not say."""
    query = ["nvidia-smi", "-i", "0", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        mhz, watts = printed.split("\n")[0].split(",")
        return dict(sm_mhz=float(mhz), watts=float(watts))
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}


# Compiling ahead: one kernel takes seconds on one core, and there are many of both.


@functools.cache
def pool():
    """A process for each core. None of them touches the GPU, and each computes with one thread."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(os.cpu_count() or 1, mp_context=context)


def _compile(job):
    """Fill the disk cache. Returns what went wrong, or None."""
    config, cc = job
    try:
        compiled.write_cache(config, compiled.architecture(cc), compiled.to_code(config, cc))
    except Exception as error:  # the others are still wanted; who runs this kernel sees the error itself
        return f"{config}: {error!r}"[:500]
    return None


def _assemble(job):
    """Let the driver assemble a whole program: that takes it seconds, and it keeps the result for other processes."""
    code, name = job
    try:
        from cuda.core import Device, ObjectCode

        Device().set_current()
        ObjectCode.from_ptx(code).get_kernel(name)
    except Exception as error:  # as in _compile
        return f"{name}: {error!r}"[:500]
    return None


def _assemble_ahead(jobs):
    """In processes that end then, and with them their hold on the GPU. They get the PTX: of a kernel with a caller's
    functions no other process knows the Config."""
    start = time.perf_counter()
    found = [(compiled.read_cache(x, compiled.architecture(cc)), compiled.entry_name(x)) for x, cc in jobs]
    found = [(code, name) for code, name in found if code is not None]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(os.cpu_count() or 1, len(jobs)), mp_context=context) as short:
        errors = [error for error in short.map(_assemble, found) if error]
    print(f"     assembled {len(found) - len(errors)} of them in {time.perf_counter() - start:.0f} s", flush=True)
    return errors


class Ahead:
    """`scripts/gpu_check --ahead` compiles what its checks need, and runs none of them."""

    only = False
    note = "compiled ahead, not run"
    jobs: ClassVar[list[Any]] = []  # of all checks: together they keep all cores busy until the end


def compile_ahead(jobs):
    """Compile every (Config, compute capability) that is not in the disk cache, on all cores."""
    if Ahead.only:
        Ahead.jobs.extend(jobs)
        return
    missing = [x for x in dict.fromkeys(jobs) if compiled.read_cache(x[0], compiled.architecture(x[1])) is None]
    own = [x for x in missing if not _can_be_sent(x)]
    if missing:
        start = time.perf_counter()
        others = [x for x in missing if x not in own]
        errors = [error for error in pool().map(_compile, others) if error] if others else []
        errors += _compile_here(own) if own else []
        whole = [x for x in missing if x[0].whole_program]
        errors += _assemble_ahead(whole) if len(whole) > MOST_AT_ONCE else []
        for error in errors:
            print(f"     did not compile: {error}")
        print(f"     compiled {len(missing) - len(errors)} kernels in {time.perf_counter() - start:.0f} s", flush=True)


def _can_be_sent(job):
    try:
        pickle.dumps(job)
    except TypeError:
        return False
    return True


MOST_AT_ONCE = 3  # whole programs that one process assembles in the time that others take to start
FORKED_SECONDS = 240  # how long copies of this process may compile


def _compile_here(jobs):
    """Kernels with a caller's functions, which only this process knows: in copies of it, one for each core, that touch
    no GPU. What they leave undone within FORKED_SECONDS, or where a process cannot be copied, compiles when it runs."""
    if not hasattr(os, "fork"):
        return []
    cores = min(os.cpu_count() or 1, len(jobs))
    context = multiprocessing.get_context("fork")
    errors = context.SimpleQueue()
    copies = [context.Process(target=_compile_some, args=(jobs[n::cores], errors), daemon=True) for n in range(cores)]
    for copy in copies:
        copy.start()
    ends = time.monotonic() + FORKED_SECONDS
    for copy in copies:
        copy.join(max(ends - time.monotonic(), 0.1))
        if copy.is_alive():
            copy.terminate()
    found = []
    while not errors.empty():
        found.append(errors.get())
    return found


def _compile_some(jobs, errors):
    for job in jobs:
        error = _compile(job)
        if error:
            errors.put(error)
    os._exit(0)  # nothing that this process has of its parent's is to be taken down


@contextlib.contextmanager
def tiles_of(rows):
    """With wgmma's tiles of so many query rows, or of as many as its table has there; None: as select chooses, which
    for problems as small as those that are checked are the fewest."""
    if rows is None:
        yield
        return
    kept = select.TILE_COST
    select.TILE_COST = {n: 1000.0 ** abs((n - rows) // 64) for n in kept}
    dispatch._plans.clear()
    try:
        yield
    finally:
        select.TILE_COST = kept
        dispatch._plans.clear()


def job(arguments, kernel, **options):
    """(Config, compute capability) of one call."""
    explained = numba_flash.explain(**arguments, **options, kernel=kernel)
    return explained.config, explained.target.cc


def jobs(arguments, kernel, **options):
    """The same of all kernels that it runs."""
    explained = numba_flash.explain(**arguments, **options, kernel=kernel)
    before, behind = (
        around.prologue(explained.config, explained.problem, explained.target),
        around.epilogue(explained.config),
    )
    return [(config, explained.target.cc) for config in (*before, explained.config, *behind)]


def by_block_mask(arguments, problem):
    """The arguments of a call with its mask_mod in a block_mask; as they are if it has none."""
    if arguments.get("mask_mod") is None:
        return arguments
    names = ("aux", "causal", "window", "q_offset", "seqlens_k")
    said = {name: arguments[name] for name in names if name in arguments}
    extents = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
    others = {name: x for name, x in arguments.items() if name not in (*said, "mask_mod")}
    return others | dict(block_mask=numba_flash.block_mask(arguments["mask_mod"], *extents, **said))


def exact_rows(q, k, v, rows, causal):
    """float64 attention of some rows of one head; q, k, v are (seqlen, dim) NumPy arrays, bottom-right."""
    offset = k.shape[0] - q.shape[0]
    q, k, v = (np.asarray(x, np.float64) for x in (q[rows], k, v))
    s = q @ k.T / q.shape[1] ** 0.5
    if causal:
        s[np.arange(k.shape[0]) > (np.asarray(rows) + offset)[:, None]] = -np.inf
    p = np.exp(s - s.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True) @ v
