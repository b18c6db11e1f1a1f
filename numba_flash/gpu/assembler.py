"""PTX -> machine code, and the assembler's report: registers, spills, stack, warnings. Needs no GPU."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Assembled:
    """A cubin with the assembler's report; the numbers are those of the worst function in it."""

    cubin: bytes
    log: str

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return self._largest(r"Used (\d+) registers")

    @property
    def spill_bytes(self) -> int:
        """Bytes of a thread that are stored to or loaded from local memory because registers did not suffice."""
        return self._largest(r"(\d+) bytes spill (?:stores|loads)")

    @property
    def stack_bytes(self) -> int:
        """Local memory of a thread: spills, and arrays that did not fit into registers."""
        return self._largest(r"(\d+) bytes stack frame")

    @property
    def shared_bytes(self) -> int:
        """Static shared memory of a block; what a launch asks for is added to it."""
        return self._largest(r"(\d+) bytes smem", at_least_one=False)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines like C7510, which says that wgmma is serialised; there should be none."""
        return tuple(line for line in self.log.splitlines() if re.search(r"warning|advisory|\bC75\d\d\b", line, re.I))

    def _largest(self, pattern: str, at_least_one: bool = True) -> int:
        found = [int(number) for number in re.findall(pattern, self.log)]
        if at_least_one and not found:  # a report with other words must not count as "no spills"
            raise ValueError(f"the assembler's report has nothing like {pattern!r}: {self.log!r}")
        return max(found, default=0)


def assemble(ptx: str, arch: str) -> Assembled:
    """Machine code for arch ("sm_90a") from PTX."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    options = LinkerOptions(arch=arch, ptxas_options=["-v"])
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=options)
    code = linker.link("cubin").code
    return Assembled(bytes(code), linker.get_info_log() + linker.get_error_log())


def assemble_whole(ptx: str, arch: str) -> Assembled:
    """Assembles a whole program as the driver does: by ptxas."""
    import subprocess
    import tempfile

    ptxas = tool("ptxas")
    if ptxas is None:
        raise NotImplementedError(
            "a kernel that is assembled as a whole program needs ptxas, and there is none in the packages or on the "
            "path: pip install nvidia-cuda-nvcc"
        )
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [ptxas, "-v", f"-arch={arch}", "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ptxas refused the kernel: {done.stderr.strip()}")
        return Assembled(made.read_bytes(), done.stderr)


@functools.cache
def tool(name: str) -> str | None:
    """A program of NVIDIA's, from the packages or the path; None where there is none."""
    import shutil

    from cuda import pathfinder

    try:
        found = pathfinder.find_nvidia_binary_utility(name)
    except Exception:  # this cuda-pathfinder does not know the program
        found = None
    return found or shutil.which(name)
