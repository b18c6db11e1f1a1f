"""Packed sequences on the GPU kernels, simulated."""

from contracts import suite, varlen

TestVarlen = suite(varlen)
