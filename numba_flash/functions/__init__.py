"""The caller's own functions that become part of a kernel: the Function class, and the numbers that it computes
with."""

NARROW = 2**28 - 1  # integers up to this: a difference of two, or a sum of a few, fits into an int32
