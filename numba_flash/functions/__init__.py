"""Functions of a caller's own that become part of a kernel: what one is, and the numbers that it computes with."""

NARROW = 2**28 - 1  # of whole numbers up to which, differences of two fit into an int32, and sums of a few
