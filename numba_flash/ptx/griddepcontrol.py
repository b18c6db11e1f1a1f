"""griddepcontrol: kernels of a stream that overlap (PTX ISA 9.7.13.13). cc 9.0.

A kernel that is launched with programmatic stream serialization (gpu/launcher.py) may start while the one before it
still runs. What it does before `wait` must not depend on that one. Launched without, both do nothing.
"""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


@intrinsic
def wait(typingctx):
    """griddepcontrol.wait: until the kernel before has ended and what it wrote can be seen. Some thread of each block
    has to, and each that reads this. Stand-in: sim.griddepcontrol.wait."""
    return asm.scalars("griddepcontrol.wait;", types.void())


@intrinsic
def launch_dependents(typingctx):
    """griddepcontrol.launch_dependents: the kernel behind may start once each block has said so or ended. By any
    thread. It orders nothing."""
    return asm.scalars("griddepcontrol.launch_dependents;", types.void())
