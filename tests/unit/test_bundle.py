"""Bundles: what is written is loaded without a compiler, and what does not fit is refused by name."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
from helpers import compiler
from helpers.simt_kernels import PLAIN, of_rung

import numba_flash
from numba_flash.__main__ import main
from numba_flash.config.simt_forward import V1Config
from numba_flash.gpu import bundle, bundling, compiled
from numba_flash.machine import toolchain

CUBIN = compiled.CUBIN + b" of "
OTHER = of_rung(V1Config, PLAIN)


def code_of(config, arch):
    return CUBIN + f"{config.kernel} for {arch}".encode()


@pytest.fixture
def made_by(monkeypatch):
    """What is compiled, each kernel in no time."""
    seen = []

    def to_code(config, cc):
        seen.append((config, cc))
        return code_of(config, compiled.architecture(cc))

    monkeypatch.setattr(compiled, "to_code", to_code)
    return seen


@pytest.fixture
def folder(tmp_path, monkeypatch, made_by):
    """A bundle with PLAIN for two GPUs, in use; the cache is another one than it was made with."""
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(tmp_path / "cache"))
    compiled._store.cache_clear()
    made = tmp_path / "bundle"
    bundling.add(made, [(PLAIN, (8, 0)), (PLAIN, (9, 0))], [], print)
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(tmp_path / "another cache"))
    monkeypatch.setenv("NUMBA_FLASH_BUNDLE", str(made))
    compiled._store.cache_clear()
    made_by.clear()
    yield made
    compiled._store.cache_clear()
    bundle.opened.cache_clear()


@pytest.fixture
def load(monkeypatch):
    """Loads a kernel: (Config, its code) instead of a kernel of the driver's."""
    monkeypatch.setattr(compiled, "_loaded", lambda config, code: (config, code))
    monkeypatch.setattr(compiled, "_opt_in", lambda kernel, config, device: kernel)
    return lambda config, cc=(8, 0): compiled._load(config, 0, cc)


def test_a_kernel_of_the_bundle_is_loaded_and_nothing_is_compiled(folder, load, made_by):
    for cc, arch in (((8, 0), "sm_80"), ((9, 0), "sm_90a")):
        assert load(PLAIN, cc) == (PLAIN, code_of(PLAIN, arch))
    assert made_by == [] and not (folder.parent / "another cache").exists()


def test_the_bundle_comes_before_the_cache(folder, load):
    compiled.write_cache(PLAIN, "sm_80", b"of the cache")
    assert load(PLAIN)[1] == code_of(PLAIN, "sm_80")


# Another kernel; another GPU.
@pytest.mark.parametrize(("config", "cc", "arch"), [(OTHER, (8, 0), "sm_80"), (PLAIN, (8, 6), "sm_86")])
def test_what_the_bundle_lacks_is_said_and_compiled_once(folder, load, made_by, config, cc, arch):
    for _ in range(2):  # the second time it comes from the cache
        with pytest.warns(
            RuntimeWarning, match=f"'{config.kernel}' for {arch} is not in the bundle {folder}: it comes"
        ):
            assert load(config, cc)[1] == code_of(config, arch)
        assert made_by == [(config, cc)]


def test_only_the_bundle(folder, load, made_by, monkeypatch):
    monkeypatch.setenv("NUMBA_FLASH_BUNDLE_ONLY", "1")
    compiled.write_cache(OTHER, "sm_80", code_of(OTHER, "sm_80"))
    with pytest.raises(NotImplementedError, match=r"'v1' for sm_80 is not in the bundle .*ONLY is set.*V1Config\("):
        load(OTHER)
    assert load(PLAIN)[1] == code_of(PLAIN, "sm_80") and made_by == []


def test_only_a_bundle_that_is_not_named(load, monkeypatch):
    monkeypatch.setenv("NUMBA_FLASH_BUNDLE_ONLY", "1")
    with pytest.raises(ValueError, match="NUMBA_FLASH_BUNDLE_ONLY is set, but NUMBA_FLASH_BUNDLE names no bundle"):
        load(PLAIN)


def test_what_the_bundle_lacks_where_nothing_can_be_compiled(folder, load, monkeypatch):
    """Not even the cache is looked for: where its folder is may not be known either."""
    monkeypatch.setattr(compiled, "read_cache", None)
    monkeypatch.setattr(bundle.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match="is not in the bundle .*numba-cuda, .*is not installed"):
        load(OTHER)


