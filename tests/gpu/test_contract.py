"""The contract on the GPU kernels."""

from contract import *  # noqa: F403
