"""Simulated threads take turns in one thread of Python, and are followed by debuggers one by one."""

import functools
import importlib
import signal
import sys
import threading
from typing import NamedTuple

import numpy as np
import pytest

from numba_flash import arrays
from numba_flash.machine import toolchain
from numba_flash.ptx.sim import launch, now, resumable

cuda = bar = None  # put here by the fixture: the simulator swaps module globals that are `numba.cuda`


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    monkeypatch.setitem(globals(), "cuda", toolchain.cuda())
    monkeypatch.setitem(globals(), "bar", importlib.import_module("numba_flash.ptx.sim.bar"))


def turns(blocks):
    """(who came by, in order; what the launch raised), of a kernel whose last block has a thread that fails."""
    came = []

    def make():
        @cuda.jit
        def kernel():
            for turn in range(2):
                came.append((int(cuda.blockIdx.x), int(cuda.threadIdx.x), turn))
                cuda.syncthreads()
                bar.warp_sync()
            if cuda.threadIdx.x == 40 and cuda.blockIdx.x == blocks - 1:
                came[0]["nothing"]
            cuda.syncthreads()

        return kernel

    with pytest.raises(TypeError) as raised:
        launch.run(make, blocks, 64, 0, (), ())
    assert now.thread is None
    return came, str(raised.value)


def test_threads_take_turns_in_order():
    came, error = turns(3)
    assert len(came) == 3 * 64 * 2 and error.startswith("tid=[40, 0, 0] ctaid=[2, 0, 0]")
    assert came[:64] == [(0, index, 0) for index in range(64)] and came[64:128] != [
        (0, index, 1) for index in range(64)
    ]
    assert turns(3) == (came, error)


def test_no_thread_is_started(monkeypatch):
    """A browser has none."""
    monkeypatch.setattr(threading.Thread, "start", None)
    assert len(turns(1)[0]) == 64 * 2


def test_after_ctrl_c_the_next_launch_runs(request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def make():
        @cuda.jit
        def kernel():
            bar.warp_sync()
            if cuda.threadIdx.x == 5:
                signal.raise_signal(signal.SIGINT)
            cuda.syncthreads()

        return kernel

    with pytest.raises(KeyboardInterrupt):
        launch.run(make, 1, 64, 0, (), ())
    assert now.thread is None
    assert len(turns(1)[0]) == 64 * 2


def test_whoever_traces_the_launch_follows_each_thread_by_itself():
    """As a debugger, coverage or a profile does: no function returns before it ends, though its thread stands still."""
    seen = []

    @cuda.jit(device=True)
    def device(i):
        bar.warp_sync()
        return i

    @cuda.jit
    def kernel():
        i = device(int(cuda.threadIdx.x))
        cuda.syncthreads()
        seen.append((i, "end"))

    def follow(frame, event, arg):
        if frame.f_code.co_name not in ("device", "kernel") or frame.f_code.co_filename != __file__:
            return None
        if event != "exception":  # Python raises one at a generator's end
            seen.append((int(now.thread.thread_id), frame.f_code.co_name, event, frame.f_lineno - first))
        return follow

    first, before = kernel.fn.__code__.co_firstlineno, sys.gettrace()
    sys.settrace(follow)
    try:
        launch.run(lambda: kernel, 1, 32, 0, (), ())
        assert sys.gettrace() is follow
    finally:
        sys.settrace(before)
    for thread in range(32):
        mine = [(name, event) for number, name, *event in [x for x in seen if len(x) > 2] if number == thread]
        names = [(name, event[0]) for name, event in mine]
        assert names == [
            ("kernel", "call"), ("kernel", "line"), ("device", "call"), ("device", "line"), ("device", "line"),
            ("device", "return"), ("kernel", "line"), ("kernel", "line"), ("kernel", "return"),
        ]  # fmt: skip


def test_votes_of_a_block():
    out = np.zeros((3, 32), np.int64)

    @cuda.jit
    def kernel(out):
        i = cuda.threadIdx.x
        out[i] = cuda.syncthreads_count(i % 3 == 0)
        out[32 + i] = cuda.syncthreads_and(i < 31)
        out[64 + i] = cuda.syncthreads_or(i == 31)

    launch.run(lambda: kernel, 1, 32, 0, (arrays.read("out", out),), ())
    assert out.tolist() == [[11] * 32, [0] * 32, [1] * 32]


def test_an_instruction_that_waits_where_python_cannot_is_named():
    @cuda.jit
    def in_a_comprehension():
        [bar.warp_sync() for _ in range(2)]

    names = dict(cuda=cuda)
    exec("def kernel():\n cuda.syncthreads()", names)  # nobody knows its source
    for kernel in (in_a_comprehension, cuda.jit(names["kernel"])):
        with pytest.raises(RuntimeError, match=r"thread 0 .*\nwent on without waiting: the simulator can stop only in"):
            launch.run(lambda kernel=kernel: kernel, 1, 32, 0, (), ())


def test_a_device_function_that_is_given_as_a_value():
    """In a tuple, by a name, made by functools.cache, and by a plain function."""

    class Tools(NamedTuple):
        meet: object

    @functools.cache
    def made():
        @cuda.jit(device=True)
        def meet(x):
            bar.warp_sync()
            return x + 1

        return meet

    def plain(x):
        return Tools(made()).meet(x) if x > 100 else tools.meet(x)

    tools, out = Tools(made()), np.zeros(32, np.int64)

    @cuda.jit
    def kernel(out):
        i = cuda.threadIdx.x
        out[i] = plain(tools.meet(i)) + plain(x=200)

    launch.run(lambda: kernel, 1, 32, 0, (arrays.read("out", out),), ())
    assert out.tolist() == [i + 203 for i in range(32)]


def test_a_file_that_changes_while_python_runs(tmp_path):
    """What was imported before goes on running, and what is imported then, too."""
    file, made = tmp_path / "kernel.py", []
    for number in (1, 2):
        text = f"def kernel(out):\n    cuda.syncthreads()\n    out[cuda.threadIdx.x] = {number}\n"
        file.write_text("\n" * number + text)
        names = dict(cuda=cuda)
        exec(compile(file.read_text(), str(file), "exec"), names)
        made.append(cuda.jit(names["kernel"]))
        for expected, kernel in enumerate(made, 1):
            out = np.zeros(32, np.int64)
            launch.run(lambda kernel=kernel: kernel, 1, 32, 0, (arrays.read("out", out),), ())
            assert out.tolist() == [expected] * 32


def asks(first):
    """A function that calls `first`, and one that waits: in this order the search meets them."""
    waiting = wait_for_all

    def function(n):
        if n:
            first(n - 1)
        waiting()

    return function


def wait_for_all():
    cuda.syncthreads()


def without_a_barrier(n):
    with_a_barrier(n)


with_a_barrier = asks(without_a_barrier)


def test_a_function_in_a_cycle_may_wait():
    """Asked for the other one first, the search comes to it while nothing is known of that."""
    assert resumable.may_wait(with_a_barrier, (cuda,))
    assert resumable.may_wait(without_a_barrier, (cuda,))
