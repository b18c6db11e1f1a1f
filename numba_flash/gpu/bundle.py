"""A bundle: a folder of kernels compiled in advance, with a table. It is a second place of the disk cache that is only
read: its entries have the names that the cache gives them (compiled.py), and the compilers need not be installed.

`bundling.py` writes it.
"""

import functools
import importlib.util
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from ..config.forward import LaunchFacts
from ..machine.announce import warn_caller
from ..machine.cache_folder import bundle_folder, bundle_only

TABLE, FORMAT = "bundle.json", 1
HOW = "python -m numba_flash bundle"


class Bundle(NamedTuple):
    folder: Path
    table: dict[str, Any]

    @property
    def compilers(self) -> tuple[str, ...]:
        """The compilers that made it."""
        return tuple(self.table["compilers"])

    def check(self, room: str, sources: str, compilers: tuple[str, ...]) -> None:
        """Raises ValueError unless the room's kernels would be the same if they were compiled here.

        sources: a hash of them; compilers: those that are installed. Where numba-cuda is not among them nothing is
        compiled, and nothing can differ.
        """
        from .. import __version__

        made = self.table["sources"].get(room, "none")
        if made != sources:
            raise ValueError(
                f"the bundle {self.folder} was made of other sources than those here: by numba_flash "
                f"{self.table['numba_flash']} with {made[:12]} for kernels/{room}, and here is numba_flash "
                f"{__version__} with {sources[:12]}. Make it anew ({HOW}), or unset NUMBA_FLASH_BUNDLE"
            )
        of_bundle, here = _versions(self.compilers), _versions(compilers)
        others = [name for name in of_bundle if of_bundle[name] != here.get(name, of_bundle[name])]
        if others and "numba_cuda" in here:
            differ = ", ".join(f"{name} {of_bundle[name]} (here is {here[name]})" for name in others)
            raise ValueError(
                f"the bundle {self.folder} was made by other compilers than those here: {differ}. Make it anew "
                f"({HOW}), install these versions, or unset NUMBA_FLASH_BUNDLE"
            )

    def code(self, key: bytes) -> bytes | None:
        """A cubin; None if the bundle does not hold it."""
        import hashlib

        entry = self.table["kernels"].get(key.hex())
        if entry is None:
            return None
        try:
            code = (self.folder / entry["file"]).read_bytes()
        except OSError as error:
            raise ValueError(f"the bundle {self.folder} lacks a file that its table names: {error}") from error
        if hashlib.sha256(code).hexdigest() != entry["sha256"]:
            raise ValueError(
                f"{entry['file']} of the bundle {self.folder} is not what its table says: its hash differs"
            )
        return code


@functools.cache
def opened(folder: Path) -> Bundle:
    """The bundle's table; ValueError if there is none that can be read."""
    try:
        table = json.loads((folder / TABLE).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"NUMBA_FLASH_BUNDLE must name a folder that {HOW} has written, not {str(folder)!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if table.get("format") != FORMAT:
        raise ValueError(
            f"the bundle {folder} has format {table.get('format')}, and this numba_flash reads {FORMAT}. Make it anew "
            f"({HOW}), or unset NUMBA_FLASH_BUNDLE"
        )
    return Bundle(folder, table)


def note_missing(config: LaunchFacts, arch: str) -> None:
    """Warns that a kernel is not in the bundle. NotImplementedError where nothing else may be loaded, or can be."""
    words = f"kernel {config.kernel!r} for {arch} is not in the bundle {bundle_folder()}"
    here = importlib.util.find_spec("numba_cuda") is not None
    if bundle_only() or not here:
        reason = "NUMBA_FLASH_BUNDLE_ONLY is set" if here else "numba-cuda, which would compile it, is not installed"
        raise NotImplementedError(f"{words}, and {reason}. Add the problem that needs it ({HOW}). It is {config!r}")
    warn_caller(
        f"{words}: it comes from the disk cache, or is compiled. Add the problem that needs it ({HOW}). With "
        "NUMBA_FLASH_BUNDLE_ONLY=1 this is an error"
    )


def _versions(compilers: tuple[str, ...]) -> dict[str, str]:
    """{name: version} of folders in which installers record them; the first is the one that Python finds. CUDA 12 and
    13 have other names for the same compiler."""
    found: dict[str, str] = {}
    for folder in compilers:
        name, version = re.sub(r"\.(dist|egg)-info$", "", folder).split("-")[:2]
        found.setdefault(re.sub(r"_cu\d+$", "", name), version)
    return found
