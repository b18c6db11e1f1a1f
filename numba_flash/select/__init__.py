"""Selects the kernel, its Config and its parameters for a Problem and a Target. Nothing here uses CUDA."""
