"""Ctrl-C while the CPU's compiled code runs."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import numba_flash
from numba_flash.cpu import backward as cpu_backward, forward as cpu
from numba_flash.machine import interrupt

posix = pytest.mark.skipif(os.name != "posix", reason="os.kill sends signals on POSIX only")

# A call of some ten seconds, and Ctrl-C half a second after it began.
PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import numba_flash

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore

def call(seqlen):
    x = np.random.default_rng(0).standard_normal((1, 2, seqlen, 64), dtype=np.float32)
    lse = np.full((1, 2, seqlen), 10, np.float32)
    if sys.argv[1] == "forward":
        numba_flash.attention(x, x, x)
    elif sys.argv[1] == "one task" and seqlen > 2000:
        few(100_000_000)
    elif sys.argv[1] == "backward":
        numba_flash.attention_backward(x, x, x, x, x, lse)
    elif sys.argv[1] == "sums":
        slopes = np.ones(2, np.float32)
        numba_flash.attention_backward(x, x, x, x, x, lse, alibi_slopes=slopes, wanted=("dalibi_slopes",))

def few(keys):  # queries, so that a task takes seconds
    x = np.ones((1, 1, 100, 64), np.float32)
    numba_flash.attention(x, *[np.broadcast_to(x[:, :, :1], (1, 1, keys, 64))] * 2)

call(2000)  # compiles
if sys.argv[1] == "one task":
    few(100_000)
fired = []
def fire():
    time.sleep(0.5)
    fired.append(time.perf_counter())
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=fire).start()
try:
    call(40_000)
except KeyboardInterrupt:
    print(time.perf_counter() - fired[0])
"""


@pytest.mark.slow
@posix
@pytest.mark.parametrize("what", ["forward", "one task", "backward", "sums"])
def test_ctrl_c_ends_a_long_call_within_half_a_second(what):
    done = subprocess.run([sys.executable, "-c", PROGRAM, what], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout, done.stderr or "it finished before the signal came"
    assert float(done.stdout) < 0.5


@posix
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_handler_that_does_not_raise_lets_the_call_finish(kind, monkeypatch):
    x = np.random.default_rng(0).standard_normal((1, 2, 2500, 64), dtype=np.float32)
    o, lse = numba_flash.attention(x, x, x, return_lse=True)

    def call():
        if kind == "forward":
            return numba_flash.attention(x, x, x)
        return numba_flash.attention_backward(x, x, x, x, o, lse).dk

    expected, runs = call(), []
    module = cpu if kind == "forward" else cpu_backward
    before = module.Ready._run

    def run(ready, stop, *pointers):
        assert stop != interrupt.NEVER, "a call of this size can be stopped"
        runs.append(ctypes.c_int64.from_address(stop).value)
        if len(runs) == 1:  # the first time, it comes while the call runs
            ctypes.c_int64.from_address(stop).value = 1
        before(ready, stop, *pointers)

    monkeypatch.setattr(module.Ready, "_run", run)
    np.testing.assert_array_equal(call(), expected)
    assert runs == [0, 0], "it was run twice, each time with the number at 0"


def stopped_by_a_signal(address, seconds=20):
    """Stands for compiled code: it gives up when the number changes."""
    flag, end = ctypes.c_int64.from_address(address), time.monotonic() + seconds
    os.kill(os.getpid(), signal.SIGINT)
    while not flag.value:
        assert time.monotonic() < end, "nobody said that a signal came"


@pytest.fixture
def counted():
    """SIGINTs are counted, and nothing else comes of them."""
    came = []
    before = signal.signal(signal.SIGINT, lambda *arguments: came.append(1))
    yield came
    signal.signal(signal.SIGINT, before)


@posix
def test_the_number_changes_and_the_work_is_done_again(counted):
    runs = []

    def run(address):
        runs.append(ctypes.c_int64.from_address(address).value)
        if len(runs) == 1:
            stopped_by_a_signal(address)

    interrupt.stoppable(run)
    assert runs == [0, 0] and counted == [1]


@posix
def test_who_else_listens_for_signals_still_hears_them(counted):
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno())
    try:
        done = []
        interrupt.stoppable(lambda address: done or done.append(stopped_by_a_signal(address)))
        ours.settimeout(10)
        assert ours.recv(8)[:1] == bytes([signal.SIGINT])
        assert signal.set_wakeup_fd(theirs.fileno()) == theirs.fileno(), "it was not put back"
    finally:
        signal.set_wakeup_fd(before)
        ours.close()
        theirs.close()


def test_an_error_leaves_everything_as_it_was():
    def run(address):
        raise ZeroDivisionError

    before = signal.set_wakeup_fd(-1)
    try:
        with pytest.raises(ZeroDivisionError):
            interrupt.stoppable(run)
        assert signal.set_wakeup_fd(-1) == -1 and interrupt._watcher().stop is None
    finally:
        signal.set_wakeup_fd(before)


def test_other_threads_are_not_stopped():
    addresses = []
    thread = threading.Thread(target=interrupt.stoppable, args=(addresses.append,))
    thread.start()
    thread.join()
    assert addresses == [interrupt.NEVER] and ctypes.c_int64.from_address(interrupt.NEVER).value == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX, where another test has imported it
def test_a_forked_process_has_a_watcher_of_its_own():
    interrupt.stoppable(lambda address: None)
    process = os.fork()
    if not process:
        os._exit(0 if interrupt._watcher().is_alive() else 1)
    assert os.waitpid(process, 0)[1] == 0


def test_small_calls_do_not_ask_for_it(monkeypatch):
    def never(run):
        raise AssertionError("a small call was made stoppable")

    monkeypatch.setattr(interrupt, "stoppable", never)
    x = np.zeros((1, 2, 100, 16), np.float32)
    numba_flash.attention(x, x, x)
    large = np.zeros((1, 2, 3000, 64), np.float32)
    with pytest.raises(AssertionError, match="stoppable"):
        numba_flash.attention(large, large, large)