def test_other_sources_are_refused(folder, load, made_by, monkeypatch):
    before = compiled.fingerprint("simt")
    monkeypatch.setattr(compiled, "fingerprint", lambda room: "0123456789abcdef")
    for config in (PLAIN, OTHER):  # also of a kernel that it does not hold
        with pytest.raises(ValueError, match=f"other sources .*{before[:12]} for kernels/simt.* with 0123456789ab"):
            load(config)
    assert made_by == []


@pytest.fixture
def installed(folder, made_by, monkeypatch):
    """The bundle is made by other compilers than those here; sets which are installed afterwards."""
    monkeypatch.setattr(compiled, "compilers", lambda: ("numba_cuda-0.30.4.dist-info", "numba-1.0.dist-info"))
    shutil.rmtree(folder)
    bundling.add(folder, [(PLAIN, (8, 0))], [], print)
    made_by.clear()
    return lambda *names: monkeypatch.setattr(compiled, "compilers", lambda: names)


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (("numba_cuda-0.30.5.dist-info",), r"numba_cuda 0\.30\.4 \(here is 0\.30\.5\)\."),
        (("numba_cuda-0.30.4.dist-info", "numba-2.0.dist-info"), r"numba 1\.0 \(here is 2\.0\)\."),
    ],
)
def test_other_compilers_are_refused(installed, load, made_by, here, words):
    installed(*here)
    with pytest.raises(ValueError, match=f"by other compilers than those here: {words} Make it anew"):
        load(PLAIN)
    assert made_by == []


# Nothing is installed; a CPU's compiler alone, of another version; one that had no part in the bundle.
@pytest.mark.parametrize(
    "here",
    [
        (),
        ("numba-9.0.dist-info", "cuda_core-9.0.dist-info"),
        ("numba_cuda-0.30.4-py3.11.egg-info", "nvidia_nvvm_cu12-9.2.dist-info"),
    ],
)
def test_compilers_that_cannot_differ(installed, load, made_by, here):
    installed(*here)
    assert load(PLAIN)[1] == code_of(PLAIN, "sm_80") and made_by == []


def test_a_compiler_has_one_name_for_every_cuda():
    assert bundle._versions(("nvidia_nvvm_cu12-12.9.dist-info", "nvidia_nvvm-13.0.dist-info")) == {
        "nvidia_nvvm": "12.9"
    }


