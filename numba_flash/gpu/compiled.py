"""(kernel, Config, device) -> a loaded kernel: the only memo, over a disk cache of code.

Numba compiles the Python function to PTX, nvJitLink assembles it, cuda.core loads it. Numba's own dispatcher and cache
are not used: a launch through the dispatcher takes 185 us with four CuPy arrays instead of 7 us (H200), and its cache's
key leaves out most of what determines the code.
"""

import contextlib
import functools
import importlib
import os
import re
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..abi import tensor_maps
from ..abi.arguments import types as parameter_types
from ..abi.parameters import SEED
from ..config.forward import LaunchFacts
from ..machine import toolchain
from ..machine.announce import announce
from ..machine.cache_folder import MOST_BYTES, bundle_folder, bundle_only, cache_folder, complain
from ..machine.forked import compile_lock

# For each compute capability the first PTX version that has it, or 8.0, which the driver of every CUDA 12 takes. The
# driver that assembles a whole program may be older than the compiler, but not older than the GPU.
PTX_VERSIONS = dict.fromkeys([(8, 0), (8, 6), (8, 7), (8, 9), (9, 0)], "8.0")
PTX_VERSIONS |= {(10, 0): "8.6", (10, 3): "8.8", (12, 0): "8.7", (12, 1): "8.8"}
CUBIN = b"\x7fELF"  # its first bytes
_kernels: dict[tuple[LaunchFacts, int], Any] = {}


def compiled(config: LaunchFacts, device: int, cc: tuple[int, int]) -> Any:
    """The kernel, loaded for a CUDA device: a cuda.core Kernel."""
    kernel = _kernels.get((config, device))
    if kernel is None:
        with compile_lock:  # if two threads ask for the same kernel, only one compiles it
            kernel = _kernels.get((config, device))
            if kernel is None:
                kernel = _kernels[config, device] = _load(config, device, cc)
    return kernel


def loaded() -> list[tuple[LaunchFacts, int]]:
    """Each kernel that this process has loaded, with its device."""
    return list(_kernels)


def _functions_of(config: LaunchFacts) -> dict[str, Any]:
    """The caller's functions, by the argument's names."""
    return {name: value for name, value in getattr(config, "uses", ()) if hasattr(value, "tree")}


def source(config: LaunchFacts) -> Any:
    """The kernel as a Numba function, from its file's make(config); the simulator can call it."""
    toolchain.cuda()
    return importlib.import_module(f"numba_flash.kernels.{config.module}").make(config)


def _load(config: LaunchFacts, device: int, cc: tuple[int, int]) -> Any:
    arch = architecture(cc)
    found = bundled(config, arch)
    if found is not None:
        return _opt_in(_from_bundle(config, found), config, device)
    if bundle_folder() is not None:
        from .bundle import note_missing

        note_missing(config, arch)
    cached = read_cache(config, arch)
    if cached is not None:
        # Code that passes its checksum but does not load is treated as missing.
        with contextlib.suppress(Exception):
            return _opt_in(_loaded(config, cached), config, device)
    started = time.perf_counter()
    announce(f"numba_flash: compiling kernel {config.kernel!r} for {arch} (once) ...", end="")
    code = to_code(config, cc)
    kernel = _opt_in(_loaded(config, code), config, device)
    announce(f" {time.perf_counter() - started:.1f} s")
    write_cache(config, arch, code)
    if functions := _functions_of(config):
        from ..functions.remembered import note_compiled

        note_compiled(functions)
    return kernel


def to_code(config: LaunchFacts, cc: tuple[int, int]) -> bytes:
    """The code that the disk cache stores and the driver loads: a cubin, or PTX for a whole program.

    nvJitLink assembles for linking with other code. Then setmaxnreg is ignored, wgmma is serialised (C7504, C7512), and
    float64 mma spills on sm_80 (255 registers and 192 bytes; a whole program takes 207). The driver assembles PTX as a
    whole, and keeps the result in a cache of its own.
    """
    from .assembler import assemble  # code from the cache does not need it

    ptx = to_ptx(config, cc)
    return ptx.encode() if config.whole_program else assemble(ptx, architecture(cc)).cubin


def _loaded(config: LaunchFacts, code: bytes) -> Any:
    """code: a cubin or PTX."""
    from cuda.core import ObjectCode

    module = ObjectCode.from_cubin(code) if code.startswith(CUBIN) else ObjectCode.from_ptx(code)
    return module.get_kernel(entry_name(config))


def _from_bundle(config: LaunchFacts, code: bytes) -> Any:
    try:
        return _loaded(config, code)
    except Exception as error:
        raise RuntimeError(
            f"kernel {config.kernel!r} of the bundle {bundle_folder()} could not be loaded: {error}. "
            "The driver may be older than the compilers that made it"
        ) from error


