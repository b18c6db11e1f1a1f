"""score_mod and mask_mod on a GPU."""

from contracts import functions, suite

TestFunctions = suite(functions)
