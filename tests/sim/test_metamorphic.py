"""Relations between calls, on the GPU kernels, simulated."""

from metamorphic import *  # noqa: F403