def _opt_in(kernel: Any, config: LaunchFacts, device: int) -> Any:
    """More than 48 KB of dynamic shared memory must be requested, for each kernel and device."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    handle = driver.CUkernel(int(kernel.handle))
    (error,) = driver.cuKernelSetAttribute(attribute, config.shared_bytes, handle, driver.CUdevice(device))
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{config.shared_bytes} bytes of shared memory were refused: {error.name}")
    return kernel


def architecture(cc: tuple[int, int]) -> str:
    """sm_90a and so on: from 9.0 on the architecture-specific target, which allows wgmma and similar instructions."""
    return f"sm_{cc[0]}{cc[1]}" + ("a" if cc >= (9, 0) else "")


def entry_name(config: LaunchFacts) -> str:
    """The name that profilers show."""
    return f"numba_flash_{config.kernel}"


def to_ptx(config: LaunchFacts, cc: tuple[int, int]) -> str:
    """PTX of one kernel. Needs Numba's compiler, no GPU and no driver."""
    cuda = toolchain.cuda()
    options: dict[str, Any] = {}
    blocks = config.blocks_per_sm  # the registers must suffice for so many
    if blocks:
        options["launch_bounds"] = (config.threads, blocks)
    with toolchain.compiling(), _compiling_for(cc):
        function = source(config).py_func
        target = (*cc, "a") if cc >= (9, 0) else cc  # as in `architecture`
        try:
            ptx, _ = cuda.compile(
                function, _signature(config), device=False, abi="numba", cc=target, output="ptx", **options
            )
        except Exception as error:
            from ..functions.failures import explained

            own = _functions_of(config)
            found = explained(error, own) if own else None
            if found is None:
                raise
            raise found from error
    mangled = re.search(r"\.entry\s+(\S+?)\s*\(", ptx)
    assert mangled, "no entry in the PTX"
    ptx = ptx.replace(mangled[1], entry_name(config))
    if config.whole_program and cc in PTX_VERSIONS:
        version = config.ptx_version or PTX_VERSIONS[cc]
        ptx = re.sub(r"^\.version \d+\.\d+", f".version {version}", ptx, count=1, flags=re.M)
    if config.shared_alignment:
        ptx = re.sub(r"^(\.extern \.shared) \.align \d+", rf"\1 .align {config.shared_alignment}", ptx, flags=re.M)
    return _with_tensor_maps(_in_clusters(ptx, config), config)


def _in_clusters(ptx: str, config: LaunchFacts) -> str:
    """Adds the cluster size, which Numba cannot express. Such a kernel is launched like any other."""
    if config.cluster == 1:
        return ptx
    directives = f".explicitcluster\n.reqnctapercluster {config.cluster}, 1, 1\n"
    ptx, replaced = re.subn(r"^(?=\.maxntid\b)", directives, ptx, count=1, flags=re.M)
    assert replaced == 1, "the PTX does not limit the block's threads"
    return ptx


def _with_tensor_maps(ptx: str, config: LaunchFacts) -> str:
    """Replaces the kernel's first parameter, a number by name, by its tensor maps: Numba has no parameter of 128
    bytes."""
    maps = config.tensor_maps
    if not maps:
        return ptx
    name = f"{entry_name(config)}_param_0"
    ptx, replaced = re.subn(
        rf"\.param\s+\.u64\s+{name}\b", f".param .align 64 .b8 {name}[{tensor_maps.SIZE * maps}]", ptx
    )
    assert replaced == 1, "the PTX declares its first parameter otherwise than expected"
    return ptx


def _signature(config: LaunchFacts) -> Any:
    from numba.core import types as numba_types

    from ..kernels.steps.elements import ELEMENT_TYPES

    def member(kind: Any) -> Any:
        if isinstance(kind, tuple):
            return numba_types.UniTuple(numba_types.int64, kind[1])
        return getattr(numba_types, kind)

    def pointer(kind: Any) -> Any:
        return numba_types.uint64 if kind == SEED else numba_types.CPointer(ELEMENT_TYPES[kind])

    parameters: list[Any] = [numba_types.uint64] if config.tensor_maps else []
    for made, kinds in parameter_types(config):
        arrays = made.__name__ == "arrays"
        members = [pointer(kind) if arrays else member(kind) for kind in kinds]
        parameters.append(numba_types.NamedTuple(members, made))
    return numba_types.void(*parameters)


@contextlib.contextmanager
def _compiling_for(cc: tuple[int, int]) -> Iterator[None]:
    """Answers for the current GPU when Numba asks for its compute capability to type a device function.

    So a kernel can be compiled without a GPU, and for another GPU than the current one.
    """
    dispatcher: Any = importlib.import_module("numba.cuda.dispatcher")
    asked = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: types.SimpleNamespace(compute_capability=cc)
    try:
        yield
    finally:
        dispatcher.get_current_device = asked


