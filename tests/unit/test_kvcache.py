"""Caches on the oracle and on the CPU rung, and what a caller may get wrong."""

from contracts import kvcache, suite

TestKvcache = suite(kvcache)
