"""Kernels on the GPU: compiled, cached on disk, loaded, launched."""
