"""The caller's own functions that become part of a kernel: the Function class, and the numbers that it computes
with."""

NARROW = 2**28 - 1  # of integers up to this, differences of two and sums of a few fit into an int32
