"""Writes a bundle (bundle.py): compiles kernels, on any machine with the compilers, and describes them in its table."""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..abi.arguments import types as parameter_types
from ..config.forward import LaunchFacts
from ..machine import toolchain
from . import compiled
from .bundle import FORMAT, TABLE, opened

Job = tuple[LaunchFacts, tuple[int, int]]  # a kernel, and a compute capability


def add(folder: Path, jobs: Iterable[Job], problems: Sequence[dict[str, Any]], say: Callable[[str], object]) -> int:
    """Adds kernels to the bundle, which is made if the folder is empty or missing. The number of those that are new.

    problems: notes for readers of the table, with the keys of kernels. Raises ValueError where the folder has other
    files, or a bundle of other sources or compilers.
    """
    table = _table(folder)
    kernels, before = table["kernels"], len(table["kernels"])
    for config, cc in dict.fromkeys(jobs):
        key, arch = key_of(config, cc), compiled.architecture(cc)
        if key in kernels:
            continue
        started = time.perf_counter()
        code = machine_code(config, cc)
        name = f"{arch}/{config.kernel}-{key[:16]}.cubin"
        (folder / arch).mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(code)
        kernels[key] = dict(file=name, sha256=hashlib.sha256(code).hexdigest(), arch=arch) | facts(config)
        say(f"{name}: {len(code)} bytes, {time.perf_counter() - started:.1f} s")
    table["problems"] += [problem for problem in problems if problem not in table["problems"]]
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{TABLE}.{os.getpid()}"
    unfinished.write_text(json.dumps(table, indent=1) + "\n")
    unfinished.replace(folder / TABLE)
    opened.cache_clear()
    return len(kernels) - before


def key_of(config: LaunchFacts, cc: tuple[int, int]) -> str:
    return compiled.key(config, compiled.architecture(cc)).hex()


def machine_code(config: LaunchFacts, cc: tuple[int, int]) -> bytes:
    """A cubin. A whole program, which the disk cache has as PTX, is assembled here, so that the driver need not."""
    arch = compiled.architecture(cc)
    code = compiled.read_cache(config, arch)
    if code is None:
        code = compiled.to_code(config, cc)
        compiled.write_cache(config, arch, code)
    if code.startswith(compiled.CUBIN):
        return code
    from .assembler import assemble_whole

    return assemble_whole(code.decode(), arch).cubin


def facts(config: LaunchFacts) -> dict[str, Any]:
    """The facts of a launch, for readers of the table. numba_flash itself has them in the Config."""
    parameters = [f"tensor map of 128 bytes, {number}" for number in range(config.tensor_maps)]
    for made, kinds in parameter_types(config):
        pointers = made.__name__ == "arrays"
        parameters += [
            f"{made.__name__}.{name}: {_words(kind, pointers)}" for name, kind in zip(made._fields, kinds, strict=True)
        ]
    return dict(
        kernel=config.kernel,
        config=repr(config),
        entry=compiled.entry_name(config),
        threads=config.threads,
        dynamic_shared_bytes=config.shared_bytes,
        cluster=config.cluster,
        persistent=config.persistent,
        programmatic_stream_serialization=config.waits,
        counter_words=config.counter_words if config.counted else 0,
        parameters=parameters,
    )


def _words(kind: Any, pointer: bool) -> str:
    if isinstance(kind, tuple):
        return f"{kind[1]} x int64"
    return f"pointer to {kind}" if pointer else str(kind)


def _table(folder: Path) -> dict[str, Any]:
    """The table of the bundle that is there, or of a new one."""
    if toolchain.simulated():
        raise ValueError("the simulator is on, which compiles nothing: unset NUMBA_ENABLE_CUDASIM")
    rooms = (path.name for path in (Path(compiled.__file__).parents[1] / "kernels").iterdir() if path.is_dir())
    sources = {room: compiled.fingerprint(room) for room in sorted(rooms) if room not in compiled.NO_SOURCES}
    made = dict(
        format=FORMAT,
        numba_flash=__version__,
        python=f"{sys.version_info[0]}.{sys.version_info[1]}",
        sources=sources,
        compilers=list(compiled.compilers()),
        kernels={},
        problems=[],
    )
    if not (folder / TABLE).exists():
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty, and is no bundle: give an empty folder, or one that is not there")
        return made
    table = opened(folder).table
    for name in ("sources", "compilers", "python"):
        if table[name] != made[name]:
            raise ValueError(
                f"{folder} is a bundle of other {name}: {table[name]} of numba_flash {table['numba_flash']}, and here "
                f"are {made[name]} of {__version__}. Give another folder"
            )
    return json.loads(json.dumps(table))  # type: ignore[no-any-return]
