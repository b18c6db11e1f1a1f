"""Tensor cores since Ampere: a warp multiplies tiles that lie in its threads' registers."""
