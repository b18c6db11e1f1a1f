"""Relations between calls, on the GPU kernels."""

from metamorphic import *  # noqa: F403
