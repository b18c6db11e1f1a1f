"""Stand-ins for `ptx` under Numba's simulator, and how a kernel is launched there."""
