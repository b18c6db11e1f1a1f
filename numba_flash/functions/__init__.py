"""Functions of a caller's own that become part of a kernel: what one is, and the numbers that it computes with."""
