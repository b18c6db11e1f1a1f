"""Attention as an operation of other frameworks: torch's autograd and compiler, JAX's transformations, Transformers.

`numba_flash.attention` loads the module it needs when an array asks for it; importing numba_flash loads none.
"""
