"""Relations between calls, on the GPU kernels, simulated."""

from contracts import metamorphic, suite

TestMetamorphic = suite(metamorphic)