def test_a_damaged_bundle_is_refused(folder, load):
    (cubin,) = (folder / "sm_80").iterdir()
    cubin.write_bytes(cubin.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{cubin.name} of the bundle .* is not what its table says"):
        load(PLAIN)
    cubin.unlink()
    with pytest.raises(ValueError, match=f"lacks a file that its table names: .*{cubin.name}"):
        load(PLAIN)


@pytest.mark.parametrize(
    ("text", "words"), [(None, "FileNotFoundError"), ("{", "JSONDecodeError"), ("{}", "format None")]
)
def test_what_is_no_bundle_is_refused(tmp_path, load, monkeypatch, text, words):
    monkeypatch.setenv("NUMBA_FLASH_BUNDLE", str(tmp_path))
    if text is not None:
        (tmp_path / bundle.TABLE).write_text(text)
    with pytest.raises(ValueError, match=f"NUMBA_FLASH_BUNDLE.*{words}|{words}.*NUMBA_FLASH_BUNDLE"):
        load(PLAIN)


def test_a_kernel_that_the_driver_refuses_is_not_compiled_instead(folder, load, made_by, monkeypatch):
    def refuse(config, code):
        raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")

    monkeypatch.setattr(compiled, "_loaded", refuse)
    with pytest.raises(
        RuntimeError, match=f"'v2' of the bundle {folder} could not be loaded: CUDA_ERROR_INVALID_IMAGE"
    ):
        load(PLAIN)
    assert made_by == []


# Writing.


def test_the_table_says_what_a_launch_needs(folder):
    table = json.loads((folder / bundle.TABLE).read_text())
    assert table["numba_flash"] == numba_flash.__version__ and table["compilers"] == list(compiled.compilers())
    assert {"mma", "simt", "softmax", "wgmma", "score"} <= table["sources"].keys()
    key = compiled.key(PLAIN, "sm_90a").hex()
    entry = table["kernels"][key]
    code = (folder / entry["file"]).read_bytes()
    assert code == code_of(PLAIN, "sm_90a") and entry["sha256"] == hashlib.sha256(code).hexdigest()
    assert entry["entry"] == "numba_flash_v2" and entry["config"] == repr(PLAIN) and entry["arch"] == "sm_90a"
    assert (entry["threads"], entry["dynamic_shared_bytes"]) == (PLAIN.threads, PLAIN.shared_bytes)
    assert entry["parameters"][0] == "arrays.q: pointer to float32"
    assert "strides.q: 4 x int64" in entry["parameters"] and "score.scale: float32" in entry["parameters"]


def test_a_bundle_grows_and_nothing_is_compiled_twice(folder, made_by):
    note = dict(asked="something")
    assert bundling.add(folder, [(PLAIN, (8, 0)), (OTHER, (8, 0)), (OTHER, (8, 0))], [note], print) == 1
    assert bundling.add(folder, [(OTHER, (8, 0))], [note], print) == 0
    assert made_by == [(OTHER, (8, 0))]
    table = json.loads((folder / bundle.TABLE).read_text())
    assert len(table["kernels"]) == 3 and table["problems"] == [note]
    assert sorted(path.name for path in folder.iterdir()) == [bundle.TABLE, "sm_80", "sm_90a"]


def test_only_a_bundle_of_the_same_is_added_to(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="is not empty, and is no bundle"):
        bundling.add(tmp_path, [], [], print)
    monkeypatch.setattr(compiled, "compilers", lambda: ("numba_cuda-9.0.dist-info",))
    with pytest.raises(ValueError, match=r"is a bundle of other compilers: .*, and here are \['numba_cuda-9.0"):
        bundling.add(folder, [(OTHER, (8, 0))], [], print)


def test_a_whole_program_is_assembled_in_advance(folder, load, monkeypatch):
    """The disk cache keeps PTX of it, which takes the driver seconds."""
    from numba_flash.gpu import assembler

    seen = []

    def assemble_whole(ptx, arch):
        seen.append((ptx, arch))
        return types.SimpleNamespace(cubin=CUBIN)

    monkeypatch.setattr(compiled, "to_code", lambda config, cc: b".version 8.0")
    monkeypatch.setattr(assembler, "assemble_whole", assemble_whole)
    bundling.add(folder, [(OTHER, (9, 0))], [], print)
    assert seen == [(".version 8.0", "sm_90a")] and compiled.read_cache(OTHER, "sm_90a") == b".version 8.0"
    assert load(OTHER, (9, 0)) == (OTHER, CUBIN)


@pytest.mark.parametrize(("code", "how"), [(CUBIN, "from_cubin"), (b".version 8.0", "from_ptx")])
@pytest.mark.parametrize("whole_program", [True, False])
def test_code_is_loaded_as_what_it_is(monkeypatch, code, how, whole_program):
    """Of a whole program the cache has PTX, and a bundle a cubin."""
    module = types.SimpleNamespace(get_kernel=lambda name: name)
    taken = types.SimpleNamespace(**{how: lambda given: module if given == code else None})
    monkeypatch.setitem(sys.modules, "cuda.core", types.SimpleNamespace(ObjectCode=taken))
    config = types.SimpleNamespace(kernel="v1", whole_program=whole_program)
    assert compiled._loaded(config, code) == "numba_flash_v1"


# The command line.


def bundled(capsys, *arguments):
    return main(["bundle", *map(str, arguments)]), capsys.readouterr()


def test_the_command_writes_forward_and_backward_for_each_gpu(folder, made_by, capsys):
    options = ("--gpu", "H100", "A100", "--head-dim", 64, "--mask", "--backward")
    status, printed = bundled(capsys, folder, *options)
    assert status == 0, printed.err
    assert f"{len(made_by)} kernels are new in {folder}" in printed.out
    names = {cc: [config.kernel for config, of in made_by if of == cc] for cc in ((9, 0), (8, 0))}
    assert {"wgmma", "mask_bits"} < set(names[9, 0]) and "wgmma_fused" in names[9, 0]
    assert "mma" in names[8, 0] and all(config.write_lse for config, _ in made_by if config.kernel in ("mma", "wgmma"))
    problems = json.loads((folder / bundle.TABLE).read_text())["problems"]
    expected = [(gpu, direction) for gpu in ("H100", "A100") for direction in ("forward", "backward")]
    assert [(note["gpu"], note["direction"]) for note in problems] == expected
    assert problems[0]["asked"] == "--gpu H100 A100 --head-dim 64 --mask --backward"
    assert all(launch["blocks"] > 0 for note in problems for launch in note["launches"])


def test_what_is_bundled_is_what_a_call_would_load(folder, made_by, capsys, monkeypatch):
    """As explain has it, of the same problem."""
    bundled(capsys, folder, "--gpu", "H100", "--head-dim", 64, "--mask")
    options = ["explain", "--gpu", "H100", "--head-dim", "64", "--mask"]
    main(options)
    assert f"bundle: {folder} has mask_bits, wgmma for sm_90a\n" in capsys.readouterr().out
    main([*options, "--scale", "0.3"])  # which is no constant of the kernel
    assert f"bundle: {folder} has mask_bits, wgmma for sm_90a\n" in capsys.readouterr().out
    main([*options, "--softcap", "9"])
    assert f"{folder} has mask_bits for sm_90a; not in it, and compiled: wgmma\n" in capsys.readouterr().out
    monkeypatch.setenv("NUMBA_FLASH_BUNDLE_ONLY", "1")
    main([*options, "--softcap", "9"])
    assert "; not in it, and refused: wgmma\n" in capsys.readouterr().out
    monkeypatch.setattr(compiled, "fingerprint", lambda room: "0123456789abcdef")
    main(options)
    assert "  bundle: refused: the bundle" in capsys.readouterr().out


def test_gradients_are_chosen_by_name(folder, made_by, capsys):
    bundled(capsys, folder, "--cc", "8.0", "--bias", "--backward", "dbias")
    assert any("dbias" in config.kernel for config, _ in made_by)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "for which GPUs"), (("--gpu", "H1"), "GPU 'H1' is not known"),
        (("--gpu", "H100", "--kernel", "cpu"), "cpu"),
        (("--cc", "8.0", "--backward", "dbias"), "no bias was given"), (("--run",), "--run takes a Python file"),
        (("--cc", "8.0", "--seqlen-q", "0"), "no GPU that is named has a kernel"),
    ],
)  # fmt: skip
def test_a_bundle_that_cannot_be_made(folder, capsys, options, words):
    status, printed = bundled(capsys, folder, *options)
    assert status == 2 and printed.err.startswith("bundle: ") and words in printed.err


