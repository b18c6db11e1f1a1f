"""Processes that are forked off while another thread compiles, and Ctrl-C while Numba is imported."""

import os
import subprocess
import sys
import threading
import warnings

import pytest
from numba.core.compiler_lock import global_compiler_lock

from numba_flash.machine import forked, toolchain

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def takes(lock):
    """Whether a child of this process can take a lock."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's and JAX's, that there are other threads
        child = os.fork()
    if not child:
        os._exit(0 if lock.acquire(timeout=5) else 1)
    return os.waitpid(child, 0)[1] == 0


# What is held, and the lock that a compile in the child takes.
@forks
@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        (toolchain.compiling, forked.compile_lock),
        (toolchain.importing, forked.compile_lock),
        (lambda: global_compiler_lock, global_compiler_lock._lock),
    ],
    ids=["compiling", "importing", "Numba compiles"],
)
def test_a_fork_waits_for_the_thread_that_compiles(held, wanted):
    begun, goes_on = threading.Event(), threading.Event()

    def work():
        with held():
            begun.set()
            goes_on.wait(0.2)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    assert takes(wanted)
    thread.join()
    assert takes(wanted) and not forked._taken
    thread = threading.Thread(target=lambda: wanted.acquire() and wanted.release())  # it was given back here, too
    thread.start()
    thread.join(5)
    assert not thread.is_alive()


@forks
def test_a_thread_that_compiles_may_fork():
    with toolchain.compiling():
        assert takes(forked.compile_lock)


@forks
def test_a_fork_does_not_import_numba():
    program = "import os, sys, numba_flash\nif not os.fork(): os._exit('numba' in sys.modules)\nassert not os.wait()[1]"
    subprocess.run([sys.executable, "-c", program], check=True)


# The first call, in a thread, imports Numba when this process forks. The child makes its own.
FIRST_IMPORT = """
import os, sys, threading, time
import numpy as np
import numba_flash
x = np.ones((1, 1, 4, 4), np.float32)
thread = threading.Thread(target=numba_flash.attention, args=(x, x, x))
thread.start()
while "numba.core" not in sys.modules:
    time.sleep(0.001)
if not os.fork():
    numba_flash.attention(x, x, x)
    os._exit(0)
thread.join()
assert os.wait()[1] == 0
"""


@forks
def test_a_fork_during_the_first_import_of_numba():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FIRST_IMPORT], check=True, timeout=120)


# SIGINT comes when the first of Numba's parts is looked for.
INTERRUPTED = """
import os, signal, sys
import numpy as np
import numba_flash

class Interrupts:
    def find_spec(self, name, *arguments):
        if name == "numba.core.types" and self in sys.meta_path:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
x = np.ones((1, 1, 4, 4), np.float32)
try:
    numba_flash.attention(x, x, x)
except KeyboardInterrupt:
    print(numba_flash.attention(x, x, x)[0, 0, 0])
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


@pytest.mark.skipif(os.name != "posix", reason="os.kill sends signals on POSIX only")
def test_ctrl_c_during_the_first_import_of_numba_leaves_a_package_that_works():
    run = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "[1. 1. 1. 1.]\n", run.stderr
