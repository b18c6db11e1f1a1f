"""Relations between calls, on the oracle and on the CPU rung."""

from contracts import metamorphic, suite

TestMetamorphic = suite(metamorphic)
