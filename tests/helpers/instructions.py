"""For tests of the stand-ins of PTX instructions: launching a small kernel, and what it should say of a misuse."""

import inspect
import linecache
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from numba_flash import arrays
from numba_flash.abi.tensor_maps import TensorMap
from numba_flash.machine import toolchain
from numba_flash.ptx.sim.errors import InstructionError
from numba_flash.ptx.sim.launch import run

rng = np.random.default_rng(0)
BASE = 1024  # where dynamic shared memory begins
KINDS = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
TILE = TensorMap("float16", (64, 64), (128,), (64, 64), 128)


def launch(kernel, threads, *operands, shared_bytes=0, blocks=1, scalars=(), maps=(), in_cluster=1, behind=False):
    """maps: (number of the operand, TensorMap); in_cluster: how many blocks run together; behind: as of run."""
    operands = tuple(None if x is None else arrays.read("array", x) for x in operands)
    made = toolchain.cuda().jit(kernel)
    run(lambda: made, blocks, threads, shared_bytes, operands, scalars, maps, in_cluster, behind)


def lanes(kernel, dtype=np.uint32, threads=32, **options):
    """What kernel(out) left in out[thread]."""
    out = np.zeros(threads, dtype)
    launch(kernel, threads, out, **options)
    return out


def holds(condition):
    """An assert in a kernel. pytest changes functions with the word, and then their source is not what runs."""
    assert condition


def compiled(text, names, file="kernel.py"):
    """Runs the changed text of a kernel's file in `names`, where the simulator finds it: as a file that nobody has."""
    file = str(Path(f"changed_{len(linecache.cache)}", Path(file).name))
    linecache.cache[file] = len(text), None, text.splitlines(True), file  # None: it is never looked for on the disk
    exec(compile(text, file, "exec"), names)


def line_of(function, text):
    """The number of the one line of a kernel with this text."""
    source, first = inspect.getsourcelines(function)
    (number,) = [first + i for i, line in enumerate(source) if text in line and "def " not in line]
    return number


def misuse(kernel, threads, *operands, match, at=None, thread=None, **options):
    """The kernel's error says `match`, the line with the text `at`, and the thread."""
    with pytest.raises(InstructionError, match=match) as caught:
        launch(kernel, threads, *operands, **options)
    message = str(caught.value)
    if at is not None:
        file = Path(inspect.getsourcefile(kernel)).name
        assert re.search(rf"{re.escape(file)}:{line_of(kernel, at)}: ", message), message
    if thread is not None:
        assert message.startswith(f"block (0, 0, 0), thread {thread} (warp {thread // 32}, lane {thread % 32}) at"), (
            message
        )
    return message


def random(*shape, kind="f16"):
    return rng.standard_normal(shape).astype(KINDS[kind])


def wide(x):
    return x.astype(np.float64)
