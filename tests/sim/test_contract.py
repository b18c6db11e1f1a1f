"""The contract on the GPU kernels, simulated."""

from contract import *  # noqa: F403
