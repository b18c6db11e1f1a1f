"""The contract on the GPU kernels."""

from contracts import forward, suite

TestForward = suite(forward)
