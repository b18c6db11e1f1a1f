"""Relations between calls, on the GPU kernels."""

from contracts import metamorphic, suite

TestMetamorphic = suite(metamorphic)