# The disk cache. An entry is a cubin, or PTX, followed by its SHA-256, which tools that read cubins ignore.


@functools.cache
def _store(max_size_bytes: int | None = None) -> Any:
    """The entries. Writers give a limit; to keep it, the size of every entry is looked up at once."""
    from cuda.core.utils import FileStreamProgramCache

    return FileStreamProgramCache(cache_folder() / "cubin", max_size_bytes=max_size_bytes)


# The folders in which installers record the version of the compilers, for CUDA 12 and 13.
_COMPILERS = re.compile(
    r"(numba|numba_cuda|llvmlite|cuda_core|nvidia_(nvvm|nvjitlink|cuda_nvcc)(_cu\d+)?)-.*\.(dist|egg)-info"
)


# The files and whole folders that determine the code of a kernel. Its Config and the room of kernels/ that has its file
# do so, too.
SOURCES = (
    "kernels/steps",
    "kernels/score",
    "kernels/recompute",
    "functions",
    "ptx",
    "config",
    "abi",
    "arrays/dtypes.py",
    "problem/ranges.py",
    "problem/groups.py",
    "problem/options.py",
    "gpu/assembler.py",
    "gpu/compiled.py",
)
NO_SOURCES = ("sim", "__pycache__")  # folders that are never compiled


@functools.cache
def fingerprint(room: str) -> str:
    """A hash of the sources that shape the code of the room's kernels."""
    content = []
    for file in _sources(room):
        with open(file, "rb", buffering=0) as opened:
            content += [os.path.basename(file).encode(), opened.read()]
    return _sha256(b"".join(content)).hex()


def _sources(room: str) -> list[str]:
    """The paths of the sources. os.walk takes 1 ms of a first call, pathlib's glob 4."""
    package = Path(__file__).parents[1]
    found: set[str] = set()
    for name in (*SOURCES, f"kernels/{room}"):
        if name.endswith(".py"):
            found.add(str(package / name))
        for folder, inside, files in os.walk(package / name):  # a file has none
            inside[:] = [each for each in inside if each not in NO_SOURCES]
            found.update(os.path.join(folder, file) for file in files if file.endswith(".py"))
    return sorted(found)


@functools.cache
def compilers() -> tuple[str, ...]:
    """The installed compilers with their versions, in the order in which Python would find them.

    It reads only the names of folders: importlib.metadata, which reads their files, takes 20 ms of a first call.
    """
    found: list[str] = []
    for folder in sys.path:
        with contextlib.suppress(OSError):  # an archive, or nothing at all
            found += sorted(filter(_COMPILERS.fullmatch, os.listdir(folder or ".")))
    return tuple(found)


def _sha256(data: bytes) -> bytes:
    import hashlib  # loads OpenSSL, 3 to 13 ms; importing numba_flash does not need it

    return hashlib.sha256(data).digest()


def room_of(config: LaunchFacts) -> str:
    """The room of kernels/ that has the kernel's file."""
    return config.module.partition(".")[0]


def key(config: LaunchFacts, arch: str, made_by: tuple[str, ...] | None = None) -> bytes:
    """Names an entry. made_by: the compilers, if not those that are installed here."""
    of = compilers() if made_by is None else made_by
    return _sha256(f"{fingerprint(room_of(config))} {of} {arch} {config!r}".encode())


def read_cache(config: LaunchFacts, arch: str) -> bytes | None:
    try:
        entry = _store().get(key(config, arch))
    except Exception as error:  # a cache never fails a call, whatever is wrong with its folder
        complain(error)
        return None
    if not entry or _sha256(entry[:-32]) != entry[-32:]:
        return None  # absent, cut short or overwritten
    return bytes(entry[:-32])


def write_cache(config: LaunchFacts, arch: str, code: bytes) -> None:
    try:
        _store(MOST_BYTES).update({key(config, arch): code + _sha256(code)})
    except Exception as error:
        complain(error)


def bundled(config: LaunchFacts, arch: str) -> bytes | None:
    """The kernel's code in the bundle that NUMBA_FLASH_BUNDLE names, which is looked at before the disk cache. None: it
    is not there, or there is no bundle.

    Raises ValueError if the bundle was made of other sources or by other compilers.
    """
    folder = bundle_folder()
    if folder is None:
        if bundle_only():
            raise ValueError("NUMBA_FLASH_BUNDLE_ONLY is set, but NUMBA_FLASH_BUNDLE names no bundle")
        return None
    from .bundle import opened

    made, room = opened(folder), room_of(config)
    made.check(room, fingerprint(room), compilers())
    return made.code(key(config, arch, made.compilers))
