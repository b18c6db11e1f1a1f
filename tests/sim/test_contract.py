"""The contract on the GPU kernels, simulated."""

from contracts import forward, suite

TestForward = suite(forward)