def test_the_kernels_of_a_program(folder, made_by, capsys, tmp_path, monkeypatch):
    """What it has loaded when it ends, by the device's own compute capability."""
    monkeypatch.setattr(compiled, "_kernels", {})
    monkeypatch.setattr(
        "numba_flash.machine.target.Target.of", lambda device: types.SimpleNamespace(cc=[(8, 0), (12, 0)][device])
    )
    program = tmp_path / "program.py"
    program.write_text("import sys\nsys.exit(int(sys.argv[1]) if __name__ == '__main__' else 5)\n")
    status, printed = bundled(capsys, folder, "--run", program, 0)
    assert status == 2 and "loaded no kernel" in printed.err
    compiled._kernels.update({(OTHER, 0): "a kernel", (OTHER, 1): "a kernel"})
    arguments = list(sys.argv)
    assert bundled(capsys, folder, "--run", program, 3)[0] == 2 and made_by == []
    assert bundled(capsys, folder, "--run", program, 0)[0] == 0 and made_by == [(OTHER, (8, 0)), (OTHER, (12, 0))]
    assert sys.argv == arguments


def test_info_names_the_bundle(folder):
    from numba_flash import __main__ as command

    assert dict(command._cache())["bundle"] == f"{folder}, 2 kernels for sm_80, sm_90a"


# Without a compiler.

