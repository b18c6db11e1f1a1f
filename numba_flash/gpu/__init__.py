"""Kernels on the GPU: compiled, kept on disk, loaded, launched."""
