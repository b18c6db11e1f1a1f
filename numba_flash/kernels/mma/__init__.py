"""Kernels on tensor cores since Ampere: a warp multiplies tiles that are in its registers."""