PROGRAM = """
import sys, types
sys.path[:0] = {paths}
from helpers import without_compiler
without_compiler.forbid()
import cuda.core
from cuda.bindings import driver
OK, launched, loaded = driver.CUresult.CUDA_SUCCESS, [], []

class Device:
    name, compute_capability = "A100", types.SimpleNamespace(major=8, minor=0)
    properties = types.SimpleNamespace(max_shared_memory_per_block_optin=163 << 10, multiprocessor_count=108)
    def __init__(self, number): pass

class ObjectCode:
    @staticmethod
    def from_cubin(code):
        loaded.append(code)
        return types.SimpleNamespace(get_kernel=lambda name: types.SimpleNamespace(handle=0x1234))

class Stream:
    @staticmethod
    def from_handle(address): raise AssertionError

cuda.core.Device, cuda.core.ObjectCode = Device, ObjectCode
driver.cuDeviceGetCount = driver.cuCtxGetDevice = lambda: (OK, 1)
driver.cuPointerGetAttribute = lambda *arguments: (OK, 0)
driver.cuKernelSetAttribute = lambda *arguments: (OK,)
driver.cuKernelGetParamInfo = lambda *arguments: (OK, 0, 8)
driver.cuLaunchKernel = lambda function, *arguments: launched.append(arguments) or (OK,)

class Array:
    def __init__(self, at):
        self.__cuda_array_interface__ = dict(shape=(1, 8, 512, 64), typestr="<f2", data=(at, False), version=3)

import numba_flash
q, k, v, o = map(Array, (1 << 20, 2 << 20, 3 << 20, 4 << 20))
print(numba_flash.explain(q, k, v, out=o))
assert numba_flash.attention(q, k, v, out=o) is o
(arguments,) = launched
assert arguments[0] == 32 and arguments[3] == 128, arguments
print(loaded == [{code!r}], without_compiler.imported())
try:
    numba_flash.attention(q, k, v, out=o, causal=True, score_mod=lambda score, b, h, i, j: score - abs(i - j) / 7)
except NotImplementedError as error:
    print(error)
"""


@pytest.mark.skipif(compiler.missing() is not None, reason="needs cuda.core")
def test_a_call_from_the_public_function_to_the_launch_needs_no_numba(folder, tmp_path, capsys):
    """By a driver that only writes down what it is told."""
    bundled(capsys, folder, "--gpu", "A100", "--head-dim", 64, "--seqlen-q", 512)
    root = Path(__file__).resolve().parents[2]
    code = code_of(types.SimpleNamespace(kernel="mma"), "sm_80")
    text = PROGRAM.format(paths=[str(root), str(root / "tests")], code=code)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=os.environ, timeout=120)
    assert done.returncode == 0, done.stderr
    *_, loaded, missing = done.stdout.splitlines()
    assert f"bundle: {folder} has mma for sm_80" in done.stdout and loaded == "True []"
    assert "'mma' for sm_80 is not in the bundle" in missing and "numba-cuda, which would compile it" in missing


def test_numba_cuda_need_not_be_installed_for_a_bundle(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", asked.append)  # finds nothing
    toolchain.unusable.cache_clear()
    try:
        assert "cuda.core is not installed" in toolchain.unusable() and asked == ["cuda.core"]
    finally:
        toolchain.unusable.cache_clear()


# With the compilers that are here.


@compiler.needed
@pytest.mark.slow
@pytest.mark.parametrize("cc", ["8.0", "9.0", "10.0"])
def test_real_kernels(tmp_path, capsys, monkeypatch, cc):
    """mma by nvJitLink, and on Hopper wgmma by ptxas as a whole program."""
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(tmp_path / "cache"))
    compiled._store.cache_clear()
    folder = tmp_path / "bundle"
    status, printed = bundled(capsys, folder, "--cc", cc, "--head-dim", 64, "--causal")
    assert status == 0, printed.err
    (entry,) = json.loads((folder / bundle.TABLE).read_text())["kernels"].values()
    code = (folder / entry["file"]).read_bytes()
    assert code.startswith(compiled.CUBIN) and entry["entry"].encode() + b"\0" in code
    assert entry["entry"] == ("numba_flash_wgmma" if cc == "9.0" else "numba_flash_mma")
    # e_flags of a cubin: from CUDA 13 on its second byte is the compute capability
    assert int(cc.replace(".", "")) in code[48:52]
    monkeypatch.setenv("NUMBA_FLASH_BUNDLE", str(folder))
    main(["explain", "--cc", cc, "--head-dim", "64", "--causal"])
    assert f"bundle: {folder} has {entry['kernel']} for {entry['arch']}" in capsys.readouterr().out
    compiled._store.cache_clear()
