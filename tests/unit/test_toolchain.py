"""toolchain.py: NumPy's missing names, and which numba.cuda is taken."""

import contextlib
import gc
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
from helpers import compiler
from helpers.machines import HOPPER, problem

from numba_flash.gpu import compiled
from numba_flash.machine import cache_folder, toolchain
from numba_flash.select import forward as select


def test_a_missing_numpy_name_is_lent_and_taken_away(monkeypatch):
    monkeypatch.delattr(np, "row_stack", raising=False)
    with toolchain.numpy_names():
        assert np.row_stack is np.vstack
    assert "row_stack" not in vars(np)
    with pytest.raises(ZeroDivisionError), toolchain.numpy_names():
        1 / 0  # noqa: B018
    assert "row_stack" not in vars(np)


@compiler.needed
def test_a_kernel_of_ones_own_may_import_ptx_first():
    """With a NumPy that lacks the name."""
    code = "import numpy; vars(numpy).pop('row_stack', None); import numba_flash.ptx"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_name_that_numpy_has_is_left_alone(monkeypatch):
    own = object()
    monkeypatch.setattr(np, "row_stack", own, raising=False)
    with toolchain.numpy_names():
        assert np.row_stack is own
    assert np.row_stack is own


def test_numbas_built_in_copy_is_refused_with_the_remedy(monkeypatch):
    fake = types.SimpleNamespace(implementation="Built-in")
    monkeypatch.setattr(toolchain.importlib, "import_module", lambda name: fake)
    toolchain.cuda.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"numba-cuda: pip install 'numba-flash\[cu13\]'"):
            toolchain.cuda()
    finally:
        toolchain.cuda.cache_clear()


def test_a_missing_package_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    toolchain.unusable.cache_clear()
    try:
        assert "numba_cuda is not installed: pip install 'numba-flash[cu13]'" in toolchain.unusable()
    finally:
        toolchain.unusable.cache_clear()


def test_the_reason_why_no_gpu_can_be_used_is_one_line(monkeypatch):
    def broken(number):
        raise RuntimeError("first line\nsecond line")

    pytest.importorskip("cuda.core", reason="needs cuda-core")
    monkeypatch.setattr("cuda.core.Device", broken)
    toolchain.unusable.cache_clear()
    try:
        assert toolchain.unusable() == "RuntimeError: first line"
    finally:
        toolchain.unusable.cache_clear()


# On, off, set to off, empty; before Numba is imported and after.
@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False), (None, False)])
def test_the_simulator_is_what_the_environment_says(value, expected):
    environment = {name: x for name, x in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    if value is not None:
        environment["NUMBA_ENABLE_CUDASIM"] = value
    code = "from numba_flash.machine import toolchain as t; a = t.simulated(); import numba; print(a, t.simulated())"
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [str(expected)] * 2


@pytest.mark.parametrize("collecting", [True, False])
def test_garbage_is_kept_for_a_while(collecting):
    before = gc.isenabled()
    try:
        (gc.enable if collecting else gc.disable)()
        with pytest.raises(ZeroDivisionError), toolchain.keeping_garbage():
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() == collecting
    finally:
        (gc.enable if before else gc.disable)()


def look_up():
    from numba import types

    return types.Function.get_call_type


def test_signatures_are_looked_up_once_while_numba_compiles():
    from numba import njit, types
    from numba.core.typing.templates import AbstractTemplate, signature

    before, asked = look_up(), []

    class Template(AbstractTemplate):
        key = "twice"

        def generic(self, args, kws):
            asked.append(args)
            return signature(args[0], *args)

    function, context = types.Function(Template), njit(lambda: 0).targetctx.typing_context
    with pytest.raises(ZeroDivisionError), toolchain.compiling():
        for kind in (types.int32, types.int32, types.int64, types.int32):
            assert function.get_call_type(context, (kind,), {}) == signature(kind, kind)
        with toolchain.compiling():  # one kernel's compile may start another's
            function.get_call_type(context, (types.float32,), {})
        raise ZeroDivisionError
    assert asked == [(types.int32,), (types.int64,), (types.float32,)]
    assert look_up() is before
    function.get_call_type(context, (types.int32,), {})
    assert len(asked) == 4


def test_threads_compile_one_after_the_other():
    """Or one would leave what another has put in."""
    before, inside, order = look_up(), threading.Event(), []

    def other():
        inside.wait()
        with toolchain.compiling():
            order.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    with toolchain.compiling():
        inside.set()
        time.sleep(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "other"] and look_up() is before


@compiler.needed
def test_code_is_the_same_as_by_looking_up_each_time(monkeypatch):
    def instructions():
        text = compiled.to_ptx(select.select(problem(64), HOPPER, "mma").config, (9, 0))
        text = re.sub(r"_cudapy_smem_\d+", "", text)  # numbered through the process
        return re.findall(r"^\t[^.\n].*;$", text, re.M)

    found = instructions()
    monkeypatch.setattr(toolchain, "_remembering_signatures", contextlib.nullcontext)
    assert len(found) > 1000 and instructions() == found


# As on macOS, where pip finds no numba-cuda: Numba's own numba.cuda is there. The simulator needs no more.
WITHOUT_NUMBA_CUDA = """
import sys
sys.meta_path[:] = [x for x in sys.meta_path if "numba_cuda" not in type(x).__module__]
sys.modules["_numba_cuda_redirector"] = sys.modules["numba_cuda"] = None
import numpy as np, numba_flash
x = np.random.default_rng(0).standard_normal((1, 1, 18, 16)).astype(np.float16)
options = dict(score_mod=lambda s, b, h, i, j, t: s + t[j], aux=(np.arange(18, dtype=np.float32),))
for kernel in ("v1", "v2", "mma", "wgmma"):
    o, lse = numba_flash.attention(x, x, x, **options, return_lse=True, kernel=kernel)
    assert np.isfinite(o).all()
    if kernel != "v1":
        numba_flash.attention_backward(x, x, x, x, o, lse, **options, kernel=kernel)
import numba.cuda
assert "numba_cuda" not in numba.cuda.__file__
"""


@pytest.mark.slow
def test_the_simulator_needs_no_numba_cuda():
    environment = dict(os.environ, NUMBA_ENABLE_CUDASIM="1")
    subprocess.run([sys.executable, "-c", WITHOUT_NUMBA_CUDA], env=environment, check=True)


def test_no_package_is_advised_that_macos_does_not_have(monkeypatch):
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(toolchain, "simulated", lambda: False)
    for platform, advised in (("darwin", False), ("linux", True)):
        monkeypatch.setattr(sys, "platform", platform)
        reason = toolchain.unusable.__wrapped__()
        assert ("pip install" in reason) == advised and ("simulator" in reason) != advised


def test_a_warning_from_within_numba_is_at_the_callers_line(tmp_path):
    """As that of a cache folder that is none: Numba's compiler calls this package's cache."""
    program = "import numpy as np, numba_flash\nx = np.ones((1, 1, 4, 4))\nnumba_flash.attention(x, x, x)"
    (tmp_path / "file").touch()
    environment = dict(os.environ, NUMBA_FLASH_CACHE_DIR=str(tmp_path / "file"))
    command = [sys.executable, "-W", "always", "-c", program]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "<string>:3: RuntimeWarning: numba_flash cannot use" in run.stderr


def test_a_tilde_in_the_cache_folder_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", "~/kernels")
    assert cache_folder.cache_folder() == pathlib.Path.home() / "kernels"
