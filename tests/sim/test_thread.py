"""What simulated threads run on, greenlets or threads of Python's: the same turns on both, and who gets which."""

import importlib
import signal
import sys
import threading

import pytest

from numba_flash.machine import toolchain
from numba_flash.ptx.sim import launch, now

cuda = bar = None  # put here by the fixture: the simulator swaps module globals that are `numba.cuda`


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    monkeypatch.setitem(globals(), "cuda", toolchain.cuda())
    monkeypatch.setitem(globals(), "bar", importlib.import_module("numba_flash.ptx.sim.bar"))


@pytest.fixture
def thread():
    pytest.importorskip("greenlet", reason="needs greenlet")
    return importlib.import_module("numba_flash.ptx.sim.thread")


@pytest.fixture
def runs_on(monkeypatch):
    scheduler = importlib.import_module("numba_flash.ptx.sim.scheduler")
    return lambda kind: monkeypatch.setattr(scheduler, "kind", lambda: kind)


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


def test_turns_are_the_same_on_both(thread, runs_on):
    runs_on(thread.OnGreenlet)
    came, error = turns(3)
    assert len(came) == 3 * 64 * 2 and error.startswith("tid=[40, 0, 0] ctaid=[2, 0, 0]")
    assert came[:64] == [(0, index, 0) for index in range(64)] and came[64:128] != [
        (0, index, 1) for index in range(64)
    ]
    runs_on(thread.OnThread)
    assert turns(3) == (came, error)


@pytest.mark.parametrize("kind", ["OnGreenlet", "OnThread"])
def test_after_ctrl_c_the_next_launch_runs(thread, kind, runs_on, request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    runs_on(getattr(thread, kind))

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


# The debuggers of Python 3.12 and later say so in sys.monitoring, others by a trace function.
def test_whoever_is_traced_runs_on_threads(thread, monkeypatch):
    monkeypatch.setattr(sys, "gettrace", lambda: None)  # coverage has one
    assert thread.kind() is thread.OnGreenlet
    for module in (sys, threading):
        with monkeypatch.context() as patch:
            patch.setattr(module, "gettrace", lambda: print)
            assert thread.kind() is thread.OnThread
    if hasattr(sys, "monitoring"):
        sys.monitoring.use_tool_id(sys.monitoring.DEBUGGER_ID, "a debugger")
        try:
            assert thread.kind() is thread.OnThread
        finally:
            sys.monitoring.free_tool_id(sys.monitoring.DEBUGGER_ID)


def test_without_greenlet_all_run_on_threads(thread, monkeypatch):
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    monkeypatch.setattr(thread, "greenlet", None)
    assert thread.kind() is thread.OnThread
